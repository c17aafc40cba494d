"""Packaging that pyproject.toml cannot express. Each extra is defined by one file in requirements/."""

import re
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

if sys.version_info < (3, 9):  # for tools that do not check `requires-python`
    sys.exit(
        f"ddpshim needs Python 3.9 or newer, and this is {sys.version.split()[0]}; nothing was installed. Make an "
        "environment with a newer Python, as docs/start.md shows."
    )

EXTRAS = ("completion", "report", "robomimic")  # for users; other files are for the tests
# robomimic itself is in none: it requires a torchvision that would replace torch, and compiles a renderer.


def lines_of(file: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def description() -> str:
    """Return the README for a package index, which has no other file: links to them would lead nowhere."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8").partition("\n## Files")[0]
    text = re.sub(r"pip install \. +# in a clone; ", "pip install ddpshim   # ", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n", "", text)
    text = re.sub(r"\[([^\]]+)\]\((?!http)[^)]*\)", r"\1", text)
    return f"{text}\n`python -m ddpshim docs` lists and prints the pages.\n"


class BuildPages(build_py):
    """Adds the pages that are not in docs/ to those in the wheel for `python -m ddpshim docs`."""

    def build_package_data(self) -> None:
        super().build_package_data()
        for page in ("MIGRATION.md", "README.md", "examples/README.md"):
            copy = Path(self.build_lib) / "ddpshim" / page
            self.mkpath(str(copy.parent))
            self.copy_file(str(Path(__file__).parent / page), str(copy))


requirements = Path(__file__).parent / "requirements"
setup(
    cmdclass={"build_py": BuildPages},
    long_description=description(),
    long_description_content_type="text/markdown",
    extras_require={name: lines_of(requirements / f"{name}.txt") for name in EXTRAS},
)
