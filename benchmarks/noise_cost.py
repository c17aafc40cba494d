"""Measures the cost of one process's noise: a 5M-parameter policy's step on two ranks, with it and with a rank's own.

    python -m benchmarks.noise_cost

Two policies are trained with the noise and timesteps of a diffusion policy: one of linear layers, and one with dropout
after each layer, for which every rank draws the masks of all ranks. The steps alternate. On a busy machine the ratio of
the two is mostly measurement noise; the time of the draws alone is reliable.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch import nn

import ddpshim
from benchmarks.results import Result, main, ratio
from ddpshim.job import noise, shares
from ddpshim.process.job import current
from tests.ranks import run_ranks

D_OBS, HORIZON, D_ACTION, HIDDEN, NUM_HIDDEN = 64, 16, 14, 1100, 3  # 5 M parameters


class _Policy(nn.Module):
    """Predicts the noise in a sequence of actions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        size = HORIZON * D_ACTION
        widths = [D_OBS + size + 1, *[HIDDEN] * (NUM_HIDDEN + 1), size]
        layers: list[nn.Module] = []
        for a, b in zip(widths, widths[1:]):
            layers += [nn.Linear(a, b), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        self.layers = nn.Sequential(*layers[: -1 - bool(dropout)])

    def loss(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        noise, timestep = torch.randn_like(actions), torch.randint(0, 100, (len(obs),))
        kept = (1 - timestep / 100)[:, None]
        noisy = kept.sqrt() * actions + (1 - kept).sqrt() * noise
        return (self.layers(torch.cat([obs, noisy, kept], 1)) - noise).square().mean()


@contextlib.contextmanager
def _as_one_process(num_rows: int) -> Iterator[None]:
    with noise.names_replaced(current().part(shares.Sharing)):
        shares.begin_batch(num_rows)
        yield
        shares.end_batch()


def _time_ms(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1000


def _measure(dropout: float, num_rounds: int, batch_size_per_rank: int) -> dict[str, Any]:
    """Return this rank's times in ms (collective)."""
    obs, actions = torch.randn(batch_size_per_rank, D_OBS), torch.randn(batch_size_per_rank, HORIZON * D_ACTION)
    policy = ddpshim.wrap_parallel(_Policy(dropout))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
    masks = torch.ones(batch_size_per_rank, HIDDEN)

    def step() -> None:
        optimizer.zero_grad()
        policy.loss(obs, actions).backward()
        optimizer.step()

    def draw() -> None:
        torch.randn_like(actions), torch.randint(0, 100, (len(obs),))
        for _ in range((NUM_HIDDEN + 1) * bool(dropout)):
            nn.functional.dropout(masks, dropout)

    ms: dict[str, list[float]] = {}
    for number in range(num_rounds + 1):
        for way in ("own", "one process"):
            with _as_one_process(batch_size_per_rank) if way == "one process" else contextlib.nullcontext():
                took = _time_ms(step), _time_ms(draw)
            if number:  # the first round warms up
                ms.setdefault(f"{way}, step", []).append(took[0])
                ms.setdefault(f"{way}, draws", []).append(took[1])
    return {**ms, "num_parameters": sum(p.numel() for p in policy.parameters())}


def run(quick: bool, batch_size_per_rank: int = 64) -> list[Result]:
    """Return, for both policies, the step with one process's noise over that with a rank's own, and the draws' time."""
    results = []
    for kind, dropout in (("without dropout", 0.0), ("with dropout", 0.1)):
        got = run_ranks(_measure, 2, dropout, 10 if quick else 200, batch_size_per_rank, timeout_s=600)[0]
        value, quartiles = ratio(got["one process, step"], got["own, step"])
        step_ms = statistics.median(got["own, step"])
        more_ms = statistics.median(got["one process, draws"]) - statistics.median(got["own, draws"])
        size = f"{got['num_parameters'] / 1e6:.1f}M parameters, 2 ranks, {kind}"
        note = f"{step_ms:.1f} ms"
        results += [
            Result("noise_cost", f"step with the noise of one process, {size}", value, "x own", quartiles, note=note),
            Result("noise_cost", f"draws in it, more than own, {kind}", 100 * more_ms / step_ms, "% of a step"),
        ]
    return results


if __name__ == "__main__":
    main(run, __doc__)
