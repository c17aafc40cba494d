"""Copies an object's `torch.save` bytes into shared memory, so that another process can write them.

Both processes use torch's own serializer, so the file is the one that `torch.save` would have written.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch

from ddpshim.process.observed import outside_steps

_ALIGNMENT = 64  # bytes; records in the buffer start at cache lines


class Buffer:
    """Shared memory that grows as needed and has no name, so that it is freed when its last process ends.

    Not a file in /dev/shm, which containers limit to 64 MB.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ddpshim")
        self._memory = (ctypes.c_char * 0)()
        self._growing = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The current size."""
        return len(self._memory)

    def grow(self, num_bytes: int) -> None:
        """Grow to at least `num_bytes`; it never shrinks. Raises OSError if memory is short."""
        with self._growing:
            there = self.num_bytes
            if there < num_bytes:
                # Otherwise, if memory is short, the first access would kill the process.
                os.posix_fallocate(self.descriptor, 0, num_bytes)
                memory = (ctypes.c_char * num_bytes).from_buffer(mmap.mmap(self.descriptor, num_bytes))
                ctypes.memset(ctypes.addressof(memory) + there, 0, num_bytes - there)  # maps pages now, not in a copy
                self._memory = memory

    def grow_soon(self, num_bytes: int) -> None:
        """Call `grow` in a thread: nearly all its time is the kernel's. The next `grow` repeats its errors."""

        def grow() -> None:
            with contextlib.suppress(OSError):
                self.grow(num_bytes)

        threading.Thread(target=grow, name="ddpshim-buffer", daemon=True).start()

    def put(self, address: int, num_bytes: int, offset: int) -> None:
        """Copy memory at `address` to `offset`, in one thread: several wait for each other on a busy machine."""
        self.grow(offset + num_bytes)
        memory = self._memory  # a reference, because `grow` in a thread may replace it during the copy
        ctypes.memmove(ctypes.addressof(memory) + offset, address, num_bytes)

    def close(self) -> None:
        """Free the memory."""
        with self._growing:
            self._memory = (ctypes.c_char * 0)()
            os.close(self.descriptor)
            self.descriptor = -1  # a thread in `grow_soon` must not use another file of that number


@dataclass(frozen=True)
class Snapshot:
    """A copy of an object in a buffer; it can be sent to a process that has the buffer's descriptor."""

    descriptor: int
    index: slice  # the list of records' place in the buffer

    def write(self, path: str) -> None:
        """Write the file that `torch.save` would have written to `path`."""
        with torch.serialization._open_zipfile_writer(path) as file:
            memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
            for name, kind, held in pickle.loads(memory[self.index]):
                if kind is None:
                    file.write_record(name, held, len(held))
                    continue
                offset, num_bytes = held
                content = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)
                file.write_record(name, content.data_ptr() if kind is int else content.untyped_storage(), num_bytes)


def size(num_bytes: int) -> int:
    """Return the approximate size of a buffer for an object with `num_bytes` of tensors."""
    return num_bytes + num_bytes // 64


def take(obj: Any, buffer: Buffer, num_bytes: int) -> Snapshot:
    """Copy `obj`, of about `num_bytes`, into the buffer, and overwrite what was there.

    Raises what `torch.save` would raise, OSError if memory is short, and others if torch's internals have changed.
    """
    with outside_steps():
        buffer.grow(size(num_bytes))
        records = _Records(buffer)
        with _through_pinned_memory():
            torch.serialization._save(obj, records, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    packed = bytearray(pickle.dumps(records.index))
    held = (ctypes.c_char * len(packed)).from_buffer(packed)
    return Snapshot(buffer.descriptor, records.put(ctypes.addressof(held), len(packed)))


@contextlib.contextmanager
def _through_pinned_memory() -> Iterator[None]:
    """Make torch copy storages from a GPU through pinned memory in this block, if it can (from torch 2.7 on)."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        yield
        return
    name = "use_pinned_memory_for_d2h"
    has_it = hasattr(getattr(config, "save", None), name)
    patch: Any = getattr(config, "patch", None)
    with patch(f"save.{name}", True) if has_it and patch else contextlib.nullcontext():
        yield


class _Records:
    """Takes the records that torch writes, instead of a file."""

    def __init__(self, buffer: Buffer) -> None:
        self.index: list[tuple[str, Optional[type], Any]] = []
        self._buffer, self._end = buffer, 0

    def write_record(self, name: str, content: Any, num_bytes: int) -> None:
        """Take a record, as torch's writer does: bytes, text or a storage (before torch 2.2, its address)."""
        if isinstance(content, (bytes, str)) or num_bytes == 0:
            self.index.append((name, None, content if isinstance(content, (bytes, str)) else b""))
            return
        address = content if isinstance(content, int) else content.data_ptr()
        place = self.put(address, num_bytes)
        self.index.append((name, type(content), (place.start, num_bytes)))

    def put(self, address: int, num_bytes: int) -> slice:
        start = self._end
        self._buffer.put(address, num_bytes, start)
        self._end = -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
        return slice(start, start + num_bytes)
