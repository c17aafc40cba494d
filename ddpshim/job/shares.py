"""Knows which rows of the batch at hand are this rank's.

`make_loader` deals out the batches of one process: row j of rank r of W is row j * W + r.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ddpshim.job.job import current


class Share(NamedTuple):
    """Which rows of a batch are a rank's."""

    rank: int
    world_size: int
    num_rows: int  # of this rank
    others: tuple[int, ...] = ()  # of this rank's batches of other loaders whose passes are under way
    sequence_first: Collection[tuple[int, ...]] = ()  # the first two sizes of tensors that have the batch second

    @property
    def sizes(self) -> tuple[int, ...]:
        """What a batch of this rank may have for rows."""
        return (self.num_rows, *self.others)

    def divided(self, num: int) -> list[Share]:
        """What each of `num` virtual ranks of this one has."""
        sizes = [size // num for size in self.sizes]
        numbers = (self.rank + i * self.world_size for i in range(num))
        return [
            Share(number, self.world_size * num, sizes[0], tuple(sizes[1:]), self.sequence_first) for number in numbers
        ]

    def num_samples(self, num_rows: int) -> Optional[int]:
        """Of how many samples `num_rows` rows are, one or several of each; None if of no batch."""
        if num_rows in self.sizes:
            return num_rows
        return next((size for size in self.sizes if num_rows and num_rows % size == 0), None)

    def dimension(self, shape: Sequence[int]) -> Optional[tuple[int, int]]:
        """(dimension of the batch in `shape`, how many of its entries belong to a sample); None without one."""
        if tuple(shape[:2]) in self.sequence_first and shape[1] in self.sizes:
            return 1, 1
        num_samples = self.num_samples(shape[0]) if len(shape) else None
        if num_samples is not None:
            return 0, shape[0] // num_samples
        return next(((number, 1) for number, size in enumerate(shape) if size in self.sizes), None)

    def whole(self, shape: Sequence[int], where: tuple[int, int]) -> list[int]:
        """`shape` for the global batch."""
        return [size * self.world_size if i == where[0] else size for i, size in enumerate(shape)]

    def rows(self, drawn: Any, where: tuple[int, int]) -> Any:
        """This rank's rows of a tensor or array for the global batch."""
        dimension, num_each = where
        if num_each == 1:
            return drawn[(slice(None),) * dimension + (slice(self.rank, None, self.world_size),)]
        each = drawn.reshape((-1, num_each, *drawn.shape[1:]))[self.rank :: self.world_size]
        return each.reshape((-1, *drawn.shape[1:]))

    def among_others(self, own: torch.Tensor, where: tuple[int, int]) -> torch.Tensor:
        """`own` at its rows of the global batch; the others' rows are ones, which every distribution can take."""
        whole = own.new_ones(self.whole(own.shape, where))
        dimension, num_each = where
        if num_each == 1:
            index = (slice(None),) * dimension + (slice(self.rank, None, self.world_size),)
            whole[index] = own
            return whole
        whole.view(-1, num_each, *own.shape[1:])[self.rank :: self.world_size] = own.reshape(
            -1, num_each, *own.shape[1:]
        )
        return whole


class Position(NamedTuple):
    """Which batch of a loader a pass gave last."""

    loader: int  # by the order in which loaders were made
    epoch: int
    step: int
    num_samples: Optional[int]  # in that pass, of all ranks


class Sharing:
    """How the draws of a job are shared out, while they are.

    Attributes:
        share: of the batch at hand; None between batches.
        trains_whole_batches: whether ranks may train on a whole batch each, on which they are to draw alike.
    """

    def __init__(self) -> None:
        self.share: Optional[Share] = None
        self.is_on = self.trains_whole_batches = False
        self.sequence_first: set[tuple[int, ...]] = set()  # for `Share`
        self.named: set[str] = set()  # the lines that were told of
        self.last: tuple[Optional[Position], str] = None, ""  # the batch at hand, also of a pass that nobody holds
        self.passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # under way, with their batches


def begin_batch(num_rows: int, of: Optional[object] = None) -> None:
    """From here on this rank trains on `num_rows` of the samples of a global batch, which the pass `of` gave. Local."""
    job = current()
    assert job.world is not None
    sharing = job.part(Sharing)
    if of is not None:
        sharing.passes[of] = num_rows
        sharing.last = getattr(of, "position", None), getattr(of, "called", "")
    others = tuple(sorted({*sharing.passes.values()} - {num_rows}))
    sharing.share = Share(job.world.rank, job.world.world_size, num_rows, others, sharing.sequence_first)


def positions() -> list[tuple[Position, str]]:
    """Where the passes that feed the training are, and where their loaders were made. Local."""
    sharing = current().part(Sharing)
    given = {(getattr(of, "position", None), getattr(of, "called", "")) for of in sharing.passes} | {sharing.last}
    return sorted((position, called) for position, called in given if position is not None)


def play(share: Optional[Share]) -> Optional[Share]:
    """Make `share` that of the batch at hand; returns the one before it. Local."""
    sharing = current().part(Sharing)
    before, sharing.share = sharing.share, share
    return before


def end_batch(of: Optional[object] = None) -> None:
    """No batch is at hand any more, and the pass `of` is over: draws are alike on all ranks. Local."""
    sharing = current().part(Sharing)
    sharing.share, sharing.last = None, (None, "")
    if of is not None:
        sharing.passes.pop(of, None)


def is_shared() -> bool:
    """Whether a draw now is a rank's rows of what one process draws. Local."""
    sharing = current().part(Sharing)
    return sharing.is_on and sharing.share is not None


def at_hand() -> Optional[Share]:
    """Which samples of the global batch this rank has; None between batches. Local."""
    return current().part(Sharing).share


@contextlib.contextmanager
def without_batch() -> Iterator[None]:
    """Inside, what is computed is no share of a batch, and ranks draw alike. Local."""
    before = play(None)
    try:
        yield
    finally:
        play(before)


def has_share() -> bool:
    """Whether what is computed now is a rank's share of a batch. Local."""
    sharing = current().part(Sharing)
    return sharing.share is not None or (torch.is_grad_enabled() and not sharing.trains_whole_batches)
