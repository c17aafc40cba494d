"""Finds what pip and uv would do to an installed torch: `python -m evidence.installs` fills evidence/installs.md.

Each environment contains only the metadata that pip reads of an installed package, its name and version. So only
metadata is downloaded, and nothing is installed: both make a dry run. It needs uv and a package index.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from evidence.matrix import find
from evidence.pages import fill
from evidence.release import ROOT, out_of

PAGE = ROOT / "evidence" / "installs.md"
START, END = "<!-- written by `python -m evidence.installs` -->", "<!-- end -->"
NUMPY = {"numpy": ("1.26.4", [])}
ENVIRONMENTS: dict[str, dict[str, tuple[str, Sequence[str]]]] = {
    "torch 2.0.1": {"torch": ("2.0.1", []), **NUMPY},
    "torch 2.1.2": {"torch": ("2.1.2", []), **NUMPY},
    "torch 2.1.2+cu118, torchvision": {
        "torch": ("2.1.2+cu118", []),
        "torchvision": ("0.16.2+cu118", ["torch (==2.1.2)", "numpy"]),
        **NUMPY,
    },
    "torch 2.8.0+cu126, torchvision, numpy 2": {
        "torch": ("2.8.0+cu126", []),
        "torchvision": ("0.23.0+cu126", ["torch (==2.8.0)", "numpy"]),
        "numpy": ("2.2.6", []),
    },
}
# As in docs/start.md; `.` is replaced by the wheel.
REQUESTS = [
    ["."],
    [".[completion]"],
    [".[report]"],
    [".[robomimic]"],
    ["robomimic==0.3.0"],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.11", help="the environments' Python (3.11)")
    arguments = parser.parse_args()
    interpreter = find(arguments.python)
    if interpreter is None:
        sys.exit(f"no python{arguments.python} on this machine: nothing was asked. Name another one with --python.")
    with tempfile.TemporaryDirectory(prefix="installs-") as folder:
        out_of(sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT))
        (wheel,) = Path(folder).glob("*.whl")
        lines = [f"| `pip install` | {' | '.join(ENVIRONMENTS)} |", f"|---|{'---|' * len(ENVIRONMENTS)}"]
        environments = {
            name: environment(Path(folder, re.sub(r"\W", "", name)), interpreter, packages)
            for name, packages in ENVIRONMENTS.items()
        }
        for request in REQUESTS:
            words = [word if word[0] != "." else f"{wheel}{word[1:]}" for word in request]
            cells = []
            for name, python in environments.items():
                by_pip, by_uv = pip(python, words), uv(python, words)
                cells.append(cell(ENVIRONMENTS[name], by_pip, by_uv))
            shown = " ".join(f'"{word}"' if word != "." else word for word in request)
            lines.append(f"| `{shown}` | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    fill(PAGE, START, "\n".join(lines) + "\n", END)


def environment(folder: Path, interpreter: Path, packages: Mapping[str, tuple[str, Sequence[str]]]) -> Path:
    """Make an environment in which pip finds these packages, and return its Python."""
    out_of(str(interpreter), "-m", "venv", "--without-pip", str(folder))
    (site,) = folder.glob("lib/python*/site-packages")
    for name, (version, requires) in packages.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires), ""]))
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").touch()
    return folder / "bin" / "python"


def pip(python: Path, words: Sequence[str]) -> dict[str, str]:
    """Return the versions that pip would install, by name."""
    report = python.parent / "report.json"
    asked = ["-m", "pip", "--python", str(python), "install", "-q", "--dry-run", "--report", str(report)]
    out_of(sys.executable, *asked, *words)
    planned = (item["metadata"] for item in json.loads(report.read_text())["install"])
    return {item["name"].lower(): item["version"] for item in planned}


def uv(python: Path, words: Sequence[str]) -> dict[str, str]:
    """Return the versions that uv would install, by name."""
    output = out_of("uv", "pip", "install", "--dry-run", "--python", str(python), *words)
    return dict(re.findall(r"^ \+ (\S+?)(?:==| @ )(\S+)$", output, re.MULTILINE))


def cell(packages: Mapping[str, object], by_pip: Mapping[str, str], by_uv: Mapping[str, str]) -> str:
    """Return which installed packages would be replaced, and by which tool; else how many packages pip would add."""
    replaced = []
    for name in packages:
        who = [(tool, plan[name]) for tool, plan in (("pip", by_pip), ("uv", by_uv)) if name in plan]
        replaced += [f"**{name} becomes {version}** ({tool})" for tool, version in who]
    if "torchvision" not in packages and ("torchvision" in by_pip or "torchvision" in by_uv):
        replaced.append("adds a torchvision")
    added = len(by_pip.keys() - packages.keys() - {"ddpshim"})
    return "; ".join(replaced) if replaced else f"adds {added}, replaces nothing"


if __name__ == "__main__":
    main()
