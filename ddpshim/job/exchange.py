"""Gathers and sums tensors over all ranks."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ddpshim.process.job import current


def begin_gather(everyones: list[torch.Tensor], own: torch.Tensor, group: Any) -> Any:
    """Begin to gather `own`, and return the work (collective). It is `dist.all_gather` without its checks, which take
    as long.

    `own` and all `everyones` are contiguous, and of one shape, type and device.
    """
    if own.is_complex():
        everyones, own = [torch.view_as_real(x) for x in everyones], torch.view_as_real(own)
    ranks: Any = group or dist.group.WORLD
    return ranks.allgather([everyones], [own])


def pairs(own: tuple[int, int], size: int, group: Any) -> list[tuple[int, int]]:
    """Return two int64 of each of `size` ranks; the second identifies the collective in which a rank is (collective).

    Every message of World's collectives begins with such a pair, so that ranks in different ones detect it.
    """
    everyones = torch.empty((size, 2), dtype=torch.int64, device="cpu")
    mine = torch.tensor(own, dtype=torch.int64, device="cpu")
    begin_gather([*everyones.unbind()], mine, group).wait()
    return [tuple(theirs) for theirs in everyones.tolist()]


def table(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the tensors of all ranks, of one shape, joined in a new first dimension (collective)."""
    here, own = current().world, own.detach()
    if here is None or here.world_size == 1:
        return own.unsqueeze(0)
    everyones = own.new_empty((dist.get_world_size(group), *own.shape))
    begin_gather([*everyones.unbind()], own.contiguous(), group).wait()
    return everyones


def add_up(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of all ranks' tensors, as a new tensor (collective)."""
    total = own.detach().clone()
    dist.all_reduce(total, group=group)
    return total


class RowsOfRanks(torch.autograd.Function):
    """Gathers the rows of all ranks; their gradients are summed over the ranks, and return to the rows' ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int, group: Any) -> torch.Tensor:
        ctx.rank, ctx.group = rank, group
        return table(x, group).flatten(0, 1).clone()  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = add_up(gradient.contiguous(), ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[ctx.rank], None, None


def new_group(backend: Optional[str] = None) -> Any:
    """Return another process group of all ranks, with the first one's timeout and default backend (collective)."""
    timeout = current().timeout
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    return dist.new_group(backend=backend, **options)


class _Group:
    """The process group for messages within forward and backward passes, separate from the buckets' group."""

    def __init__(self) -> None:
        self.made = new_group()


def group() -> Any:
    """Return the group for messages within forward and backward passes (the first call is collective)."""
    return current().part(_Group).made
