"""Deals out the batches that torch's own loader makes in one process, from the random streams that it has there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Optional

import torch
from torch.utils.data import DataLoader, Sampler

from ddpshim.data.sampler import EpochCounter, layers
from ddpshim.errors import DataError
from ddpshim.job.random_streams import rank_states, restore_rank_states
from ddpshim.job.world import World


class TorchsBatches(Sampler[Any]):
    """This rank's share of each batch of `plain`: every W-th index, from the r-th on.

    A pass begins with the main rank's random streams on all ranks: what it alone has drawn, one process would have
    drawn. Then torch's loader draws the seed of its workers and torch's sampler its order, as they do in one process.
    A sampler that is not torch's own may have entropy of its own: the main rank draws, for all.

    Args:
        plain: the loader of one process, for the global batch.
        world: whose ranks share the batches.
        length: the number of steps.

    Attributes:
        begun_with: the random streams with which the pass began, the samplers' own generators included.
        begins_with: those with which the next one is to begin, in place of the current ones.
        is_plain: whether this pass, of a world of one, is left to torch altogether.
        sizes: the number of samples of this rank in each of the batches that were asked for and not yet used.
    """

    def __init__(self, plain: DataLoader[Any], world: World, length: int, epochs: EpochCounter) -> None:
        self.epochs = epochs
        self.begun_with: Optional[dict[str, Any]] = None
        self.begins_with: Optional[dict[str, Any]] = None
        self.sizes: deque[int] = deque()
        self.is_plain = False
        self._plain, self._world, self._length = plain, world, length
        self._batches: Optional[Iterator[Any]] = None
        self._start: list[Any] = []  # of the order: what fills up a last batch that does not split

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs, or of the first one to come."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass `epoch`, and those after it with the epochs that follow. Local."""
        self.epochs.set(epoch)

    @property
    def generator(self) -> Optional[torch.Generator]:
        """What torch draws from in one process; None for the global generator."""
        generator: Optional[torch.Generator] = self._plain.generator
        return generator

    def num_steps(self) -> int:
        """Return the number of steps of a pass, equal on every rank."""
        return self._length

    def __len__(self) -> int:
        return self._length

    def begin(self, epoch: int) -> None:
        """Draw the order of the pass (collective). Raises what the sampler raises."""
        here = self._world
        now = {**rank_states(here.device), "generators": self.generator_states()}
        if here.world_size > 1:
            now = here.broadcast(now)
        begins_with, self.begins_with = self.begins_with, None
        self.sizes = deque()
        self.is_plain = here.world_size == 1 and begins_with is None and not self.epochs.start_step
        if self.is_plain:
            self.begun_with, self._batches = now, None
            return
        self.begun_with = now if begins_with is None else begins_with
        restore_rank_states(self.begun_with, here.device)
        self.restore_generators(self.begun_with["generators"])
        torch.empty((), dtype=torch.int64).random_(generator=self._plain.generator)  # the seed of torch's workers
        if here.world_size == 1 or (is_torchs(self._plain.sampler) and is_torchs(self._plain.batch_sampler)):
            batches: Iterator[Any] = iter(self._indices())
        else:
            batches = iter(here.run_on_main(lambda: list(self._indices())))
            restore_rank_states(here.broadcast(rank_states(here.device)), here.device)
        first = [*islice(batches, 1)]
        self._start = [index for batch in first if isinstance(batch, list) for index in batch[: here.world_size]]
        batches = islice(chain(first, batches), self.epochs.start_step, None)
        self._batches = chain([*islice(batches, 1)], batches)  # all that torch draws for the order is drawn by now
        if begins_with is not None:
            restore_rank_states(now, here.device)

    def _generators(self) -> list[torch.Generator]:
        """Those that the caller has given to the loader or to its samplers."""
        given = [self._plain.generator]
        for sampler in (self._plain.sampler, self._plain.batch_sampler):
            given += [getattr(layer, "generator", None) for layer in layers(sampler)]
        return [*{id(one): one for one in given if isinstance(one, torch.Generator)}.values()]

    def generator_states(self) -> list[torch.Tensor]:
        """The states of the generators that the caller has given. Local."""
        return [generator.get_state() for generator in self._generators()]

    def restore_generators(self, states: list[torch.Tensor]) -> None:
        """Put back what `generator_states` returned, in this process or an earlier one. Local."""
        for generator, state in zip(self._generators(), states):
            generator.set_state(state)

    def _indices(self) -> Iterable[Any]:
        plain = self._plain
        return plain.sampler if plain.batch_sampler is None else plain.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        batches, self._batches = self._batches, None
        for batch in iter(self._indices()) if batches is None else batches:
            share = self._share(batch) if isinstance(batch, (list, tuple)) else batch
            self.sizes.append(len(share) if isinstance(share, list) else 1)
            yield share

    def _share(self, batch: Any) -> list[Any]:
        here, batch = self._world, list(batch)
        left_over = len(batch) % here.world_size
        if left_over and self._plain.drop_last is False and is_torchs(self._plain.batch_sampler):
            more = [self._start[i % len(self._start)] for i in range(here.world_size - left_over)]
            batch += more
        elif left_over or not batch:
            raise DataError(
                f"A batch of the batch_sampler has {len(batch)} indices, which do not split over {here.world_size} "
                f"ranks; ranks would step on unequal shards. Make every batch a multiple of {here.world_size} "
                "(drop_last=True drops a short last one)."
            )
        share: list[Any] = batch[here.rank :: here.world_size]
        return share


def is_torchs(sampler: Any) -> bool:
    """Whether `sampler`, and what it wraps, is of torch's own classes: it draws from generators that ranks share."""
    return all(type(layer).__module__.startswith("torch.utils.data") for layer in layers(sampler))
