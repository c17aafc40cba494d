"""Tests whether the diagnosis after 20 steps names the injected cause of slowness, and measures its clock's cost.

    python -m benchmarks --only diagnosis

evidence/slowness.py lists the injected causes. The cost is CPU time, in a step that does only what the clock measures.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.utils.data import DataLoader

import ddpshim
from benchmarks.results import Result, alternate, main, ratio
from ddpshim.job.slow_step_report import Pace
from ddpshim.model import backward
from ddpshim.process import timing
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from evidence import slowness
from tests.ranks import run_ranks

NUM_STEPS = 2000
D_MODEL, BATCH = 256, 64


def _steps(policy: torch.nn.Module, x: torch.Tensor, num_steps: int) -> float:
    """Return the CPU seconds of a step."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-6)
    samples = slowness.Samples(lambda: None, num_steps)
    start = time.process_time()
    for _ in DataLoader(samples, batch_size=None):
        optimizer.zero_grad()
        policy(x).square().mean().backward()
        optimizer.step()
    return (time.process_time() - start) / num_steps


def _cost_us(num_rounds: int, num_steps: int) -> float:
    """Return the microseconds of CPU that the clock adds to a step, from the least disturbed rounds."""
    policy, x = ddpshim.wrap_parallel(torch.nn.Linear(1, 1)), torch.zeros(1, 1)

    def measure(is_counted: bool) -> float:
        backward.watch(lambda: None)  # as if there were gradients to reduce
        if is_counted:
            Pace().begin()
        took = _steps(policy, x, num_steps)
        current().end()
        return took

    got = alternate({"with": lambda: measure(True), "without": lambda: measure(False)}, num_rounds)
    return 1e6 * (min(got["with"]) - min(got["without"]))


def _small(num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a small network's step on ranks, with the clock and without (collective)."""
    with ddpshim.shared_random_streams(0):
        net = torch.nn.Sequential(*(torch.nn.Linear(D_MODEL, D_MODEL) for _ in range(4)))
    policy = ddpshim.wrap_parallel(net)
    clock, x = timing.running, torch.zeros(BATCH, D_MODEL)

    def measure(is_counted: bool) -> float:
        timing.measure_by(clock if is_counted else None)
        ddpshim.world().barrier()
        start = time.perf_counter()
        _steps(policy, x, 20)
        took = (time.perf_counter() - start) / 20
        timing.measure_by(clock)
        return took

    with replaced(Pace, "_tell", lambda *_: None):  # its clock stops in every other round
        measure(True)
        return alternate({"with": lambda: measure(True), "without": lambda: measure(False)}, num_rounds)


def run(quick: bool) -> list[Result]:
    """Return how many injected causes were found, the number of false alarms, and the clock's own CPU time."""
    cost_us = _cost_us(4 if quick else 20, NUM_STEPS)
    got = run_ranks(_small, 2, 6 if quick else 40, timeout_s=300)[0]
    slower, spread = ratio(got["with"], got["without"])
    step_us = 1e6 * statistics.median(got["without"])
    cases = list(slowness.cases(1))
    rows = slowness.measure(cases[::7] if quick else cases, num_at_once=2)
    planted = [slowness.is_right(*row) for row in rows if row[0].phase is not None]
    healthy = [found for case, found in rows if case.phase is None]
    return [
        Result("diagnosis", "clock's own code in a step", cost_us, "us of CPU"),
        Result(*("diagnosis", "the same in a small step, 2 ranks", 100 * cost_us / step_us, "%"), at_most=0.5),
        Result(
            *("diagnosis", "small step that is counted, 2 ranks", slower, "x without", spread),
            note=f"{step_us / 1e3:.1f} ms",
        ),
        Result(
            *("diagnosis", "plants placed right", 100 * sum(planted) / len(planted), "%"),
            at_least=95.0,
            note=f"{len(planted)} runs of {slowness.NUM_RANKS} ranks",
        ),
        Result(
            *("diagnosis", "false alarms in healthy runs", sum(found is not None for found in healthy), ""),
            at_most=0.0,
            note=f"{len(healthy)} runs",
        ),
    ]


if __name__ == "__main__":
    main(run, __doc__)
