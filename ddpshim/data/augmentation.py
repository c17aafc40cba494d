"""Gives what a dataset draws for a sample random streams that depend on the sample's place in the epoch alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, Subset, get_worker_info

from ddpshim.job.random_streams import derive_seed, digest, seed_globals
from ddpshim.job.say import say


class Numbered(list[Any]):
    """A rank's indices of one step, which know of which: they also travel to data workers."""

    def __init__(self, indices: Iterable[Any], epoch: int, step: int) -> None:
        super().__init__(indices)
        self.epoch, self.step = epoch, step


def numbered(batches: Iterable[list[Any]], epoch: int, start_step: int) -> Iterator[list[Any]]:
    """Give `batches`, numbered from `start_step` on. Local."""
    for step, batch in enumerate(batches, start_step):
        yield Numbered(batch, epoch, step)


class SampleStreams(Dataset[Any]):
    """`dataset`, with the global generators seeded before each sample, if it draws from them at all.

    The seed depends on `seed`, the epoch, and the sample's place in it: neither on the worker that fetches it nor on
    the number of ranks. Row j of rank r of W is row j * W + r of the step. A batch in which a first draw is noticed is
    fetched again, with seeds.

    Args:
        speaks: whether to say, once, that the dataset draws.
    """

    def __init__(self, dataset: Any, seed: int, rank: int, world_size: int, speaks: bool) -> None:
        self.dataset = dataset
        self._seed, self._rank, self._world_size, self._speaks = seed, rank, world_size, speaks
        self._draws, self._is_first = False, True

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        by_batch = _by_batch(self.dataset)
        if not isinstance(indices, Numbered):
            return by_batch(indices) if by_batch else [self.dataset[index] for index in indices]
        place = derive_seed(self._seed, "sample", indices.epoch, indices.step)
        if by_batch:
            seed_globals((place + self._rank) % 2**63)
            return by_batch(indices)
        samples = [] if self._draws else self._unseeded(indices)
        if self._draws:
            for row, index in enumerate(indices):
                seed_globals((place + row * self._world_size + self._rank) % 2**63)
                samples.append(self.dataset[index])
        return samples

    def _unseeded(self, indices: list[Any]) -> list[Any]:
        """The samples of a dataset that is not known to draw; none where it does."""
        samples, before = [], digest()
        for index in indices:
            samples.append(self.dataset[index])
            if self._is_first and digest() != before:  # most that draw do so for each sample: only one is fetched again
                break
        self._is_first = False
        if digest() == before:
            return samples
        self._draws = True
        worker = get_worker_info()
        if self._speaks and (worker is None or worker.id == 0):
            say(
                f"{type(self.dataset).__name__} draws random numbers for a sample: here they depend on the seed, the "
                "epoch and the sample's place in it, on any number of ranks and workers; in a process without a "
                "launcher they do not. A run to compare with: python -m ddpshim run --nproc 1"
            )
        return []


def _by_batch(dataset: Any) -> Any:
    """What gives a whole batch of `dataset` in a way of its own; None where samples come one by one."""
    inner = dataset
    while type(inner) is Subset:  # asks the one inside for a batch only if that has it
        inner = inner.dataset
    return getattr(dataset, "__getitems__", None) if getattr(inner, "__getitems__", None) else None


def show_dataset_to_worker() -> None:
    """In a data worker: have torch's worker info name the user's own dataset. Local."""
    info: Any = get_worker_info()
    if info is not None and isinstance(info.dataset, SampleStreams):
        object.__setattr__(info, "dataset", info.dataset.dataset)
