"""Gives each rank its share of the batches that torch's loader draws in one process, from the same random streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Optional

from torch.utils.data import DataLoader, Sampler

from ddpshim.data.dataset_fingerprint import length
from ddpshim.data.numbered import (
    EpochCounter,
    Numbered,
    generator_states,
    layers,
    restore_generators,
    without_lists,
)
from ddpshim.errors import DataError
from ddpshim.job.noise import Share, draws_alike
from ddpshim.job.world import World
from ddpshim.process.job import current
from ddpshim.process.random_streams import digest, rank_states, restore_rank_states
from ddpshim.process.say import say_once


class TorchsBatches(Sampler[Any]):
    """This rank's share of each batch of `plain`: n of its n * W indices, from r * n on.

    torch's loader asks its sampler for an iterator, draws the seed of its workers, and with workers asks again. torch's
    sampler draws its order with its first index. All ranks draw the order from the main rank's random streams, because
    draws that it alone has made would also have been made in one process. A sampler that is not torch's own may have
    entropy of its own, and may draw when it is asked for an iterator, so the main rank draws for all.

    Args:
        plain: the loader of one process, for the global batch.
        world: whose ranks share the batches.
    Attributes:
        latest: the pass that was begun last.
        opens_with: `opened_with` and `draws_with` of the pass that the next one redraws; None for a new one.
    """

    def __init__(self, plain: DataLoader[Any], world: World, epochs: EpochCounter, num_workers: int) -> None:
        self.epochs, self.plain, self.world, self.num_workers = epochs, plain, world, num_workers
        self.sampler = plain.sampler if plain.batch_sampler is None else plain.batch_sampler
        self.name = f"the order of loader {current().next_number('order')}"
        self.latest: Optional[OrderOfPass] = None
        self.opens_with: Optional[tuple[Any, Any]] = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass use `epoch`, and later passes the following epochs. Local."""
        self.epochs.set(epoch)

    def num_samples(self) -> Optional[int]:
        """Return how many samples the order has."""
        return length(self.plain.sampler)

    def __len__(self) -> int:
        """Return the number of steps of a pass over the dataset's current samples, equal on every rank."""
        return len(self.plain)

    num_steps = __len__

    def __iter__(self) -> Iterator[Any]:
        self.latest = OrderOfPass(self)
        return self.latest.shares()


class OrderOfPass:
    """The global batches of one pass, from the epoch's first step on.

    Attributes:
        num_ahead: how many batches before that step are given, so that each worker, which fetches every n-th batch,
            gets the same ones after an interruption as without.
        opened_with: the random streams in which the caller's own sampler, if it has one, was asked for an iterator.
        draws_with: those in which it is asked for the first index; None before that.
        sizes: the numbers of rows of batches that torch's loader has requested and not given.
    """

    def __init__(self, of: TorchsBatches) -> None:
        """Collective if the order comes from the caller's own sampler, else local."""
        self._plain, self._world, self._name = of.plain, of.world, of.name
        self._start, self._num_workers = of.epochs.start_step, of.num_workers
        self.num_ahead = self._start % self._num_workers if self._num_workers else 0
        self.sizes: deque[int] = deque()
        self._batches: Optional[Iterator[Any]] = None
        self._before: list[Any] = []  # the global batches before the first of `_batches`
        self._sampler = without_lists(of.sampler)
        # The classes of the sampler that are not torch's; if there are some, the sampler's iterator on the main rank.
        kinds = map(type, layers(of.sampler))
        self._own = [kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.utils.data")]
        self._indices: Any = None
        again: tuple[Any, Any] = of.opens_with or (None, None)
        self.opened_with, self.draws_with = again
        if self._own and self.opened_with is None:
            self.opened_with, after = of.world.run_on_main(self._open)
            if draws_alike():
                self._restore(after)

    def _open(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ask the caller's own sampler for an iterator; return the random streams before and after that."""
        before, self._indices = self._states(), iter(self._sampler)
        return before, self._states()

    def draw(self) -> None:
        """Draw the order, if that was not done (collective). Raises what the sampler raises."""
        if self._batches is not None:
            return
        here = self._world
        own = None if draws_alike() or here.is_main else rank_states(here.device)
        if self._own:
            drawn, self.draws_with = here.run_on_main(self._draw_all)
            batches = iter(drawn)
            self._restore(here.broadcast(self._states()))
        else:
            self._restore(here.answers_of_main(self._name, self._states()))
            batches = iter(self._sampler)
            batches = chain([*islice(batches, 1)], batches)  # these are all draws, except those at the end
        if own is not None:
            restore_rank_states(own, here.device)
        before = islice(batches, self._start - self.num_ahead)
        self._before = [*before] if self._num_workers else [*deque(before, maxlen=0)]
        self._batches = batches

    def _draw_all(self) -> tuple[list[Any], dict[str, Any]]:
        """Return what the caller's own sampler gives in a pass, and the streams from which; print a line if it draws
        between its indices."""
        if self._indices is None:
            self._restore(self.opened_with)
            self._open()
        if self.draws_with is not None:
            self._restore(self.draws_with)
        draws_with, drawn = self._states(), [*islice(self._indices, 1)]
        before = digest()
        drawn += self._indices
        if before != digest():
            say_once(
                f"{self._own[0]} draws random numbers during iteration: on ranks all at the start of "
                "a pass, in one process between the steps, from the same streams as the training. So the samples "
                "differ from one process"
            )
        return drawn, draws_with

    def _states(self) -> dict[str, Any]:
        return states_of(self._plain, self._world)

    def _restore(self, states: dict[str, Any]) -> None:
        restore_states(self._plain, self._world, states)

    def shares(self) -> Iterator[Any]:
        """Yield this rank's share of each batch (collective)."""
        self.draw()
        assert self._batches is not None
        first = self._start - self.num_ahead
        for step, batch in enumerate(self._batches, first):
            share = batch
            if isinstance(batch, (list, tuple)):
                share = Numbered(batch, _own_rows(batch, self._world), step)
                if step < first + self._num_workers:
                    share.before = self._before[step % self._num_workers :: self._num_workers]
            self.sizes.append(len(share) if isinstance(share, Numbered) else 1)
            yield share


def _own_rows(batch: Any, here: World) -> range:
    """Return this rank's rows of the batch. Raises DataError if the ranks do not divide it."""
    num = len(batch)
    if not num:
        raise DataError("A batch of the batch_sampler is empty; no rank could train on it. Leave it out.")
    if num % here.world_size:
        raise DataError(
            f"A batch of the batch_sampler has {num} indices, which {here.world_size} ranks do not divide: their means "
            'would weigh samples differently. Use sizes that they divide, or setup(batch="global").'
        )
    rows: range = range(num)[Share(here.rank, here.world_size, num // here.world_size).own(num)]
    return rows


def states_of(loader: Any, here: World) -> dict[str, Any]:
    """Return the states of this rank's random streams, and of the generators that the caller gave to `loader`."""
    return {**rank_states(here.device), "generators": generator_states(loader)}


def restore_states(loader: Any, here: World, states: dict[str, Any]) -> None:
    """Restore what `states_of` returned, or a part of it, in this process or an earlier one. Local."""
    restore_rank_states(states, here.device)
    restore_generators(loader, states["generators"])
