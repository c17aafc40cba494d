"""Tests a machine with GPUs: runs every check that is possible, also after failures, and writes the results."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

from ddpshim.errors import DdpShimError, LaunchError
from ddpshim.process.say import count
from ddpshim.tools.selftest.running import Plan, SelfTestFailed, completed, preloading_context, started
from ddpshim.version import __version__

_MOST_GPUS = 8
# Device files of the drivers: NVIDIA (two), Jetson (two), WSL, AMD.
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvidia-caps", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")
_NAME = r"[^\s/\"'<>:,;()]+"
_FOLDERS = rf"(?<![\w:/.])(?:~|\.{{1,2}})?(?:/{_NAME})+/({_NAME})"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class Check(NamedTuple):
    """One check.

    Attributes:
        proves: what holds on this machine if the check passes.
        stage: checks of the same stage run on the same ranks.
        num_ranks: how many ranks it needs.
        needs_own: whether each rank needs a GPU of its own; the others also pass on a shared one, through gloo.
        is_quick: whether --quick includes it.
        after: the checks that must have passed before.
    """

    name: str
    proves: str
    stage: str = "ranks"
    num_ranks: int = 2
    is_quick: bool = True
    after: tuple[str, ...] = ()
    needs_own: bool = False


_SAME = "several ranks train as one process does, both on GPUs"
CHECKS = (
    Check("rendezvous", "a process starts on a GPU", "one process", 1),
    Check("one process", "plain torch trains on a GPU: the reference for the ranks", "one process", 1),
    Check("rendezvous", "ranks start, and reach each other"),
    Check("facts", "each rank has a GPU of its own", num_ranks=1, needs_own=True),
    Check("collectives", "values travel between ranks unchanged"),
    Check("all-reduce", "sums over all ranks are right; their speed"),
    Check("links", "each pair of GPUs adds and copies right; its speed", needs_own=True),
    Check("U-Net", _SAME, after=("one process",)),
    Check("transformer", _SAME, after=("one process",)),
    Check("ResNet", f"{_SAME}, with BatchNorm", after=("one process",)),
    Check("RNN", _SAME, after=("one process",)),
    Check("other methods", f"{_SAME}, with methods other than forward and unused parameters", after=("one process",)),
    Check("streams", "no gradient is read before it has arrived", after=("one process",)),
    Check("noise", "each rank draws what one process draws for its samples"),
    Check("sharding", "each sample is seen once in a pass, also from data workers"),
    Check("save", "progress is saved"),
    # On new ranks, because these checks train without a loader, and from then on each rank draws its own noise.
    Check("rendezvous", "ranks start", "networks"),
    Check("memory", "a further network costs no communicator", "networks", needs_own=True),
    Check("odd calls", "unusual arguments reach the network", "networks"),
    Check("branches", "ranks may leave out different branches of several networks", "networks"),
    Check("no syncs", "no usual step waits for the GPU", "networks", needs_own=True),
    Check("overlap", "a step takes no longer than raw DDP's", "networks", needs_own=True),
    Check("rendering", "each rank renders on its own GPU", "networks", num_ranks=1, needs_own=True),
    Check("rendezvous", "fewer ranks start", "fewer", after=("save",)),
    Check(
        "resume",
        "a different number of ranks resumes where the first ones stopped",
        "fewer",
        after=("save", "one process"),
    ),
    Check("rendezvous", "ranks start", "weights"),
    Check("guard: weights", "a weight that differs on one rank is reported", "weights"),
    Check("rendezvous", "ranks start", "steps"),
    Check("guard: steps", "an optimizer step that one rank makes alone is reported", "steps"),
    Check("exception", "a rank that raises ends the job, and is named", "failures"),
    Check("out of memory", "a rank without memory ends the job, and is named", "failures"),
    Check("stop", "a rank that stands still is named", "failures"),
    Check("kill", "a rank that is killed ends the job, and is named", "failures"),
    Check("robomimic", "robomimic itself trains on several ranks as in one process", "robomimic", is_quick=False),
)


@dataclass
class Result:
    """The result of one check; `rank` and `device` are those that failed."""

    name: str
    stage: str
    proves: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""
    rank: Optional[int] = None
    device: Optional[str] = None


# Runs a stage that starts whole jobs, and yields the result of each check; arguments: the plan, a folder, the checks.
Program = Callable[[Plan, Path, list[Check]], Iterator[Result]]


def accept(
    options: Plan,
    is_quick: bool = False,
    file: Optional[Path] = None,
    say: Callable[[str], None] = print,
) -> tuple[str, bool]:
    """Run the checks and return (last line, whether none failed). Prints each result through `say`.

    For one machine. Raises LaunchError before anything starts if there is no GPU or `file` cannot be written.
    """
    begun = time.monotonic()
    if options.nnodes != 1 or options.device == "cpu":
        raise LaunchError(
            f"--gpu with --nnodes {options.nnodes} and --device {options.device}: it tests one machine with GPUs. "
            "Run it on each node, and `selftest --nnodes` for the network between them."
        )
    _check_writable(file)
    refuse_without_gpu()
    options = completed(options, os.environ)
    context = preloading_context("ddpshim.tools.selftest.gpu_checks")  # its process imports torch while this one does
    import torch

    num_gpus = _number_of_gpus(torch)
    num_ranks = options.nproc or min(num_gpus, _MOST_GPUS)
    options = replace(options, device="cuda", nproc=num_ranks)
    shares = ", shared: through gloo, not nccl" if num_ranks > num_gpus else ""
    say(f"ddpshim selftest: {count(num_ranks, 'rank')} on {count(num_gpus, 'GPU')}{shares}{', quick' * is_quick}")
    results: list[Result] = []
    facts = None if file is None else {"num_ranks": num_ranks, "is_quick": is_quick, **_facts()}
    with tempfile.TemporaryDirectory() as folder:
        for result in _run(options, is_quick, Path(folder), context, num_ranks > num_gpus):
            results.append(result)
            say(as_line(result))
            _write(file, facts, results, time.monotonic() - begun)  # each time: the next check may crash the machine
    tally = {outcome: sum(result.outcome == outcome for result in results) for outcome in (PASSED, FAILED, NOT_RUN)}
    seconds = time.monotonic() - begun
    _write(file, facts, results, seconds, is_complete=True)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in tally.items())
    where = f"; written to {file}" if file is not None else ""
    return f"selftest on GPUs: {counts}, {seconds:.0f} s{where}", not tally[FAILED]


def _run(options: Plan, is_quick: bool, folder: Path, context: Any, shares: bool = False) -> Iterator[Result]:
    from ddpshim.tools.selftest import gpu_programs

    programs: Mapping[str, Program] = {"failures": gpu_programs.failures, "robomimic": gpu_programs.robomimic}
    num_ranks = options.nproc or 1
    fewer = max((n for n in range(1, num_ranks) if num_ranks % n == 0), default=1)
    sizes = {"one process": 1, "fewer": fewer}
    passed: set[str] = set()
    for stage in dict.fromkeys(check.stage for check in CHECKS):
        left = []
        for check in [check for check in CHECKS if check.stage == stage]:
            why = _why_not(check, num_ranks, is_quick, passed, shares)
            if why is None:
                left.append(check)
            elif check.name != "rendezvous":
                yield Result(check.name, stage, check.proves, NOT_RUN, detail=why)
        if [check.name for check in left] in ([], ["rendezvous"]):
            continue
        if stage in programs:
            found = programs[stage](options, folder, left)
        else:
            place = {"num_ranks": num_ranks, "is_quick": is_quick}
            found = _on_ranks(replace(options, nproc=sizes.get(stage, num_ranks)), folder, context, left, place)
        reported: list[str] = []
        try:
            for result in found:
                reported.append(result.name)
                if result.outcome == PASSED:
                    passed.add(result.name)
                yield result
        except (DdpShimError, OSError) as error:  # no ranks, or no job, could be started
            for number, check in enumerate(check for check in left if check.name not in reported):
                why = str(error) if number == 0 else f"nothing could be started after '{left[len(reported)].name}'"
                yield Result(check.name, stage, check.proves, NOT_RUN if number else FAILED, detail=why)


def _why_not(check: Check, num_ranks: int, is_quick: bool, passed: set[str], shares: bool = False) -> Optional[str]:
    """Return the reason to skip a check, or None."""
    if check.num_ranks > num_ranks and check.name != "rendezvous":
        return f"it needs {count(check.num_ranks, 'rank')}, and has {num_ranks}"
    if shares and check.needs_own:
        return "ranks share a GPU"
    if is_quick and not check.is_quick:
        return "only without --quick"
    missing = [name for name in check.after if name not in passed]
    if missing:
        return f"it needs the check '{missing[0]}', which did not pass"
    return None


def _on_ranks(
    options: Plan, folder: Path, context: Any, checks: list[Check], place: Mapping[str, Any]
) -> Iterator[Result]:
    """Run checks on ranks; after a failure, run the remaining ones on new ranks."""
    from ddpshim.tools.selftest import gpu_checks

    rendezvous, *left = checks
    is_reported = False
    while left:
        names = tuple(check.name for check in (rendezvous, *left))
        with started(options, context, str(folder), gpu_checks.run_rank, checks=names, **place) as (_, ranks):
            for check in (rendezvous, *left):
                begun = time.monotonic()
                result = Result(check.name, check.stage, check.proves, PASSED)
                try:
                    reports = ranks.reports_of(check.name, options.timeout_s)
                    result.detail = next((report.detail for report in reports if report.detail), "")
                    result.seconds = max(report.seconds for report in reports)
                    reason = next((report.detail for report in reports if report.is_not_run), None)
                    if reason is not None:
                        result.outcome, result.detail = NOT_RUN, reason
                except SelfTestFailed as failure:
                    result.outcome, result.detail, result.rank = FAILED, str(failure), failure.rank
                    result.device = None if failure.rank is None else f"cuda:{failure.rank}"
                    result.seconds = time.monotonic() - begun
                if check is not rendezvous:
                    left = left[1:]
                if check is not rendezvous or result.outcome == FAILED or not is_reported:
                    yield result
                is_reported = True
                if result.outcome == FAILED:
                    break
            if result.outcome == FAILED and check is rendezvous:
                for check in left:
                    yield Result(check.name, check.stage, check.proves, NOT_RUN, detail="the ranks did not start")
                return


def refuse_without_gpu() -> None:
    """Raise LaunchError if no driver is loaded, without importing torch, which takes seconds. Local."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU, so there is nothing to test. Unset it, or name GPUs "
            "in it."
        )
    if "torch" in sys.modules or sys.platform != "linux" or any(map(glob.glob, _DEVICES)):
        return  # `_number_of_gpus` asks torch
    raise LaunchError(
        "this machine has no visible GPU (no driver's device in /dev), so there is nothing to test. Run it on a "
        "machine with GPUs; start a container with them (docker run --gpus all). `python -m ddpshim selftest` tests "
        "the CPU."
    )


def _number_of_gpus(torch: Any) -> int:
    if not torch.cuda.is_available():
        built = "is built without CUDA" if torch.version.cuda is None and torch.version.hip is None else "has CUDA"
        raise LaunchError(
            f"torch {torch.__version__} {built}, and sees no GPU, so there is nothing to test. Install a torch that "
            "is built for this machine's driver (https://pytorch.org/get-started/locally), and check nvidia-smi."
        )
    return int(torch.cuda.device_count())


def _check_writable(file: Optional[Path]) -> None:
    """Raise LaunchError if `file` cannot be written."""
    if file is None:
        return
    try:
        was_there = file.exists()
        with file.open("a"):
            pass
        if not was_there:
            file.unlink()
    except OSError as error:
        raise LaunchError(
            f"{file} cannot be written ({error.strerror}): the results would be lost. Name a file in an existing "
            "folder that you may write to."
        ) from error


def as_line(result: Result) -> str:
    """Return a result as text: a line with outcome, time and what it proves, then lines with details."""
    shown = {PASSED: "ok", FAILED: "FAILED", NOT_RUN: "not run"}[result.outcome]
    lines = [f"  {result.name:14} {shown:7} {result.seconds:5.1f} s  {result.proves}"]
    culprit = "" if result.rank is None else f"rank {result.rank}, {result.device}: "
    if result.detail:
        lines += [f"{'':34}{line}" for line in f"{culprit}{result.detail}".splitlines()]
    return "\n".join(lines)


def _facts() -> dict[str, Any]:
    """Return versions, GPUs and the date, for the file of results."""
    from ddpshim.observe.environment import describe

    environment = describe()
    versions = {name: public(value) for name, value in environment["versions"].items() if value is not None}
    return {"versions": versions, "GPUs": environment["GPUs"], "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _write(
    file: Optional[Path],
    facts: Optional[Mapping[str, Any]],
    results: list[Result],
    seconds: float,
    is_complete: bool = False,
) -> None:
    """Write the results so far, without names of users and machines.

    `schema` changes with every change that a program reading the file could notice.
    """
    if file is None or facts is None:
        return
    checks = [{**asdict(one), "detail": public(one.detail), "seconds": round(one.seconds, 2)} for one in results]
    head = {"schema": 1, "ddpshim": __version__, "is_complete": is_complete, "seconds": round(seconds)}
    file.write_text(json.dumps({**head, **facts, "checks": checks}, indent=1) + "\n")


def public(text: str) -> str:
    """Return `text` without the names of this machine and its user, and without folders."""
    from ddpshim.observe.environment import without_names

    without_folders = re.sub(_FOLDERS, r"\1", text)
    return without_names(without_folders)
