"""Wall time of a step whose gradients are reduced while backward goes on: 20M parameters, two gloo ranks.

    python -m benchmarks.overlap [--quick]

Compute is emulated (benchmarks/emulated.py): two networks of 20 layers sleep, so that the two ranks do not compete for
cores, as two GPUs would not. Sleeps and the writing of gradients make up the compute; one all-reduce of all gradients
takes 0.1, 0.4 and 1.1 of it. The optimizer's update, alike in all arms, is made but not timed. All arms make the same
steps, and their weights are compared bit by bit at the end.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpshim
from benchmarks.emulated import SleepingPolicy
from benchmarks.results import Result, alternate, main, median_and_quartiles, ratio
from benchmarks.step import Both, checksum, switch_guards
from ddpshim.model import seams
from tests.ranks import run_ranks

NUM_PARAMETERS, NUM_LAYERS = 20_000_000, 40  # of both networks together
TARGETS = {0.1: 0.95, 0.4: 0.86, 1.1: 0.75}  # all-reduce over compute: wall time over that of two wraps


def _nets() -> nn.ModuleDict:
    half = NUM_PARAMETERS // 2, NUM_LAYERS // 2
    return nn.ModuleDict({name: SleepingPolicy(*half, 0.0) for name in ("encoder", "noise_net")})


ARMS: dict[str, Callable[[nn.ModuleDict], nn.Module]] = {
    "no sync": Both,
    "two wraps": lambda nets: Both(nn.ModuleDict({name: DistributedDataParallel(net) for name, net in nets.items()})),
    "raw DDP": lambda nets: DistributedDataParallel(Both(nets)),
    "ddpshim": lambda nets: Both(ddpshim.wrap_parallel(nets)),
    "ddpshim by public API": lambda nets: Both(_wrapped_publicly(nets)),
}


def _wrapped_publicly(nets: nn.ModuleDict) -> Any:
    """As on a torch without the private names that its reducer is armed by."""
    names, seams.REDUCER = seams.REDUCER, ("hidden",)
    try:
        return ddpshim.wrap_parallel(nets)
    finally:
        seams.REDUCER = names


class _Arm:
    def __init__(self, name: str) -> None:
        self.is_ours = name.startswith("ddpshim")
        with ddpshim.shared_random_streams(0):
            nets = _nets()
        self._policies: list[Any] = list(nets.values())
        self.net = ARMS[name](nets)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def run(self, sleep_s: float) -> float:
        """Seconds forward and backward, of which the layers sleep `sleep_s` (collective)."""
        for policy in self._policies:
            policy.compute_s = sleep_s / 2
        switch_guards(self.is_ours)
        self.optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        self.net(torch.ones(1) + dist.get_rank()).backward()
        seconds = time.perf_counter() - start
        self.optimizer.step()
        return seconds


def measure(names: list[str], ratios: list[float], num_rounds: int) -> dict[str, Any]:
    """Seconds of a step by ratio, arm and round, those of the slower rank (collective)."""
    here = ddpshim.world()
    arms = {name: _Arm(name) for name in names}
    for arm in arms.values():
        arm.run(0.0)
        arm.run(0.0)
    awake_s, _ = median_and_quartiles([max(here.gather(arms["no sync"].run(0.0))) for _ in range(10)])
    gradients = torch.zeros(NUM_PARAMETERS)

    def reduce() -> float:
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradients)
        return time.perf_counter() - start

    found = {}
    for wanted in ratios:
        reduce_s, _ = median_and_quartiles([max(here.gather(reduce())) for _ in range(7)])
        sleep_s = max(0.0, reduce_s / wanted - awake_s)
        steps = alternate({name: functools.partial(arm.run, sleep_s) for name, arm in arms.items()}, num_rounds)
        found[wanted] = {name: [max(both) for both in zip(*here.gather(s))] for name, s in steps.items()}
    synchronised = [arm for name, arm in arms.items() if name != "no sync"]
    sums = {text for arm in synchronised for text in here.gather(checksum(arm.net))}
    return {"seconds": found, "num_sums": len(sums)}


def run(quick: bool) -> list[Result]:
    """The three ratios; `quick`: fewer rounds, without the first."""
    ratios = [0.4, 1.1] if quick else list(TARGETS)
    got = run_ranks(measure, 2, list(ARMS), ratios, 6 if quick else 20, timeout_s=290)[0]
    equal = "weights of all arms and ranks bit-equal" if got["num_sums"] == 1 else "WEIGHTS DIFFER"
    out = []
    for wanted, seconds in got["seconds"].items():
        what = f"wall time of a step, 20M parameters, all-reduce/compute {wanted}"
        note = (
            equal
            + "; medians in ms: "
            + ", ".join(f"{name} {1000 * median_and_quartiles(times)[0]:.0f}" for name, times in seconds.items())
        )
        for name in ("two wraps", "raw DDP"):
            middle, quartiles = ratio(seconds["ddpshim"], seconds[name])
            target = TARGETS[wanted] if name == "two wraps" else None
            out.append(Result("overlap", what, middle, f"x {name}", quartiles, target, note=note if target else ""))
        middle, quartiles = ratio(seconds["ddpshim by public API"], seconds["ddpshim"])
        out.append(Result("overlap", f"{what}, by torch's public API alone", middle, "x ddpshim", quartiles))
    return out


if __name__ == "__main__":
    main(run, __doc__)
