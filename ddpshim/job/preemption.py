"""Notes signals that tell a training to stop, so that all ranks act on them at the same step.

A handler cannot contact other ranks: it may interrupt a collective. `ddpshim.checkpoint.resume` reads the note.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Optional

from ddpshim.job import events, failure
from ddpshim.job.say import say

# SIGTERM: torchrun, kill, the end of a SLURM job. SIGUSR1: what `sbatch --signal` is usually told to send before it.
SIGNALS = ("SIGTERM", "SIGUSR1")
# torchrun kills 30 s after it has passed on a SIGTERM; a rank that nobody can reach any more should say so before.
_GRACE_S = 25.0


@dataclass
class _State:
    """What was asked for, and what `listen` put in place."""

    asked: Optional[str] = None
    is_heard: bool = False  # the training knows, and will end
    is_left: bool = False  # with the world: whatever listens next begins afresh
    previous: dict[int, Any] = field(default_factory=dict)
    wakeup: Optional[tuple[socket.socket, socket.socket]] = None


_state = _State()


def listen() -> None:
    """Note SIGTERM and SIGUSR1 from now on, instead of ending at once. Local; main thread only; idempotent.

    A rank that is stuck while another has failed, or that finishes no step within 25 s of a SIGTERM, still ends.
    """
    if _state.is_left:
        unlisten()
    if _state.previous or threading.current_thread() is not threading.main_thread():
        return
    _state.asked, _state.is_heard, _state.is_left = None, False, False
    for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
        _state.previous[number] = signal.signal(number, _note)
    # Python runs a handler between two of its own instructions; a thread hears of the signal also while the main
    # one waits inside a collective.
    hears, tells = socket.socketpair()
    tells.setblocking(False)
    taken = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    if taken != -1:  # somebody else's, an event loop perhaps
        signal.set_wakeup_fd(taken)
        hears.close()
        tells.close()
        return
    _state.wakeup = hears, tells
    threading.Thread(target=_watch, args=(hears,), name="ddpshim-preemption", daemon=True).start()


def unlisten(is_complete: bool = False) -> None:
    """Restore the handlers that `listen` replaced. Local; idempotent.

    If the training `is_complete`, SIGUSR1 is then ignored unless there was another handler: it asks for a save, and by
    default would kill a process that has nothing left to save, and fail the job.
    """
    for number, handler in _state.previous.items():
        signal.signal(number, handler or signal.SIG_DFL)
        if is_complete and number != signal.SIGTERM and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    _state.previous.clear()
    if _state.wakeup is not None:
        signal.set_wakeup_fd(-1)
        hears, tells = _state.wakeup
        _state.wakeup = None
        with contextlib.suppress(OSError):
            hears.shutdown(socket.SHUT_RDWR)
        tells.close()
    _state.asked = None


def leave() -> None:
    """`unlisten` when `cleanup()` leaves the job. Local.

    If an error or a signal is about to end this process, a launcher's SIGTERM must not change its exit code: then the
    next `listen` restores them.
    """
    if _state.is_heard or sys.exc_info()[1] is not None:
        _state.is_left = True
    else:
        unlisten()


def asked() -> Optional[str]:
    """The name of the signal that asked this rank to end, or None. Local."""
    return _state.asked


def heard() -> None:
    """Note that the training will stop by itself, however long its last save takes. Local."""
    _state.is_heard = True


def ignore_in_worker() -> None:
    """Ignore these signals in a data worker: they are meant for the rank, which ends its workers. Local."""
    for name in SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _in_child() -> None:
    """A forked process is no rank: SIGTERM ends it again, and nothing reaches the rank's watcher from it."""
    if not _state.previous:
        return
    if _state.wakeup is not None:
        signal.set_wakeup_fd(-1)
    for number, handler in _state.previous.items():
        signal.signal(number, (handler or signal.SIG_DFL) if number == signal.SIGTERM else signal.SIG_IGN)
    _state.previous.clear()
    _state.wakeup = _state.asked = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _note(number: int, frame: Optional[FrameType]) -> None:
    _state.asked = signal.Signals(number).name
    if number == signal.SIGTERM:
        failure.told_to_end()


def _watch(hears: socket.socket) -> None:
    """End this rank where it cannot end by itself: it waits for a rank that failed, or comes to no step."""
    with hears:
        while True:
            numbers = _read(hears)
            if not numbers:
                return
            if signal.SIGTERM in numbers:
                break
        end = time.monotonic() + _GRACE_S
        while not _state.is_heard and (wakeup := _state.wakeup) is not None and wakeup[0] is hears:
            first = failure.first()
            if first not in (None, failure.rank()):
                _leave(f"stops because rank {first} failed first", 1)
            if time.monotonic() > end:
                _leave(
                    f"got SIGTERM and finished no step within {_GRACE_S:g} s, so nothing was saved",
                    128 + signal.SIGTERM,
                )
            time.sleep(0.2)
        while _read(hears):  # until `unlisten`: a signal that nobody reads is a warning of Python's
            pass


def _read(hears: socket.socket) -> bytes:
    """The numbers of the signals that came; nothing when `unlisten` has closed the other end."""
    with contextlib.suppress(OSError):
        return hears.recv(64)
    return b""


def _leave(reason: str, code: int) -> None:
    events.end("stopped", error=reason, first=failure.first())
    say(f"rank {failure.rank()} {reason}", directly=True)
    os._exit(code)
