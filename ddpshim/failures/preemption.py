"""Records signals that ask a training to stop, so that all ranks act on them at the same step.

A handler cannot contact other ranks: it may interrupt a collective. `ddpshim.checkpoint.resume` reads the record.
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

from ddpshim.failures import failure
from ddpshim.process import events
from ddpshim.process.say import say

# SIGTERM: torchrun, kill, the end of a SLURM job. SIGUSR1: the usual choice for `sbatch --signal`, sent before the end.
SIGNALS = ("SIGTERM", "SIGUSR1")
# torchrun kills ranks 30 s after it has passed on a SIGTERM; a rank that cannot stop must report that before.
_GRACE_S = 25.0


@dataclass
class _State:
    """The signal that asked this rank to end, and the handlers that `listen` replaced."""

    asked: Optional[str] = None
    is_heard: bool = False  # the training has seen the signal, and will end
    is_left: bool = False  # the world has ended: the next `listen` starts afresh
    previous: dict[int, Any] = field(default_factory=dict)
    wakeup: Optional[tuple[socket.socket, socket.socket]] = None


_state = _State()


def listen() -> None:
    """Record SIGTERM and SIGUSR1 from now on, instead of ending at once. Local; main thread only; idempotent.

    A rank that is stuck while another has failed, or comes to no place to save at within 25 s of a SIGTERM, still ends.
    """
    if _state.is_left:
        unlisten()
    if _state.previous or threading.current_thread() is not threading.main_thread():
        return
    _state.asked, _state.is_heard, _state.is_left = None, False, False
    for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
        _state.previous[number] = signal.signal(number, _note)
    # Python runs a handler only between two instructions of the main thread. Through this socket another thread learns
    # of the signal even while the main thread waits in a collective.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    taken = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    if taken != -1:  # in use, perhaps by an event loop
        signal.set_wakeup_fd(taken)
        receiver.close()
        sender.close()
        return
    _state.wakeup = receiver, sender
    threading.Thread(target=_watch, args=(receiver,), name="ddpshim-preemption", daemon=True).start()


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
        receiver, sender = _state.wakeup
        _state.wakeup = None
        with contextlib.suppress(OSError):
            receiver.shutdown(socket.SHUT_RDWR)
        sender.close()
    _state.asked = None


def leave() -> None:
    """Restore the handlers when `cleanup()` leaves the job. Local.

    If an error or a signal is about to end this process, they stay until the next `listen`: a launcher's SIGTERM must
    not change the exit code.
    """
    if _state.is_heard or sys.exc_info()[1] is not None:
        _state.is_left = True
    else:
        unlisten()


def asked() -> Optional[str]:
    """Return the name of the signal that asked this rank to end, or None. Local."""
    return _state.asked


def heard() -> None:
    """Record that the training will stop, however long its last save takes. Local."""
    _state.is_heard = True


def ignore_in_worker() -> None:
    """Ignore these signals in a data worker: they are meant for the rank, which ends its workers. Local."""
    for name in SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _in_child() -> None:
    """In a forked process, which is not a rank, let SIGTERM end it again, and detach it from the rank's watcher."""
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


def _watch(receiver: socket.socket) -> None:
    """End this rank if it cannot stop: it waits for a rank that failed, or comes to no place to save at."""
    with receiver:
        while True:
            numbers = _read(receiver)
            if not numbers:
                return
            if signal.SIGTERM in numbers:
                break
        end = time.monotonic() + _GRACE_S
        while not _state.is_heard and (wakeup := _state.wakeup) is not None and wakeup[0] is receiver:
            first = failure.first()
            if first not in (None, failure.rank()):
                _leave(f"stops because rank {first} failed first", 1)
            if time.monotonic() > end:
                _leave(
                    f"got SIGTERM and came to no place to save at within {_GRACE_S:g} s, so nothing was saved",
                    128 + signal.SIGTERM,
                )
            time.sleep(0.2)
        while _read(receiver):  # until `unlisten`: Python warns of signals that nobody reads
            pass


def _read(receiver: socket.socket) -> bytes:
    """Return the numbers of the signals received; empty when `unlisten` has closed the other end."""
    with contextlib.suppress(OSError):
        return receiver.recv(64)
    return b""


def _leave(reason: str, code: int) -> None:
    events.end("stopped", error=reason, first=failure.first())
    say(f"rank {failure.rank()} {reason}", directly=True)
    os._exit(code)
