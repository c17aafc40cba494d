"""Wall time of a step whose gradients are reduced while backward goes on: 20M parameters, two gloo ranks.

    python -m benchmarks.overlap [--quick]

The compute is emulated: each layer sleeps, a third of its time forward and two thirds backward, so that the two ranks
do not compete for cores as two GPUs would not. The sleeps are set so that one all-reduce of all gradients takes 0.1,
0.4 and 1.1 of them. The sleeps stand for all of the compute: the optimizer's update, alike in all arms, is made but not
timed. All arms make the same steps, and their weights are compared bit by bit at the end.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpshim
from benchmarks.results import Result, alternate, median_and_quartiles, ratio
from benchmarks.step import Both, checksum, line, switch_guards
from tests.ranks import run_ranks

WIDTH, NUM_LAYERS = 1000, 20  # of both nets together
TARGETS = {0.1: 0.95, 0.4: 0.86, 1.1: 0.75}  # all-reduce over compute: wall time over that of two wraps


class _Sleep(torch.autograd.Function):
    """Its input, after a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: _Layer) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.layer.seconds * 2 / 3)
        return gradients[0], None


class _Layer(nn.Module):
    """A linear layer that takes `seconds`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(torch.relu(self.linear(x)), self)  # type: ignore[no-any-return, no-untyped-call]


def _nets() -> nn.ModuleDict:
    half = NUM_LAYERS // 2
    return nn.ModuleDict({name: nn.Sequential(*(_Layer() for _ in range(half))) for name in ("encoder", "noise_net")})


ARMS: dict[str, Callable[[nn.ModuleDict], nn.Module]] = {
    "two wraps": lambda nets: Both(nn.ModuleDict({name: DistributedDataParallel(net) for name, net in nets.items()})),
    "raw DDP": lambda nets: DistributedDataParallel(Both(nets)),
    "ddpshim": lambda nets: Both(ddpshim.wrap_parallel(nets)),
}


class _Arm:
    def __init__(self, name: str) -> None:
        self.is_ours = name.startswith("ddpshim")
        with ddpshim.shared_random_streams(0):
            nets = _nets()
        self.layers = [layer for net in nets.values() for layer in net]  # type: ignore[union-attr]
        self.net = ARMS[name](nets)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self._batches = torch.Generator().manual_seed(dist.get_rank())

    def run(self, compute_s: float) -> float:
        """Seconds forward and backward, where the layers take `compute_s` together (collective)."""
        for layer in self.layers:
            layer.seconds = compute_s / NUM_LAYERS
        x = torch.randn(1, WIDTH, generator=self._batches)
        switch_guards(self.is_ours)
        self.optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        self.net(x).pow(2).mean().backward()
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
    gradients = torch.zeros(sum(p.numel() for p in arms[names[0]].net.parameters()))

    def reduce() -> float:
        start = time.perf_counter()
        dist.all_reduce(gradients)
        return time.perf_counter() - start

    found, reduce_s = {}, 0.0
    for wanted in ratios:
        reduce_s, _ = median_and_quartiles([max(here.gather(reduce())) for _ in range(5)])
        runs = {name: functools.partial(arm.run, reduce_s / wanted) for name, arm in arms.items()}
        steps = alternate(runs, num_rounds)
        found[wanted] = {name: [max(both) for both in zip(*here.gather(s))] for name, s in steps.items()}
    sums = {text for arm in arms.values() for text in here.gather(checksum(arm.net))}
    return {"seconds": found, "reduce_s": reduce_s, "num_sums": len(sums)}


def run(quick: bool) -> list[Result]:
    """The three ratios; `quick`: fewer rounds, without the first."""
    ratios = [0.4, 1.1] if quick else list(TARGETS)
    got = run_ranks(measure, 2, list(ARMS), ratios, 6 if quick else 20, timeout_s=290)[0]
    equal = "weights of all arms and ranks bit-equal" if got["num_sums"] == 1 else "WEIGHTS DIFFER"
    out = []
    for wanted, seconds in got["seconds"].items():
        what = f"wall time of a step, 20M parameters, all-reduce/compute {wanted}"
        for name in ("two wraps", "raw DDP"):
            middle, quartiles = ratio(seconds["ddpshim"], seconds[name])
            target = TARGETS[wanted] if name == "two wraps" else None
            out.append(Result("overlap", what, middle, f"x {name}", quartiles, target, note=equal))
    return out


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    for result in run(parser.parse_args().quick):
        print(line(result))


if __name__ == "__main__":
    main()
