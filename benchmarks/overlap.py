"""Measures the wall time of a step whose gradients are reduced while backward continues, on two gloo ranks.

    python -m benchmarks.overlap [--quick]

The policies have the parameters of robomimic's transformer, its diffusion U-Net (sizes divided by 4) and its image
encoder, in the policy's own order, and gradients arrive in the order of its backward pass
(benchmarks/gradient_orders.py). A fourth has 40 equal layers, whose gradients arrive from the last to the first.
Compute is emulated (benchmarks/emulated.py) by sleeping, so that the two ranks do not compete for cores, like two GPUs.
One all-reduce of all gradients takes 0.1, 0.4 and 1.1 of a step without it. The optimizer's update, equal in all arms,
is made but not timed. All arms make the same steps, and their weights are compared bit by bit at the end.

"Backward left" is the share of the gradients' bytes that are not computed yet when a byte is sent, averaged over bytes.
"""

from __future__ import annotations

import functools
import json
import time
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpshim
from benchmarks.emulated import RealOrder
from benchmarks.gradient_orders import FILE
from benchmarks.results import Result, alternate, main, median_and_quartiles, ratio
from benchmarks.step import checksum, switch_guards
from tests.ranks import run_ranks

TARGETS = {0.1: 0.95, 0.4: 0.90, 1.1: 0.85}  # all-reduce / compute: wall time / raw DDP's
_EQUAL_LAYERS = "40 equal layers"
_LEAST = "copied, not sent"
_DIVISORS = {"diffusion U-Net": 4}

ARMS: dict[str, Callable[[nn.Module], Any]] = {
    "no sync": lambda net: net,
    _LEAST: lambda net: _copied(net),
    "raw DDP": DistributedDataParallel,
    "ddpshim": ddpshim.wrap_parallel,
}


def policies() -> dict[str, dict[str, list[int]]]:
    """Return, by name, the sizes of the parameters, and their numbers in the order of their gradients."""
    found: dict[str, dict[str, list[int]]] = json.loads(FILE.read_text())
    for name, divisor in _DIVISORS.items():
        found[name]["sizes"] = [max(1, size // divisor) for size in found[name]["sizes"]]
    return {**found, _EQUAL_LAYERS: {"sizes": [500_000] * 40, "arrival": list(range(39, -1, -1))}}


def _copied(net: nn.Module) -> nn.Module:
    """Return `net`; its gradients are copied on arrival into the memory for sending, but not sent."""
    flat = torch.zeros(sum(p.numel() for p in net.parameters()))
    for parameter, view in zip(net.parameters(), flat.split([p.numel() for p in net.parameters()])):
        parameter.register_post_accumulate_grad_hook(functools.partial(_copy, view))
    return net


def _copy(view: torch.Tensor, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        torch.mul(parameter.grad, 1 / dist.get_world_size(), out=view)
    parameter.grad = view


class _Arm:
    def __init__(self, name: str, policy: str) -> None:
        self.is_ours = name.startswith("ddpshim")
        self._policy = RealOrder(**policies()[policy])
        self.net = ARMS[name](self._policy)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def run(self, sleep_s: float) -> float:
        """Return the seconds of forward and backward, of which the policy sleeps `sleep_s` (collective)."""
        self._policy.compute_s = sleep_s
        switch_guards(self.is_ours)
        self.optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        self.net(torch.ones(1) + dist.get_rank()).backward()
        seconds = time.perf_counter() - start
        self.optimizer.step()
        return seconds


def measure(policy: str, names: list[str], ratios: list[float], num_rounds: int) -> dict[str, Any]:
    """Return the slower rank's seconds of a step by ratio, arm and round (collective)."""
    here = ddpshim.world()
    arms = {name: _Arm(name, policy) for name in names}
    for arm in arms.values():
        for _ in range(3):
            arm.run(0.0)
    awake_s, _ = median_and_quartiles([max(here.gather(arms["no sync"].run(0.0))) for _ in range(10)])
    gradients = torch.zeros(sum(policies()[policy]["sizes"]))

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
    synchronised = [arm for name, arm in arms.items() if name not in ("no sync", _LEAST)]
    sums = {text for arm in synchronised for text in here.gather(checksum(arm.net))}
    return {"seconds": found, "num_sums": len(sums)}


def backward_left(policy: str, name: str) -> float:
    """Return the share of gradient bytes not computed yet when a byte is sent, mean over bytes (collective)."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    arm, sent, num_arrived = _Arm(name, policy), [], [0]

    def hook(state: Any, bucket: Any) -> Any:
        sent.append((bucket.buffer().numel(), num_arrived[0]))
        return allreduce_hook(None, bucket)

    def count(parameter: torch.Tensor) -> None:
        num_arrived[0] += parameter.numel()

    hook.__annotations__ = allreduce_hook.__annotations__  # torch checks them
    arm.net.register_comm_hook(None, hook)
    for parameter in arm.net.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    for _ in range(3):
        sent.clear()
        num_arrived[0] = 0
        arm.run(0.0)
    total = sum(parameter.numel() for parameter in arm.net.parameters())
    return sum(size * (total - there) for size, there in sent) / sum(size for size, _ in sent) / total


def run(quick: bool) -> list[Result]:
    """Measure all policies at the three ratios; `quick`: fewer rounds and policies, without the first ratio."""
    ratios = [0.4, 1.1] if quick else list(TARGETS)
    out = []
    for policy in ["transformer", "diffusion U-Net"] if quick else policies():
        got = run_ranks(measure, 2, policy, list(ARMS), ratios, 6 if quick else 16, timeout_s=290)[0]
        equal = "weights of all arms and ranks bit-equal" if got["num_sums"] == 1 else "WEIGHTS DIFFER"
        for wanted, seconds in got["seconds"].items():
            what = f"wall time of a step, {policy}, all-reduce/compute {wanted}"
            medians = (f"{name} {1000 * median_and_quartiles(times)[0]:.0f}" for name, times in seconds.items())
            note = f"{equal}; medians in ms: {', '.join(medians)}"
            middle, quartiles = ratio(seconds["ddpshim"], seconds["raw DDP"])
            least, _ = ratio(seconds[_LEAST], seconds["raw DDP"])
            target = TARGETS[wanted] if least < TARGETS[wanted] else None
            if target is None:
                note += (
                    f"; no target: gradients copied to where they are sent from, and not sent, take {least:.3f} of it"
                )
            out.append(Result("overlap", what, middle, "x raw DDP", quartiles, target, note=note))
        ours, torchs = (run_ranks(backward_left, 2, policy, name, timeout_s=120)[0] for name in ("ddpshim", "raw DDP"))
        what = f"backward left when a byte is sent, {policy}"
        out.append(
            Result("overlap", what, ours / torchs, "x raw DDP", at_least=1.0, note=f"{ours:.2f} and {torchs:.2f}")
        )
    return out


if __name__ == "__main__":
    main(run, __doc__)
