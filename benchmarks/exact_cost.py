"""Measures the cost of the option `exact`: the ratio of its step to an ordinary step, and to gradient accumulation.

    python -m benchmarks.exact_cost

With as many ranks as virtual ranks, it is compared with an ordinary step of ddpshim. On one rank, which makes the steps
of four virtual ranks one after another, it is compared with hand-written gradient accumulation over four parts of the
batch. The two alternate. Two policies of 5M parameters: linear layers, whose step is bound by memory, and convolutions
over the time of an action sequence, whose step is bound by computation.
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
from ddpshim.job import shares
from ddpshim.process.job import current
from tests.ranks import run_ranks

_NO_GUARD = {"DDPSHIM_GUARD": "0"}  # it would also check the networks of the other arm
D_OBS, HORIZON, D_ACTION, NUM_PARTS = 64, 16, 14, 4


def _layers(kind: str) -> nn.Module:
    if kind == "layers":
        widths = [D_OBS + HORIZON * D_ACTION, *[1100] * 4, HORIZON * D_ACTION]
        return _sequence([(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:])])
    widths = [D_ACTION, 256, 512, 640, 512, 256, D_ACTION]
    return _sequence([(nn.Conv1d(a, b, 5, padding=2), nn.Mish()) for a, b in zip(widths, widths[1:])])


def _sequence(pairs: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
    return nn.Sequential(*[part for pair in pairs for part in pair][:-1])


def _batch(kind: str, num: int) -> torch.Tensor:
    return torch.randn(num, D_OBS + HORIZON * D_ACTION) if kind == "layers" else torch.randn(num, D_ACTION, HORIZON)


def _step(net: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def _accumulated(net: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    for i in range(NUM_PARTS):
        (net(x[i::NUM_PARTS]).square().mean() / NUM_PARTS).backward()
    optimizer.step()


def _measure(kind: str, num_rounds: int, batch_size: int) -> dict[str, Any]:
    """Return this rank's step times in ms (collective)."""
    torch.set_num_threads(1)
    plain = ddpshim.world()
    is_alone = plain.world_size == 1
    exact = replace(plain, options=replace(plain.options, exact=NUM_PARTS if is_alone else plain.world_size))
    x = _batch(kind, batch_size // plain.world_size)
    steps: dict[str, Callable[[], Any]] = {}
    for way, world in (("usual", plain), ("exact", exact)):
        current().world = world
        net = _layers(kind)
        wrapped = net if is_alone and way == "usual" else ddpshim.wrap_parallel(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
        if way == "exact":
            made = ddpshim.virtual_step(_step, wrapped, optimizer)
            steps[way] = lambda made=made: made(x)  # type: ignore[misc]
        else:
            one = _accumulated if is_alone else _step
            steps[way] = lambda one=one, net=wrapped, optimizer=optimizer: one(net, optimizer, x)  # type: ignore[misc]
    ms: dict[str, list[float]] = {way: [] for way in steps}
    for number in range(num_rounds + 2):
        for way, world in (("usual", plain), ("exact", exact)):
            current().world = world
            shares.begin_batch(len(x))
            plain.barrier()
            start = time.perf_counter()
            steps[way]()
            if number > 1:  # the first rounds warm up
                ms[way].append((time.perf_counter() - start) * 1000)
    current().world = plain
    return {**ms, "num_parameters": sum(p.numel() for p in _layers(kind).parameters())}


def run(quick: bool, batch_size: int = 128) -> list[Result]:
    """Return the ratios for both policies, on two ranks and on one."""
    results = []
    for kind in ("layers", "convolutions"):
        for num_ranks, over in ((2, "an ordinary step, 2 of 2 ranks"), (1, "accumulation, 1 rank for 4")):
            got = run_ranks(
                _measure, num_ranks, kind, 4 if quick else 60, batch_size, timeout_s=900, environ=_NO_GUARD
            )[0]
            value, quartiles = ratio(got["exact"], got["usual"])
            size = f"{got['num_parameters'] / 1e6:.1f}M, {kind}"
            note = f"{statistics.median(got['usual']):.0f} ms"
            results.append(Result("exact_cost", f"exact over {over}, {size}", value, "x", quartiles, note=note))
    return results


if __name__ == "__main__":
    main(run, __doc__)
