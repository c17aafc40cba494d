"""Lets a dataset that an adapter knows return whole batches, instead of one call per sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional, Protocol

import torch
from torch.utils.data import default_collate

from ddpshim import adapters


class Collate(Protocol):
    """A `collate_fn` that also takes what a fetcher's dataset gives for a whole batch."""

    def __call__(self, samples: Any) -> Any:
        """The batch, as torch's default collate makes it."""

    def expect(self, dataset: Any, batch_size: int, num_workers: int, prefetch_factor: Optional[int]) -> None:
        """Make room for the batches of workers that stay for all epochs. Local; may be left out."""


class Fetcher(Protocol):
    """Gives whole batches of one dataset, with the values, types and order of keys that torch's collate gives."""

    def attach(self) -> Optional[str]:
        """Have torch's loaders fetch the dataset by the batch. Local. Returns why not, if it can't be."""

    def collate(self) -> Collate:
        """For the loader; it takes samples that came one by one as well."""


class WholeBatches:
    """A dataset of ddpshim, with a method `batch`, of which `make_loader` fetches whole batches. Its own fetcher."""

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples with these indices, collated."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """For a loader with torch's own collate."""
        batch = self.batch(indices)
        return [dict(zip(batch, row)) for row in zip(*(value.unbind() for value in batch.values()))]

    def attach(self) -> Optional[str]:
        vars(self)["__getitems__"] = functools.partial(_one, self)
        return None

    def collate(self) -> Any:
        return _unpacked


class _Batch(list[Any]):
    """A batch, as the only one in what a fetcher hands to a `collate_fn`."""


def _one(dataset: WholeBatches, indices: Sequence[int]) -> _Batch:
    return _Batch([dataset.batch(indices)])


def _unpacked(samples: Any) -> Any:
    return samples[0] if isinstance(samples, _Batch) else default_collate(samples)


def fetcher_of(dataset: Any) -> Optional[Fetcher]:
    """What gives whole batches of `dataset`; None where no adapter does. Local."""
    if isinstance(dataset, WholeBatches):
        return dataset
    found = (offer(dataset) for offer in adapters.functions_for(dataset, "fetcher"))
    return next((fetcher for fetcher in found if fetcher is not None), None)
