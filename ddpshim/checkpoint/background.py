"""Writes files in a thread, one after the other, while training continues.

torch's own serializer copies an object into memory, so the file is the one that `torch.save` would have written. The
thread writes that copy without Python's interpreter lock (from torch 2.2 on), so training does not wait for it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import CheckpointError
from ddpshim.process.observed import outside_steps
from ddpshim.process.say import described

_NICE = 5


class Background:
    """A thread that runs jobs in order, and the memory of the object that it writes. Local.

    If a job fails, the later ones are left out, until `wait` has raised that. The program ends after its jobs.
    """

    def __init__(self) -> None:
        self._owner, self._thread_id = os.getpid(), 0
        self._thread = ThreadPoolExecutor(1, "ddpshim-saves", self._begin)
        self._pending: list[Future[None]] = []
        self._error: Optional[Exception] = None
        self._left_out: list[str] = []  # the jobs after the one that failed
        self.copy = Copy()

    @property
    def is_here(self) -> bool:
        """Whether this process started it (False in a fork), and this is not its own thread."""
        return self._owner == os.getpid() and self._thread_id != threading.get_ident()

    @property
    def is_busy(self) -> bool:
        """Whether jobs are pending, or one failed and `wait` has not raised that yet."""
        return bool(self._pending)

    def do(self, job: Callable[[], Any], what: str) -> None:
        """Submit `job`, which runs after the earlier ones if they all succeed; `what` names it in errors."""
        self._pending.append(self._thread.submit(self._run, job, what))

    def wait(self, timeout_s: Optional[float] = None) -> None:
        """Wait for all jobs, at most `timeout_s`. Raises CheckpointError if one failed; no job is pending then."""
        if wait(self._pending, timeout_s).not_done:
            return
        (error, self._error), (left_out, self._left_out) = (self._error, None), (self._left_out, [])
        self._pending = []
        if error is not None:
            said = str(error) if isinstance(error, CheckpointError) else described(error)
            raise CheckpointError(f"{said} Left out because of it: {', '.join(left_out)}." if left_out else said)

    def _begin(self) -> None:
        self._thread_id = threading.get_ident()
        if sys.platform == "linux":  # elsewhere it would be the whole process's
            os.nice(_NICE)  # training must not wait for a core

    def _run(self, job: Callable[[], Any], what: str) -> None:
        if self._error is not None:
            self._left_out.append(what)
            return
        try:
            job()
        except Exception as error:
            self._error = error


class Copy:
    """A copy of an object in memory, in the form in which torch writes it."""

    def __init__(self) -> None:
        self._records: dict[str, Any] = {}  # bytes, text, or the type of a storage with its content
        self._earlier: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """The size of its tensors."""
        return sum(len(record[1]) for record in self._records.values() if isinstance(record, tuple))

    def take(self, obj: Any) -> None:
        """Copy `obj`; the memory of the earlier copy is used again where a tensor has the same size.

        Raises what `torch.save` would raise, and others if torch's internals have changed.
        """
        self._earlier, self._records = self._records, {}
        with outside_steps():
            torch.serialization._save(obj, self, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
        self._earlier = {}

    def write_record(self, name: str, content: Any, num_bytes: int) -> None:
        """Take a record, as torch's writer does: bytes, text or a storage (before torch 2.2, its address)."""
        if isinstance(content, (bytes, str)) or num_bytes == 0:
            self._records[name] = content if isinstance(content, (bytes, str)) else b""
            return
        _, memory = self._earlier.get(name, (None, b""))
        if len(memory) != num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        ctypes.memmove(memory.data_ptr(), content if isinstance(content, int) else content.data_ptr(), num_bytes)
        self._records[name] = type(content), memory

    def write(self, path: str) -> None:
        """Write the file that `torch.save` would have written to `path`."""
        with torch.serialization._open_zipfile_writer(path) as file:
            for name, record in self._records.items():
                if not isinstance(record, tuple):
                    file.write_record(name, record, len(record))
                    continue
                kind, memory = record
                file.write_record(name, memory.data_ptr() if kind is int else memory.untyped_storage(), len(memory))
