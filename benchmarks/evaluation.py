"""Compares `ddpshim.evaluate` on W ranks and on one, and measures how a background evaluation slows training.

    python -m benchmarks.evaluation [--quick]

Arms alternate. In the first measurement the environment sleeps where a simulator would compute on its own core, and
episodes differ in length by up to a factor of four. In the second it computes all the time, beside as many ranks as
there are cores, so nothing is idle: it compares training steps while evaluations play and while they are stopped.
"""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import ddpshim
from benchmarks.results import Result, alternate, main, median_and_quartiles, ratio
from ddpshim.job.job import current
from ddpshim.job.machine import num_cores
from tests.ranks import run_ranks

_AT_MOST = 1.15  # times the main rank's wall time, divided by W
_STALL_AT_MOST = 1.02
_STEP_S = 0.01
_HORIZON = 40
_NUM_STEPS = 50


class Sleeping:
    """Episodes of 10 to 40 steps; each step takes as long as a simulator's."""

    def reset(self, *, seed: Any = None) -> Any:
        self._left = 10 + seed % (_HORIZON - 9)
        return [0.0], {}

    def step(self, action: Any) -> Any:
        self._wait()
        self._left -= 1
        return [0.0], 0.0, False, self._left == 0, {"success": False}

    def _wait(self) -> None:
        time.sleep(_STEP_S)


class Computing(Sleeping):
    """The same, but each step keeps a core busy."""

    def _wait(self) -> None:
        end = time.thread_time() + _STEP_S
        while time.thread_time() < end:
            torch.rand(1000).sort()


def policy(observation: Any) -> int:
    """Act at no cost."""
    return 0


def run(quick: bool) -> list[Result]:
    """Return the ratio of the wall times, times W, and the ratio of training steps with and without an evaluation."""
    dealt = _dealt(16, 2, [2]) if quick else _dealt(40, 5, [2, 4])
    return [*dealt, *_beside(16 if quick else 100)]


def _dealt(num_episodes: int, num_rounds: int, sizes: list[int]) -> Iterator[Result]:
    for num_ranks in sizes:
        seconds = run_ranks(_measure_dealt, num_ranks, num_episodes, num_rounds, timeout_s=200)[0]
        value, quartiles = ratio(seconds["all"], seconds["main"], times=num_ranks)
        yield Result(
            "evaluation",
            f"{num_episodes} episodes of 10 to {_HORIZON} steps on {num_ranks} ranks, a simulator that sleeps",
            value,
            "x main rank / W",
            quartiles=quartiles,
            at_most=_AT_MOST,
        )


def _measure_dealt(num_episodes: int, num_rounds: int) -> dict[str, list[float]]:
    here = ddpshim.world()

    def evaluate(which: str) -> float:
        current().world = replace(here, launcher="torchrun", options=replace(here.options, rollouts=which))
        here.barrier()
        start = time.perf_counter()
        ddpshim.evaluate(Sleeping, policy, num_episodes)
        here.barrier()
        return time.perf_counter() - start

    found = alternate({which: functools.partial(evaluate, which) for which in ("all", "main")}, num_rounds)
    current().world = here
    return found


def _beside(num_rounds: int) -> Iterator[Result]:
    num_ranks = max(1, min(4, num_cores()))
    seconds, calls = run_ranks(_measure_beside, num_ranks, num_rounds, timeout_s=150)[0]
    value, quartiles = ratio(seconds["with"], seconds["without"])
    yield Result(
        "evaluation",
        f"{_NUM_STEPS} training steps beside an evaluation in the background",
        value,
        "x without",
        quartiles=quartiles,
        at_most=_STALL_AT_MOST,
        note=f"{num_ranks} ranks and as many evaluations that compute, on {num_cores()} cores",
    )
    value, quartiles = median_and_quartiles([1000 * call for call in calls])
    yield Result("evaluation", "the call of evaluate_in_background, 1.1M parameters", value, "ms", quartiles=quartiles)


def _measure_beside(num_rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of steps while evaluations play and while a signal stops them, and those of the calls."""
    here, calls = ddpshim.world(), []
    net = ddpshim.wrap_parallel(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    rows = torch.randn(32, 512)
    for num_episodes in (2, 2, 2, 10**6):
        start = time.perf_counter()
        played = ddpshim.evaluate_in_background(Computing, Acting(net), num_episodes)
        calls.append(time.perf_counter() - start)
        if num_episodes == 2:
            played.result()
    process = played._beside._process
    assert process is not None

    def train(number: int) -> float:
        process.send_signal(number)
        here.barrier()
        start = time.perf_counter()
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
        here.barrier()
        return time.perf_counter() - start

    arms = {"with": functools.partial(train, signal.SIGCONT), "without": functools.partial(train, signal.SIGSTOP)}
    found = alternate(arms, num_rounds)
    process.send_signal(signal.SIGCONT)
    played.cancel()
    return found, calls


class Acting:
    """A policy that holds a network but does not compute with it."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, observation: Any) -> int:
        return 0


if __name__ == "__main__":
    main(run, __doc__)
