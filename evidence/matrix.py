"""Tests which versions of Python and torch ddpshim works with; `python -m evidence.matrix` writes supported.md.

For each Python on this machine it makes an environment with the oldest torch that ddpshim supports and that has a wheel
for that Python, and one with the newest. It installs the built wheel there, and runs tests of the source distribution
against it, in a folder without the library's sources. It needs uv, a package index and 40 GB: environments are removed,
downloads stay in uv's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional
from xml.etree import ElementTree

from ddpshim import version
from evidence import pages

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
ENDS = {"oldest": "lowest-direct", "newest": "highest"}  # in uv's words
QUICK = ("seams", "parallel", "guard", "loader", "noise", "streams", "import_cost", "certificate", "check")
UNEDITED = ("one_process", "unedited", "private_files", "reads", "clock", "whole_batch", "replaced", "tasks")
MORE = ("group", "sharding", "checkpoint", "resume", "options", "launch", "slurm", "patching")
DEADLINE_S = 3600
COLUMNS = ("Python", "torch", "version", "numpy", "tests", "passed", "skipped", "failed", "minutes", "date")
START = "<!-- what follows is written by python -m evidence.matrix -->"


class CannotInstall(Exception):
    """An environment cannot be made on this machine; the message says why."""


@dataclass(frozen=True)
class Tried:
    """The results of the tests in one environment."""

    python: str
    torch: str
    numpy: str
    num_passed: int
    num_skipped: int
    failed: tuple[str, ...]
    minutes: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", choices=PYTHONS, action="append", help="only this one; lines of others are kept")
    parser.add_argument("--torch", choices=ENDS, action="append", help="only this one; lines of others are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "evidence" / "supported.md")
    sets = {"quick": QUICK, "unedited": QUICK + UNEDITED, "all": QUICK + MORE}
    parser.add_argument("--tests", choices=sets, default="all", help="which ones (all)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job; tests inherit it
    lines = _lines(arguments.out)
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        run("uv", "build", "-q", "--out-dir", folder, str(ROOT))
        for python in arguments.python or PYTHONS:
            for end in arguments.torch or ENDS:
                try:
                    with environment(python, end, next(Path(folder).glob("*.whl"))) as interpreter:
                        tried = try_in(interpreter, next(Path(folder).glob("*.tar.gz")), sets[arguments.tests])
                    num_failed += len(tried.failed)
                    lines[python, end] = row(python, end, arguments.tests, tried)
                except CannotInstall as error:
                    lines[python, end] = (
                        f"| {python} | {end} | not installable here: {error} | | | | | | | {_today()} |"
                    )
                print(lines[python, end], flush=True)
                ordered = [lines[p, e] for p in PYTHONS for e in ENDS if (p, e) in lines]
                pages.fill(arguments.out, START, "\n".join([*pages.table(COLUMNS, [], False), *ordered, ""]))
    return int(num_failed > 0)


@contextlib.contextmanager
def environment(python: str, end: str, wheel: Path) -> Iterator[Path]:
    """Make an environment with the wheel, torch and the tests' packages; yield its Python. Raises CannotInstall."""
    base = find(python)
    if base is None:
        raise CannotInstall(f"no python{python} on this machine")
    with tempfile.TemporaryDirectory(prefix=f"matrix-{python}-{end}-") as folder:
        interpreter = Path(folder, "bin", "python")
        run("uv", "venv", "-q", "--allow-existing", "--python", str(base), folder)
        install = ("uv", "pip", "install", "-q", "--python", str(interpreter))
        # The oldest numpy as well: torch before 2.3 does not work with numpy 2. Both only as wheels.
        wheels = ("--only-binary", "torch", "--only-binary", "numpy", "--resolution", ENDS[end])
        major, minor = python.split(".")
        torch = f"torch>={version.oldest_torch((int(major), int(minor)))}"
        run(*install, *wheels, "-r", str(ROOT / "pyproject.toml"), torch, "numpy>=1.24")
        run(*install, str(wheel), "pytest", "pytest-xdist", "pytest-timeout", "h5py", "plotly", "tensorboardX")
        yield interpreter


def find(python: str) -> Optional[Path]:
    """Return a working Python of this minor version, from the PATH or pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for candidate in (shutil.which(f"python{python}"), *sorted(pyenv.glob(f"{python}.*/bin/python"))):
        if (
            candidate is not None
            and subprocess.run([candidate, "-V"], capture_output=True, check=False).returncode == 0
        ):
            return Path(candidate)
    return None


def try_in(interpreter: Path, source_distribution: Path, names: Sequence[str]) -> Tried:
    """Run the tests of the source distribution against the library installed in an environment."""
    with tempfile.TemporaryDirectory(prefix="matrix-tests-") as folder:
        with tarfile.open(source_distribution) as archive:
            archive.extractall(folder)
        (sources,) = Path(folder).iterdir()
        # Tests that read or start the library's files must use the installed ones.
        shutil.rmtree(sources / "ddpshim")
        installed = "import importlib.util; print(importlib.util.find_spec('ddpshim').origin)"
        (sources / "ddpshim").symlink_to(Path(run(str(interpreter), "-c", installed).strip()).parent)
        report = Path(folder, "report.xml")
        files = [str(path) for name in names for path in sources.glob(f"tests/*/test_{name}.py")]
        command = [str(interpreter), "-m", "pytest", "-q", "--durations=10", f"--junitxml={report}", *files]
        start = time.monotonic()
        parallel = ("-n", "2", "--dist", "loadfile")
        subprocess.run([*command, *parallel], cwd=sources, env=environ(), timeout=DEADLINE_S, check=False)
        minutes = (time.monotonic() - start) / 60
        cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    code = "import platform, numpy, torch; print(platform.python_version(), torch.__version__, numpy.__version__)"
    versions = run(str(interpreter), "-c", code).split()
    return Tried(
        python=versions[0],
        torch=versions[1],
        numpy=versions[2],
        num_passed=len(cases) - len(skipped) - len(failed),
        num_skipped=len(skipped),
        failed=tuple(str(case.get("name")) for case in failed),
        minutes=minutes,
    )


def row(python: str, end: str, tests: str, tried: Tried) -> str:
    """Return the line of the table for one environment."""
    failed = f"{len(tried.failed)}: {', '.join(tried.failed)}" if tried.failed else "0"
    counts = f"{tried.num_passed} | {tried.num_skipped} | {failed} | {tried.minutes:.0f}"
    return f"| {python} | {end} | {tried.torch} on {tried.python} | {tried.numpy} | {tests} | {counts} | {_today()} |"


def _lines(file: Path) -> dict[tuple[str, str], str]:
    """Return the table's existing lines, by Python and by torch (oldest or newest)."""
    rows = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("| 3.")]
    return {(line.split("|")[1].strip(), line.split("|")[2].strip()): line for line in rows}


def run(*command: str) -> str:
    ran = subprocess.run(command, env=environ(), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise CannotInstall(" ".join(ran.stderr.split())[-300:])
    return ran.stdout


def environ() -> dict[str, str]:
    """Return the environment variables without those that expose the sources or disable bytecode."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}


def _today() -> str:
    return time.strftime("%Y-%m-%d")


if __name__ == "__main__":
    sys.exit(main())
