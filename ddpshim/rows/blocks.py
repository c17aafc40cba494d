"""Divides a dimension into one block for each rank, and gathers blocks, with gradients.

Every rank runs the whole program. The gradient of a tensor that all ranks hold whole is equal on all ranks. Inside
blocks, gradients are W times a rank's share, so that the mean over the W ranks, which a reducer computes for
parameters, is their sum. So a gather's backward pass multiplies by W, and a scatter's divides by W.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from ddpshim.job.job import current
from ddpshim.job.whole_batch import group

LEAST_ROWS = 2  # in a block: a dimension of one row has no strides that show the memory layout of the whole


class Part(NamedTuple):
    """How a dimension is divided: `outer` times all rows, of which rank r holds those from cuts[r] to cuts[r + 1].

    50 rows on 3 ranks: outer 1, cuts (0, 16, 33, 50). A dimension of more than one `outer` arises if time, then batch
    are flattened into one.
    """

    outer: int
    cuts: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.cuts[-1]

    @property
    def size(self) -> int:
        return self.outer * self.cuts[-1]

    def num_own(self, rank: int) -> int:
        return self.cuts[rank + 1] - self.cuts[rank]


class Ranks(NamedTuple):
    """This rank among those that divide the rows."""

    rank: int
    size: int


class State:
    """The state of row tensors in a job."""

    def __init__(self) -> None:
        world = current().world
        self.ranks = Ranks(0, 1) if world is None else Ranks(world.rank, world.world_size)


def ranks() -> Ranks:
    return current().part(State).ranks


@functools.lru_cache(maxsize=1024)
def part_of(num_rows: int, num_ranks: int) -> Optional[Part]:
    """Return how `num_rows` rows are divided; None if a block would have fewer than LEAST_ROWS."""
    cuts = tuple(num_rows * rank // num_ranks for rank in range(num_ranks + 1))
    return Part(1, cuts) if num_rows // num_ranks >= LEAST_ROWS else None


def own(whole: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
    """Return this rank's block of `whole`; a view if `part.outer` is 1. Local."""
    here = ranks()
    start, num = part.cuts[here.rank], part.num_own(here.rank)
    if part.outer == 1:
        return whole.narrow(dim, start, num)
    apart: torch.Tensor = whole.unflatten(dim, (part.outer, part.num_rows))
    return apart.narrow(dim + 1, start, num).flatten(dim, dim + 1)


def gather(block: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
    """Return the whole tensor, in the memory layout that it would have in one process (collective)."""
    here = ranks()
    counts = [part.num_own(rank) for rank in range(here.size)]
    whole = torch.empty_strided(*layout(block, dim, part.size), dtype=block.dtype, device=block.device)
    if not whole.numel():
        return whole
    rows, into = block.detach(), whole
    if part.outer > 1:
        rows = rows.unflatten(dim, (part.outer, counts[here.rank]))
        into = into.unflatten(dim, (part.outer, part.num_rows))
        dim += 1
    # `contiguous` would keep any stride of a dimension of size 1.
    apart = rows.movedim(dim, 0).resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    data = apart.view(len(apart), -1).view(torch.uint8)  # as bytes: backends lack some types
    if len(data) < max(counts):
        data = torch.cat([data, data.new_empty((max(counts) - len(data), data.shape[1]))])
    everyones = [torch.empty_like(data) for _ in counts]
    dist.all_gather(everyones, data, group=group())
    into = into.movedim(dim, 0)
    for theirs, start, num in zip(everyones, part.cuts, counts):
        into[start : start + num] = theirs[:num].view(block.dtype).view(num, *apart.shape[1:])
    return whole


def layout(block: torch.Tensor, dim: int, size: int) -> tuple[list[int], list[int]]:
    """Return the shape and strides of a whole, whose dimension `dim` has `size`, in one process: dense, in the order of
    the block's dimensions in memory. Local."""
    shape, strides, step = list(block.shape), [0] * block.dim(), 1
    shape[dim] = size
    of_block = block.stride()
    for i in sorted(range(block.dim()), key=lambda i: (of_block[i], -i)):
        strides[i], step = step, step * max(1, shape[i])
    return shape, strides


def strides_of_whole(block: torch.Tensor, dim: int, size: int) -> list[int]:
    """Return the strides that the whole has in one process, if `block` is a view as the whole is. Local."""
    own, of_rows = block.shape[dim], block.stride(dim)
    return [stride * size // own if stride > of_rows else stride for stride in block.stride()]


def added_up(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' tensors (collective)."""
    is_small = tensor.dtype in (torch.float16, torch.bfloat16)
    total = (
        tensor.detach().to(torch.float32) if is_small else tensor.detach().clone(memory_format=torch.contiguous_format)
    )
    if total.is_complex():
        dist.all_reduce(torch.view_as_real(total), group=group())
    else:
        dist.all_reduce(total.contiguous(), group=group())
    return total.to(tensor.dtype)


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ on any rank (collective)."""
    return bool(added_up(torch.tensor([not torch.equal(one, other)], dtype=torch.int32, device=one.device)).item())


class Gather(torch.autograd.Function):
    """Blocks -> the whole, whose gradient is equal on all ranks (collective)."""

    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
        ctx.dim, ctx.part = dim, part
        return gather(block, dim, part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Scatter.apply(gradient, ctx.dim, ctx.part) * ranks().size, None, None  # type: ignore[no-untyped-call]


class Scatter(torch.autograd.Function):
    """The whole -> blocks (its backward pass is collective)."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
        ctx.dim, ctx.part = dim, part
        return own(whole, dim, part).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Gather.apply(gradient, ctx.dim, ctx.part) / ranks().size, None, None  # type: ignore[no-untyped-call]


class Mean(torch.autograd.Function):
    """The mean over ranks; its own gradient is equal on all ranks already (collective)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return added_up(tensor) / ranks().size

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def same(whole: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor that each rank uses with its rows: its gradient is the sum of the ranks' (backward:
    collective)."""
    used = whole.view_as(whole)
    used.register_hook(Mean.apply)  # no function of its own: its view would refuse changes of `whole` in place
    return used
