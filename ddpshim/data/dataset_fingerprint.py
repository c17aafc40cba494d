"""Describes a dataset's contents, for ranks to compare before training: splits, file order, arrays, a few items.

It reads only what the dataset holds in memory, and a few items if this process will read items anyway. Random streams
are restored afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from ddpshim.errors import DataError
from ddpshim.process.random_streams import PrivateRandom

_MOST_ENTRIES = 1024  # of an array or a list, that are hashed
_DEEPEST = 4
# Attributes that may differ between ranks.
_OWN = ("cache", "rank", "seed", "rng", "worker", "log", "time", "lock", "generator", "device", "host", "pid")


def length(sized: Any) -> Optional[int]:
    """Return `len(sized)`, or None if it has no length: some classes have a __len__ that only raises."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def refuse_unlike(facts_of_ranks: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """Raise DataError if a rank's fact differs from rank 0's. Local, on gathered facts, so it raises on every rank."""
    for name in facts_of_ranks[0]:
        values = [facts[name] for facts in facts_of_ranks]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise DataError(
                f"Ranks disagree on the {name}: {values[0]} on rank 0, {values[odd]} on rank {odd}; they would "
                f"train on mismatched batches, or hang. {remedy}"
            )


def facts_of(dataset: Any) -> dict[str, int]:
    """Return hashes of the attributes of `dataset` that decide which sample an index means, by name. Local."""
    found: dict[str, int] = {}
    _walk(dataset, "dataset", found, _DEEPEST, set())
    return found


def probe(dataset: Any) -> dict[str, Optional[int]]:
    """Return hashes of the first, a middle and the last item, by name. Local; random streams are restored.

    For an item that cannot be read, its error is hashed: training will raise it. None: two reads of the item differ, so
    it has entropy of its own.
    """
    num = None if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") else length(dataset)
    found: dict[str, Optional[int]] = {}
    for index in dict.fromkeys((0, (num or 0) // 2, (num or 1) - 1)) if num else ():
        reads = []
        with _generators_kept(dataset):
            for _ in range(2):
                with PrivateRandom(index).swapped_in():
                    reads.append(_hash_of_item(dataset, index))
        found[f"item {index} of the dataset"] = reads[0] if reads[0] == reads[1] else None
    return found


def _hash_of_item(dataset: Any, index: int) -> int:
    try:
        return hash_of(dataset[index])
    except Exception as error:
        return zlib.crc32(type(error).__name__.encode())


def hash_of(value: Any) -> int:
    """Return a hash of the numbers and the text in `value`, or of the class of another object. Local."""
    if isinstance(value, Mapping):
        return zlib.crc32(repr([(str(key), hash_of(inner)) for key, inner in value.items()]).encode())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([len(value), *map(hash_of, _some(value))]).encode())
    if isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "reshape"):  # torch's, numpy's
        kind = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
        if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_meta or value.is_quantized):
            return kind
        return zlib.crc32(repr(_some(value.reshape(-1)).tolist()).encode(), kind)
    if callable(getattr(value, "tobytes", None)):  # an image
        return zlib.crc32(value.tobytes())
    return zlib.crc32(type(value).__name__.encode())


def _some(values: Any) -> Any:
    """Return about `_MOST_ENTRIES` of the entries of a list or an array."""
    return values[:: max(1, len(values) // _MOST_ENTRIES)]


def _walk(value: Any, title: str, found: dict[str, int], depth: int, seen: set[int]) -> None:
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Subset):
        found[f"order of the split {title}.indices"] = hash_of(list(value.indices))
        _walk(value.dataset, f"{title}.dataset", found, depth, seen)
        return
    if isinstance(value, ConcatDataset):
        for number, inner in enumerate(value.datasets[:_MOST_ENTRIES]):
            _walk(inner, f"{title}.datasets[{number}]", found, depth - 1, seen)
        return
    for name, held in sorted(getattr(value, "__dict__", {}).items(), key=lambda item: item[0]):
        if any(own in name.lower() for own in _OWN):
            continue
        where = f"{title}.{name}"
        if isinstance(held, Dataset):
            _walk(held, where, found, depth - 1, seen)
        elif _holds_samples(held):
            found[where] = hash_of(_without_folder(held))


def _holds_samples(held: Any) -> bool:
    """Whether this is a list, an array or a mapping of values that a hash can distinguish."""
    if isinstance(held, torch.Tensor) or (type(held).__module__.split(".")[0] == "numpy" and hasattr(held, "reshape")):
        return True
    if isinstance(held, Mapping):
        return len(held) > 0 and all(isinstance(key, str) and _holds_samples(inner) for key, inner in held.items())
    is_list = isinstance(held, (list, tuple)) and len(held) > 0
    return is_list and all(
        isinstance(item, (str, int, float, bytes, list, tuple)) or _holds_samples(item) for item in _some(held)
    )


def _without_folder(held: Any) -> Any:
    """Return names of files without their common folder, because nodes may have copies in different places."""
    if isinstance(held, (list, tuple)) and all(isinstance(item, str) and os.sep in item for item in held):
        with contextlib.suppress(ValueError):  # both absolute and relative names
            folder = os.path.commonpath(list(map(os.path.dirname, held)))
            return [item[len(folder) :] for item in held]
    return held


@contextlib.contextmanager
def _generators_kept(dataset: Any) -> Iterator[None]:
    """Within this block the dataset's own generators may draw; afterwards their states are restored."""
    kept: list[tuple[Callable[[Any], None], Any]] = []
    holder: Optional[Any] = dataset
    while holder is not None:
        for held in list(getattr(holder, "__dict__", {}).values()):
            if isinstance(held, random.Random):
                kept.append((held.setstate, held.getstate()))
            elif isinstance(held, torch.Generator) or type(held).__module__ == "numpy.random.mtrand":
                kept.append((held.set_state, held.get_state()))
            elif type(held).__module__ == "numpy.random._generator":
                kept.append((functools.partial(setattr, held.bit_generator, "state"), held.bit_generator.state))
        holder = getattr(holder, "dataset", None)
    try:
        yield
    finally:
        for put_back, state in kept:
            put_back(state)
