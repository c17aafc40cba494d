"""Compares `ddpshim.evaluate` on W ranks and on one.

    python -m benchmarks.evaluation [--quick]

Arms alternate. The environment sleeps where a simulator would compute on its own core, and episodes differ in length by
up to a factor of four.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import ddpshim
from benchmarks.results import Result, alternate, main, ratio
from ddpshim.process.job import current
from tests.ranks import run_ranks

_AT_MOST = 1.15  # times the main rank's wall time, divided by W
_STEP_S = 0.01
_HORIZON = 40


class Sleeping:
    """Episodes of 10 to 40 steps; each step takes as long as a simulator's."""

    def reset(self, *, seed: Any = None) -> Any:
        self._left = 10 + seed % (_HORIZON - 9)
        return [0.0], {}

    def step(self, action: Any) -> Any:
        time.sleep(_STEP_S)
        self._left -= 1
        return [0.0], 0.0, False, self._left == 0, {"success": False}


def policy(observation: Any) -> int:
    """Act at no cost."""
    return 0


def run(quick: bool) -> list[Result]:
    """Return the ratio of the wall times, times W."""
    return [*(_dealt(16, 2, [2]) if quick else _dealt(40, 5, [2, 4]))]


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


if __name__ == "__main__":
    main(run, __doc__)
