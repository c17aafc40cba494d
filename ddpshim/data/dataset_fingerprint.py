"""Describes a dataset's contents, for ranks to compare before training: splits, file order, arrays in memory."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from ddpshim.errors import DataError, WorldError
from ddpshim.failures import failure
from ddpshim.job.world import World
from ddpshim.process.say import described

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


def first_unlike(of_ranks: Sequence[Mapping[str, Any]]) -> Optional[tuple[str, int, Any]]:
    """Return the name of the first fact that a rank has otherwise than rank 0, that rank and its value. Local.

    A fact that a rank lacks is none.
    """
    for name, expected in of_ranks[0].items():
        values = [facts.get(name) for facts in of_ranks]
        odd = next((rank for rank, value in enumerate(values) if value != expected), None)
        if odd is not None and None not in values:
            return name, odd, values[odd]
    return None


def refuse_unlike(facts_of_ranks: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """Raise DataError if a rank's fact differs from rank 0's. Local, on gathered facts, so it raises on every rank."""
    if (odd := first_unlike(facts_of_ranks)) is not None:
        name, rank, value = odd
        raise DataError(
            f"Ranks disagree on the {name}: {facts_of_ranks[0][name]} on rank 0, {value} on rank {rank}; they would "
            f"train on mismatched batches, or hang. {remedy}"
        )


def on_each_rank(here: World, what: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of `function` on each rank (collective); an exception on one rank is raised on all."""
    error: Optional[BaseException] = None
    value = None
    try:
        value = function(*args)
    except BaseException as raised:  # raised below, because the other ranks wait in the gather
        error = raised
    failed = None if error is None else (isinstance(error, DataError), described(error), str(error))
    everyones = here.gather((value, failed))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(everyones):
        if problem is not None:
            is_ours, shown, text = problem
            lost = f"rank {rank} could not {what} ({shown}); rank {here.rank} would hang. See that rank's traceback."
            raise failure.caused_by(rank, DataError(f"on rank {rank}: {text}") if is_ours else WorldError(lost))
    return [value for value, _ in everyones]


def facts_of(dataset: Any) -> dict[str, int]:
    """Return hashes of the attributes of `dataset` that decide which sample an index means, by name. Local."""
    found: dict[str, int] = {}
    _walk(dataset, "dataset", found, _DEEPEST, set())
    return found


def _hash_of(value: Any) -> int:
    """Return a hash of the numbers and the text in `value`, or of the class of another object. Local."""
    if isinstance(value, Mapping):
        return zlib.crc32(repr([(str(key), _hash_of(inner)) for key, inner in value.items()]).encode())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([len(value), *map(_hash_of, _some(value))]).encode())
    if isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "reshape"):  # torch's, numpy's
        kind = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
        if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_meta or value.is_quantized):
            return kind
        return zlib.crc32(repr(_some(value.reshape(-1)).tolist()).encode(), kind)
    return zlib.crc32(type(value).__name__.encode())


def _some(values: Any) -> Any:
    """Return about `_MOST_ENTRIES` of the entries of a list or an array."""
    return values[:: max(1, len(values) // _MOST_ENTRIES)]


def _walk(value: Any, title: str, found: dict[str, int], depth: int, seen: set[int]) -> None:
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Subset):
        found[f"order of the split {title}.indices"] = _hash_of(list(value.indices))
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
            found[where] = _hash_of(_without_folder(held))


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
