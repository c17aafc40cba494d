"""Set up a fresh machine and run something on it: `python3 bootstrap.py demo` or `python3 bootstrap.py test`.

Makes a virtual environment (.venv beside this file), installs what is missing from the package index,
and never replaces a torch that the calling Python already has.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TORCH = "torch==2.13.0" if sys.version_info >= (3, 10) else "torch"  # the newest one that the tests were run with


def make_environment(folder: Path) -> Path:
    """The Python of a virtual environment in `folder`, which sees the caller's torch if there is one."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        print(f"making a virtual environment in {folder}", flush=True)
        venv.create(folder, with_pip=True)
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None and not str(Path(found.origin)).startswith(str(folder)):
        theirs = Path(found.origin).parent.parent
        print(f"using the torch in {theirs}", flush=True)
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own = subprocess.run([str(python), "-c", where], check=True, capture_output=True, text=True).stdout.strip()
        (Path(own) / "torch_of_the_caller.pth").write_text(f"{theirs}\n")
    return python


def install(python: Path) -> None:
    """Everything that the demo and the tests need; seconds where it is there already."""

    def pip(*arguments: str) -> None:
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
        print("pip install", " ".join(arguments), flush=True)
        subprocess.run(command, check=True, cwd=ROOT)

    def has(module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([str(python), "-c", code], check=False).returncode == 0

    if not has("torch"):
        pip(TORCH)
    lines = (ROOT / "requirements" / "no-deps.txt").read_text().splitlines()
    bare = [line for line in lines if line and not line.startswith("#") and not has(line.split("==")[0])]
    if bare:
        pip("--no-deps", *bare)
    pip("-r", "requirements/robomimic.txt", "-r", "requirements/test.txt")
    pip("--no-deps", "-e", ".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "test", "install"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args, rest = parser.parse_known_args()
    python = make_environment(args.venv.resolve())
    install(python)
    commands = {
        "install": [],
        "demo": [["examples/same_experiment.py", *rest]],
        "test": [
            ["-m", "ruff", "check", "."],
            ["-m", "ruff", "format", "--check", "."],
            ["-m", "mypy"],
            # Two files at a time, each on one process: the fixtures of a file are costly.
            ["-m", "pytest", "-n", "2", "--dist", "loadfile", *rest],
        ],
    }
    for command in commands[args.what]:
        print("python", " ".join(command), flush=True)
        code = subprocess.run([str(python), *command], check=False, cwd=ROOT).returncode
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
