"""Gives what a dataset draws for a sample random streams that depend on the sample's place in the epoch alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, get_worker_info

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
    """`dataset`, with the global generators seeded before each sample.

    The seed depends on `seed`, the epoch, and the sample's place in it: neither on the worker that fetches it nor on
    the number of ranks. Row j of rank r of W is row j * W + r of the step.

    Args:
        speaks: whether to say, once, that the dataset draws at all.
    """

    def __init__(self, dataset: Any, seed: int, rank: int, world_size: int, speaks: bool) -> None:
        self.dataset = dataset
        self._seed, self._rank, self._world_size, self._speaks = seed, rank, world_size, speaks

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        by_batch = getattr(self.dataset, "__getitems__", None)
        if not isinstance(indices, Numbered):
            return by_batch(indices) if by_batch else [self.dataset[index] for index in indices]
        place = derive_seed(self._seed, "sample", indices.epoch, indices.step)
        if by_batch:
            self._begin(place + self._rank)
            return by_batch(indices)
        samples = []
        for row, index in enumerate(indices):
            self._begin(place + row * self._world_size + self._rank)
            before = digest() if self._speaks else None
            samples.append(self.dataset[index])
            if before is not None:
                self._speaks = False
                self._name(before)
        return samples

    def _begin(self, seed: int) -> None:
        seed_globals(seed % 2**63)

    def _name(self, before: str) -> None:
        """Say it where the dataset has drawn since `before`."""
        worker = get_worker_info()
        if before != digest() and (worker is None or worker.id == 0):
            say(
                f"{type(self.dataset).__name__} draws random numbers for a sample: here they depend on the seed, the "
                "epoch and the sample's place in it, on any number of ranks and workers; in a process without a "
                "launcher they do not. A run to compare with: python -m ddpshim run --nproc 1"
            )


def show_dataset_to_worker() -> None:
    """In a data worker: have torch's worker info name the user's own dataset. Local."""
    info: Any = get_worker_info()
    if info is not None and isinstance(info.dataset, SampleStreams):
        object.__setattr__(info, "dataset", info.dataset.dataset)
