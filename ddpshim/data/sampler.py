"""Defines one order of samples for each epoch, and each rank's share of it.

An order (sequential, shuffled, weighted, or drawn by the user's own sampler) is a function of (seed, epoch), so
it is the same at any world size. A rank's share follows by arithmetic: :meth:`Split.positions` maps (step, rank) to
positions in the order, without state, so any step of any epoch is found directly. Shuffled and weighted orders are
computed only at these positions: they are not stored, and no step needs the previous ones.
"""

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import torch
from torch.utils.data import Sampler, WeightedRandomSampler

from ddpshim import adapters
from ddpshim.data.epochs import EpochCounter, layers
from ddpshim.data.numbered import numbered
from ddpshim.data.permutation import Computed, Permutation
from ddpshim.data.split import Split
from ddpshim.errors import DataError
from ddpshim.job.random_streams import PrivateRandom
from ddpshim.job.seeds import derive_seed

if TYPE_CHECKING:
    from ddpshim.data.weighted import WeightedOrder

# Types of an order. An int64 tensor takes an eighth of the memory of a list of ints; a list is for other indices.
Indices = Union[range, Computed, torch.Tensor, list[Any]]
_NUM_SORTED = 2**12


def _number_of(samples: Union[Sized, int]) -> int:
    return samples if isinstance(samples, int) else len(samples)


@dataclass(eq=False)
class SequentialOrder:
    """0, 1, 2, ... in every epoch; `samples` is a fixed number, or an object whose current length counts."""

    samples: Union[Sized, int]

    def __len__(self) -> int:
        return _number_of(self.samples)

    def draw(self, epoch: int) -> Indices:
        """Return the order of `epoch`. Local."""
        return range(len(self))


@dataclass(eq=False)
class ShuffledOrder:
    """A permutation of the samples for each (seed, epoch), the same on every machine and with every torch."""

    samples: Union[Sized, int]
    seed: int

    def __len__(self) -> int:
        return _number_of(self.samples)

    def draw(self, epoch: int) -> Indices:
        """Return the order of `epoch`. Local: every rank computes the same one."""
        key, num_samples = derive_seed(self.seed, "shuffle", epoch), len(self)
        if num_samples <= _NUM_SORTED:
            return Permutation(2**53, key)[:num_samples].argsort()
        return Permutation(num_samples, key)


@dataclass(eq=False)
class DrawnOrder:
    """The order that the user's own sampler draws: once for each epoch, and the same on all ranks.

    For the draw, the global generators (and the sampler's own `generator`, if it is torch's) are seeded from
    (seed, epoch) and restored afterwards. A sampler with entropy of its own still gives one order to all ranks, but
    a different one in another run.

    Args:
        sampler: any iterable of indices that has a length; its `set_epoch`, if it has one, is called.
        seed: equal on all ranks.
        run_on_main: `World.run_on_main`, which calls a function on the main rank alone and gives all ranks its result
            or failure. None: the draw is local.

    Raises:
        DataError: the sampler has no length.
    """

    sampler: Iterable[Any]
    seed: int
    run_on_main: Optional[Callable[[Callable[[int], Any], int], Any]] = None

    def __post_init__(self) -> None:
        if not hasattr(self.sampler, "__len__"):
            raise DataError(
                f"{type(self.sampler).__name__} has no __len__; ranks could not agree on the number of steps, and "
                "would hang. Give it a __len__ that returns the number of indices per epoch."
            )

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def draw(self, epoch: int) -> Indices:
        """Return the order of `epoch`. Collective, unless the draw is local.

        Raises:
            DataError: the sampler gave fewer indices than its length; on every rank.
            Exception: the sampler's own on the main rank; WorldError on the others.
        """
        if self.run_on_main is None:
            num_expected, packed = self._draw_here(epoch)
        else:
            num_expected, packed = self.run_on_main(self._draw_here, epoch)
        order = _unpack(packed)
        if len(order) < num_expected:
            raise DataError(
                f"{type(self.sampler).__name__} gave {len(order)} indices in epoch {epoch} where its "
                f"__len__ says {num_expected}; the pass would end before len(loader). Make the two agree."
            )
        return order

    def _draw_here(self, epoch: int) -> tuple[int, Any]:
        seed = derive_seed(self.seed, "draw", epoch)
        with PrivateRandom(seed).swapped_in(), _seeded_generators(self.sampler, seed):
            for layer in layers(self.sampler):
                if callable(getattr(layer, "set_epoch", None)):
                    layer.set_epoch(epoch)
            num_expected = len(self)
            return num_expected, _pack(list(islice(iter(self.sampler), num_expected)))


Order = Union[SequentialOrder, ShuffledOrder, "WeightedOrder", DrawnOrder]


def draws_by_weight(sampler: Any) -> bool:
    """Whether `sampler` draws like a WeightedOrder: it is torch's own, or an adapter says that it draws like it."""
    if not isinstance(sampler, WeightedRandomSampler) or not sampler.replacement:
        return False
    offered = adapters.functions_for(sampler, "draws_by_weight")
    return type(sampler) is WeightedRandomSampler or any(is_like(sampler) for is_like in offered)


@contextlib.contextmanager
def _seeded_generators(sampler: Any, seed: int) -> Iterator[None]:
    found = [getattr(layer, "generator", None) for layer in layers(sampler)]
    generators = [generator for generator in found if isinstance(generator, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)


def _as_int(index: Any) -> int:
    if type(index) is int:
        return index
    if getattr(index, "ndim", 0) != 0:
        raise TypeError(f"{type(index).__name__} is not one index")
    return operator.index(index)


def _pack(indices: list[Any]) -> Any:
    """Return an int64 tensor for ints, (lengths, flat) tensors for lists of ints, else the list itself."""
    with contextlib.suppress(TypeError, OverflowError):
        return torch.tensor([_as_int(index) for index in indices], dtype=torch.int64, device="cpu")
    if all(isinstance(batch, list) for batch in indices):
        with contextlib.suppress(TypeError, OverflowError):
            flat = [_as_int(index) for batch in indices for index in batch]
            lengths = [len(batch) for batch in indices]
            options: Any = {"dtype": torch.int64, "device": "cpu"}
            return torch.tensor(lengths, **options), torch.tensor(flat, **options)
    return indices


def _unpack(message: Any) -> Indices:
    if isinstance(message, tuple):
        lengths, flat = message
        return [part.tolist() for part in flat.split(lengths.tolist())]
    order: Indices = message
    return order


class _Epochs:
    """The epoch of one rank's sampler, which users may set."""

    epochs: EpochCounter

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or the one set for the next pass."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass use `epoch`, and later passes the following epochs. Local."""
        self.epochs.set(epoch)


class ShardedSampler(_Epochs, Sampler[Any]):
    """One rank's indices, in the order of the current epoch.

    `len()` is the number of samples of this rank in a pass. Iterating yields the pass that :meth:`begin` began. The
    epoch advances with the loader's `iter()` and not with this one, because torch asks a loader's sampler for several
    iterators per pass.

    >>> split = Split(global_batch_size=4, rank=0, world_size=2, drop_last=True)
    >>> list(ShardedSampler(SequentialOrder(10), split))
    [0, 2, 4, 6]
    """

    def __init__(self, order: Order, split: Split, epochs: Optional[EpochCounter] = None) -> None:
        self.split = split
        self.epochs = epochs if epochs is not None else EpochCounter()
        self._order = order
        self._drawn: Optional[Indices] = None

    def begin(self, epoch: int) -> None:
        """Draw the order of `epoch`. Collective if it is weighted or the user's sampler draws it."""
        self._drawn = self._order.draw(epoch)

    def num_steps(self) -> int:
        """Return the number of steps of a pass, equal on every rank."""
        return self.split.num_steps(len(self._order))

    def num_samples(self) -> int:
        """Return how many samples the order has."""
        return len(self._order)

    def batches(self) -> Iterator[list[Any]]:
        """Yield this rank's batches of the pass that was begun, from its first step on."""
        if self._drawn is None:
            self.begin(self.epoch)
        assert self._drawn is not None
        start = self.epochs.start_step
        return numbered(self.split.batches(self._drawn, start), self.epoch, start)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.batches())

    def __len__(self) -> int:
        return self.split.num_samples_per_rank(len(self._order))


class ShardedBatchSampler(_Epochs, Sampler[list[Any]]):
    """The batches of a :class:`ShardedSampler`; `len()` is the number of steps."""

    def __init__(self, sampler: ShardedSampler) -> None:
        self.sampler, self.epochs = sampler, sampler.epochs

    def __iter__(self) -> Iterator[list[Any]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return self.sampler.num_steps()


class SplitBatchSampler(_Epochs, Sampler[list[Any]]):
    """One rank's share of each batch of the user's batch sampler: every W-th index, from the r-th on.

    Each batch that `order` draws is a global batch. [[0, 1, 2, 3]], 2 ranks: rank 1 sees [[1, 3]].
    """

    def __init__(self, order: DrawnOrder, rank: int, world_size: int, epochs: EpochCounter) -> None:
        self.epochs = epochs
        self._order = order
        self._rank = rank
        self._world_size = world_size
        self._batches: Optional[list[list[Any]]] = None

    def begin(self, epoch: int) -> None:
        """Draw the batches of `epoch`. Collective.

        Raises:
            DataError: a batch does not split over the ranks; on every rank.
        """
        drawn: Any = self._order.draw(epoch)
        batches = [list(batch) for batch in drawn]
        for step, batch in enumerate(batches):
            if len(batch) == 0 or len(batch) % self._world_size:
                raise DataError(
                    f"Batch {step} of the batch_sampler has {len(batch)} indices, which do not split over "
                    f"{self._world_size} ranks; ranks would step on unequal shards. Make every batch a "
                    f"multiple of {self._world_size} (drop_last=True drops a short last one)."
                )
        self._batches = [batch[self._rank :: self._world_size] for batch in batches]

    def num_steps(self) -> int:
        """Return the number of steps of a pass, equal on every rank."""
        return len(self._order)

    def __iter__(self) -> Iterator[list[Any]]:
        if self._batches is None:
            self.begin(self.epoch)
        start = self.epochs.start_step
        return numbered(islice(self._batches or [], start, None), self.epoch, start)

    def __len__(self) -> int:
        return self.num_steps()
