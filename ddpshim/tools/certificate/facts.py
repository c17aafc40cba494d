"""Returns the facts of a run that decide its numbers: code, packages, data, environment. Computes no tensors."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from ddpshim.variables import PREFIX, ROWS, UNEDITED

_WHOLE = 1 << 30  # bytes; of a larger file, samples are hashed
_SAMPLES, _BLOCK = 64, 1 << 20
_NOT_DATA = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib")
_PACKAGES = ("/site-packages/", "/dist-packages/")  # also those that another environment shares with this one
# Variables that change numbers; ddpshim's options are added, without those that have these words.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
)
_LEFT_OUT = ("TRUST", "CHECKPOINT", "KEEP", "RESUME", "BACKGROUND")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file; of one above 1 GB, that of its size and of 64 MB spread over it."""
    made, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            while block := file.read(_BLOCK):
                made.update(block)
            return made.hexdigest()
        made.update(str(size).encode())
        for number in range(_SAMPLES):
            file.seek((size - _BLOCK) * number // (_SAMPLES - 1))
            made.update(file.read(_BLOCK))
    return f"{made.hexdigest()} of 64 MB"


def named(path: Path, here: Path) -> str:
    """Return a path as a certificate names it: relative to the folder `here` if it lies inside."""
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _stdlib() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.realpath(paths[name]) + "/" for name in ("stdlib", "platstdlib"))


def code(here: Path) -> dict[str, str]:
    """Return the files of the program, started in `here`, with their hashes."""
    files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    real = {os.path.realpath(file) for file in files if isinstance(file, str) and file.endswith(".py")}
    others = (os.path.realpath(Path(__file__).parents[2]) + "/", *_stdlib())
    own = [file for file in real if not (file.startswith(others) or any(folder in file for folder in _PACKAGES))]
    return {named(Path(file), here): sha256_of(Path(file)) for file in sorted(own) if os.path.isfile(file)}


def packages() -> dict[str, str]:
    """Return the versions of the packages that are loaded under the name by which they are installed."""
    names = sorted({name.partition(".")[0] for name in [*sys.modules]})
    return {name: found for name in names if (found := version(name))}


def version(package: str) -> str:
    """Return the version of an installed package; "" if nothing of its name is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


class Reads:
    """The files that this process and its children read: those that Python opens, and those that C libraries hold."""

    def __init__(self, before: float) -> None:
        """`before`: files that were changed later are the run's own."""
        self._before = before
        self.here = Path.cwd()  # before the program changes it
        self._paths = dict[str, None]()
        self._process = os.getpid()

    def install(self) -> None:
        """Start recording, until this process ends: audit hooks cannot be removed."""
        sys.addaudithook(self._see)

    def _see(self, event: str, args: Any) -> None:
        if event == "open" and os.getpid() == self._process:
            path, _, flags = args
            if isinstance(path, (str, bytes)) and isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR):
                self._paths[os.path.abspath(os.fsdecode(path))] = None

    def look(self) -> None:
        """Add the files that are open now. Linux only; elsewhere nothing is added."""
        processes = [str(self._process)]
        with contextlib.suppress(OSError):
            processes += Path(f"/proc/{self._process}/task/{self._process}/children").read_text().split()
        for opened in (file for process in processes for file in Path(f"/proc/{process}/fd").glob("*")):
            with contextlib.suppress(OSError):  # it is closed
                self._paths[os.readlink(opened)] = None

    def hashes(self) -> dict[str, str]:
        """Return the files with their hashes, without code, temporary files, and files of the run itself."""
        ours = Path(__file__).parents[2]
        left_out = (
            *_NOT_DATA,
            *_stdlib(),
            f"{ours}/",
            f"{ours.parent}/patches/",
            f"{sys.prefix}/",
            f"{sys.base_prefix}/",
            *map(os.path.expanduser, ("~/.cache/", "~/.triton/")),
            f"{tempfile.gettempdir()}/torchinductor_",
        )
        found = {}
        for name in sorted(self._paths):
            path = Path(name)
            is_code = name.endswith((".py", ".pyc", ".so")) or ".so." in path.name or "-info/" in name
            with contextlib.suppress(OSError):
                is_data = not is_code and not name.startswith(left_out) and path.is_file()
                if is_data and path.stat().st_mtime < self._before:
                    found[named(path, self.here)] = sha256_of(path)
        return found


def environment(device: Any) -> dict[str, Any]:
    """Return what decides the last bit beside code and data: hardware, versions, variables."""
    from ddpshim.process.devices import computes_on

    return {
        **computes_on(device),
        "python": platform.python_version(),
        "variables": {name: os.environ[name] for name in sorted(names_of_variables()) if name in os.environ},
    }


def names_of_variables() -> set[str]:
    """Return the variables that choose numbers, not where files lie or whom a process trusts."""
    from dataclasses import fields

    from ddpshim.options import Options

    options = {f"{PREFIX}{field.name.upper()}" for field in fields(Options)} | {UNEDITED, ROWS}
    return {*_VARIABLES, *(name for name in options if not any(word in name for word in _LEFT_OUT))}
