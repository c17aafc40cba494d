"""Sends a data worker's batches to its rank in one piece, through shared memory that is reused."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any, Optional

import torch

MAX_BYTES = 1 << 23  # beyond this size, sending a batch takes no longer than copying it
_ALIGNMENT = 64


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


def num_bytes(batch: Any) -> int:
    """Return the number of bytes of `batch` in a mailbox. Local."""
    return sum(_aligned(tensor) for _, tensor in _leaves(batch, ()))


def _leaves(tree: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
