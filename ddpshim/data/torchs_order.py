"""Gives each rank its share of the batches that torch's loader draws in one process, from the same random streams."""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Optional

import torch
from torch.utils.data import DataLoader, Sampler

from ddpshim.data.dataset_fingerprint import length
from ddpshim.data.numbered import EpochCounter, Numbered, layers, own_generators, without_lists
from ddpshim.errors import DataError
from ddpshim.job.noise import draws_alike
from ddpshim.job.shares import Share
from ddpshim.job.world import World
from ddpshim.process.job import current
from ddpshim.process.random_streams import digest, rank_states, restore_rank_states
from ddpshim.process.say import say_once


@dataclass
class _Drawn:
    """The global batches of one pass."""

    epoch: int
    start_step: int
    batches: Iterable[Any] = ()
    before: list[Any] = field(default_factory=list)  # the global batches before the first of `batches`
    num_ahead: int = 0  # how many of `batches` are before `start_step`
    opened_with: Any = None  # the random streams in which the caller's own sampler was asked for `indices`
    indices: Any = None  # on the main rank: that sampler's iterator
    sizes: deque[int] = field(default_factory=deque)  # rows of batches that torch's loader has requested and not given


class TorchsBatches(Sampler[Any]):
    """This rank's share of each batch of `plain`: n of its n * W indices, from r * n on.

    torch's loader asks its sampler for an iterator, draws the seed of its workers, and with workers asks again, all in
    `iter()` (`begin`). torch's sampler draws its order at the first batch, or in `iter()` too if there are workers
    (`draw`). All ranks draw the order from the main rank's random streams, because draws that it alone has made would
    also have been made in one process. A sampler that is not torch's own may have entropy of its own, and may draw when
    it is asked for an iterator, so the main rank draws for all.

    Args:
        plain: the loader of one process, for the global batch.
        world: whose ranks share the batches.
    Attributes:
        begun_with: the random streams from which this pass's order was drawn, with the samplers' own generators.
        begins_with: the streams from which to draw the next order, instead of the current ones; None for these.
        workers_begun_with: the state from which torch drew the seed of the current workers; None if it did not.
    """

    def __init__(self, plain: DataLoader[Any], world: World, epochs: EpochCounter, num_workers: int = 0) -> None:
        self.epochs = epochs
        self._num_workers = num_workers
        self.workers_begun_with: Optional[torch.Tensor] = None
        self.begun_with: Optional[dict[str, Any]] = None
        self.begins_with: Optional[dict[str, Any]] = None
        self._plain, self._world = plain, world
        self._name = f"the order of loader {current().next_number('order')}"
        self._drawn: Optional[_Drawn] = None

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or the one set for the next pass."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass use `epoch`, and later passes the following epochs. Local."""
        self.epochs.set(epoch)

    def num_steps(self) -> int:
        """Return the number of steps of a pass over the dataset's current samples, equal on every rank."""
        return len(self._plain)

    def num_samples(self) -> Optional[int]:
        """Return how many samples the order has."""
        return length(self._plain.sampler)

    def __len__(self) -> int:
        return len(self._plain)

    def begin(self, epoch: int, draws_seed: bool = True) -> None:
        """Begin a pass; if `draws_seed`, draw the seed of workers as torch's loader does.

        Collective if the order comes from the caller's own sampler, else local.
        """
        start = self.epochs.start_step
        # A worker fetches every n-th batch: after an interruption, each must get the same batches as without one.
        drawn = _Drawn(epoch, start, num_ahead=start % self._num_workers if self._num_workers else 0)
        self._drawn = drawn
        if self.begins_with is not None:
            return
        self._open(drawn)
        if draws_seed:
            if draws_alike() or self._world.is_main:
                generator = self._plain.generator or torch.default_generator
                self.workers_begun_with = generator.get_state()
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            if self._num_workers:
                self._open(drawn)

    def _open(self, drawn: _Drawn) -> None:
        """Let the main rank ask the caller's own sampler, if it has one, for an iterator (collective)."""
        if is_torchs(self._plain.sampler) and is_torchs(self._plain.batch_sampler):
            return

        def opened() -> Any:
            before, drawn.indices = self._states(), iter(self._indices())
            return before, self._states()

        drawn.opened_with, after = self._world.run_on_main(opened)
        if draws_alike():
            self._restore(after)

    def draw(self, drawn: _Drawn) -> None:
        """Draw the order of a pass that was begun (collective). Raises what the sampler raises."""
        here = self._world
        now = here.answers_of_main(self._name, self._states())
        begins_with, self.begins_with = self.begins_with, None
        own = None if draws_alike() or here.is_main else rank_states(here.device)
        if begins_with is not None:
            self._restore(begins_with.get("opened") or begins_with)
            self._open(drawn)
        self.begun_with = {**now, "opened": drawn.opened_with} if begins_with is None else begins_with
        self._restore(self.begun_with)
        if drawn.opened_with is None:
            batches: Iterator[Any] = iter(self._indices())
        else:
            batches = iter(here.run_on_main(self._draw_all, drawn.indices))
            self._restore(here.broadcast(self._states()))
        batches = chain([*islice(batches, 1)], batches)
        # By now torch has made all draws for the order, except those that it may make at the end.
        start = drawn.start_step
        before = islice(batches, start - drawn.num_ahead)
        drawn.before = [*map(_compact, before)] if self._num_workers else [*deque(before, maxlen=0)]
        taken = [*islice(batches, max(0, min(start + 1, len(self._plain)) - start + drawn.num_ahead))]
        drawn.batches = chain(taken, batches)
        if own is not None or begins_with is not None:
            restore_rank_states(own or now, here.device)

    def _draw_all(self, indices: Iterator[Any]) -> list[Any]:
        """Return what the caller's own sampler gives in a pass; print a line if it draws between its indices."""
        drawn = [*islice(indices, 1)]
        before = digest()
        drawn += indices
        if before != digest():
            kind = type(self._plain.sampler if is_torchs(self._plain.batch_sampler) else self._plain.batch_sampler)
            say_once(
                f"{kind.__name__} draws random numbers during iteration: on ranks all at the start of a pass, in "
                "one process between the steps, from the same streams as the training. So the samples differ from "
                "one process"
            )
        return drawn

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of the generators that the caller has given. Local."""
        return [generator.get_state() for generator in own_generators(self._plain)]

    def restore_generators(self, states: list[torch.Tensor]) -> None:
        """Restore the states that `generator_states` returned, in this process or an earlier one. Local."""
        for generator, state in zip(own_generators(self._plain), states):
            generator.set_state(state)

    def _states(self) -> dict[str, Any]:
        return {**rank_states(self._world.device), "generators": self.generator_states()}

    def _restore(self, states: dict[str, Any]) -> None:
        restore_rank_states(states, self._world.device)
        self.restore_generators(states["generators"])

    def _indices(self) -> Any:
        plain = self._plain
        return without_lists(plain.sampler if plain.batch_sampler is None else plain.batch_sampler)

    @property
    def drawn(self) -> _Drawn:
        """The pass that was begun last, for `draw`."""
        assert self._drawn is not None
        return self._drawn

    def __iter__(self) -> Iterator[Any]:
        # torch asks for two iterators of a pass, and iterates over one.
        drawn = self._drawn if self._drawn is not None else _Drawn(self.epoch, 0, self._indices())
        return self._deal(drawn)

    def _deal(self, drawn: _Drawn) -> Iterator[Any]:
        if drawn is self._drawn:
            self._drawn = None
        first_step, num_workers = drawn.start_step - drawn.num_ahead, self._num_workers
        for step, batch in enumerate(drawn.batches, first_step):
            if not isinstance(batch, (list, tuple)):
                drawn.sizes.append(1)
                yield batch
                continue
            rows = self._rows(batch)
            share = Numbered([batch[row] for row in rows], drawn.epoch, step)
            share.whole, share.rows = list(batch), rows
            if step < first_step + num_workers:
                share.before = drawn.before[step % num_workers :: num_workers]
            drawn.sizes.append(len(share))
            yield share

    def _rows(self, batch: Any) -> Sequence[int]:
        """Return this rank's rows of the batch."""
        here = self._world
        if not batch:
            raise DataError("A batch of the batch_sampler is empty; no rank could train on it. Leave it out.")
        if len(batch) % here.world_size:
            raise DataError(
                f"A batch of the batch_sampler has {len(batch)} indices, which {here.world_size} ranks do not divide: "
                'their means would weigh samples differently. Use sizes that they divide, or setup(batch="global").'
            )
        num = len(batch)
        rows: Sequence[int] = range(num)[Share(here.rank, here.world_size, num // here.world_size).own(num)]
        return rows


def _compact(batch: Any) -> Any:
    """Return a batch of ints as an array, in a fifth of the memory of a list; any other batch as it is."""
    with contextlib.suppress(TypeError, OverflowError):
        return array("q", batch)
    return batch


def is_torchs(sampler: Any) -> bool:
    """Whether `sampler` and all that it wraps are torch's classes, which draw from generators that ranks share."""
    return all(type(layer).__module__.startswith("torch.utils.data") for layer in layers(sampler))
