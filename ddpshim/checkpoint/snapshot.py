"""Copies an object's `torch.save` bytes into shared memory, so that another process can write them.

torch's own serializer decides what a file holds, both here and there: the file is the one that it would have made.
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

from ddpshim.job import events

_ALIGNMENT = 64  # of a record in the buffer: whole cache lines


class Buffer:
    """Shared memory that grows as needed and has no name: nothing is left of it when its last process has ended.

    Not a file in /dev/shm, which containers limit to 64 MB.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ddpshim")
        self._memory = (ctypes.c_char * 0)()
        self._growing = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """How much it holds without growing."""
        return len(self._memory)

    def grow(self, num_bytes: int) -> None:
        """Have room for `num_bytes`, kept from then on. Raises OSError where there is no memory."""
        with self._growing:
            there = self.num_bytes
            if there < num_bytes:
                # Else the first access to memory that is not there would kill the process.
                os.posix_fallocate(self.descriptor, 0, num_bytes)
                memory = (ctypes.c_char * num_bytes).from_buffer(mmap.mmap(self.descriptor, num_bytes))
                ctypes.memset(ctypes.addressof(memory) + there, 0, num_bytes - there)  # mapped now, not in a copy
                self._memory = memory

    def grow_soon(self, num_bytes: int) -> None:
        """`grow`, in a thread: nearly all of it is the system's work. What goes wrong there `grow` will meet again."""

        def grow() -> None:
            with contextlib.suppress(OSError):
                self.grow(num_bytes)

        threading.Thread(target=grow, name="ddpshim-buffer", daemon=True).start()

    def put(self, address: int, num_bytes: int, offset: int) -> None:
        """Copy what is at `address` to `offset`. By one thread: more of them wait for each other on a busy machine."""
        self.grow(offset + num_bytes)
        memory = self._memory  # kept while it is copied to: a thread that grows it puts another in its place
        ctypes.memmove(ctypes.addressof(memory) + offset, address, num_bytes)

    def close(self) -> None:
        """Give the memory back."""
        with self._growing:
            self._memory = (ctypes.c_char * 0)()
            os.close(self.descriptor)
            self.descriptor = -1  # a thread that grows it only now must not find another file under the old number


@dataclass(frozen=True)
class Snapshot:
    """An object as it was, in a buffer; it can be sent to a process that has the buffer's descriptor."""

    descriptor: int
    index: slice  # where in the buffer the list of records is

    def write(self, path: str) -> None:
        """The file that `torch.save` would have written to `path`."""
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
    """About what a buffer must hold for an object with so many bytes of tensors."""
    return num_bytes + num_bytes // 64


def take(obj: Any, buffer: Buffer, num_bytes: int) -> Snapshot:
    """`obj` as it is now; what was in the buffer is gone. `num_bytes`: about how much it holds.

    Raises what `torch.save` would raise, OSError where there is no memory, and others where torch has changed.
    """
    with events.counted("save"):
        buffer.grow(size(num_bytes))
        records = _Records(buffer)
        with _through_pinned_memory():
            torch.serialization._save(obj, records, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    packed = bytearray(pickle.dumps(records.index))
    held = (ctypes.c_char * len(packed)).from_buffer(packed)
    return Snapshot(buffer.descriptor, records.put(ctypes.addressof(held), len(packed)))


@contextlib.contextmanager
def _through_pinned_memory() -> Iterator[None]:
    """In it, torch copies storages of a GPU to the host through pinned memory, where it can (from torch 2.7 on)."""
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
    """In place of torch's file: takes its records as they come."""

    def __init__(self, buffer: Buffer) -> None:
        self.index: list[tuple[str, Optional[type], Any]] = []
        self._buffer, self._end = buffer, 0

    def write_record(self, name: str, content: Any, num_bytes: int) -> None:
        """As that of torch's: the bytes or text of a record, else a storage, before torch 2.2 its address."""
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
