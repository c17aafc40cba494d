"""Says which rank failed first, and reports how: on stderr, to torchrun, and in a note for `run` and `spawn`.

Loaded when a rank fails.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from ddpshim import variables
from ddpshim.errors import SyncError
from ddpshim.failures import memory, preemption
from ddpshim.process import observed
from ddpshim.process.job import current
from ddpshim.process.job_store import ask_store, claim, is_there, rank_in
from ddpshim.process.say import place, ranks_called, say
from ddpshim.process.users_line import OURS
from ddpshim.reading import end_of

_EXIT_HANDLERS_DEADLINE_S = _LAUNCHER_DEADLINE_S = 5.0
LOST, LATE = "lost", "late"
# What a text in an error means of another rank, and where the text comes from.
_SIGNS = {
    "Connection closed by peer": LOST,  # gloo/transport/tcp/pair.cc
    "onnection reset by peer": LOST,  # the same: the system's text for ECONNRESET
    "Broken pipe": LOST,  # the same: the system's text for EPIPE
    "remote process exited or there was a network error": LOST,  # nccl src/init.cc: ncclGetErrorString
    "a remote process exiting prematurely": LOST,  # torch/csrc/distributed/c10d/NCCLUtils.cpp
    "Timed out waiting": LATE,  # gloo/transport/tcp/unbound_buffer.cc
    "Application timeout caused pair closure": LATE,  # the same
    "Watchdog caught collective operation timeout": LATE,  # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
    "wait timeout after ": LATE,  # torch/csrc/distributed/c10d/TCPStore.cpp: a wait in the store, as new_group's
    "Socket Timeout": LATE,  # the same, before torch 2.4
}
_NUM_LINES_OF_WATCHDOG = 200  # nccl's watchdog prints stacks after its message
_LONGEST = 300  # characters of an error in the line of a rank that did not fail first
_REST_OF_FRAME = r".*\n(?:    .*\n|  \[Previous line .*\n)*"
_OF_DECORATOR = r".*/(?:torch/_dynamo/\w+|torch/utils/_contextlib|contextlib|functools|runpy)\.py|<frozen runpy>"
_DECORATORS = rf'(?:  File "(?:{_OF_DECORATOR})"{_REST_OF_FRAME})*'  # between two of ddpshim's, or of one
_OUR_FRAMES = re.compile(
    rf'^{_DECORATORS}  File "{re.escape(OURS + os.sep)}{_REST_OF_FRAME}{_DECORATORS}', re.MULTILINE
)
_WITHOUT_FRAMES = re.compile(  # an error that ddpshim itself has handled
    r"^Traceback \(most recent call last\):\n(?! ).*?\n\nDuring handling of .*?:\n\n", re.MULTILINE | re.DOTALL
)


class Note(NamedTuple):
    """How a rank failed."""

    moment: float  # in seconds since 1970
    exit_code: int
    lost_a_peer: bool  # whether the error only says that another rank is gone, or has failed
    traceback: str  # as Python prints it; empty for a SystemExit
    is_first: bool = True  # whether no other rank had claimed to be the first, which is what ranks print


def meaning_of(text: str) -> Optional[str]:
    """Return the meaning, LOST or LATE, of the first of `_SIGNS` that `text` contains; else None. Local."""
    return next((meaning for sign, meaning in _SIGNS.items() if sign in text), None)


def lost_a_peer(error: Optional[BaseException]) -> bool:
    """Return whether `error`, its cause or its context only says that another process is gone. Local."""
    while error is not None:
        is_of_its_own = isinstance(error, BrokenPipeError)  # the program's own pipe
        if meaning_of(str(error)) == LOST and not is_of_its_own:
            return True
        error = error.__cause__ or error.__context__
    return False


def _rank() -> int:
    """Return this process's rank; 0 without a job. Local."""
    last = current().world or current().left
    return 0 if last is None else last.rank


def claim_first(error: BaseException) -> int:
    """Return the rank that failed first: this one, unless another is named in the store already. Local."""
    if "first_failure" in error.__dict__:
        return int(error.__dict__["first_failure"])
    me, where = _rank(), place(error)
    raised = f" in {where}" if where else ""  # another thread's error may never have been raised
    why = f"{type(error).__name__}{raised}".encode(errors="backslashreplace").decode()
    ask_store(lambda store: store.set(f"why/{me}", why))
    claimed = ask_store(lambda store: rank_in(claim(store, "first_failure", str(me))))
    if claimed == me and isinstance(error, SystemExit):
        ask_store(lambda store: store.set("left", "1"))  # it has no traceback for the others to wait for
    if claimed is not None:
        return claimed
    # If no agent serves the store (torchrun up to 2.2, mpirun), it ends with rank 0, which has then failed first.
    return 0 if current().watched is not None and lost_a_peer(error) else me


def note(error: BaseException) -> int:
    """Record in the store and the run's records that `error` ends this rank; returns the first rank to fail. Local."""
    first, said = claim_first(error), f"{type(error).__name__}: {error}"
    observed.note("end", how="failed", error=said, first=first, lost_a_peer=lost_a_peer(error))
    return first


def report(error: BaseException, exit_code: int) -> None:
    """Report `error` to the job, the launcher and stderr, and run exit handlers."""
    me, sigterms = _rank(), list[int]()
    with contextlib.suppress(ValueError):  # not the main thread
        # A launcher that has seen another rank end sends SIGTERM: delay it until the records are written.
        signal.signal(signal.SIGTERM, lambda number, frame: sigterms.append(number))
        # torch's handler raises when a data worker ends, and a launcher may end the workers together with this rank.
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    write(error, exit_code)
    first = note(error)
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sigterms:
            os.kill(os.getpid(), signal.SIGTERM)
    if first == me and lost_a_peer(error):
        # The peer was killed and could not report it. A launcher sees that, blames it and ends this rank in seconds.
        say(f"rank {me} lost a peer ({type(error).__name__})", directly=True)
        if preemption.asked() == "SIGTERM":
            os._exit(exit_code)
        time.sleep(_LAUNCHER_DEADLINE_S)
    if first == me:
        if (explained := _explained(error)) is not error:
            error = explained
            write(error, exit_code, knows_cause=True)
        what = "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        say(f"rank {me} ({socket.gethostname()}) {what}:\n{traceback_of(error).rstrip()}", directly=True)
        if isinstance(error, Exception):
            _record_for_torchrun(error)
    else:
        line = f"rank {me} stops because rank {first} failed first{_why(first)}; rank {me}'s own error: {_short(error)}"
        say(f"rank {me} was interrupted" if isinstance(error, KeyboardInterrupt) else line, directly=True)
        # A launcher kills all other ranks when it sees one end, and torchrun blames the one that ended in
        # the earliest second: exit only after the first rank has printed its traceback and exited.
        ask_store(lambda store: store.wait(["left"], timedelta(seconds=2 * _EXIT_HANDLERS_DEADLINE_S)))
        time.sleep(1.1)
    handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    handlers.start()
    handlers.join(_EXIT_HANDLERS_DEADLINE_S)
    for out in filter(None, (sys.stdout, sys.stderr, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            out.flush()
    if first == me:
        ask_store(lambda store: store.set("left", "1"))


def traceback_of(error: BaseException) -> str:
    """Return what Python prints of `error`, without the frames of ddpshim, so that it looks as in one process. Local.

    Also in the text of a data worker's traceback. DDPSHIM_TRACEBACK=full shows them.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    is_full = os.environ.get(variables.TRACEBACK, "").strip().lower() == "full"
    return text if is_full else _WITHOUT_FRAMES.sub("", _OUR_FRAMES.sub("", text))


def _short(error: BaseException) -> str:
    """Return the first line of `error`, cut between words if it is long. Local."""
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return said if len(said) <= _LONGEST else said[: _LONGEST + 1].rpartition(" ")[0] + " ..."


def _explained(error: BaseException) -> BaseException:
    """Return `error`; if it waited for a rank that has left the job, or that did not come, a SyncError that says so."""
    watched, me = current().watched, f"rank {_rank()}"
    if watched is None or watched.watch is None:
        return error
    ranks: Sequence[int] = watched.watch.ranks
    if lost_a_peer(error) and (left := watched.watch.describe_left()):
        text = f"{me} waits for a rank that has already left the job, and would hang:\n{left}\n{SAME_WAY}."
    elif lost_a_peer(error) and (silent := ask_store(lambda s: [r for r in ranks if not is_there(s, f"why/{r}")])):
        text = (
            f"{ranks_called(silent)} ended without an error in the middle of the job (os._exit, exit code 0, killed), "
            f"and {me} would wait forever ({_short(error)}). Let all ranks end together, or raise an error."
        )
    elif meaning_of(str(error)) == LATE and (verdict := watched.watch.await_verdict()):
        who = ranks_called(verdict.named) if verdict.named else "another rank"
        text = f"{who} did not answer {me} within the timeout ({_short(error)}): {verdict.text}"
    else:
        return error
    return SyncError(text).with_traceback(error.__traceback__)


def _why(rank: int) -> str:
    """Return where `rank` failed, in parentheses, for the line of another rank; "" if unknown."""
    key = f"why/{rank}"
    told = ask_store(lambda store: store.get(key).decode() if is_there(store, key) else None)
    return f" ({told})" if told else ""


def _record_for_torchrun(error: Exception) -> None:
    """Write the traceback for torchrun's agent, so that its summary names the root cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def fail() -> None:
            raise error

        with contextlib.suppress(type(error)):
            fail()


def write(error: BaseException, exit_code: int, *, knows_cause: bool = False) -> None:
    """Write this rank's note, once, if `run` or `spawn` started it. Local. Raises nothing: the rank must end anyway.

    Only with `knows_cause` it replaces an earlier note, whose moment it keeps.
    """
    with contextlib.suppress(Exception):
        memory.explain(error)
    folder = os.environ.get(variables.RUN_DIR)
    rank = os.environ.get("RANK", os.environ.get(variables.RANK))
    if folder is None or rank is None:
        return
    note = Path(folder, f"failed.{rank}")
    if note.exists() and not knows_cause:
        return
    text = "" if isinstance(error, SystemExit) else traceback_of(error)
    lost = lost_a_peer(error) or str(error.__dict__.get("first_failure", rank)) != rank
    is_first = claim_first(error) == _rank()
    # torch's agent compares when processes ended, in whole seconds: ranks that fail because of this one may end
    # earlier, and then the agent ends this one, perhaps while it writes. So the note appears only when complete.
    try:
        moment = Note(*json.loads(note.read_text())).moment if note.exists() else time.time()
        put(folder, rank, Note(moment, exit_code, lost, text, is_first))
    except OSError as cause:
        say(f"{note} cannot be written ({cause}); nobody will know why rank {rank} failed", directly=True)


def put(folder: str, rank: Union[int, str], note: Note) -> None:
    """Write the note of `rank`, which is complete or absent. Local. Raises OSError."""
    partial = Path(folder, f"partial.{rank}")
    partial.write_text(json.dumps(note))
    partial.replace(Path(folder, f"failed.{rank}"))


def notes_in(run_dir: str) -> dict[int, Note]:
    """Return the notes of the ranks that failed, by rank. Local."""
    return {int(file.suffix[1:]): Note(*json.loads(file.read_text())) for file in Path(run_dir).glob("failed.*")}


def first_to_fail(
    seen: Mapping[int, Any], notes: Mapping[int, Note], log_dir: Optional[Path] = None
) -> tuple[int, int]:
    """Return the rank that failed first, and its exit code; `seen`: torch's `ProcessFailure` by rank. Local."""

    def order(rank: int) -> tuple[int, bool, int, bool, float]:
        # First ranks with an error of their own, then one that the agent saw ended by SIGTERM before it ended others,
        # then those that only lost a peer (perhaps before the agent saw the peer end), last those that the agent ended
        # because of another one. Among them the one that claimed to be the first (the other ranks have printed its
        # name), or the earliest; the agent's times are whole seconds, and within one second a rank with a note counts
        # as first.
        own = notes.get(rank)
        if own is not None:
            return 2 * own.lost_a_peer, not own.is_first, int(own.moment), False, own.moment
        code = seen[rank].exitcode
        # nccl's watchdog ends a process that waits for another one by SIGABRT: it only lost a peer.
        end = "" if log_dir is None else end_of(log_dir / f"rank_{rank}.log", _NUM_LINES_OF_WATCHDOG)
        waited = code == -signal.SIGABRT and (log_dir is None or meaning_of(end) is not None)
        ended = code == -signal.SIGTERM and (1 if rank == next(iter(seen)) else 3)
        return ended or 2 * waited, False, int(seen[rank].timestamp), True, 0.0

    first = min({*seen, *notes}, key=order)
    return first, notes[first].exit_code if first in notes else seen[first].exitcode


# What to do where ranks wait for each other in different places.
SAME_WAY = (
    "Let every rank take the same batches, backward passes and calls of World, in the same order. Look for a decision "
    "by something that differs between ranks: a file, a clock, random numbers, or the rank (`loss.item()` belongs "
    "before `if world.is_main`; work of one rank alone in World.run_on_main)"
)
