"""Splits training passes over a DataLoader among ranks, and leaves all other passes complete on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable, Optional, TypeVar

import torch
from torch.utils import data as torch_data

from ddpshim.data.loader import make_loader
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError, SyncError
from ddpshim.job import shares
from ddpshim.job.group import world
from ddpshim.job.job import current
from ddpshim.job.random_streams import derive_seed
from ddpshim.job.replaced import replaced
from ddpshim.job.world import World
from ddpshim.model import guard
from ddpshim.trainers.unedited.loops import evaluates
from ddpshim.trainers.unedited.places import frame_of_the_program, line_of_the_program, say_on_main
from ddpshim.trainers.unedited.steps import Steps

T_co = TypeVar("T_co", covariant=True)

_END = object()
_PASSED_ON = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


class DataLoader(torch_data.DataLoader[T_co]):
    """torch's DataLoader with the same attributes; training passes in a drawn order are split over the ranks.

    A pass trains if it begins with gradients enabled and a network of the program in training mode, unless its loop
    turns gradients off and trains nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.place = line_of_the_program()
        self.num_given = 0  # batches that were split
        self._split: Optional[ShardedLoader] = None

    def __iter__(self) -> Any:
        steps = current().part(Steps)
        if torch.is_grad_enabled():
            steps.networks.wrap()
        trains = torch.is_grad_enabled() and steps.networks.is_training()
        is_split = trains and is_drawn(self)
        if is_split and evaluates(frame_of_the_program()):
            trains = is_split = False
        if is_split and self._split is None:
            self._split = _split(self, steps)
        if is_split and self._split is not None:
            # In one process, persistent workers of a whole pass also serve this one, and draw no new seed.
            self._split.has_begun |= self._iterator is not None
            batches = self._split.__iter__
        else:
            batches = self._whole
        return batches() if world().world_size == 1 else _pass(self, batches, is_split, trains)

    def _whole(self) -> Any:
        """Begin a pass as torch does."""
        persist = self.persistent_workers and self._split is not None and self._split.has_begun
        if not persist or self._iterator is not None:
            return super().__iter__()
        # In one process, workers persist from the training pass and draw no new seed from the global generator.
        with replaced(self, "generator", torch.Generator()):
            return super().__iter__()


def _pass(loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], is_split: bool, trains: bool) -> Iterator[Any]:
    """Yield the batches of one pass over `loader`. Collective at the end of a training pass.

    For a split batch, each rank draws its rows of one process's random numbers. Everything else draws the same on all
    ranks: whole passes, even if they shuffle or augment, data splits, and the initial weights of networks.
    """
    steps, batches = current().part(Steps), None
    num_passes = steps.num_passes
    try:
        with _kept(loader) if is_split else shares.without_batch():
            while True:
                steps.is_reading = True
                steps.leave(loader)
                try:
                    with steps.shadows.aside():
                        batches = begin() if batches is None else batches
                        batch = next(batches, _END)
                finally:
                    steps.is_reading = False
                if batch is _END:
                    steps.training.discard(loader)
                    break
                if trains:
                    steps.training.add(loader)
                if trains or not steps.training:  # else an evaluation between a training batch and its step
                    steps.source, steps.is_split = loader, is_split
                if is_split:
                    steps.follow(loader, batch)
                yield batch
    finally:
        # Ends an abandoned pass now, on every rank: Python up to 3.10 keeps this frame until garbage collection.
        batches = None
    if is_split and steps.num_passes == num_passes:
        raise SyncError(
            f"{loader.place}: a pass over this DataLoader began with gradients enabled and a network in training "
            "mode, so it was split over the ranks, but nothing was trained in it; the program's results from it "
            f"cover only 1/{world().world_size} of the samples. Call model.eval() or use torch.no_grad() there."
        )
    if trains:
        guard.check_equal_steps(f"a pass over the DataLoader of {loader.place}")


@contextlib.contextmanager
def _kept(loader: DataLoader[Any]) -> Iterator[None]:
    """After this block, remember the share of a batch: the program may still evaluate one, as for a training error."""
    is_left = True
    try:
        yield
        is_left = False
    finally:
        current().part(Steps).leave(loader)
        if loader._split is not None:
            shares.keep(is_left)


def is_drawn(loader: Any) -> bool:
    """Whether the order of `loader` is other than 0, 1, 2, ..."""
    if isinstance(loader.dataset, torch_data.IterableDataset):
        return False
    batches = loader.batch_sampler
    makes_batches = loader.batch_size is not None or batches is None or type(batches) is torch_data.BatchSampler
    sampler = getattr(batches, "sampler", loader.sampler) if makes_batches else batches
    return type(sampler) is not torch_data.SequentialSampler


def _split(loader: DataLoader[Any], steps: Steps) -> ShardedLoader:
    """Return `loader`, split over the ranks (collective)."""
    here = world()
    _check_same_indices(loader, here)
    batching: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is not None:
        batching = {"batch_sampler": loader.batch_sampler}
    elif _is_plain_shuffle(loader):
        batching["shuffle"] = True
    else:
        batching["sampler"] = loader.sampler
    seed = torch.initial_seed() if loader.generator is None else loader.generator.initial_seed()
    steps.num_split += 1  # part of the seed, so that two datasets of equal size have different orders
    made: Any = make_loader(
        loader.dataset,
        **batching,
        **{name: getattr(loader, name) for name in _PASSED_ON if hasattr(loader, name)},
        seed=derive_seed(seed, "loader", steps.num_split),
    )
    if here.world_size > 1:
        say_on_main(
            f"{loader.place}: training passes over this DataLoader are split, and each rank sees "
            f"1/{here.world_size} of the samples. The length of a batch is that of this share"
        )
    return made  # type: ignore[no-any-return]


def _is_plain_shuffle(loader: Any) -> bool:
    sampler = loader.sampler
    if type(sampler) is not torch_data.RandomSampler or sampler.data_source is not loader.dataset:
        return False
    return not sampler.replacement and sampler._num_samples is None and sampler.generator is loader.generator


def _check_same_indices(loader: DataLoader[Any], here: World) -> None:
    """Raise DataError if ranks hold different parts of the data (collective)."""
    inner, own = loader.dataset, []
    while isinstance(inner, torch_data.Subset):
        own.append(hash(tuple(int(index) for index in inner.indices)))
        inner = inner.dataset
    everyones = here.gather(own)
    odd = next((rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]), None)
    if odd is not None:
        raise DataError(
            f"{loader.place}: the Subsets of ranks 0 and {odd} have different indices; a sample would be used for "
            "training on one rank and for validation on another. Draw the split from torch's, numpy's or Python's "
            "global generator, or with a fixed seed (np.random.default_rng(0))."
        )
