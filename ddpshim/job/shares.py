"""Records which rows of the current batch are this rank's.

`make_loader` deals out the batches of one process: rank r's n rows are those from row r * n on of the global batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ddpshim.process.job import current


class Share(NamedTuple):
    """A rank's rows of a batch."""

    rank: int
    world_size: int
    num_rows: int  # on this rank
    others: tuple[int, ...] = ()  # rows on this rank in the current batches of other loaders
    sequence_first: Collection[tuple[int, ...]] = ()  # the first two sizes of tensors with the batch in dimension 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a batch on this rank may have."""
        return (self.num_rows, *self.others)

    def own(self, num: int) -> Any:
        """Return the index of this rank's entries among `num` of the global batch."""
        each = num // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)

    def num_samples(self, num_rows: int) -> Optional[int]:
        """Return to how many samples `num_rows` rows belong, with one or several rows each; None if to no batch."""
        if num_rows in self.sizes:
            return num_rows
        return next((size for size in self.sizes if num_rows and num_rows % size == 0), None)

    def dimension(self, shape: Sequence[int]) -> Optional[int]:
        """Return the dimension of the batch in `shape`; None if no dimension is the batch."""
        if tuple(shape[:2]) in self.sequence_first and shape[1] in self.sizes:
            return 1
        if len(shape) and self.num_samples(shape[0]) is not None:
            return 0
        return next((number for number, size in enumerate(shape) if size in self.sizes), None)

    def whole(self, shape: Sequence[int], dimension: Optional[int]) -> list[int]:
        """Return `shape` for the global batch; unchanged if no dimension is the batch."""
        return [size * self.world_size if i == dimension else size for i, size in enumerate(shape)]

    def rows(self, drawn: Any, dimension: int) -> Any:
        """Return this rank's rows of `drawn`, a tensor or array for the global batch."""
        return drawn[(slice(None),) * dimension + (self.own(drawn.shape[dimension]),)]

    def among_others(self, own: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return `own` in its rows of the global batch, and ones elsewhere, which are valid in every distribution."""
        whole = own.new_ones(self.whole(own.shape, dimension))
        whole[(slice(None),) * dimension + (self.own(whole.shape[dimension]),)] = own
        return whole


class Position(NamedTuple):
    """The latest batch of a pass over a loader."""

    loader: int  # its number in the order in which loaders were made
    epoch: int
    step: int
    num_samples: Optional[int]  # of the whole pass, on all ranks


class Sharing:
    """The state of a job's random draws, of which each rank gets its rows.

    Attributes:
        share: this rank's rows of the current batch; None between batches.
        under_way: the rows of the latest batch of each pass that may still be trained on.
    """

    def __init__(self) -> None:
        self.share: Optional[Share] = None
        self.is_on = False
        self.sequence_first: set[tuple[int, ...]] = set()  # for `Share`
        self.named: set[str] = set()  # the lines of code that were reported
        self.last: tuple[Optional[Position], str] = None, ""  # of the current batch, also if its pass was deleted
        self.under_way: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def begin_batch(num_rows: int, of: Optional[object] = None) -> None:
    """Record that each rank now trains on `num_rows` samples of a global batch, which the pass `of` returned. Local."""
    job = current()
    assert job.world is not None
    sharing = job.part(Sharing)
    if of is not None:
        sharing.under_way[of] = num_rows
        sharing.last = getattr(of, "position", None), getattr(of, "called", "")
    others = tuple(sorted({*sharing.under_way.values()} - {num_rows}))
    sharing.share = Share(job.world.rank, job.world.world_size, num_rows, others, sharing.sequence_first)


def positions() -> list[tuple[Position, str]]:
    """Return (position, line that made the loader) of each pass that feeds the training. Local."""
    sharing = current().part(Sharing)
    places = {(getattr(of, "position", None), getattr(of, "called", "")) for of in sharing.under_way} | {sharing.last}
    return sorted((position, called) for position, called in places if position is not None)


def end_batch(of: Optional[object] = None) -> None:
    """Record that there is no current batch and the pass `of` is over: draws are now equal on all ranks. Local."""
    sharing = current().part(Sharing)
    sharing.share, sharing.last = None, (None, "")
    if of is not None:
        sharing.under_way.pop(of, None)


def at_hand() -> Optional[Share]:
    """Return this rank's share of the current batch; None between batches. Local."""
    return current().part(Sharing).share


def has_share() -> bool:
    """Return whether the current computation is for this rank's share of a batch. Local."""
    sharing = current().part(Sharing)
    return sharing.share is not None or (torch.is_grad_enabled() and not current().holds_whole_batches)
