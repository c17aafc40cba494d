"""The checklist before a release: `python -m evidence.release` prints a line for each check, and stops at a fault.

It checks that the tree is clean and the version is the same everywhere, builds the wheel and checks its files. Then it
does what a new user does: it runs the commands of README's first screen, in a new folder and a new environment of the
oldest and the newest Python, with the wheel instead of the clone, until a policy is trained. It needs a package index
and 6 GB, for one environment at a time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

from ddpshim import version
from evidence.matrix import PYTHONS, find

ROOT = Path(__file__).resolve().parent.parent
MOST_S = 300  # the longest time for a new user's first policy, including downloads
DEADLINE_S = 1800
# By Python, the requirements instead of `torch`. torch before 2.3 does not work with numpy 2.
STRANGERS = {PYTHONS[0]: "torch==2.1.0 'numpy<2'", PYTHONS[-1]: "torch"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", choices=STRANGERS, action="append", help="only this one (both)")
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
            tell(f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) holds the library", wrong_in(wheel, tracked))
            for python in arguments.python or STRANGERS:
                tell(*stranger(wheel, python, STRANGERS[python], Path(folder)))
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))} ended with {error.returncode}:\n{error.stdout}", file=sys.stderr)
        return 1
    return 0


def tell(what: str, faults: Collection[str]) -> None:
    """Print what was checked; exit if there are faults."""
    print(f"{'NO ' if faults else 'yes'} {what}", *sorted(faults), sep="\n    ", flush=True)
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


def first_screen() -> str:
    """Return the README's last commands before its first heading: they make an environment and train robomimic."""
    text = (ROOT / "README.md").read_text().partition("\n## ")[0]
    return str(re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[-1])


def script(wheel: Path, python: Path, torch: str) -> str:
    """Return a new user's commands: the README's lines, with the wheel, this Python, and two ranks."""
    text = first_screen()
    for written, meant in (
        ("python3 -m venv", f"{python} -m venv"),
        ('".[', f'"{wheel}['),
        ("install torch ", f"install {torch} "),
        ("--nproc 4", "--nproc 2"),
    ):
        if written not in text:
            raise ValueError(f"the README's first screen has no {written!r}: tell evidence/release.py what it has now")
        text = text.replace(written, meant)
    return text


def stranger(wheel: Path, python: str, torch: str, folder: Path) -> tuple[str, list[str]]:
    """Run a new user's commands; return a text about the result, and its faults."""
    interpreter = find(python)
    if interpreter is None:
        return f"Python {python}: a trained policy", [f"no python{python} on this machine"]
    home = folder / f"stranger-{python}"
    home.mkdir()
    asks = "import ddpshim, platform, torch; print(platform.python_version(), torch.__version__, ddpshim.__file__)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "DDPSHIM"))}
    begin = time.monotonic()
    ran = subprocess.run(
        ["bash", "-e", "-c", f"{script(wheel, interpreter, torch)}\npython -c '{asks}'"],
        cwd=home,
        env={**kept, "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    took_s = time.monotonic() - begin
    if ran.returncode:
        return f"Python {python}: a trained policy", [*ran.stdout.splitlines()[-30:]]
    version_of_python, version_of_torch, file = ran.stdout.splitlines()[-1].split()
    losses = [float(loss) for loss in re.findall(r'^ +"Loss": (\S+?),?$', ran.stdout, re.MULTILINE)]
    faults = [] if Path(file).is_relative_to(home / "env") else [f"ddpshim is that of {file}"]
    faults += [] if len(losses) == 20 and losses[-1] < losses[0] / 2 else [f"losses of 20 epochs: {losses}"]
    faults += [] if [*home.glob("lift_bc/lift_bc/*/models/model_epoch_20.pth")] else ["no model_epoch_20.pth"]
    faults += [line for line in ran.stdout.splitlines() if line.startswith("ERROR")]
    faults += [f"that is more than {MOST_S} s"] * (took_s > MOST_S)
    subprocess.run(["rm", "-rf", str(home)], check=True)
    what = f"Python {version_of_python} with torch {version_of_torch}: the README's first screen trains a policy"
    return f"{what} in {took_s:.0f} s (loss {losses[0]:.3f} to {losses[-1]:.3f})", faults


def out_of(*command: str) -> str:
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
