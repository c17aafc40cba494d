"""Runs jobs one after the other in a separate process, while training continues.

The process is started, not forked: a fork of a process with threads or a GPU may hang at the first lock. A thread
would compete with the training for Python's interpreter lock.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Callable, Optional

from ddpshim.errors import DdpShimError
from ddpshim.failures.preemption import SIGNALS

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
