"""Set up a fresh machine and run something on it: `python3 bootstrap.py demo` or `python3 bootstrap.py test`.

Makes a virtual environment (.venv beside this file), installs missing packages from the package index, and never
replaces a torch that the calling Python already has. `test --fast` tests each promise, `test --daily` also pages, types
and what is printed; pytest gets the other arguments. `install` asks pip again even if everything seems to be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parent
TORCH = "torch==2.13.0" if sys.version_info >= (3, 10) else "torch"  # the newest one that the tests were run with
THIS_PYTHON = str(sys.implementation.cache_tag)  # "cpython-311": the pythons that can load the same compiled packages
MADE = "made-by-bootstrap"  # a file in each environment that this script made, and may empty
STAMP = "installed-by-bootstrap"  # a file in a complete environment; contains the fingerprint
RESOLVED = ("robomimic", "report", "test")  # files of requirements/; those in no-deps.txt are installed last
FAST_TESTS = "tests/promises"
FIRST_TOO_NEW = (3, 12)  # the torchvision in requirements/no-deps.txt has no wheel for it


def python_of(folder: Path) -> Path:
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def torch_of_the_caller(folder: Path) -> Optional[Path]:
    """Return the folder that contains the calling Python's torch; None if there is none outside of `folder`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or folder in Path(spec.origin).parents:
        return None
    return Path(spec.origin).parent.parent


def fingerprint(folder: Path) -> str:
    """Return a hash of everything that determines what is installed in the environment `folder`."""
    digest = hashlib.sha256(f"{THIS_PYTHON}\n{ROOT}\n{torch_of_the_caller(folder)}\n".encode())
    for file in (*sorted((ROOT / "requirements").glob("*.txt")), ROOT / "pyproject.toml", ROOT / "setup.py"):
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def is_installed(folder: Path) -> bool:
    stamp = folder / STAMP
    return python_of(folder).exists() and stamp.exists() and stamp.read_text() == fingerprint(folder)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[tuple[int, ...]]:
    """Keep other bootstraps from installing into `folder`; yield the descriptors that hold the lock.

    Pass them to each process that writes there: if only this script is killed, its pip still writes, and the next
    bootstrap must wait for it.
    """
    try:
        import fcntl
    except ImportError:  # Windows: without a lock
        yield ()
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the environment and never deleted: a lock on a deleted file has no effect.
    with open(folder.with_name(f"{folder.name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another bootstrap.py is installing into {folder}: waiting", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield (file.fileno(),)


def call(command: list[str], held: tuple[int, ...] = ()) -> None:
    """Run a command in ROOT; if it fails, exit with its code: it has printed the reason."""
    code = subprocess.run(command, check=False, cwd=ROOT, pass_fds=held).returncode
    if code:
        sys.exit(code if code > 0 else 128 - code)


def asked(folder: Path, code: str, *arguments: str) -> Optional[str]:
    """Return the output of `code` in the environment's Python, or None if it fails or does not start."""
    with contextlib.suppress(OSError):
        ran = subprocess.run([str(python_of(folder)), "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
        return ran.stdout.strip() if ran.returncode == 0 else None
    return None


def refuse_this_python(folder: Path) -> None:
    """Exit, before anything is made or downloaded, if ddpshim or the released robomimic cannot be installed."""
    if sys.version_info < (3, 9):
        sys.exit(
            f"this is Python {sys.version.split()[0]}, and ddpshim needs 3.9 or newer; nothing was changed. Run "
            "bootstrap.py with Python 3.9, 3.10 or 3.11."
        )
    if sys.version_info[:2] >= FIRST_TOO_NEW and not has(folder, "torchvision"):
        sys.exit(
            f"this is Python {sys.version_info[0]}.{sys.version_info[1]}, for which the torchvision that goes with "
            "robomimic 0.3.0 and with any torch (0.16.2) has no wheel; nothing was changed. Run bootstrap.py with "
            "Python 3.9, 3.10 or 3.11. (The library itself runs on newer ones: pip install .)"
        )


def make_environment(folder: Path, held: tuple[int, ...] = ()) -> None:
    """Make the virtual environment unless it exists. Make an unfinished one of an earlier run again."""
    found = asked(folder, "import pip, sys; print(sys.implementation.cache_tag)")
    if (folder / MADE).exists() and (found is None or not (folder / STAMP).exists()):
        if Path(sys.prefix).resolve() == folder:
            sys.exit(f"{folder} is unfinished, and its own Python cannot make it again. Run `deactivate` first.")
        print(f"{folder} is unfinished or its Python is gone: making it again", flush=True)
        empty(folder)
    elif found is None and folder.exists() and any(folder.iterdir()):
        sys.exit(
            f"{folder} is not empty and has no working Python with pip, so nothing can be installed into it. If it is "
            "a broken environment, delete it; otherwise name another folder with --venv."
        )
    elif found is not None and found != THIS_PYTHON:
        sys.exit(
            f"{folder} was made with {found}, and this Python is {THIS_PYTHON}: packages of one do not load in the "
            f"other. Run bootstrap.py with that Python, name another folder (--venv .venv-{THIS_PYTHON}), or delete "
            "this one."
        )
    elif found is not None:
        return
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"{sys.executable} has no ensurepip, so that a virtual environment would have no pip. Install it (Debian "
            "and Ubuntu: apt install python3-venv), or use another Python."
        )
    print(f"making a virtual environment in {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MADE).touch()  # first: an environment without it was made by others, and is never emptied
    call([sys.executable, "-m", "venv", str(folder)], held)


def empty(folder: Path) -> None:
    """Delete everything in an environment but the file MADE, so that a killed run can be repeated."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MADE:
            path.unlink()


def share_torch(folder: Path) -> None:
    """Make the caller's torch available in the environment, if the environment has none itself."""
    theirs = torch_of_the_caller(folder)
    if theirs is not None and not has(folder, "torch"):
        print(f"using the torch in {theirs}", flush=True)
        own = asked(folder, "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(str(own)) / "torch_of_the_caller.pth").write_text(f"{theirs}\n")


def has(folder: Path, module: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return asked(folder, code, module) is not None


def install(folder: Path, held: tuple[int, ...] = ()) -> None:
    """Install everything that the demo and the tests need; takes seconds if it is installed already."""

    def pip(*arguments: str) -> None:
        print("pip install", " ".join(arguments), flush=True)
        # Compiling all of torch and mypy would take longer than the rest; Python compiles modules on first import.
        quickly = ["-q", "--disable-pip-version-check", "--no-compile"]
        call([str(python_of(folder)), "-m", "pip", "install", *quickly, *arguments], held)

    (folder / STAMP).unlink(missing_ok=True)
    share_torch(folder)
    lines = (ROOT / "requirements" / "no-deps.txt").read_text().splitlines()
    no_deps = [line for line in lines if line and not line.startswith("#")]
    missing = [line for line in no_deps if not has(folder, re.split(r"\W", line)[0])]
    torch = [] if has(folder, "torch") else [TORCH]
    # Packages without dependencies come last: if pip resolves others beside them, it reports their missing dependencies
    # in red. In an environment of ours the only conflicts are theirs, which are intended, and those of the caller's
    # packages beside a shared torch, which do not change; so later runs do not report them either.
    ours = ["--no-warn-conflicts"] if (folder / MADE).exists() else []
    files = [option for name in RESOLVED for option in ("-r", f"requirements/{name}.txt")]
    pip(*ours, *torch, *files)
    pip("--no-deps", *missing, "-e", ".")
    (folder / STAMP).write_text(fingerprint(folder))


def commands(what: str, fast: bool, daily: bool, rest: list[str]) -> list[list[str]]:
    """Return Python's arguments, one list per command."""
    if what == "install":
        return []
    if what == "demo":
        return [["examples/same_experiment.py", *rest]]
    chosen = [FAST_TESTS] if fast else [] if daily else ["-m", "not daily"]
    return [
        ["-m", "ruff", "check", "."],
        ["-m", "ruff", "format", "--check", "."],
        # More processes than cores, since jobs also wait. A file stays on one process: its fixtures are expensive.
        ["-m", "pytest", "-n", "4", "--dist", "loadfile", *chosen, *rest],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", choices=["demo", "test", "install"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment's folder (default: .venv)")
    parser.add_argument("--fast", action="store_true", help=f"with test: only {FAST_TESTS}")
    parser.add_argument("--daily", action="store_true", help="with test: those marked daily as well")
    args, rest = parser.parse_known_args()
    if (args.fast or args.daily) and args.what != "test":
        parser.error("--fast and --daily choose tests: write `bootstrap.py test --fast`")
    folder = args.venv.resolve()
    if args.what == "install" or not is_installed(folder):
        with locked(folder) as held:
            if args.what == "install" or not is_installed(folder):  # again: another bootstrap may have done it
                refuse_this_python(folder)
                make_environment(folder, held)
                install(folder, held)
    for command in commands(args.what, args.fast, args.daily, rest):
        print("python", " ".join(command), flush=True)
        call([str(python_of(folder)), *command])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
