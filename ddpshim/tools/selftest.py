"""Runs the self-test's jobs through `python -m ddpshim run`, as a user's own.

As a program it is one of these jobs: it tests how ranks start, meet, add and end.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import LaunchError, WorldError
from ddpshim.job.group import join
from ddpshim.job.world import World
from ddpshim.process.say import count
from ddpshim.reading import end_of

_RANKS, _TRAININGS = __file__, str(Path(__file__).with_name("selftest_trainings.py"))
_LIMIT = 1e-9  # of differences in float64, relative to the largest value
_MOST_RANKS = 8  # where --nproc says nothing
_SAME = "ranks train as one process does"
PROVES = {
    "start": "ranks start and meet",
    "all-reduce": "sums over ranks are right",
    "one process": "plain torch trains here: the reference",
    "dropout": f"{_SAME}, with dropout and noise",
    "BatchNorm": f"{_SAME}, with BatchNorm",
    "data workers": f"{_SAME}, with two data workers whose samples draw",
    "killed rank": "a killed rank ends the job, and is named",
}


@dataclass
class Result:
    """The result of one check."""

    name: str
    is_good: bool
    seconds: float
    detail: str

    def __str__(self) -> str:
        head = f"  {self.name:13}{'ok' if self.is_good else 'FAILED':7}{self.seconds:6.1f} s  {PROVES[self.name]}"
        return "\n".join([head, *(f"{'':31}{line}" for line in self.detail.splitlines())])


def selftest(nproc: Optional[int] = None, gpu: bool = False, timeout_s: float = 120.0) -> bool:
    """Run the checks in order until one fails, print each result, and return whether all passed.

    `nproc`: the number of ranks (None: that of the GPUs, from 2 to 8); `timeout_s`: of each job. Raises LaunchError
    before anything starts if there would be one rank, or with `gpu` on a machine without GPUs.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu and not num_gpus:
        raise LaunchError(
            f"torch {torch.__version__} sees no GPU, so there is nothing to test. Run this on a machine with GPUs and "
            "a torch that is built for their driver; CUDA_VISIBLE_DEVICES may hide them. Without --gpu, the CPU is "
            "tested."
        )
    nproc = nproc or min(max(num_gpus, 2), _MOST_RANKS)
    if nproc < 2:
        raise LaunchError("--nproc 1: one rank has nobody to add with, so there is nothing to test. Give at least 2.")
    is_shared = 0 < num_gpus < nproc
    device = f"{count(num_gpus, 'GPU')}{', shared: gloo in place of nccl' if is_shared else ''}" if num_gpus else "CPU"
    print(f"ddpshim selftest: {count(nproc, 'rank')}, {device}")
    environ = {**os.environ, **({"DDPSHIM_BACKEND": "gloo"} if is_shared else {})}
    with tempfile.TemporaryDirectory(prefix="ddpshim-selftest-") as folder:
        for result in _results(nproc, Path(folder), functools.partial(_call, Path(folder), environ, timeout_s)):
            print(result, flush=True)
            if not result.is_good:
                return False
    return True


def _results(nproc: int, folder: Path, call: Callable[[list[str]], tuple[int, float, str]]) -> Iterator[Result]:
    """Yield the results in the order of PROVES; a job that fails gives the first result that it has not made."""
    run = [sys.executable, "-m", "ddpshim", "run", "--no-logs", "--grace", "5", "--nproc", str(nproc)]
    file = folder / "ranks.jsonl"
    code, seconds, said = call([*run, _RANKS, str(file)])
    made = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for result in made:
        yield Result(**result, is_good=True)
    if len(made) < 2:
        yield Result(list(PROVES)[len(made)], False, seconds, said)
    named = re.search(r"rank 1\b[^\n]*SIGKILL", said)
    is_good = code == 128 + signal.SIGKILL and named is not None
    why = f"exit code {code}, where 137 says that a rank was killed; rank 1 was {'' if named else 'not '}named:"
    seconds -= sum(result["seconds"] for result in made)
    killed = Result("killed rank", is_good, seconds, "" if is_good else f"{why}\n{said}")
    program = str(shutil.copy(_TRAININGS, folder))  # outside of ddpshim: run like a user's own
    one, several = folder / "one.json", folder / "several.json"
    code, seconds, said = call([sys.executable, program, str(one)])
    yield Result("one process", not code, seconds, said if code else "")
    code, seconds, said = call([*run, program, str(several)])
    if code:
        yield Result("dropout", False, seconds, said)
    found, expected = (json.loads(path.read_text()) for path in (several, one))
    for name in expected:
        yield compared(name, found[name], expected[name], seconds / len(expected))
    yield killed


def _call(folder: Path, environ: Mapping[str, str], timeout_s: float, command: list[str]) -> tuple[int, float, str]:
    """Run a command to its end; return its exit code (124 at the deadline), seconds, and its last lines."""
    begun = time.monotonic()
    log = folder / "output.txt"
    with log.open("wb") as output:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=folder, env=environ, **streams)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = 124
        finally:  # if it still runs: `run` ends its ranks when it gets SIGTERM
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
    late = f"\nnot finished within {timeout_s:g} s; a slow machine needs a longer --timeout"
    return code, time.monotonic() - begun, end_of(log) + (late if code == 124 else "")


def compared(name: str, found: Mapping[str, Any], expected: Mapping[str, Any], seconds: float) -> Result:
    """Return whether ranks' losses and weights, lists of numbers, equal those of one process."""
    if [*map(len, found.values())] != [*map(len, expected.values())]:
        return Result(name, False, seconds, "ranks made another number of steps than one process")
    largest = {}
    for what, values in expected.items():
        theirs, ours = torch.tensor([values, found[what]], dtype=torch.float64)
        largest[what] = float((ours - theirs).abs().max() / (theirs.abs().max() or 1.0))  # NaN if one number is
    detail = " and ".join(f"{what} differ by {value:.0e}" for what, value in largest.items())
    is_good = all(value <= _LIMIT for value in largest.values())
    more = f", at most {_LIMIT:.0e} expected: ranks would train another model. Report this with all that it printed"
    return Result(name, is_good, seconds, f"{detail} of the largest{'' if is_good else more}")


def check_ranks(file: Path) -> None:
    """Write a JSON line into `file` for each check of ranks that passed; then rank 1 kills itself (collective)."""
    begun = time.perf_counter()
    world = join(seed=1)
    for name, check in {"start": _start, "all-reduce": _all_reduce}.items():
        detail = check(world)
        world.barrier()
        if world.is_main:
            with file.open("a") as lines:
                line = {"name": name, "seconds": time.perf_counter() - begun, "detail": detail}
                lines.write(json.dumps(line) + "\n")
        begun = time.perf_counter()
    world.sum(1)  # the last line is written
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.sum(1)


def _start(world: World) -> str:
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    devices = ", ".join(dict.fromkeys(f"{where} ({what})" for where, what in world.gather((str(world.device), name))))
    return f"{world.backend} on {devices}"


def _all_reduce(world: World) -> str:
    megabytes = 256 if world.backend == "nccl" else 4
    # Integers far below 2**24, so their sums are exact in float32.
    pattern = (torch.arange(megabytes * 250_000, device=world.device) % 251).float()
    reduced = pattern * (world.rank + 1)
    torch.distributed.all_reduce(reduced)
    num_wrong = int((reduced != pattern * (world.world_size * (world.world_size + 1) // 2)).sum())
    if num_wrong:
        raise WorldError(
            f"all-reduce of {megabytes} MB over {world.backend} gave {num_wrong} wrong numbers of {len(pattern)}; "
            "gradients would be wrong. Try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, to find the faulty link; "
            "nccl-tests measures each."
        )
    return f"{megabytes} MB"


if __name__ == "__main__":
    check_ranks(Path(sys.argv[1]))
