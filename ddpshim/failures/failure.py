"""Ends the job when a rank fails, and names the first failing rank once, with its traceback.

(torch's elastic agent takes the earliest failure as the root cause, so ranks that fail because of another rank must
exit after it.)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Callable, NoReturn, Optional, TypeVar, Union

from packaging.version import Version

from ddpshim.errors import SyncError
from ddpshim.failures import failure_notes
from ddpshim.failures.failure_notes import is_late, lost_a_peer
from ddpshim.process import events
from ddpshim.process.job import Job, current
from ddpshim.process.say import place, ranks_called, say

T = TypeVar("T")

_EXIT_HANDLERS_DEADLINE_S = _STORE_DEADLINE_S = _LAUNCHER_DEADLINE_S = 5.0
_OTHER_THREAD_DEADLINE_S = 60.0
_LONGEST = 300  # characters of an error in the line of a rank that did not fail first


@dataclass
class Watched:
    """This rank and the store in which ranks report failures; exists from `arm` on, longer than the process group."""

    rank: int
    store: Any
    previous_hook: Any  # sys.excepthook before `arm`
    is_told_to_end: bool = False  # a SIGTERM has arrived
    watch: Any = None  # ddpshim.failures.hang_detector.Watch, with the option guard
    ending: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that ends this rank


def arm(rank: int, store: Any) -> None:
    """Make an uncaught exception end the job from now on. `store`: the job's own key-value store. Local."""
    job = current()
    previous = job.watched.previous_hook if job.watched is not None else sys.excepthook
    job.watched, sys.excepthook = Watched(rank, store, previous), _excepthook


def disarm(job: Job) -> None:
    """Restore the previous sys.excepthook. Local."""
    if job.watched is not None and sys.excepthook is _excepthook:
        sys.excepthook = job.watched.previous_hook
    job.watched = None


def is_there(store: Any, key: str) -> bool:
    """Return whether `store` holds `key`. Local."""
    with contextlib.suppress(RuntimeError, ValueError):
        if hasattr(store, "check"):
            return bool(store.check([key]))
        store.wait([key], timedelta(seconds=0.1))  # torch 2.1 has no check(); a late answer counts as no
        return True
    return False


def claim(store: Any, key: str, value: str) -> str:
    """Set `key` of `store` to `value` unless another process has set it; returns the value it then holds. Local."""
    import torch  # not at the top: the self-test's ranks import torch while this process imports it

    # torch before 2.4 creates compare_set's result without holding Python's lock (GIL). A result of one character, as
    # most ranks are, crashes Python 3.10 (segmentation fault); while other threads run, no version of Python is safe.
    if Version(torch.__version__).release >= (2, 4):
        return str(store.compare_set(key, "", value).decode(errors="replace"))
    if store.add(f"{key}/claims", 1) == 1:
        store.set(key, value)
    return str(store.get(key).decode(errors="replace"))  # waits until the first process has set it


def rank() -> int:
    """Return this process's rank; 0 without a job. Local."""
    job = current()
    known = job.watched or job.world or job.left
    return 0 if known is None else known.rank


def first() -> Optional[int]:
    """Return the rank that failed first; None if none has reported a failure. Local; safe in any thread."""
    claimed = _ask_store(lambda store: store.get("first_failure") if is_there(store, "first_failure") else None)
    return None if claimed is None else _rank_in(claimed)


def told_to_end() -> None:
    """Record that a launcher is ending this rank, so that `abort` need not wait for it. Local; for signal handlers."""
    watched = current().watched
    if watched is not None:
        watched.is_told_to_end = True


def on_the_way_out() -> bool:
    """Return whether an exception is ending this rank, for code in a `finally`; if so, claims the failure. Local."""
    error = sys.exc_info()[1]
    if current().watched is None or error is None or (isinstance(error, SystemExit) and not error.code):
        return False
    # Claim it now: peers fail as soon as this rank's connections close, and would claim to be the first.
    _claim(error)
    return True


def note(error: BaseException) -> int:
    """Record in the store and the run's records that `error` ends this rank; returns the first rank to fail. Local."""
    first = _claim(error)
    events.end("failed", error=f"{type(error).__name__}: {error}", first=first, lost_a_peer=lost_a_peer(error))
    return first


def caused_by(rank: int, error: Exception) -> Exception:
    """Return `error`, marked as a consequence of the failure of `rank`. Local."""
    error.__dict__["first_failure"] = rank
    return error


def abort(error: BaseException, exit_code: int = 1) -> NoReturn:
    """End this rank, and with it the job, with one traceback on stderr and a non-zero exit code. Local.

    The first rank to fail prints its traceback (also into torchrun's error file); ranks that fail because of it, or
    after it, print one line. Exit handlers get five seconds, so that a logger's thread cannot keep other ranks waiting.
    With one process it ends that process.

    Args:
        error: the error to report, with its traceback.
        exit_code: this process's exit code, not 0.
    """
    me, watched = rank(), current().watched
    if watched is not None:  # a thread that is ending this rank reports the reason, and ends this one with it
        watched.ending.acquire(timeout=_OTHER_THREAD_DEADLINE_S)
    try:
        _report(error, exit_code, me, watched)
    except BaseException:  # exit even so: peers would wait for a rank that stays
        traceback.print_exc(file=sys.__stderr__)
    os._exit(exit_code)


def _report(error: BaseException, exit_code: int, me: int, watched: Optional[Watched]) -> None:
    """Report `error` to the job, the launcher and stderr, and run exit handlers."""
    sigterms: list[int] = []
    with contextlib.suppress(ValueError):  # not the main thread
        # A launcher that has seen another rank end sends SIGTERM: delay it until the records are written.
        signal.signal(signal.SIGTERM, lambda number, frame: sigterms.append(number))
        # torch's handler raises when a data worker ends, and a launcher may end the workers together with this rank.
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    failure_notes.write(error, exit_code)
    first = note(error)
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sigterms:
            os.kill(os.getpid(), signal.SIGTERM)
    if first == me and lost_a_peer(error):
        # The peer was killed and could not report it. A launcher sees that, blames it and ends this rank in seconds.
        say(f"rank {me} lost a peer ({type(error).__name__})", directly=True)
        if watched is not None and watched.is_told_to_end:
            os._exit(exit_code)
        time.sleep(_LAUNCHER_DEADLINE_S)
    if first == me:
        if (explained := _explained(error)) is not error:
            error = explained
            failure_notes.write(error, exit_code, knows_cause=True)
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        what = "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        say(f"rank {me} ({socket.gethostname()}) {what}:\n{lines}", directly=True)
        if isinstance(error, Exception):
            _record_for_torchrun(error)
    else:
        line = f"rank {me} stops because rank {first} failed first{_why(first)}; rank {me}'s own error: {_short(error)}"
        say(f"rank {me} was interrupted" if isinstance(error, KeyboardInterrupt) else line, directly=True)
        # A launcher kills all other ranks when it sees one end, and torchrun blames the one that ended in
        # the earliest second: exit only after the first rank has printed its traceback and exited.
        _ask_store(lambda store: store.wait(["left"], timedelta(seconds=2 * _EXIT_HANDLERS_DEADLINE_S)))
        time.sleep(1.1)
    handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    handlers.start()
    handlers.join(_EXIT_HANDLERS_DEADLINE_S)
    for out in filter(None, (sys.stdout, sys.stderr, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            out.flush()
    if first == me:
        _ask_store(lambda store: store.set("left", "1"))


def _short(error: BaseException) -> str:
    """Return the first line of `error`, cut between words if it is long. Local."""
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return said if len(said) <= _LONGEST else said[: _LONGEST + 1].rpartition(" ")[0] + " ..."


def _explained(error: BaseException) -> BaseException:
    """Return `error`; if it waited for a rank that has left the job, or that did not come, a SyncError that says so."""
    watched = current().watched
    if watched is None or watched.watch is None:
        return error
    me = watched.rank
    if lost_a_peer(error) and (left := watched.watch.describe_left()):
        from ddpshim.process.remedies import remedy

        why = "waits for a rank that has already left the job, and would hang"
        text = f"rank {me} {why}:\n{left}\n{remedy('same end')}."
    elif is_late(error) and (verdict := watched.watch.await_verdict()).text:
        who = ranks_called(verdict.named) if verdict.named else "another rank"
        text = f"{who} did not answer rank {me} within the timeout ({_short(error)}): {verdict.text}"
    else:
        return error
    return SyncError(text).with_traceback(error.__traceback__)


def _claim(error: BaseException) -> int:
    """Return the rank that failed first: this one, unless another is named in the store already."""
    if "first_failure" in error.__dict__:
        return int(error.__dict__["first_failure"])
    raised = f" in {where}" if (where := place(error)) else ""  # another thread's error may never have been raised
    why = f"{type(error).__name__}{raised}".encode(errors="backslashreplace").decode()
    _ask_store(lambda store: store.set(f"why/{rank()}", why))
    claimed = _ask_store(lambda store: _rank_in(claim(store, "first_failure", str(rank()))))
    if claimed == rank() and isinstance(error, SystemExit):
        _ask_store(lambda store: store.set("left", "1"))  # it has no traceback for the others to wait for
    if claimed is not None:
        return claimed
    # If no agent serves the store (torchrun up to 2.2, mpirun), it ends with rank 0, which has then failed first.
    return 0 if current().watched is not None and lost_a_peer(error) else rank()


def _rank_in(claimed: Union[str, bytes]) -> Optional[int]:
    """Return the rank in `claimed`; None if no rank wrote it: any process that reaches the store can write to it."""
    text = claimed if isinstance(claimed, str) else claimed.decode(errors="replace")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _why(rank: int) -> str:
    """Return where `rank` failed, in parentheses, for the line of another rank; "" if unknown."""
    told = _ask_store(lambda store: store.get(f"why/{rank}").decode() if is_there(store, f"why/{rank}") else None)
    return f" ({told})" if told else ""


def _ask_store(ask: Callable[[Any], T]) -> Optional[T]:
    """Return `ask(store)`; None without a store, or if the process that serves it has ended."""
    if (watched := current().watched) is not None:
        with contextlib.suppress(RuntimeError, ValueError):
            watched.store.set_timeout(timedelta(seconds=_STORE_DEADLINE_S))
            return ask(watched.store)
    return None


def _record_for_torchrun(error: Exception) -> None:
    """Write the traceback for torchrun's agent, so that its summary names the root cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        try:
            raise error
        except Exception:  # torch records the exception that is being handled
            handler.record_exception(error)


def _excepthook(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
    abort(error.with_traceback(trace), 130 if issubclass(kind, KeyboardInterrupt) else 1)
