"""Measures the cost of the guards: a step of a 5M-parameter policy on two ranks, with and without, in alternation.

    python -m benchmarks.guard_cost

It makes two equal policies, one wrapped without guards (the option `guard`), and trains them in turn. It prints the
ratio of the two steps, which on a busy machine is mostly noise, and the time inside the guards' own code, which is
reliable: in every step, in a comparison of weights (once in 1000 steps and after each save), and in the hash of all
weights at the end of each epoch.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any, Callable

import torch
from torch import nn

import ddpshim
from benchmarks.results import Result, main, ratio
from ddpshim.failures import hang_detector
from ddpshim.model import guard
from ddpshim.process.job import current
from tests.ranks import run_ranks

D_IN, HIDDEN, D_OUT, NUM_HIDDEN = 64, 1100, 14, 4  # 4.9 M parameters


def _policy() -> nn.Module:
    widths = [D_IN, *[HIDDEN] * (NUM_HIDDEN + 1), D_OUT]
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Arm:
    """A policy and its optimizer, with guards or without."""

    def __init__(self, guarded: bool) -> None:
        here = ddpshim.world()
        with ddpshim.shared_random_streams(0):
            policy = _policy()
        world = replace(here, options=replace(here.options, guard=guarded))
        self.policy = ddpshim.wrap_parallel(policy, world=world)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-4)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.policy(x).pow(2).mean().backward()
        self.optimizer.step()


def _time_ms(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1000


def _measure(num_rounds: int, steps_per_round: int, batch_size_per_rank: int) -> dict[str, Any]:
    """Return this rank's times in ms (collective)."""
    x = torch.randn(batch_size_per_rank, D_IN)
    arms = {"without": _Arm(guarded=False), "with": _Arm(guarded=True)}

    watched = current().part(guard.Watched)

    def run(name: str) -> float:
        # The hooks belong to the process, not to a policy.
        (guard.watch_optimizers if name == "with" else watched.unwatch_optimizers)()
        return _time_ms(lambda: [arms[name].step(x) for _ in range(steps_per_round)]) / steps_per_round

    for name in arms:
        run(name)
    ms: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(num_rounds):
        for name in sorted(arms, reverse=number % 2 == 0):
            ms[name].append(run(name))

    def hook() -> None:
        watched.steps.clear()  # as after a new backward pass, when the check takes longest
        guard._check_step(arms["with"].optimizer, (), {})

    def compare() -> None:
        equality.start(1)
        equality.finish()

    def agree() -> None:
        presence = arms["with"].policy._presence.grad
        arms["with"].policy._agreement.fill(presence, False, 1, [1e-4])
        arms["with"].policy._agreement.read(presence)

    def look() -> None:
        watched_by._counted = None  # the first look is as during steps, the second as in a rank without progress
        watched_by._look()
        watched_by._look()

    equality, watched_by = arms["with"].policy._equality, current().part(hang_detector.Watch)
    return {
        "look": statistics.median(_time_ms(look) for _ in range(200)) / 2,
        **ms,
        "hook": statistics.median(_time_ms(hook) for _ in range(200)),
        "agree": statistics.median(_time_ms(agree) for _ in range(200)),
        "hash": statistics.median(_time_ms(guard.hash_of_all) for _ in range(20)),
        "compare": statistics.median(_time_ms(compare) for _ in range(20)),
        "num_parameters": sum(p.numel() for p in arms["with"].policy.parameters()),
    }


def run(quick: bool, batch_size_per_rank: int = 64) -> list[Result]:
    """Return the ratio of steps with guards to steps without, and the time spent in the guards' own code."""
    got = run_ranks(_measure, 2, 10 if quick else 100, 2, batch_size_per_rank, timeout_s=600)[0]
    value, quartiles = ratio(got["with"], got["without"])
    step_ms, size = statistics.median(got["without"]), f"{got['num_parameters'] / 1e6:.1f}M parameters, 2 ranks"
    # One comparison in 1000 steps; every 100 steps one more after a save, and a hash of all weights for an epoch.
    own_ms = got["hook"] + got["agree"] + got["compare"] / 1000 + (got["compare"] + got["hash"]) / 100
    return [
        Result("guard_cost", f"step with guards, {size}", value, "x without", quartiles, note=f"{step_ms:.1f} ms"),
        Result("guard_cost", "guards' own code in a step", (got["hook"] + got["agree"]) * 1000, "us"),
        Result("guard_cost", "one comparison of weights and Adam's state, of 1000 steps", got["compare"], "ms"),
        Result("guard_cost", "a hash of them, at the end of an epoch", got["hash"], "ms"),
        Result("guard_cost", "a look of the thread that watches for hangs, one a second", got["look"] * 1000, "us"),
        Result("guard_cost", "guards' own code, epochs and saves of 100 steps", 100 * own_ms / step_ms, "% of a step"),
    ]


if __name__ == "__main__":
    main(run, __doc__)
