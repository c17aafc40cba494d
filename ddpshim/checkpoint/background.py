"""Writes files in a separate process, one after the other, while training continues.

An object's `torch.save` bytes are copied into shared memory. Both processes use torch's own serializer, so the file is
the one that `torch.save` would have written.

The process is started, not forked: a fork of a process with threads or a GPU may hang at the first lock. A thread
would compete with the training for Python's interpreter lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import DdpShimError
from ddpshim.failures.preemption import SIGNALS
from ddpshim.process.observed import outside_steps

Task = Callable[[], Any]
_READY = "ready"
_NICE = 5
_LOOK_EVERY_S = 1.0
_END_DEADLINE_S = 5.0
# Signals to all processes of a job are meant for the ranks. They are ignored before torch is imported, which takes
# seconds. `nice`, so that training does not wait for a core.
_PROGRAM = """
import os, signal, sys
os.nice({nice})
for name in {names}:
    hasattr(signal, name) and signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.path[:] = {path}
import importlib
importlib.import_module({module!r}).{function}({arguments})
"""
_ALIGNMENT = 64  # bytes; records in the buffer start at cache lines


def start_process(
    serve: Callable[..., None],
    *arguments: Any,
    environ: Optional[dict[str, str]] = None,
    descriptors: Iterable[int] = (),
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a Python that calls `serve(descriptor, parent, *arguments)`; return it, and a connection to it. Local.

    It ignores the signals that are sent to jobs. Its stderr is ours; its stdout is discarded.

    Args:
        serve: a function of a module, called with the descriptor of its end and the pid of this process.
        arguments: values whose `repr` is a literal.
        environ: variables in addition to those of this process.
        descriptors: open files to inherit.
    """
    ours, theirs = multiprocessing.Pipe()
    program = _PROGRAM.format(
        nice=_NICE,
        names=("SIGINT", *SIGNALS),
        path=sys.path,
        module=serve.__module__,
        function=serve.__name__,
        arguments=", ".join(map(repr, (theirs.fileno(), os.getpid(), *arguments))),
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=(theirs.fileno(), *descriptors),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **(environ or {})},
        )
    return process, ours


class JobFailed(Exception):
    """A job failed. Those submitted after it, until this is raised, were left out."""


class Background:
    """A separate process that runs jobs: functions that can be pickled, and whose results are discarded. Local.

    Its start takes seconds, but jobs can be submitted at once. When the process that made it ends, it finishes its
    jobs and ends, too. If it cannot be started, `wait` runs its jobs.

    Args:
        module: the module to import before the first job.
        descriptors: open files that jobs use.
    """

    def __init__(self, module: str, descriptors: Iterable[int] = ()) -> None:
        self._owner = os.getpid()
        self._waiting: deque[tuple[Task, str]] = deque()
        self._failed: list[str] = []  # why a job failed, then the jobs left out because of it
        self._is_ready = False
        self.did_not_start = False
        environ = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process, self._ours = start_process(_serve, module, environ=environ, descriptors=descriptors)

    @property
    def is_here(self) -> bool:
        """Whether this process started it; False in a fork of this process."""
        return self._owner == os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether jobs are pending, or one failed and `wait` has not raised that yet."""
        return bool(self._waiting or self._failed)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def do(self, job: Task, what: str) -> None:
        """Submit `job`, which runs after the earlier ones if they all succeed; `what` names it in errors."""
        self._waiting.append((job, what))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the process has ended: `wait` handles that
            self._ours.send(job)

    def wait(self, timeout_s: Optional[float] = None) -> bool:
        """Wait for all jobs, and return whether they are done within `timeout_s`.

        Raises JobFailed if one failed or the process has ended; no job is pending then.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._waiting:
            if end is not None and not self._ours.poll(max(0.0, end - time.monotonic())):
                return False
            try:
                said = self._ours.recv()
            except (EOFError, ConnectionResetError):
                self._ended()
                break
            if said == _READY:
                self._is_ready = True
                continue
            _, what = self._waiting.popleft()
            if self._failed or said is not None:
                self._failed.append(said or what)
        if self._failed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._ours.send(None)
            (why, *left_out), self._failed = self._failed, []
            raise JobFailed(f"{why} Left out because of it: {', '.join(left_out)}." if left_out else why)
        return True

    def end(self) -> None:
        """Close the connection, so that the process ends after its jobs; wait for it if it has none. Local."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._ours.fileno())) as connection:
            connection.shutdown(socket.SHUT_WR)  # close() is not enough: data workers hold it, too
        self._ours.close()
        if not self._waiting:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_DEADLINE_S)

    def _ended(self) -> None:
        """Handle the end of the process: if it never was ready, run its jobs here; else they are lost."""
        code, jobs = self._process.wait(), list(self._waiting)
        self._waiting.clear()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if self._is_ready:
            self._failed.append(
                f"the process that writes in the background (pid {self.pid}) ended ({how}) before this was done: "
                f"{', '.join(what for _, what in jobs)}. Earlier files are unchanged; the newer state is lost. If "
                "memory ran out (see dmesg), set DDPSHIM_BACKGROUND_SAVE=no."
            )
            return
        self.did_not_start = True
        warnings.warn(
            f"the process that writes in the background did not start ({how}, {sys.executable}), so training waits "
            "for each write. Its error is above; DDPSHIM_BACKGROUND_SAVE=no avoids the attempt.",
            stacklevel=2,
        )
        for job, _ in jobs:
            job()


def _serve(descriptor: int, parent: int, module: str) -> None:
    """Run jobs in the new process, until the parent ends or closes the connection."""
    connection = Connection(descriptor)
    importlib.import_module(module)
    with contextlib.suppress(EOFError, ConnectionResetError):  # the parent ended, or closed it
        for said in itertools.chain([_READY], _jobs(connection, parent)):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # its pending jobs are still done
                connection.send(said)
    os._exit(0)


def _jobs(connection: Connection, parent: int) -> Iterator[Optional[str]]:
    """Run jobs as they arrive, while the parent lives; yield for each why it failed, or None."""
    has_failed = False
    # The parent's data workers hold its end of the connection, too, and may outlive it.
    while connection.poll(_LOOK_EVERY_S) or os.getppid() == parent:
        if not connection.poll():
            continue
        job = connection.recv()
        if job is None:
            has_failed = False  # the parent has raised JobFailed
        elif has_failed:
            yield None
        else:
            try:
                job()
                yield None
            except Exception as error:
                has_failed = True
                yield str(error) if isinstance(error, DdpShimError) else traceback.format_exc()


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


def size_of_copy(num_bytes: int) -> int:
    """Return the approximate size of a buffer for an object with `num_bytes` of tensors."""
    return num_bytes + num_bytes // 64


def take(obj: Any, buffer: Buffer, num_bytes: int) -> Snapshot:
    """Copy `obj`, of about `num_bytes`, into the buffer, and overwrite what was there.

    Raises what `torch.save` would raise, OSError if memory is short, and others if torch's internals have changed.
    """
    with outside_steps():
        buffer.grow(size_of_copy(num_bytes))
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
