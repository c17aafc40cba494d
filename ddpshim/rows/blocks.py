"""Divides a dimension into one block for each rank, and gathers blocks, with gradients.

Every rank runs the whole program. The gradient of a tensor that all ranks hold whole is equal on all ranks. Inside
blocks, gradients are W times a rank's share, so that the mean over the W ranks, which a reducer computes for
parameters, is their sum. So a gather's backward pass multiplies by W, and a scatter's divides by W. (With the option
`exact`, `pieces` adds them up, and the factor is 1.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from ddpshim.job.collectives import begin_gather, group
from ddpshim.job.news import settle
from ddpshim.process.job import current
from ddpshim.process.observed import Progress

_SENT_AS_THEY_ARE = (torch.float32, torch.float64, torch.int64)  # others as bytes: backends lack some
LEAST_ROWS = 2  # in a block: a dimension of one row has no strides that show the memory layout of the whole


class Part(NamedTuple):
    """How a dimension is divided: `outer` times all rows, of which piece i has those from cuts[i] to cuts[i + 1].

    50 rows on 3 ranks: outer 1, cuts (0, 16, 33, 50). A rank holds one piece, or with the option `exact` V / W. A
    dimension of more than one `outer` arises if time, then batch are flattened into one.
    """

    outer: int
    cuts: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.cuts[-1]

    @property
    def size(self) -> int:
        return self.outer * self.cuts[-1]

    def bounds(self, rank: int, size: int) -> tuple[int, int]:
        """Return the first row of a rank among `size`, and that after its last."""
        each = (len(self.cuts) - 1) // size
        return self.cuts[rank * each], self.cuts[(rank + 1) * each]


class Ranks(NamedTuple):
    """This rank among those that divide the rows."""

    rank: int
    size: int


class State:
    """The state of row tensors in a job."""

    def __init__(self) -> None:
        world = current().world
        # This rank, or, while a piece is computed, this piece among all.
        self.ranks = Ranks(0, 1) if world is None else Ranks(world.rank, world.world_size)
        exact = None if world is None else world.options.exact
        self.is_exact, self.num_pieces = exact is not None, exact or self.ranks.size  # into which rows are divided
        self.is_in_piece = False  # one is being computed (`pieces`)
        self.factor = 1 if self.is_exact else self.ranks.size  # of gradients inside blocks to a rank's share
        self.num_messages = 0  # how often wholes were gathered, or added up
        self.rows_at_once = None if world is None else world.options.rows_at_once  # of a network's call
        self.has_graphs = world is not None and world.options.graphs == "on"
        self.mask = own_rows  # returns this rank's rows of a mask that the first argument draws, as of the second
        self.tape: Any = None  # writes down the calls on blocks, if the call of a network is being captured

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that is one call for a tape."""
        return function(*args) if self.tape is None else self.tape.call(function, args)


def own_rows(draw: Callable[[], torch.Tensor], rows: Any) -> torch.Tensor:
    return own(draw(), rows.dimension, rows.part)


def ranks() -> Ranks:
    return current().part(State).ranks


def factor() -> int:
    return current().part(State).factor


def num_pieces() -> int:
    return current().part(State).num_pieces


def part_of(num_rows: int, num: Optional[int] = None) -> Optional[Part]:
    """Return how `num_rows` rows are divided, into `num` pieces in a data worker, which knows no job. Local.

    None if a piece would have fewer than LEAST_ROWS.
    """
    return _part_of(num_rows, num or num_pieces())


@functools.lru_cache(maxsize=1024)
def _part_of(num_rows: int, num_pieces: int) -> Optional[Part]:
    cuts = tuple(num_rows * piece // num_pieces for piece in range(num_pieces + 1))
    return Part(1, cuts) if num_rows // num_pieces >= LEAST_ROWS else None


def own(whole: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
    """Return this rank's block of `whole`; a view if `part.outer` is 1. Local."""
    start, end = part.bounds(*ranks())
    if part.outer == 1:
        return whole.narrow(dim, start, end - start)
    apart: torch.Tensor = whole.unflatten(dim, (part.outer, part.num_rows))
    return apart.narrow(dim + 1, start, end - start).flatten(dim, dim + 1)


def gather(block: torch.Tensor, dim: int, part: Part, waits: Optional[list[Any]] = None) -> torch.Tensor:
    """Return the whole tensor, in the memory layout that it would have in one process (collective).

    With a list `waits` it does not wait: its values are there when what was added to the list has been called in order.
    """
    if torch.is_inference_mode_enabled():  # gloo's thread may not write into its tensors (seen with torch 2.1)
        with torch.inference_mode(False):
            made = gather(block, dim, part)
        return made.clone()
    here = ranks()
    counts, shape, strides, is_simple = _plan(part, here, dim, block.shape, block.stride(), block.dtype)
    whole = torch.empty_strided(shape, strides, dtype=block.dtype, device=block.device)
    if not whole.numel():
        return whole
    if is_simple:
        own = block.detach().contiguous() if waits is None else block.detach().clone()  # the program may write into it
        gather_alike(own, [*torch.split(whole.data, counts[0])], waits)  # gloo counts it as a write, at some time
        return whole
    bounds = [part.bounds(rank, here.size) for rank in range(here.size)]
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
    everyones = gather_alike(data, None, waits)
    into = into.data.movedim(dim, 0)  # a cached whole keeps its version

    def put() -> None:
        for theirs, (start, end), num in zip(everyones, bounds, counts):
            into[start:end] = theirs[:num].view(block.dtype).view(num, *apart.shape[1:])

    put() if waits is None else waits.append(put)
    return whole


@functools.lru_cache(maxsize=1024)
def _plan(part: Part, here: Ranks, dim: int, shape: Any, strides: Any, dtype: torch.dtype) -> Any:
    """Return each rank's number of rows, the whole's shape and strides, and whether it is the blocks one by one."""
    bounds = [part.bounds(rank, here.size) for rank in range(here.size)]
    counts = [end - start for start, end in bounds]
    # In one process it is dense, in the order of the block's dimensions in memory.
    of_whole, strides_of_whole, step = [*shape], [0] * len(shape), 1
    of_whole[dim] = part.size
    for i in sorted(range(len(shape)), key=lambda i: (strides[i], -i)):
        strides_of_whole[i], step = step, step * max(1, of_whole[i])
    is_dense = strides_of_whole == [*torch.empty(of_whole, device="meta").stride()]
    is_alike = here.size > 1 and len({*counts}) == 1 and dtype in _SENT_AS_THEY_ARE
    return counts, of_whole, strides_of_whole, is_alike and dim == 0 and part.outer == 1 and is_dense


def gather_alike(
    own: torch.Tensor, everyones: Optional[list[torch.Tensor]] = None, waits: Optional[list[Any]] = None
) -> list[torch.Tensor]:
    """Return all ranks' tensors, of one shape, in `everyones` if it is given (collective). `waits`: as of `gather`."""
    state = current().part(State)
    state.num_messages += 1
    if waits is None:
        settle()
    if state.ranks.size == 1:
        return [own]
    if everyones is None:
        everyones = [torch.empty_like(own) for _ in range(state.ranks.size)]
    work = begin_gather(everyones, own, group())

    def wait(_: torch.Tensor = own) -> None:  # whose memory is in use until then
        with current().part(Progress).waiting():
            work.wait()

    wait() if waits is None else waits.append(wait)
    return everyones


def added_up(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' tensors (collective)."""
    current().part(State).num_messages += 1
    settle()
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    total = tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    if ranks().size > 1:
        with current().part(Progress).waiting():
            dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=group())
    return total.to(tensor.dtype)


class GatherBlocks(torch.autograd.Function):
    """Blocks -> the whole, whose gradient is equal on all ranks (collective)."""

    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, dim: int, part: Part, waits: Any = None) -> torch.Tensor:
        ctx.dim, ctx.part = dim, part
        return gather(block, dim, part, waits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Scatter.apply(gradient, ctx.dim, ctx.part) * factor(), None, None, None  # type: ignore[no-untyped-call]


class Scatter(torch.autograd.Function):
    """The whole -> blocks (its backward pass is collective)."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
        ctx.dim, ctx.part = dim, part
        return own(whole, dim, part).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return GatherBlocks.apply(gradient, ctx.dim, ctx.part) / factor(), None, None  # type: ignore[no-untyped-call]


class Mean(torch.autograd.Function):
    """The mean over ranks; its own gradient is equal on all ranks already (collective)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return added_up(tensor) / ranks().size

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return same(gradient)  # for third derivatives


def same(whole: torch.Tensor) -> torch.Tensor:
    """Return a whole that each rank uses with its rows: its gradient is the ranks' sum (backward: collective)."""
    if not whole.requires_grad:
        return whole
    used = whole.view_as(whole)
    # No function of its own: its view would refuse changes of `whole` in place.
    used.register_hook(lambda gradient: None if gradient is None else Mean.apply(gradient))  # type: ignore[no-untyped-call]
    return used
