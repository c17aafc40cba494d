"""The checklist before a release: `python -m evidence.release` prints a line for each check, and stops at a fault.

It checks that the tree is clean and the version is the same everywhere, builds the wheel and checks its files. Then
evidence/newcomer.py does with it what a new user does, in environments of the oldest and the newest Python.
`--rehearsal` is a dry run, of an unreleased version. It needs a package index and 6 GB.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

from ddpshim import version
from evidence import newcomer
from evidence.matrix import PYTHONS

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", choices=newcomer.TORCHS, action="append", help="only this one (two)")
    parser.add_argument("--rehearsal", action="store_true", help="the tree may be changed, and the version unreleased")
    arguments = parser.parse_args()
    try:
        if not arguments.rehearsal:
            tell("the tree is clean", [line for line in out_of("git", "status", "--porcelain").splitlines() if line])
            tell("the version has a date", [] if "(unreleased)" not in changelog() else ["CHANGELOG.md: unreleased"])
        tell(f"the version is {version.__version__} everywhere", [*disagreements()])
        with tempfile.TemporaryDirectory(prefix="release-") as folder:
            out_of(sys.executable, "-m", "build", "--outdir", folder, str(ROOT))
            (wheel,) = Path(folder).glob("*.whl")
            tracked = out_of("git", "ls-files").splitlines()
            tell(
                f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) holds the library",
                sorted(wrong_in(wheel, tracked)),
            )
            for python in arguments.python or (PYTHONS[0], PYTHONS[-1]):
                print(f"    Python {python}:")
                for what, faults in newcomer.visit(wheel, python):
                    tell(what, faults)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))} ended with {error.returncode}:\n{error.stdout}", file=sys.stderr)
        return 1
    return 0


def tell(what: str, faults: Collection[str]) -> None:
    """Print what was checked; exit if there are faults."""
    print(f"{'NO ' if faults else 'yes'} {what}", *faults, sep="\n    ", flush=True)
    if faults:
        sys.exit(1)


def changelog() -> str:
    """Return the heading of the newest version."""
    return next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))


def disagreements() -> Iterator[str]:
    """Yield the files whose version differs from the package's."""
    if changelog().split()[1] != version.__version__:
        yield f"CHANGELOG.md: {changelog()}"
    if f"\nversion: {version.__version__}\n" not in (ROOT / "CITATION.cff").read_text():
        yield "CITATION.cff"


def wrong_in(wheel: Path, sources: Collection[str]) -> set[str]:
    """Return the files that the wheel lacks, or should not contain; `sources`: the tree's files."""
    info = f"ddpshim-{version.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {f"{info}/licenses/LICENSE", *(file for file in sources if file.startswith("ddpshim/"))}
    for folder, place in (
        (r"(patches)/.*", "ddpshim/patches"),
        (r"(docs)/\w+\.md", "ddpshim/docs"),
        (r"(MIGRATION\.md)", "ddpshim/docs/MIGRATION.md"),
        (r"(examples/data)/.*(?<!README\.md)", "ddpshim/tools/lift"),
    ):
        found = (re.fullmatch(folder, file) for file in sources)
        expected |= {match[0].replace(match[1], place, 1) for match in found if match is not None}
    generated = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    return expected ^ (names - generated)


def out_of(*command: str) -> str:
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
