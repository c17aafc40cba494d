"""Measures how the time of a step falls with the number of ranks, with emulated compute.

    python -m benchmarks --only scaling

A policy whose passes sleep instead of computing, so that eight ranks run on two cores, is trained through
`wrap_parallel` and gloo. The global batch is fixed, so compute is divided by the ranks.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

import ddpshim
from benchmarks.emulated import SleepingPolicy
from benchmarks.results import Result, alternate, main, ratio
from tests.ranks import run_ranks

NUM_PARAMETERS, NUM_LAYERS = 1_000_000, 8
COMPUTE_S = 0.8  # of the global batch, in one process
WORLD_SIZES = (1, 2, 4, 8)


def _measure(num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of this rank's steps, and of the same steps under no_sync (collective)."""
    here = ddpshim.world()
    bare = SleepingPolicy(NUM_PARAMETERS, NUM_LAYERS, COMPUTE_S / here.world_size)
    policy = ddpshim.wrap_parallel(bare)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)

    def step(synchronised: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        with policy.accumulate(is_last=synchronised):
            policy(torch.ones(1)).backward()
        if synchronised:
            optimizer.step()
        spent = time.perf_counter() - start
        # By hand: the guard refuses an optimizer step on one rank's gradients.
        optimizer.zero_grad(set_to_none=False)
        return spent

    for is_last in (True, False, True):
        step(is_last)
    found = alternate({"alone": lambda: step(False), "step": lambda: step(True)}, num_rounds)
    step(True)  # completes the accumulation that no_sync began
    return found


def run(quick: bool) -> list[Result]:
    """Return the share of compute in a step with 1, 2, 4 and 8 ranks on this machine; `quick`: with 1, 2 and 4."""
    results, one_s = [], 0.0
    for world_size in WORLD_SIZES[: 3 if quick else None]:
        found = run_ranks(_measure, world_size, 5 if quick else 30, timeout_s=300)[0]
        share, quartiles = ratio(found["alone"], found["step"])
        step_s = statistics.median(found["step"])
        one_s = one_s or step_s
        note = f"step {step_s * 1e3:.0f} ms; {one_s / step_s:.2f} times one rank"
        what = f"compute / step, {world_size} ranks, emulated compute"
        results.append(Result("scaling", what, share, "", quartiles, note=note))
    return results


if __name__ == "__main__":
    main(run, __doc__)
