"""Fetches batches of robomimic's sequence datasets with one index per key instead of one call per sample.

Values, types and the order of keys equal those of the dataset's `__getitem__` and torch's default collate, bit for
bit: the dataset's code must be known here, and a few samples are compared before batches are fetched this way.
Otherwise they are fetched sample by sample, as without ddpshim. A data worker sends its batch to its rank in one piece.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.utils.data import default_collate, get_worker_info

from ddpshim.robomimic import known, node_cache
from ddpshim.robomimic.windows import Plan, Several, Unproven, Windows

_MAX_BYTES = 1 << 20  # beyond this size, a file and a connection take no longer than copying a batch through a pipe
_ALIGNMENT = 64


def concerns(dataset: Any) -> bool:
    """Whether `dataset` is robomimic's SequenceDataset or MetaDataset, or of a subclass of one. Local."""
    module = sys.modules.get("robomimic.utils.dataset")  # if it is not imported, no such dataset can exist
    kinds = [getattr(module, name, None) for name in ("SequenceDataset", "MetaDataset")]
    return isinstance(dataset, tuple(kind for kind in kinds if kind is not None))


def is_known(dataset: Any) -> bool:
    """Whether the code of `dataset` is known; known code draws no random numbers. Local."""
    with contextlib.suppress(Unproven):
        _releases(dataset)
        return True
    return False


def plan(dataset: Any) -> Plan:
    """Return how to fetch batches of `dataset`, whose cached data become flat arrays. Local.

    Raises Unproven or Unlike if these batches are not known to equal the dataset's own samples.
    """
    releases = _releases(dataset)
    parts = getattr(dataset, "datasets", [dataset])
    for part in parts:
        node_cache.flatten(part)
    windows = [Windows(part, release.normalizes_obs) for part, release in zip(parts, releases)]
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
    if not isinstance(samples, _Samples):
        return default_collate(samples)
    batch = samples.collated()
    return batch if get_worker_info() is None else Packed(batch)


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


def _releases(dataset: Any) -> list[known.Release]:
    """Return the release whose code each SequenceDataset in `dataset` runs; raise Unproven if one is unknown."""
    if not concerns(dataset):
        raise Unproven(f"{type(dataset).__name__} is no dataset of robomimic's")
    parts, releases = [dataset], []
    if hasattr(dataset, "datasets"):
        if _digest(dataset, known.META_METHODS) != known.META_DIGEST:
            raise Unproven(f"the code of {type(dataset).__name__} is not one that is known here")
        parts = dataset.datasets
    for part in parts:
        release = known.release_of(_digest(part, known.SAMPLE_METHODS))
        if release is None:
            raise Unproven(f"the code of {type(part).__name__} is not one that is known here")
        if getattr(part, "shuffled_obs_key_groups", ()):
            raise Unproven(f"{type(part).__name__} swaps observations at random")
        releases.append(release)
    return releases


def _digest(dataset: Any, names: Sequence[str]) -> str:
    """Return the digest of the source of the methods `names`; empty if one is not the class's or has no source."""
    functions = [getattr(type(dataset), name, None) for name in names]
    if any(name in vars(dataset) or not hasattr(function, "__code__") for name, function in zip(names, functions)):
        return ""
    return known.digest(*functions)


class Packed(dict[str, Any]):
    """A batch that a worker sends in one piece.

    torch needs a file and a connection for each tensor, which takes longer than copying a batch of low-dim data.
    """

    def __reduce__(self) -> Any:
        layout, end = [], 0
        leaves = list(_leaves(self, ()))
        for path, tensor in leaves:
            layout.append((path, end, tensor.dtype, tuple(tensor.shape)))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(end, dtype=torch.uint8, device="cpu")
        for (_, tensor), (_, start, _, _) in zip(leaves, layout):
            buffer[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        return _unpacked, (buffer if end > _MAX_BYTES else bytearray(buffer.numpy()), layout)


def _unpacked(sent: Any, layout: list[tuple[tuple[str, ...], int, torch.dtype, tuple[int, ...]]]) -> dict[str, Any]:
    buffer = sent if isinstance(sent, torch.Tensor) else torch.frombuffer(sent, dtype=torch.uint8)
    batch: dict[str, Any] = {}
    for (*groups, name), start, dtype, shape in layout:
        into = batch
        for group in groups:
            into = into.setdefault(group, {})
        into[name] = buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return batch


def _leaves(tree: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
