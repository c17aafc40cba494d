"""Fetches batches of robomimic's sequence datasets with one index per key instead of one call per sample.

Values, types and the order of keys equal those of the dataset's `__getitem__` and torch's default collate, bit for
bit: the dataset's code must be known here, and a few samples are compared before batches are fetched this way.
Otherwise they are fetched sample by sample, as without ddpshim. A data worker sends its batch to its rank in one piece,
through shared memory that is reused.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.utils.data import default_collate, get_worker_info

from ddpshim.robomimic import known
from ddpshim.robomimic.windows import Arrays, Plan, Several, Unproven, Windows, filled

_MAX_BYTES = 1 << 23  # beyond this size, sending a batch takes no longer than copying it
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
    """Return how to fetch batches of `dataset`; reads the layout of its file, but no data. Local.

    Raises Unproven if these batches are not known to equal the dataset's own samples.
    """
    releases = _releases(dataset)
    if not hasattr(dataset, "datasets"):
        return Windows(dataset, releases[0].normalizes_obs)
    parts = enumerate(zip(dataset.datasets, releases))
    return Several(dataset, [Windows(part, release.normalizes_obs, f"{n}:") for n, (part, release) in parts])


def attach(dataset: Any, planned: Optional[Plan] = None, arrays: Optional[Arrays] = None) -> Optional[str]:
    """Make torch's loaders fetch whole batches of `dataset` (:class:`Collate`). Local. Return the reason if they can't.

    The dataset's own caches become views of `arrays`, and its copies of the data are released.

    Args:
        planned: the result of :func:`plan`.
        arrays: arrays that `planned.fill` has already filled, for example in shared memory.
    """
    if isinstance(vars(dataset).get("__getitems__"), _Fetch):
        return None
    try:
        planned = plan(dataset) if planned is None else planned
        planned.read_from(filled(planned) if arrays is None else arrays)
        planned.compare()
    except Unproven as reason:
        return str(reason)
    except Exception as error:  # an unfamiliar file, which the dataset itself may be able to read
        return f"{type(error).__name__}: {error}"
    planned.take_over()
    dataset.__getitems__ = _Fetch(planned)
    return None


class Fetcher(NamedTuple):
    """Implements `ddpshim.data.loader_builder.Fetcher` for one dataset."""

    dataset: Any

    def attach(self) -> Optional[str]:
        """Make torch's loaders fetch whole batches of the dataset. Local. Return the reason if they can't."""
        return attach(self.dataset)

    def collate(self) -> Collate:
        """Return the collate function for the loader."""
        return Collate()


class Collate:
    """Collates as torch does by default; for an attached dataset, without making single samples first. Local."""

    def __init__(self) -> None:
        self._mailbox: Optional[Mailbox] = None
        self._num_batches = 0

    def expect(self, dataset: Any, batch_size: int, num_workers: int, prefetch_factor: Optional[int]) -> None:
        """Allocate shared memory for the batches of persistent workers, which run only one pass at a time. Local."""
        fetch = vars(dataset).get("__getitems__")
        if isinstance(fetch, _Fetch):
            num_bytes = _num_bytes(fetch([0] * batch_size).collated())
            if num_bytes <= _MAX_BYTES:
                ahead = 2 if prefetch_factor is None else prefetch_factor
                self._mailbox = Mailbox(num_workers, ahead, num_bytes)

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, _Samples):
            return default_collate(samples)
        batch, worker = samples.collated(), get_worker_info()
        if worker is None:
            return batch
        self._num_batches += 1
        return Packed(batch, self._mailbox, worker.id, self._num_batches)


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


class Mailbox:
    """Shared memory for the batches of workers. Each worker writes to its own places in turn.

    A worker has as many places as torch lets it work ahead. torch takes batches in order, and gives a worker new work
    only after taking the batch that is so far back; so a place is overwritten only after its batch was taken.
    """

    def __init__(self, num_workers: int, num_places: int, most_bytes: int) -> None:
        self.places = torch.empty(
            (num_workers, num_places, most_bytes), dtype=torch.uint8, device="cpu"
        ).share_memory_()
        self.name = next(_names)
        _mailboxes[self.name] = self


_mailboxes: weakref.WeakValueDictionary[int, Mailbox] = weakref.WeakValueDictionary()
_names = itertools.count()


class Packed(dict[str, Any]):
    """A batch that a worker sends in one piece.

    torch needs a file and a connection for each tensor, which takes longer than copying a batch of low-dim data.
    """

    def __init__(self, batch: dict[str, Any], mailbox: Optional[Mailbox], worker: int, number: int) -> None:
        super().__init__(batch)
        self._mailbox, self._worker, self._number = mailbox, worker, number

    def __reduce__(self) -> Any:
        layout, size = [], 0
        leaves = list(_leaves(self, ()))
        for path, tensor in leaves:
            layout.append((path, size, tensor.dtype, tuple(tensor.shape)))
            size += _aligned(tensor)
        if self._mailbox is None or size > self._mailbox.places.shape[-1]:
            sent: Any = torch.empty(size, dtype=torch.uint8, device="cpu")
            buffer = sent
        else:
            place = self._worker, self._number % self._mailbox.places.shape[1]
            buffer, sent = self._mailbox.places[place], (self._mailbox.name, *place, size)
        for (_, tensor), (_, start, _, _) in zip(leaves, layout):
            buffer[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        return _unpacked, (sent, layout)


def _unpacked(sent: Any, layout: list[tuple[tuple[str, ...], int, torch.dtype, tuple[int, ...]]]) -> dict[str, Any]:
    """Return the batch, from the bytes that were sent or from its place in a mailbox."""
    if not isinstance(sent, torch.Tensor):
        name, worker, place, size = sent
        sent = _mailboxes[name].places[worker, place, :size].clone()
    batch: dict[str, Any] = {}
    for (*groups, name), start, dtype, shape in layout:
        into = batch
        for group in groups:
            into = into.setdefault(group, {})
        into[name] = sent[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return batch


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _num_bytes(batch: Any) -> int:
    """Return the number of bytes of `batch` in a mailbox."""
    return sum(_aligned(tensor) for _, tensor in _leaves(batch, ()))


def _leaves(tree: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
