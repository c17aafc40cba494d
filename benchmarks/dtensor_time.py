"""Measures the time of DTensor on two gloo ranks, with the batch as Shard(0): of single operations, and of a step.

    python -m benchmarks.dtensor_time [--quick]

An operation is on (4, 16) numbers of each rank: Python and dispatch, in CPU time of this thread. A step is that of a
diffusion U-Net of 3.1M parameters with AdamW and 64 samples, one thread a rank. Its GroupNorm and loss are written out:
torch's own give DTensor an error and another gradient (benchmarks/dtensor.py). Arms alternate, each in processes of its
own. "one process" has the whole batch on each rank. "DTensor" has parameters from `distribute_module`; "DTensor, one
reduction" plain ones, whose gradients are reduced in one message. DDP's loss is that of its rank's samples.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Iterator
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.dtensor import Arm, dtensor
from benchmarks.one_process_programs import UNet
from benchmarks.results import Result, main, median_and_quartiles, ratio
from tests.ranks import run_ranks

NUM_SAMPLES, HORIZON, D_ACTION, D_OBS, D_CONDITION = 64, 16, 7, 20, 96
PLAIN = "DTensor, one reduction"
OFF = {"DDPSHIM_GUARD": "0"}  # no arm is wrapped by ddpshim, whose guard would refuse it
_grad = torch.autograd.grad  # row tensors may replace it


class _Block(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(num_in, num_out, 5, padding=2)
        self.second, self.skip = nn.Conv1d(num_out, num_out, 5, padding=2), nn.Conv1d(num_in, num_out, 1)
        self.condition, self.scale = nn.Linear(D_CONDITION, num_out), nn.Parameter(torch.ones(num_out, 1))

    def forward(self, x: Any, condition: Any) -> Any:
        y = self.first(x)
        groups = y.reshape(y.shape[0], 8, -1)
        groups = (groups - groups.mean(-1, keepdim=True)) / groups.std(-1, keepdim=True)
        y = F.mish(groups.reshape(y.shape) * self.scale) + self.condition(condition)[:, :, None]
        return self.second(y) + self.skip(x)


def step(name: str, num_steps: int) -> dict[str, float]:
    """Return a step's milliseconds, the last loss, and for DTensor the number of messages (collective)."""
    arm = Arm(name)
    torch.manual_seed(0)
    observation, actions = torch.randn(NUM_SAMPLES, D_OBS), torch.randn(NUM_SAMPLES, HORIZON, D_ACTION)
    net: Any = UNet(_Block) if name in ("one process", "DDP", PLAIN) else arm.own(UNet(_Block))
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    if name == "DDP":
        net = DistributedDataParallel(net)

    def one() -> float:
        noise, timestep = arm.cut(torch.randn(actions.shape)), arm.cut(torch.randint(0, 100, (NUM_SAMPLES,)))
        kept = 1 - timestep[:, None, None] / 100
        predicted = net(kept * arm.cut(actions) + (1 - kept) * noise, timestep, arm.cut(observation))
        loss = (predicted - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if name == PLAIN:
            blocks = [p.grad.to_local() for p in parameters]
            dist.all_reduce(flat := torch.cat([block.flatten() for block in blocks]))
            for p, block, total in zip(parameters, blocks, flat.split([block.numel() for block in blocks])):
                p.grad = total.view_as(block)
        optimizer.step()
        return float(arm.whole(loss.detach()))

    with arm.context():
        losses, walls = [one() for _ in range(3)], []
        spent = time.process_time()
        for _ in range(num_steps):
            start = time.perf_counter()
            losses.append(one())
            walls.append(1000 * (time.perf_counter() - start))
        spent = 1000 * (time.process_time() - spent) / num_steps
        found = {"wall": median_and_quartiles(walls)[0], "cpu": spent, "loss": losses[-1]}
        if name == "DTensor":
            with importlib.import_module(f"{dtensor.__name__}.debug").CommDebugMode() as messages:
                one()
            found["collectives"] = messages.get_total_counts()
    return found


def operation_us(name: str) -> dict[str, float]:
    """Return the microseconds of each operation, forward, and forward and backward."""
    arm = Arm(name)
    x, linear, norm = arm.cut(torch.randn(8, 16), True), arm.own(nn.Linear(16, 16)), arm.own(nn.LayerNorm(16))
    leaf, found = x.block if arm.is_rows else x, {}
    ones = torch.ones_like(leaf)

    def spent_us(function: Callable[[], Any]) -> float:
        us = []
        for _ in range(15):
            start = time.thread_time()
            for _ in range(100):
                function()
            us.append((time.thread_time() - start) * 1e4)
        return median_and_quartiles(us[5:])[0]  # the first ones fill caches

    with arm.context():
        for operation, call, inputs in (
            ("relu", lambda: F.relu(x), [leaf]),
            ("add", lambda: x + x, [leaf]),
            ("linear", lambda: F.linear(x, linear.weight, linear.bias), [leaf, linear.weight, linear.bias]),
            ("layer_norm", lambda: F.layer_norm(x, (16,), norm.weight, norm.bias), [leaf, norm.weight, norm.bias]),
        ):
            found[operation] = spent_us(call)

            def both(call: Callable[[], Any] = call, inputs: Any = inputs) -> None:
                y = call()
                _grad(y.block if arm.is_rows else y, inputs, ones)

            found[f"{operation} and its backward"] = spent_us(both)
    return found


def run(quick: bool) -> Iterator[Result]:
    """Yield the time of operations, and of steps over DDP's."""
    num_rounds = 2 if quick else 6
    arms = ("DDP", "DTensor", "row tensors")
    rounds = [{arm: run_ranks(operation_us, 2, arm)[0] for arm in arms} for _ in range(num_rounds)]
    for what in rounds[0]["DDP"]:
        plain, others, rows = (median_and_quartiles([each[arm][what] for each in rounds])[0] for arm in arms)
        note = f"plain {plain:.1f}, DTensor {others:.1f}, row tensors {rows:.1f} us"
        yield Result("dtensor_time", f"{what}, DTensor", others - plain, "us more than plain", note=note)
        yield Result("dtensor_time", f"{what}, row tensors", rows - plain, "us more than plain")
    arms = ("one process", "DDP", "DTensor", PLAIN, "row tensors")
    steps = []
    for number in range(num_rounds):
        order = arms[:: 1 - 2 * (number % 2)]
        steps.append({arm: run_ranks(step, 2, arm, 10, timeout_s=300, environ=OFF)[0] for arm in order})
    for arm, unit in itertools.product(arms, ("wall", "cpu")):
        ms = [each[arm][unit] for each in steps]
        value, quartiles = ratio(ms, [each["DDP"][unit] for each in steps])
        note = f"{median_and_quartiles(ms)[0]:.0f} ms, last loss {steps[0][arm]['loss']:.6f}"
        note += f", {steps[0][arm]['collectives']} collectives" if "collectives" in steps[0][arm] else ""
        yield Result("dtensor_time", f"{unit} time of a U-Net's step, {arm}", value, "x DDP", quartiles, note=note)


if __name__ == "__main__":
    main(run, __doc__)
