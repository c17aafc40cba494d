"""Lets a dataset that an adapter knows return whole batches, instead of one call per sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional, Protocol

import torch
from torch.utils.data import default_collate


class Collate(Protocol):
    """A `collate_fn` that also accepts a whole batch from a fetcher's dataset."""

    def __call__(self, samples: Any) -> Any:
        """Return the batch, as torch's default collate makes it."""

    def expect(self, dataset: Any, batch_size: int, num_workers: int, prefetch_factor: Optional[int]) -> None:
        """Allocate memory for the batches of persistent workers. Local; this method is optional."""


class Fetcher(Protocol):
    """Gives whole batches of one dataset, with the values, types and order of keys of torch's collate."""

    def attach(self) -> Optional[str]:
        """Make torch's loaders fetch the dataset by the batch; return the reason if that is impossible. Local."""

    def collate(self) -> Collate:
        """Return the loader's `collate_fn`; it also accepts samples that were fetched one by one."""


class WholeBatches:
    """A dataset of ddpshim whose method `batch` gives whole batches to `make_loader`."""

    is_its_own_fetcher = True

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the samples with these indices, collated."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a list of samples, for a loader with torch's own collate."""
        batch = self.batch(indices)
        return [dict(zip(batch, row)) for row in zip(*(value.unbind() for value in batch.values()))]

    def attach(self) -> Optional[str]:
        vars(self)["__getitems__"] = functools.partial(_one, self)
        return None

    def collate(self) -> Any:
        return _unpacked


class _Batch(list[Any]):
    """A list with one item, a whole batch, as a fetcher passes it to a `collate_fn`."""


def _one(dataset: WholeBatches, indices: Sequence[int]) -> _Batch:
    return _Batch([dataset.batch(indices)])


def _unpacked(samples: Any) -> Any:
    return samples[0] if isinstance(samples, _Batch) else default_collate(samples)
