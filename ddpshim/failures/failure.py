"""Ends the job when a rank fails, and names the first failing rank once, with its traceback.

torch's elastic agent takes the earliest failure as the root cause, so ranks that fail because of another exit after it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import traceback
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, NoReturn, Optional

from ddpshim.process.job import Job, current
from ddpshim.process.observed import num_collectives, observe

_OTHER_THREAD_DEADLINE_S = 60.0


@dataclass
class Watched:
    """This rank and the store in which ranks report failures; exists from `arm` on, longer than the process group."""

    store: Any
    previous_hook: Any  # sys.excepthook before `arm`
    watch: Any  # ddpshim.failures.hang_detector.Watch, with the option guard
    ending: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that ends this rank


def arm(job: Job, watch: Any = None) -> None:
    """Make an uncaught exception end the job from now on. Local."""
    previous = job.watched.previous_hook if job.watched is not None else sys.excepthook
    job.watched, sys.excepthook = Watched(job.store, previous, watch), _excepthook


def disarm(job: Job) -> None:
    """Restore the previous sys.excepthook. Local."""
    if job.watched is not None and sys.excepthook is _excepthook:
        sys.excepthook = job.watched.previous_hook
    job.watched = None


if hasattr(os, "register_at_fork"):  # a forked process is no rank, and a thread of the rank may have locked the store
    os.register_at_fork(after_in_child=lambda: disarm(current()))


def begin_checks() -> None:
    """Check in each step of this job, which begins now, that ranks do not train separate models. Local."""
    job = current()
    job.num_collectives = num_collectives()  # later ones are the program's own

    def check(name: str, *given: Any) -> None:
        if not job.has_networks:
            from ddpshim.failures import unsynced_check

            getattr(unsynced_check, name)(*given)

    observe(job.at_end, backward=partial(check, "check_by_hand"), before_step=partial(check, "check_step"))


def end_with_parent() -> None:
    """End this process, which another one has started, when that one has ended: nobody waits for it then. Local.

    A process that goes on would keep connections of its parent open, so that other ranks wait for that one.
    """

    def follow(parent: int) -> None:
        wait([parent])
        os._exit(1)

    if (started_by := multiprocessing.parent_process()) is not None:
        threading.Thread(target=follow, args=(started_by.sentinel,), daemon=True).start()


def on_the_way_out() -> bool:
    """Return whether an exception is ending this rank, for code in a `finally`; if so, claims the failure. Local."""
    error = sys.exc_info()[1]
    if current().watched is None or error is None or (isinstance(error, SystemExit) and not error.code):
        return False
    from ddpshim.failures import failure_notes

    # Claim it now: peers fail as soon as this rank's connections close, and would claim to be the first.
    failure_notes.claim_first(error)
    return True


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
    if (watched := current().watched) is not None:  # a thread that is ending this rank reports it, and ends this one
        watched.ending.acquire(timeout=_OTHER_THREAD_DEADLINE_S)
    try:
        from ddpshim.failures import failure_notes

        failure_notes.report(error, exit_code)
    except BaseException:  # exit even so: peers would wait for a rank that stays
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.__stderr__)
        traceback.print_exc(file=sys.__stderr__)
    os._exit(exit_code)


def _excepthook(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
    abort(error.with_traceback(trace), 130 if issubclass(kind, KeyboardInterrupt) else 1)
