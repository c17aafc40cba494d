"""Gathers a batch's rows with their gradients, for losses of coupled samples."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ddpshim.errors import DataError
from ddpshim.job import exchange, shares
from ddpshim.job.exchange import group
from ddpshim.job.world import World


def all_gather(here: World, x: torch.Tensor) -> torch.Tensor:
    """See `World.all_gather`."""
    if here.world_size == 1:
        return x
    if shares.at_hand() is None:  # else they are shares of one batch
        _check_equal_numbers(x)
    gathered: torch.Tensor = _Gather.apply(x, here.rank, here.world_size, group())  # type: ignore[no-untyped-call]
    return gathered


def _check_equal_numbers(x: torch.Tensor) -> None:
    """Raise DataError, on all ranks, if their numbers of rows differ: gloo would end the process (collective)."""
    counted = torch.tensor([x.shape[0]], device=x.device)
    counts = exchange.table(counted, group()).flatten().tolist()
    if len(set(counts)) > 1:
        told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        raise DataError(
            f"all_gather of different numbers of rows ({told}): they do not form one batch. Gather the rows of a "
            "batch inside the loop, while it is at hand; or sum over each rank's rows (World.mean_over)."
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int, num: int, among: Any) -> torch.Tensor:
        ctx.number, ctx.num, ctx.group = number, num, among
        return exchange.table(x, among).flatten(0, 1).clone()  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = exchange.add_up(gradient.contiguous(), ctx.group)
        return total.chunk(ctx.num)[ctx.number], None, None, None
