"""Reads, checks and writes the JSON of a certificate, and finds its facts. Nothing in it is unpickled or executed.

One object:
- program (words after `run`), exact, ranks, every, seed (of the generators that the program does not seed)
- first: the step after which recording began; 0 but in a repetition
- facts, which decide the numbers: code, packages, data, environment
- marks, one for every `every` steps, and where a file was saved: step; losses, for each step since the mark before the
  sum over its backward passes; weights, a hash of the tensors of the optimizers that stepped since then
- checkpoints: step, file (beside the certificate), sha256
- is_complete: whether the program has ended
- seal: a hash of all else
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import sysconfig
import tempfile
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ddpshim.errors import CertificateError
from ddpshim.options import Options
from ddpshim.reading import read_bytes
from ddpshim.variables import PREFIX, ROWS, UNEDITED

SCHEMA = 1
_FIELDS = ("program", "exact", "every", "seed", "facts", "is_complete")
_MOST_BYTES = 256 * 1024 * 1024
_WHOLE = 1 << 30  # bytes; of a larger file, samples are hashed
_SAMPLES, _BLOCK = 64, 1 << 20
_OURS = Path(__file__).parents[1]
_PYTHONS = tuple(os.path.realpath(sysconfig.get_paths()[name]) + "/" for name in ("stdlib", "platstdlib"))
_PACKAGES = ("/site-packages/", "/dist-packages/")  # also those that another environment shares with this one
_NOT_DATA = (
    *("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib", f"{sys.prefix}/", f"{sys.base_prefix}/", *_PYTHONS),
    *(f"{_OURS}/", f"{_OURS.parent}/patches/", *map(os.path.expanduser, ("~/.cache/", "~/.triton/"))),
)
# Variables that change numbers; ddpshim's options are added, without those that have these words.
_VARIABLES = (
    *("OMP_NUM_THREADS", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "MKL_CBWR"),
    "ATEN_CPU_CAPABILITY",
)
_LEFT_OUT = ("TRUST", "CHECKPOINT", "KEEP", "RESUME", "BACKGROUND")


def write(document: dict[str, Any], path: Path) -> None:
    """Seal a certificate and replace `path` by it: readers see the old one or the new one. Local."""
    document["seal"] = seal_of(document)
    rest = json.dumps({name: value for name, value in document.items() if name != "marks"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(mark)}" for mark in document["marks"])
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(f'{rest[:-2]},\n "marks": [\n{rows}\n ]\n}}\n')
    os.replace(partial, path)


def read(path: Path, first: int = 0) -> dict[str, Any]:
    """Return a certificate that begins after step `first`. Raises CertificateError if it is none, or was edited."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CertificateError(f"{path} is larger than {_MOST_BYTES >> 20} MB: no certificate is. It was not read.")
        document: dict[str, Any] = json.loads(read_bytes(path))
        if document["certificate"] != SCHEMA:
            raise ValueError(f"its field 'certificate' is not {SCHEMA}")
        missing = [name for name in _FIELDS if name not in document]
        if missing:
            raise ValueError(f"it has no field {missing[0]!r}")
        if document["first"] != first:
            raise ValueError(f"it begins after step {document['first']}")
        for mark in document["marks"]:
            if mark["step"] - len(mark["losses"]) != first:
                raise ValueError(
                    f"the mark of step {mark['step']} does not follow that of step {first}: steps are missing"
                )
            first = mark["step"]
        for saved in document["checkpoints"]:
            if os.path.basename(saved["file"]) != saved["file"]:
                raise ValueError(f"the checkpoint {saved['file']!r} lies in another folder")
        is_sealed = document["seal"] == seal_of(document)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CertificateError(
            f"{path} cannot be read as a certificate of this version of ddpshim ({error}). Nothing was run. Make it "
            "with `python -m ddpshim run --certify FILE`."
        ) from None
    if not is_sealed:
        raise CertificateError(
            f"{path} was edited after it was written: it is not what was recorded. Nothing was run; get the file again "
            "from who made it."
        )
    return document


def seal_of(document: dict[str, Any]) -> str:
    """Return the hash of a certificate."""
    rest = {name: value for name, value in document.items() if name != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def folder_of(path: Path) -> Path:
    """Return the folder with a certificate's checkpoints."""
    return path.with_name(f"{path.stem}.checkpoints")


# Facts


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
    options = {f"{PREFIX}{field.name.upper()}" for field in fields(Options)} | {UNEDITED, ROWS}
    return {*_VARIABLES, *(name for name in options if not any(word in name for word in _LEFT_OUT))}


class Reads:
    """The files that this process and its children read: those that Python opens, and those that C libraries hold."""

    def __init__(self, before: float) -> None:
        """`before`: files that were changed later are the run's own."""
        self._before = before
        self._here = Path.cwd()  # before the program changes it
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

    def code(self) -> dict[str, str]:
        """Return the files of the program with their hashes."""
        files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        real = {os.path.realpath(file) for file in files if isinstance(file, str) and file.endswith(".py")}
        others = (os.path.realpath(_OURS) + "/", *_PYTHONS)
        own = [file for file in real if not (file.startswith(others) or any(folder in file for folder in _PACKAGES))]
        return {self._name(Path(file)): sha256_of(Path(file)) for file in sorted(own) if os.path.isfile(file)}

    def data(self) -> dict[str, str]:
        """Return the files with their hashes, without code, temporary files, and files of the run itself."""
        left_out = (*_NOT_DATA, f"{tempfile.gettempdir()}/torchinductor_")
        found = {}
        for name in sorted(self._paths):
            path = Path(name)
            is_code = name.endswith((".py", ".pyc", ".so")) or ".so." in path.name or "-info/" in name
            with contextlib.suppress(OSError):
                is_data = not is_code and not name.startswith(left_out) and path.is_file()
                if is_data and path.stat().st_mtime < self._before:
                    found[self._name(path)] = sha256_of(path)
        return found

    def _name(self, path: Path) -> str:
        """Return a path as a certificate names it: relative to the folder of the start if it lies inside."""
        return str(path.relative_to(self._here)) if path.is_relative_to(self._here) else str(path)
