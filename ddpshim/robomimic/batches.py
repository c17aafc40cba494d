"""Fetches batches of robomimic's sequence datasets with one index per key instead of one call per sample.

Values, types and the order of keys equal those of the dataset's `__getitem__` and torch's default collate, bit for
bit: the dataset's code must be known here, and a few samples are compared before batches are fetched this way.
Otherwise they are fetched sample by sample, as without ddpshim.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

from torch.utils.data import default_collate

from ddpshim.robomimic import known, node_cache
from ddpshim.robomimic.windows import Plan, Several, Unproven, Windows


def concerns(dataset: Any) -> bool:
    """Whether `dataset` is robomimic's SequenceDataset or MetaDataset, or of a subclass of one. Local."""
    module = sys.modules.get("robomimic.utils.dataset")  # if it is not imported, no such dataset can exist
    kinds = [getattr(module, name, None) for name in ("SequenceDataset", "MetaDataset")]
    return isinstance(dataset, tuple(kind for kind in kinds if kind is not None))


def is_known(dataset: Any) -> bool:
    """Whether the code of `dataset` is known; known code draws no random numbers. Local."""
    with contextlib.suppress(Unproven):
        _normalizing(dataset)
        return True
    return False


def plan(dataset: Any) -> Plan:
    """Return how to fetch batches of `dataset`, whose cached data become flat arrays. Local.

    Raises Unproven or Unlike if these batches are not known to equal the dataset's own samples.
    """
    parts, normalizing = getattr(dataset, "datasets", [dataset]), _normalizing(dataset)
    for part in parts:
        node_cache.flatten(part)
    windows = [Windows(part, normalizes) for part, normalizes in zip(parts, normalizing)]
    return Several(dataset, windows) if hasattr(dataset, "datasets") else windows[0]


def attach(dataset: Any) -> Optional[str]:
    """Make torch's loaders fetch whole batches of `dataset` (`collate`). Local. Return the reason if they can't.

    Data that the dataset caches are flat arrays from then on.
    """
    if isinstance(vars(dataset).get("__getitems__"), _Fetch):
        return None
    try:
        planned = plan(dataset)
        planned.compare()
    except (Unproven, node_cache.Unlike) as reason:
        return str(reason)
    except Exception as error:  # an unfamiliar file, which the dataset itself may be able to read
        return f"{type(error).__name__}: {error}"
    dataset.__getitems__ = _Fetch(planned)
    return None


class Fetcher(NamedTuple):
    """Implements `ddpshim.data.loader_builder.Fetcher` for one dataset."""

    dataset: Any

    def attach(self) -> Optional[str]:
        """Make torch's loaders fetch whole batches of the dataset. Local. Return the reason if they can't."""
        return attach(self.dataset)

    def collate(self) -> Callable[[Any], Any]:
        """Return the collate function for the loader."""
        return collate


def collate(samples: Any) -> Any:
    """Collate as torch does by default; for an attached dataset, without making single samples first. Local."""
    return samples.collated() if isinstance(samples, _Samples) else default_collate(samples)


class _Fetch(NamedTuple):
    """The function that torch's fetcher calls as `dataset.__getitems__`."""

    plan: Plan

    def __call__(self, indices: Sequence[int]) -> _Samples:
        return _Samples(self.plan, indices)


class _Samples(Sequence[Any]):
    """The samples at `indices`: made by the dataset itself when accessed, or collated as one batch."""

    def __init__(self, planned: Plan, indices: Sequence[int]) -> None:
        self._plan, self._indices = planned, indices
        self._made: Optional[list[Any]] = None

    def collated(self) -> Any:
        batch = self._plan.batch(self._indices)
        return default_collate(self._all()) if batch is None else batch

    def _all(self) -> list[Any]:
        if self._made is None:
            self._made = [self._plan.dataset[index] for index in self._indices]
        return self._made

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, at: Any) -> Any:
        return self._all()[at]


def _normalizing(dataset: Any) -> list[bool]:
    """Return, of each SequenceDataset in `dataset`, whether it normalises; raise Unproven if its code is unknown."""
    if not concerns(dataset):
        raise Unproven(f"{type(dataset).__name__} is no dataset of robomimic's")
    parts, normalizing = [dataset], []
    if hasattr(dataset, "datasets"):
        if _digest(dataset, known.META_METHODS) != known.META_DIGEST:
            raise Unproven(f"the code of {type(dataset).__name__} is not one that is known here")
        parts = dataset.datasets
    for part in parts:
        normalizes = known.RELEASES.get(_digest(part, known.SAMPLE_METHODS))
        if normalizes is None:
            raise Unproven(f"the code of {type(part).__name__} is not one that is known here")
        if getattr(part, "shuffled_obs_key_groups", ()):
            raise Unproven(f"{type(part).__name__} swaps observations at random")
        normalizing.append(normalizes)
    return normalizing


def _digest(dataset: Any, names: Sequence[str]) -> str:
    """Return the digest of the source of the methods `names`; empty if one is not the class's or has no source."""
    functions = [getattr(type(dataset), name, None) for name in names]
    if any(name in vars(dataset) or not hasattr(function, "__code__") for name, function in zip(names, functions)):
        return ""
    return known.digest(*functions)
