"""Runs the self-test's jobs through `python -m ddpshim run`, as a user's own, and compares what they say."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Optional

from ddpshim.errors import LaunchError
from ddpshim.process.say import count
from ddpshim.tools.selftest import machine, rank_that_dies, trainings
from ddpshim.tools.selftest.environment import describe, without_names

_LIMIT = 1e-9  # of differences in float64, relative to the largest value
_NUM_LAST_LINES = 20
_MOST_GPUS = 8
_SAME = "ranks train as one process does"
PROVES = {
    "start": "ranks start and meet",
    "values": "values travel between ranks unchanged",
    "all-reduce": "sums over ranks are right; their speed",
    "one process": "plain torch trains here: the reference",
    "dropout": f"{_SAME}, with dropout and noise",
    "BatchNorm": f"{_SAME}, with BatchNorm",
    "data workers": f"{_SAME}, with two data workers whose samples draw",
    "killed rank": "a killed rank ends the job, and is named",
}
_TRAININGS = ("dropout", "BatchNorm", "data workers")


@dataclass(frozen=True)
class Plan:
    """What is tested. None: `nproc` is the number of GPUs (at most 8), or 2; `run` finds the place of a node."""

    nproc: Optional[int] = None
    gpu: bool = False  # refuse a machine without GPUs
    nnodes: int = 1
    node_rank: Optional[int] = None
    master_addr: Optional[str] = None
    master_port: Optional[int] = None
    timeout_s: float = 120.0  # of each job


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


def selftest(plan: Plan, file: Optional[Path] = None, say: Callable[[str], None] = print) -> bool:
    """Run the checks in order, print each result through `say`, and return whether all passed.

    The first failure ends the test: what follows would fail for the same reason. `file` gets the results and versions
    as JSON, without names of machines, users and folders. With several nodes each one calls it. Raises LaunchError
    before anything starts if `file` cannot be written, or if `plan.gpu` finds no GPU.
    """
    about = {} if file is None else {name: found for name, found in describe().items() if name in ("versions", "GPUs")}
    if file is not None:
        _write(file, about, [], is_complete=False)
    num_gpus = _number_of_gpus(plan.gpu)
    nproc = plan.nproc or min(num_gpus, _MOST_GPUS) or 2
    shared = num_gpus > 0 and nproc > num_gpus
    nodes = f" on each of {plan.nnodes} nodes" if plan.nnodes > 1 else ""
    device = f"{count(num_gpus, 'GPU')}{', shared: gloo in place of nccl' if shared else ''}" if num_gpus else "CPU"
    say(f"ddpshim selftest: {count(nproc, 'rank')}{nodes}, {device}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="ddpshim-selftest-") as folder:
        for result in _Jobs(plan, nproc, shared, Path(folder)).results():
            results.append(result)
            say(str(result))
            if file is not None:  # each time: the next check may crash the machine
                _write(file, about, results, is_complete=len(results) == len(PROVES))
    return all(result.is_good for result in results)


class _Jobs:
    """The jobs of one self-test, each in its own process group with a deadline."""

    def __init__(self, plan: Plan, nproc: int, shares_gpus: bool, folder: Path) -> None:
        self._plan, self._nproc, self._folder = plan, nproc, folder
        self._environ = {**os.environ, **({"DDPSHIM_BACKEND": "gloo"} if shares_gpus else {})}

    def results(self) -> Iterator[Result]:
        """Yield the results up to the first failure."""
        begun = time.monotonic()
        facts = self._folder / "machine.jsonl"
        code, said = self._run(machine.__file__, str(facts), str(self._plan.timeout_s))
        lines = facts.read_text().splitlines() if facts.exists() else []  # only where the main rank is
        for line in lines:
            yield Result(**json.loads(line), is_good=True)
        if code:
            yield Result(list(PROVES)[len(lines)], False, time.monotonic() - begun, said)
            return
        one, ranks = self._folder / "one.json", self._folder / "ranks.json"
        begun = time.monotonic()
        code, said = self._call([sys.executable, self._copy(trainings.__file__), str(one)])
        yield Result("one process", not code, time.monotonic() - begun, said if code else "")
        if code:
            return
        begun = time.monotonic()
        code, said = self._run(self._copy(trainings.__file__), str(ranks))
        seconds = (time.monotonic() - begun) / len(_TRAININGS)
        if code:
            yield Result(_TRAININGS[0], False, seconds, said)
            return
        if ranks.exists():
            found, expected = (json.loads(path.read_text()) for path in (ranks, one))
            for result in (compared(name, found[name], expected[name], seconds) for name in _TRAININGS):
                yield result
                if not result.is_good:
                    return
        yield self._killed()

    def _killed(self) -> Result:
        begun = time.monotonic()
        code, said = self._run(rank_that_dies.__file__, nodes=False)
        seconds = time.monotonic() - begun
        named = re.search(r"rank 1\b[^\n]*SIGKILL", said)
        if code == 128 + signal.SIGKILL and named:
            return Result("killed rank", True, seconds, "")
        why = f"exit code {code}, where 137 says that a rank was killed; rank 1 was {'' if named else 'not '}named:"
        return Result("killed rank", False, seconds, f"{why}\n{said}")

    def _copy(self, program: Optional[str]) -> str:
        """Return a copy of a program outside of ddpshim, which is run like a user's own."""
        return shutil.copy(str(program), str(self._folder))

    def _run(self, program: Optional[str], *arguments: str, nodes: bool = True) -> tuple[int, str]:
        plan = self._plan
        nproc = self._nproc if nodes else max(2, self._nproc)
        command = [sys.executable, "-m", "ddpshim", "run", "--no-logs", "--grace", "5", "--nproc", str(nproc)]
        if nodes and plan.nnodes > 1:
            given = [("nnodes", plan.nnodes), ("node-rank", plan.node_rank)]
            given += [("master-addr", plan.master_addr), ("master-port", plan.master_port)]  # type: ignore[list-item]
            command += [f"--{name}={value}" for name, value in given if value is not None]
        return self._call([*command, str(program), *arguments])

    def _call(self, command: list[str]) -> tuple[int, str]:
        """Run a command to its end; return its exit code and its last lines. 124 at the deadline."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(self._plan.timeout_s)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                _end(process)
            output.seek(0)
            lines = output.read().strip().splitlines()[-_NUM_LAST_LINES:]
        if code == 124:
            lines.append(f"not finished within {self._plan.timeout_s:g} s; a slow machine needs a longer --timeout")
        return code, "\n".join(lines)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a job: `run` ends its ranks when it gets SIGTERM."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    process.kill()
    process.wait()


def compared(name: str, found: Mapping[str, Any], expected: Mapping[str, Any], seconds: float) -> Result:
    """Return whether ranks' losses and weights, lists of numbers, equal those of one process."""
    if [*map(len, found.values())] != [*map(len, expected.values())]:
        return Result(name, False, seconds, "ranks made another number of steps than one process")
    largest = {
        what: _largest(a - b for a, b in zip(found[what], values)) / (_largest(values) or 1.0)
        for what, values in expected.items()
    }
    detail = " and ".join(f"{what} differ by {value:.0e}" for what, value in largest.items())
    is_good = all(value <= _LIMIT for value in largest.values())
    more = f", at most {_LIMIT:.0e} expected: ranks would train another model. Report this with the file of --write"
    return Result(name, is_good, seconds, f"{detail} of the largest{'' if is_good else more}")


def _largest(values: Iterable[float]) -> float:
    return max(math.inf if math.isnan(value) else abs(value) for value in values)


def _number_of_gpus(is_required: bool) -> int:
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if is_required and not num_gpus:
        raise LaunchError(
            f"torch {torch.__version__} sees no GPU, so there is nothing to test. Run this on a machine with GPUs and "
            "a torch that is built for their driver; CUDA_VISIBLE_DEVICES may hide them. Without --gpu, the CPU is "
            "tested."
        )
    return num_gpus


def _write(file: Path, about: Mapping[str, Any], results: list[Result], is_complete: bool) -> None:
    checks = [{**asdict(result), "detail": without_names(_without_folders(result.detail))} for result in results]
    try:
        file.write_text(json.dumps({**about, "is_complete": is_complete, "checks": checks}, indent=1) + "\n")
    except OSError as error:
        raise LaunchError(
            f"{file} cannot be written ({error.strerror}): the results would be lost. Name a file in an existing "
            "folder that you may write to."
        ) from error


def _without_folders(text: str) -> str:
    return re.sub(r"(?<![\w:/.])~?(?:/[^\s/\"'<>:,;()]+)*/([^\s/\"'<>:,;()]+)", r"\1", text)
