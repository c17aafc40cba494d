"""Records signals that ask a training to stop, so that all ranks act on them at the same step (`checkpoint.resume`).

A handler cannot contact other ranks: it may interrupt a collective.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from ddpshim import variables
from ddpshim.process.job import Job, current

LISTENS = "listens"  # a file in RUN_DIR: a rank saves and stops at SIGTERM, and its training can be resumed
# SIGTERM: torchrun, kill, the end of a SLURM job. SIGUSR1: the usual choice for `sbatch --signal`, sent before the end.
SIGNALS = ("SIGTERM", "SIGUSR1")
_NUMBERS = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]


class _Signals:
    asked: Optional[str] = None  # the signal that asked this rank to end
    job: Optional[Job] = None  # in which `listen` was called: in another one it starts afresh


_state = _Signals()
_previous: dict[int, Any] = {}  # the handlers that `listen` replaced


def listen() -> None:
    """Record SIGTERM and SIGUSR1 from now on, instead of ending at once. Local; main thread only; idempotent."""
    with contextlib.suppress(KeyError, OSError):
        Path(os.environ[variables.RUN_DIR], LISTENS).touch()
    if _state.job is not current():
        unlisten()
    if not _previous and threading.current_thread() is threading.main_thread():
        _state.job = current()
        for number in _NUMBERS:
            _previous[number] = signal.signal(number, _note)


def unlisten(is_complete: bool = False) -> None:
    """Restore the handlers that `listen` replaced. Local; idempotent.

    If the training `is_complete`, or this is no rank, SIGUSR1 is then ignored unless there was another handler: it asks
    for a save, and by default would kill a process that has nothing left to save, and fail the job.
    """
    for number, handler in _previous.items():
        signal.signal(number, handler or signal.SIG_DFL)
        if is_complete and number != signal.SIGTERM and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    _previous.clear()
    _state.asked = None


def leave() -> None:
    """Restore the handlers when `cleanup()` leaves the job. Local.

    If an error or a signal is about to end this process, they stay until the next `listen`: a launcher's SIGTERM must
    not change the exit code.
    """
    if _state.asked is None and sys.exc_info()[1] is None:
        unlisten()


def asked() -> Optional[str]:
    """Return the name of the signal that asked this rank to end, or None. Local."""
    return _state.asked


def ignore_in_worker() -> None:
    """Ignore these signals in a data worker: they are meant for the rank, which ends its workers. Local."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):  # a forked process is no rank
    os.register_at_fork(after_in_child=functools.partial(unlisten, is_complete=True))


def _note(number: int, frame: Optional[FrameType]) -> None:
    _state.asked = signal.Signals(number).name
