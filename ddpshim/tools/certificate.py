"""Implements `run --certify FILE` and `check --certificate FILE`, which repeats a part of a run and compares bits.

Reads, checks and writes certificates, and finds their facts. Nothing in one is unpickled or executed.

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
import math
import os
import platform
import secrets
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim import variables
from ddpshim.checkpoint.progress_folder import THE_BEGINNING
from ddpshim.errors import CertificateError, LaunchError
from ddpshim.launch.runner import Launch, make_log_dir, nodes_of_scheduler, run
from ddpshim.options import Options
from ddpshim.process.devices import computes_on
from ddpshim.process.say import count, say
from ddpshim.reading import read_bytes
from ddpshim.tools import new_files

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
_EXACT, _SAVE_EVERY, _CAPTURE = "DDPSHIM_EXACT", "DDPSHIM_CHECKPOINT_EVERY_N_STEPS", "DDPSHIM_CAPTURE"
_MARKS_OF_A_STRETCH = 5
_CLOSE = 1e-3  # of a loss, where the hardware rounds differently


@dataclass(frozen=True)
class Repetition:
    """What repeating showed. `differences`: sentences, the first one says where the runs part."""

    is_verified: bool
    first: int
    last: int
    differences: tuple[str, ...] = ()
    is_exact: bool = True  # False: compared up to rounding


def _set_up(folder: Path, file: Path, about: dict[str, Any], **repeats: Any) -> None:
    """Write what a `Certifier` reads, and set the variables for the ranks. `about`: program, every, seed and first.

    `repeats`: at, the steps of a repetition's marks; last, of its last mark; ends, whether the program goes on from
    there to its end.
    """
    document = {"certificate": SCHEMA, "first": 0, **about, "marks": [], "checkpoints": []}
    chosen = {"file": str(file), "document": document, "at": [], "last": None, "ends": True, **repeats}
    path = folder / "certificate.json"
    path.write_text(json.dumps(chosen))
    os.environ.update({variables.CERTIFY: str(path), variables.SEED: str(about["seed"])})


def certify(path: Path, every: int, job: Launch) -> int:
    """Run `job` with the option exact (default: a virtual rank for each rank), and certify it in `path`.

    A certificate of a start that did not end is continued if this start resumes from one of its checkpoints.

    Raises CertificateError, before anything is started, if `path` certifies a run that ended, or cannot be written.
    """
    path = Path(os.path.abspath(path.expanduser()))
    found = read(path) if os.path.lexists(path) else None
    if found is not None and found["is_complete"]:
        raise CertificateError(
            f"{path} certifies a run that has ended; it would have been overwritten, and nothing was started. Name "
            "another file, or move it away with its folder of checkpoints."
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise CertificateError(f"{path.parent} is not a folder that can be written to; nothing was started. Make it.")
    # This start may continue the one that was found.
    own = found or {"every": every, "seed": secrets.randbits(31), "exact": os.environ.get(_EXACT, "")}
    os.environ[_EXACT] = str(own["exact"])
    if not os.environ[_EXACT]:
        if not job.nproc.isdigit():
            raise CertificateError(
                f"--certify with --nproc {job.nproc}: the number of virtual ranks would follow the machine, and others "
                "could not repeat the run. Give --nproc a number, or set DDPSHIM_EXACT."
            )
        job = nodes_of_scheduler(job, os.environ)
        os.environ[_EXACT] = str(int(job.nproc) * (job.nnodes or 1))
        say(f"--certify sets {_EXACT}={os.environ[_EXACT]}: numbers are rounded in another order than without it")
    os.environ.setdefault(_CAPTURE, "force")
    os.environ.setdefault(_SAVE_EVERY, str(_MARKS_OF_A_STRETCH * own["every"]))
    with tempfile.TemporaryDirectory(prefix="ddpshim-certify-") as name:
        _set_up(Path(name), path, {"program": job.command, "every": own["every"], "seed": own["seed"]})
        return run(job)


def verify(path: Path, job: Launch, steps: Optional[tuple[int, int]], num_ranks: int) -> Repetition:
    """Repeat the steps A to B of a certificate, rounded outwards to its marks (default: the last ones), and compare.

    `job`: what to run; without a program, the certificate's.

    Raises CertificateError if the file is no certificate, was edited, or has no such steps; LaunchError if the program
    cannot run.
    """
    found = read(path)
    if found["exact"] % num_ranks:
        raise CertificateError(
            f"the certificate has exact={found['exact']}, which {num_ranks} ranks do not divide; nothing was run. Give "
            "--nproc a number that does."
        )
    saved = _checkpoints(found, path)
    first, last = _stretch(found["marks"], steps)
    # Not from `first` itself: whether its checkpoint holds what its mark says shows only in a run that passes it.
    saved = {step: file for step, file in saved.items() if step < first}
    job = replace(job, command=job.command or found["program"])
    odd, of_machine = [*_other_facts(found, job.command)], [*_other_machine(found["facts"]["environment"])]
    for text in (*odd, *of_machine):
        say(text)
    if of_machine:
        say(f"so bits cannot agree here: losses are compared up to {_CLOSE:g} of their size, and hashes are not")
    with new_files.without_traces() as folder:
        job = replace(job, nproc=str(num_ranks), proof=str(folder), log_dir=str(make_log_dir(job)))
        again = _again(found, job, folder, saved, last)
    parting = _parting(found, again, first, last, is_exact=not of_machine)
    if parting is not None and not odd:
        parting += ". Code, data and arguments are those of the certificate"
    differences = tuple(filter(None, (parting, *odd)))
    return Repetition(not differences, first, last, differences, is_exact=not of_machine)


def _checkpoints(found: dict[str, Any], path: Path) -> dict[int, Path]:
    """Return the certificate's checkpoints that are here, by step. Raises CertificateError if one was changed."""
    here = {}
    for saved in found["checkpoints"]:
        file = folder_of(path) / saved["file"]
        if file.is_file():
            if sha256_of(file) != saved["sha256"]:
                raise CertificateError(
                    f"checkpoint: {file} is not the file of step {saved['step']} that the certificate names: its "
                    "sha256 differs. Nothing was run. Get it again, or move it away to start from an earlier one."
                )
            here[saved["step"]] = file
    return here


def _stretch(marks: list[dict[str, Any]], steps: Optional[tuple[int, int]]) -> tuple[int, int]:
    """Return the marks around the steps asked for."""
    known = [0, *(mark["step"] for mark in marks)]
    first, last = steps or (known[-2:][0], known[-1])
    if not 0 <= first < last <= known[-1]:
        raise CertificateError(
            f"steps {first} to {last} are not in the certificate, whose last mark is at step {known[-1]}; nothing was "
            "run. Give --steps A:B within it."
        )
    return max(step for step in known if step <= first), min(step for step in known if step >= last)


def _other_facts(found: dict[str, Any], program: Sequence[str]) -> Iterator[str]:
    """Yield which arguments, code and data are other than in the certificate, each with its kind first."""
    if program != found["program"]:
        yield f"arguments: {' '.join(program)} here, and {' '.join(found['program'])} in the certificate"
    own = found["facts"]
    for kind in ("code", "data"):
        for name, sha256 in own[kind].items():
            file = Path(name)
            if not file.is_file():
                yield f"{kind}: {name} is in the certificate, and not here"
            elif sha256_of(file) != sha256:
                yield f"{kind}: {name} is not the file of the certificate (its sha256 differs)"
    for name, there in own["packages"].items():
        here = version(name)
        if here != there and name != "torch":  # which `_other_machine` names
            yield f"code: the package {name} is {here or 'not installed'} here, and {there} in the certificate"


def _other_machine(there: dict[str, Any]) -> Iterator[str]:
    """Yield what rounds differently here."""
    here = environment(torch.device("cuda" if "GPU" in there and torch.cuda.is_available() else "cpu"))
    for name in ("GPU", "CPU", "torch", "python"):
        if there.get(name) != here.get(name):
            yield f"environment: {name} is {here.get(name)} here, and {there.get(name)} in the certificate"


def _again(found: dict[str, Any], job: Launch, folder: Path, saved: dict[int, Path], last: int) -> dict[str, Any]:
    """Run the program until step `last`, from the last of the `saved` files, and return its certificate."""
    from unittest import mock

    file, start = folder / "again.json", max(saved, default=0)
    marks = [mark["step"] for mark in found["marks"]]
    ends = found["is_complete"] and last == marks[-1]
    origin = f"the checkpoint of step {start}" if saved else "the beginning"
    how = f"on {count(int(job.nproc), 'rank')}, from {origin} to step {last}; output: {job.log_dir}"
    say(f"running {' '.join(job.command)} {how}")
    chosen = found["facts"]["environment"]["variables"]
    with mock.patch.dict(os.environ):
        for name in names_of_variables():
            os.environ.pop(name, None)
        os.environ.update({name: chosen[name] for name in names_of_variables() if name in chosen})
        os.environ.update({_EXACT: str(found["exact"]), _CAPTURE: "off"})  # so that it shows what a capture got wrong
        os.environ[variables.RESUME_FROM] = str(saved[start].resolve()) if saved else THE_BEGINNING
        # The last mark of a program that ended may have been made where it saved or ended, not after its step.
        at = marks[:-1] if ends and last % found["every"] else marks
        about = {"program": job.command, "every": found["every"], "seed": found["seed"], "first": start}
        _set_up(folder, file, about, at=at, last=last, ends=ends)
        code = run(job)
    if not file.exists():
        raise LaunchError(
            f"the program ended with exit code {code} before its first mark: there is nothing to compare. Its output "
            f"is in {job.log_dir}. If it does not start because the certified run's files are here, move those away."
        )
    return read(file, start)


def _parting(found: dict[str, Any], again: dict[str, Any], first: int, last: int, is_exact: bool) -> Optional[str]:
    """Return where a repetition differs first, and in what; None if nowhere."""
    theirs = {mark["step"]: mark for mark in found["marks"]}
    ours = {mark["step"]: mark for mark in again["marks"]}
    for step in (step for step in theirs if first < step <= last):
        mark, own = theirs[step], ours.get(step)
        if own is None:
            return f"steps: the program ended here before step {step}"
        num = min(len(mark["losses"]), len(own["losses"]))  # less if it started between two marks
        for at, loss, here in zip(range(step - num + 1, step + 1), mark["losses"][-num:], own["losses"][-num:]):
            # As text, NaN is equal to itself.
            if repr(loss) != repr(here) and (is_exact or not math.isclose(loss, here, rel_tol=_CLOSE)):
                return f"loss: differs first in step {at}: {here!r}, certified {loss!r}"
        if is_exact and mark["weights"] != own["weights"]:
            return f"weights: differ first between steps {step - num} and {step}; losses agree"
    if found["is_complete"] and last == [*theirs][-1] and not (again["is_complete"] and last == [*ours][-1]):
        return f"steps: the program did not end here after step {last}"
    return None


def as_text(verdict: Repetition, num_ranks: int) -> str:
    """Return the verdict in a line, and what differs in one each."""
    where = f"steps {verdict.first} to {verdict.last}"
    if verdict.is_verified and verdict.is_exact:
        return f"verified: {where} have the hashes of the certificate, on {count(num_ranks, 'rank')}"
    if verdict.is_verified:
        return f"agrees up to rounding: the losses of {where}; bits cannot be compared here"
    return "\n".join([f"not verified: {where}", *(f"  {text}" for text in verdict.differences)])


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
        if missing := [name for name in _FIELDS if name not in document]:
            raise ValueError(f"it has no field {missing[0]!r}")
        if document["first"] != first:
            raise ValueError(f"it begins after step {document['first']}")
        for mark in document["marks"]:
            if mark["step"] - len(mark["losses"]) != first:
                at = f"the mark of step {mark['step']}"
                raise ValueError(f"{at} does not follow that of step {first}: steps are missing")
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


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file; of one above 1 GB, that of its size and of 64 MB spread over it."""
    size = path.stat().st_size
    is_whole = size <= _WHOLE
    made = hashlib.sha256(b"" if is_whole else str(size).encode())
    spread = ((size - _BLOCK) * number // (_SAMPLES - 1) for number in range(_SAMPLES))
    with path.open("rb") as file:
        for start in range(0, size, _BLOCK) if is_whole else spread:
            file.seek(start)
            made.update(file.read(_BLOCK))
    return f"{made.hexdigest()}{'' if is_whole else ' of 64 MB'}"


def packages() -> dict[str, str]:
    """Return the versions of the packages that are loaded under the name by which they are installed."""
    names = sorted({name.partition(".")[0] for name in [*sys.modules]})
    return {name: found for name in names if (found := version(name))}


def version(package: str) -> str:
    """Return the version of an installed package; "" if nothing of its name is."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def environment(device: torch.device) -> dict[str, Any]:
    """Return what decides the last bit beside code and data: hardware, versions, variables."""
    return {
        **computes_on(device),
        "python": platform.python_version(),
        "variables": {name: os.environ[name] for name in sorted(names_of_variables()) if name in os.environ},
    }


def names_of_variables() -> set[str]:
    """Return the variables that choose numbers, not where files lie or whom a process trusts."""
    options = {f"{variables.PREFIX}{name.upper()}" for name in Options.names()} | {variables.UNEDITED, variables.ROWS}
    return {*_VARIABLES, *(name for name in options if not any(word in name for word in _LEFT_OUT))}


class Reads:
    """The files that this process and its children read: those that Python opens, and those that C libraries hold."""

    def __init__(self, before: float) -> None:
        self._before = before  # files that were changed later are the run's own
        self._here = Path.cwd()  # before the program changes it
        self._paths = dict[str, None]()
        self._process = os.getpid()
        sys.addaudithook(self._see)  # until this process ends: audit hooks cannot be removed

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
        # torch writes modules of this prefix into a new folder for each process; 2.8 does when it is imported.
        modules = [module for name, module in [*sys.modules.items()] if not name.startswith("_remote_module_")]
        files = (getattr(module, "__file__", None) for module in modules)
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
