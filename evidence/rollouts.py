"""Measures the wall time of an evaluation on W ranks, and on the main rank alone, in alternation.

    python -m evidence.rollouts [--quick]

The environment sleeps where a simulator would compute on its own core.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import ddpshim
from ddpshim.process.job import current
from ddpshim.robomimic import rollout
from evidence.equivalence import source
from evidence.results import Result, alternate, main, ratio
from tests.ranks import run_ranks

_AT_MOST = 1.15
_STEP_S = 0.05  # much longer than a busy machine takes to wake a process
_RELEASE = "0.4.0"  # has a rollout policy, and an environment that works with every robosuite


@dataclass(frozen=True)
class _Plan:
    """The settings of an evaluation."""

    num_episodes: int
    horizon: int
    num_rounds: int


def run(quick: bool) -> list[Result]:
    """Return the ratio of the two wall times, times W, for numbers of episodes that W divides, and others."""
    _find_robomimic()
    num_episodes, horizon, num_rounds = (4, 8, 3) if quick else (8, 16, 5)
    divides = _Plan(num_episodes, horizon, num_rounds)
    not_quite = replace(divides, num_episodes=num_episodes + 1)
    on_two = [divides, *([] if quick else [not_quite])]
    return [*_compare(2, on_two), *_compare(4, [divides, not_quite])]


def _compare(num_ranks: int, plans: list[_Plan]) -> Iterator[Result]:
    for plan, seconds in zip(plans, run_ranks(_measure, num_ranks, plans, timeout_s=280)[0]):
        value, quartiles = ratio(seconds["all"], seconds["main"], times=num_ranks)
        best = math.ceil(plan.num_episodes / num_ranks) * num_ranks / plan.num_episodes
        yield Result(
            "rollouts",
            f"{plan.num_episodes} episodes of a simulator that sleeps on {num_ranks} ranks",
            value,
            "x main rank / W",
            quartiles=quartiles,
            at_most=_AT_MOST if best == 1 else None,
            note="" if best == 1 else f"{best:.3f} at best: ranks wait for the one that plays an episode more",
        )


def _measure(plans: list[_Plan]) -> list[dict[str, list[float]]]:
    """Return the seconds of each plan's evaluations, until all ranks have the statistics (collective)."""
    warnings.simplefilter("ignore")  # from the imports of torchvision and robosuite
    with _quiet():
        return [_measure_one(plan) for plan in plans]


def _measure_one(plan: _Plan) -> dict[str, list[float]]:
    here = ddpshim.world()
    env = _sleeping()
    options = {
        "policy": _policy(),
        "envs": {env.name: env},
        "horizon": plan.horizon,
        "num_episodes": plan.num_episodes,
    }

    def evaluate(which: str) -> float:
        current().world = replace(here, options=replace(here.options, rollouts=which))
        here.barrier()
        start = time.perf_counter()
        rollout.rollout_with_stats(epoch=1, **options)
        here.barrier()
        return time.perf_counter() - start

    arms = {which: functools.partial(evaluate, which) for which in ("all", "main")}
    arms["all"]()
    found = alternate(arms, plan.num_rounds)
    current().world = here
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _policy() -> Any:
    from robomimic.algo import RolloutPolicy

    class Still(RolloutPolicy):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def start_episode(self) -> None: ...

        def __call__(self, ob: Any, goal: Any = None) -> np.ndarray:
            return np.zeros(7)

    return Still()


def _sleeping() -> Any:
    from tests.toy_env import ToyEnv

    class Sleeping(ToyEnv):
        def _write_down(self, text: str) -> None: ...

        def step(self, action: np.ndarray) -> Any:
            time.sleep(_STEP_S)
            return super().step(action)

    return Sleeping()


def _find_robomimic() -> None:
    """Make robomimic importable on the ranks: if it is not installed, from DDPSHIM_UPSTREAM."""
    if importlib.util.find_spec("robomimic") is None:
        found = source(_RELEASE)
        if found is None:
            raise SystemExit(f"robomimic {_RELEASE} is neither installed nor under DDPSHIM_UPSTREAM")
        sys.path.insert(0, str(found))


if __name__ == "__main__":
    main(run, __doc__)
