"""Records which rows of the current batch are this rank's.

`make_loader` deals out the batches of one process: row j of rank r of W is row j * W + r of the global batch. If W does
not divide the batch, some ranks have one row more: then the mean over the batch is the mean over ranks of
`Share.weight` times the rank's mean. A rank without a row repeats a row of another rank, with weight 0.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ddpshim.process.job import current


class Share(NamedTuple):
    """A rank's rows of a batch."""

    rank: int
    world_size: int
    num_rows: int  # on this rank
    others: tuple[int, ...] = ()  # rows on this rank in the current batches of other loaders
    totals: tuple[int, ...] = ()  # rows on all ranks for each of `sizes`; empty if W divides them all
    sequence_first: Collection[tuple[int, ...]] = ()  # the first two sizes of tensors with the batch in dimension 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a batch on this rank may have."""
        return (self.num_rows, *self.others)

    @property
    def num_counted(self) -> int:
        """The number of rows that are this rank's own; 0 if it repeats a row of another rank."""
        return len(range(self.rank, self.totals[0], self.world_size)) if self.totals else self.num_rows

    @property
    def weight(self) -> float:
        """The factor of this rank's mean in the mean over ranks."""
        return self.num_counted * self.world_size / self.totals[0] if self.totals else 1.0

    def total(self, num_rows: int) -> int:
        """Return the rows on all ranks for a batch with `num_rows` on this rank, which is one of `sizes`."""
        return self.totals[self.sizes.index(num_rows)] if self.totals else num_rows * self.world_size

    def divided(self, num: int) -> list[Share]:
        """Return the shares of this rank's `num` virtual ranks."""
        sizes = [size // num for size in self.sizes]
        numbers = (self.rank + i * self.world_size for i in range(num))
        return [
            Share(number, self.world_size * num, sizes[0], tuple(sizes[1:]), sequence_first=self.sequence_first)
            for number in numbers
        ]

    def num_samples(self, num_rows: int) -> Optional[int]:
        """Return to how many samples `num_rows` rows belong, with one or several rows each; None if to no batch."""
        if num_rows in self.sizes:
            return num_rows
        return next((size for size in self.sizes if num_rows and num_rows % size == 0), None)

    def dimension(self, shape: Sequence[int]) -> Optional[tuple[int, int]]:
        """Return (dimension of the batch in `shape`, its entries per sample); None if no dimension is the batch."""
        if tuple(shape[:2]) in self.sequence_first and shape[1] in self.sizes:
            return 1, 1
        num_samples = self.num_samples(shape[0]) if len(shape) else None
        if num_samples is not None:
            return 0, shape[0] // num_samples
        return next(((number, 1) for number, size in enumerate(shape) if size in self.sizes), None)

    def whole(self, shape: Sequence[int], where: tuple[int, int]) -> list[int]:
        """Return `shape` for the global batch; `where` is the result of `dimension`."""
        dimension, num_each = where
        return [self.total(size // num_each) * num_each if i == dimension else size for i, size in enumerate(shape)]

    def _own(self, total: int) -> slice:
        return slice(self.rank, None, self.world_size) if self.rank < total else slice(0, 1)

    def rows(self, drawn: Any, where: tuple[int, int]) -> Any:
        """Return this rank's rows of `drawn`, a tensor or array for the global batch."""
        dimension, num_each = where
        own = self._own(drawn.shape[dimension] // num_each)
        if num_each == 1:
            return drawn[(slice(None),) * dimension + (own,)]
        each = drawn.reshape((-1, num_each, *drawn.shape[1:]))[own]
        return each.reshape((-1, *drawn.shape[1:]))

    def among_others(self, own: torch.Tensor, where: tuple[int, int]) -> torch.Tensor:
        """Return `own` in its rows of the global batch, and ones elsewhere, which are valid in every distribution."""
        whole = own.new_ones(self.whole(own.shape, where))
        dimension, num_each = where
        rows = self._own(whole.shape[dimension] // num_each)
        if num_each == 1:
            whole[(slice(None),) * dimension + (rows,)] = own
        else:
            whole.view(-1, num_each, *own.shape[1:])[rows] = own.reshape(-1, num_each, *own.shape[1:])
        return whole


class Position(NamedTuple):
    """The latest batch of a pass over a loader."""

    loader: int  # its number in the order in which loaders were made
    epoch: int
    step: int
    num_samples: Optional[int]  # of the whole pass, on all ranks


class Given:
    """The batches that a pass over a loader has returned so far.

    Attributes:
        is_under_way: whether its latest batch may still be trained on.
        num_rows: rows of that batch on this rank.
        total: rows of that batch on all ranks.
        feeds: whether that batch is for training.
        num_batches: number of batches so far.
        num_since: how many of them since the last backward pass.
        passes_before: backward passes of the job when this pass began.
        passes_then: backward passes of the job when it returned the latest batch.
    """

    def __init__(self, num_passes: int) -> None:
        self.is_under_way = self.feeds = True
        self.num_rows = self.total = self.num_batches = self.num_since = 0
        self.passes_before = self.passes_then = num_passes


class Sharing:
    """The state of a job's random draws, of which each rank gets its rows.

    Attributes:
        share: this rank's rows of the current batch; None between batches.
        is_uneven: whether W does not divide the latest batch of a pass that is under way or has just ended.
        has_fetched_ahead: whether that pass has ended before its last batch was trained on.
        num_passes: backward passes so far.
        given: the batches of each pass.
        last_given: the batches of the pass that returned the current one.
    """

    def __init__(self) -> None:
        self.share: Optional[Share] = None
        self.is_on = self.is_uneven = self.has_fetched_ahead = False
        self.sequence_first: set[tuple[int, ...]] = set()  # for `Share`
        self.named: set[str] = set()  # the lines of code that were reported
        self.last: tuple[Optional[Position], str] = None, ""  # of the current batch, also if its pass was deleted
        self.num_passes = 0
        self.given: weakref.WeakKeyDictionary[Any, Given] = weakref.WeakKeyDictionary()
        self.last_given: Optional[Given] = None

    def under_way(self) -> list[Given]:
        """Return the passes whose latest batch may still be trained on."""
        return [given for given in self.given.values() if given.is_under_way]


def begin_batch(num_rows: int, of: Optional[object] = None, total: Optional[int] = None) -> None:
    """Record that this rank now trains on `num_rows` samples of a global batch, which the pass `of` returned. Local.

    Args:
        total: samples on all ranks, if they may not have equally many.
    """
    job = current()
    assert job.world is not None
    sharing, size = job.part(Sharing), job.world.world_size
    total = num_rows * size if total is None else total
    if of is not None:
        given = sharing.given.setdefault(of, Given(sharing.num_passes))
        given.is_under_way, given.num_rows, given.total = True, num_rows, total
        given.num_since = 1 if given.passes_then != sharing.num_passes else given.num_since + 1
        given.num_batches += 1
        given.passes_then = sharing.num_passes
        sharing.last = getattr(of, "position", None), getattr(of, "called", "")
        given.feeds, sharing.last_given = sharing.last[0] is not None, given
    by_size = {given.num_rows: given.total for given in sharing.under_way() if given.num_rows != num_rows}
    others, totals = tuple(sorted(by_size)), (total, *(by_size[size] for size in sorted(by_size)))
    sharing.is_uneven = any(each % size for each in (total, *(given.total for given in sharing.under_way())))
    sharing.has_fetched_ahead = False
    sharing.share = Share(
        job.world.rank, size, num_rows, others, totals if sharing.is_uneven else (), sharing.sequence_first
    )


def positions() -> list[tuple[Position, str]]:
    """Return (position, line that made the loader) of each pass that feeds the training. Local."""
    sharing = current().part(Sharing)
    under_way = [of for of, given in sharing.given.items() if given.is_under_way]
    places = {(getattr(of, "position", None), getattr(of, "called", "")) for of in under_way} | {sharing.last}
    return sorted((position, called) for position, called in places if position is not None)


def play(share: Optional[Share]) -> Optional[Share]:
    """Make `share` the current batch's; returns the previous one. Local."""
    sharing = current().part(Sharing)
    before, sharing.share = sharing.share, share
    return before


def end_batch(of: Optional[object] = None) -> None:
    """Record that there is no current batch and the pass `of` is over: draws are now equal on all ranks. Local."""
    sharing = current().part(Sharing)
    sharing.share, sharing.last = None, (None, "")
    given = None if of is None else sharing.given.get(of)
    if given is not None:
        num_passes, given.is_under_way = sharing.num_passes - given.passes_before, False
        if sharing.is_uneven and given.feeds:
            sharing.has_fetched_ahead = not num_passes or num_passes % given.num_batches != 0


def is_shared() -> bool:
    """Return whether a draw now gives this rank's rows of one process's draw. Local."""
    sharing = current().part(Sharing)
    return sharing.is_on and sharing.share is not None


def at_hand() -> Optional[Share]:
    """Return this rank's share of the current batch; None between batches. Local."""
    return current().part(Sharing).share


@contextlib.contextmanager
def without_batch() -> Iterator[None]:
    """Run a block as if between batches: all ranks draw the same. Local."""
    before = play(None)
    try:
        yield
    finally:
        play(before)


def has_share() -> bool:
    """Return whether the current computation is for this rank's share of a batch. Local."""
    sharing = current().part(Sharing)
    return sharing.share is not None or (torch.is_grad_enabled() and not current().holds_whole_batches)
