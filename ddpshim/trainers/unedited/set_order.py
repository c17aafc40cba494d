"""Gives sets of tensors and modules one order on all ranks: Python's is that of addresses, which differ.

Parameters in the order of a set would have another place in an optimizer and its files, and norms another rounding, on
each rank. So the hash of a tensor or module is a number that is given when it is first asked for: every rank runs the
same program, so in the same order.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections import Counter
from typing import Any, Callable

import torch

from ddpshim.process.job import current
from ddpshim.process.observed import live
from ddpshim.rows.tensor import Counts

_known: dict[int, tuple[int, Any]] = {}  # hashes by id, each with what removes it before the id is given again
_num_given: Counter[int] = Counter()  # by class: what torch hashes while it compiles leaves parameters' numbers alone


@functools.cache
def make_alike() -> None:
    """Do so until this process ends: the program's sets and dicts, its optimizers' states too, outlive the job. Local.

    What exists now, or is first hashed in another thread or by one rank alone, is hashed by its address.
    """
    kinds: tuple[Any, ...] = (torch.Tensor, torch.nn.Module)
    for kind in kinds:
        for thing in live(kind):
            _note(thing, kind.__hash__(thing))
        kind.__hash__ = _hash
    if hasattr(torch.utils, "swap_tensors"):  # from torch 2.3 on
        torch.utils.swap_tensors = functools.partial(_swap, torch.utils.swap_tensors)


def _swap(real: Callable[[Any, Any], None], *tensors: Any) -> None:
    """torch.utils.swap_tensors, which refuses what has a weak reference. Both keep their hashes, as their ids."""
    numbers = [_known.pop(id(tensor), (None,))[0] for tensor in tensors]
    real(*tensors)
    for tensor, number in zip(tensors, numbers):
        if number is not None:
            _note(tensor, number)


def _hash(self: Any) -> int:
    known = _known.get(id(self))
    return _first(self) if known is None else known[0]


def _first(thing: Any) -> int:
    job = current()
    counts = None if job.world is None else job.part(Counts)
    if counts is None or not counts.is_in_lock_step():
        return _note(thing, id(thing))
    if counts.is_searching:
        return id(thing)
    kind = zlib.crc32(type(thing).__qualname__.encode())
    _num_given[kind] += 1
    # Above all addresses: no two hashes may be equal, as `==` of tensors is a tensor.
    return _note(thing, (1 << 60) + (kind << 28) + _num_given[kind])


def _note(thing: Any, number: int) -> int:
    forget = functools.partial(_known.pop, id(thing))
    return _known.setdefault(id(thing), (number, weakref.ref(thing, forget)))[0]  # the first thread's, of two
