"""What the guards cost: a step of a 5M-parameter policy on two ranks, with them and without, in alternation.

    python -m benchmarks.guard_cost

One run makes two equal policies, one wrapped without them (the option `guard`), and trains them in turn. It prints the
ratio of the two steps, which on a busy machine is mostly noise, and the time inside the guards' own code,
which is not: that of every step, and that of a comparison of weights, of which there is one in 1000 steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import ddpshim
from ddpshim import guard
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


def measure(num_rounds: int, steps_per_round: int, batch_size_per_rank: int) -> dict[str, Any]:
    """Times in ms on this rank (collective)."""
    x = torch.randn(batch_size_per_rank, D_IN)
    arms = {"without": _Arm(guarded=False), "with": _Arm(guarded=True)}

    def run(name: str) -> float:
        # The hooks are the process's, not the policy's.
        (guard.watch_optimizers if name == "with" else guard._unwatch)()
        return _time_ms(lambda: [arms[name].step(x) for _ in range(steps_per_round)]) / steps_per_round

    for name in arms:
        run(name)
    ms: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(num_rounds):
        for name in sorted(arms, reverse=number % 2 == 0):
            ms[name].append(run(name))

    def hook() -> None:
        guard._stepped.clear()  # as after a new backward pass: the longer way through it
        guard._check_step(arms["with"].optimizer, (), {})

    def compare() -> None:
        equality.start(1)
        equality.finish()

    equality = arms["with"].policy._equality
    return {
        **ms,
        "hook": statistics.median(_time_ms(hook) for _ in range(200)),
        "compare": statistics.median(_time_ms(compare) for _ in range(20)),
        "num_parameters": sum(p.numel() for p in arms["with"].policy.parameters()),
    }


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2, help="steps of one policy in a round")
    parser.add_argument("--batch-size-per-rank", type=int, default=64)
    options = parser.parse_args()
    got = run_ranks(measure, 2, options.rounds, options.steps, options.batch_size_per_rank, timeout_s=600)[0]
    step_ms = statistics.median(got["without"])
    ratios = [a / b for a, b in zip(got["with"], got["without"])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    own = got["hook"] + got["compare"] / 1000
    print(f"{got['num_parameters'] / 1e6:.1f} M parameters, 2 ranks, torch {torch.__version__}, {os.cpu_count()} cores")
    print(f"step without guards: {step_ms:.2f} ms (median of {options.rounds} rounds of {options.steps} steps)")
    print(f"with / without: {middle:.4f} (quartiles {low:.4f} to {high:.4f})")
    print(f"inside the guards: {got['hook'] * 1000:.0f} us in each step, {got['compare']:.1f} ms in each comparison")
    print(f"amortised: {own * 1000:.0f} us a step = {own / step_ms:.3%} of it")


if __name__ == "__main__":
    main()
