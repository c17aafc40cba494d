"""Records how a rank failed, for `run` and `spawn`, and knows gloo's and nccl's texts for a rank that is gone.

Each rank writes one note, once, when an exception leaves the program or is given to `ddpshim.abort`.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import NamedTuple, Optional

from ddpshim import variables
from ddpshim.process.say import say


class Note(NamedTuple):
    """How a rank failed.

    Attributes:
        moment: in seconds since 1970.
        exit_code: the process's exit code.
        lost_a_peer: whether the error only says that another rank is gone, or has failed.
        traceback: as Python prints it; empty for a SystemExit.
    """

    moment: float
    exit_code: int
    lost_a_peer: bool
    traceback: str


def write(error: BaseException, exit_code: int, *, knows_cause: bool = False) -> None:
    """Write this rank's note, if `run` or `spawn` started it. Local.

    Only with `knows_cause` it replaces an earlier note, whose moment it keeps. Raises nothing if it cannot be written:
    the rank must end anyway, and its exit code is used.
    """
    folder = os.environ.get(variables.RUN_DIR)
    rank = os.environ.get("RANK", os.environ.get(variables.RANK))
    if folder is None or rank is None:
        return
    note, partial = Path(folder, f"failed.{rank}"), Path(folder, f"partial.{rank}")
    if note.exists() and not knows_cause:
        return
    lines = [] if isinstance(error, SystemExit) else traceback.format_exception(type(error), error, error.__traceback__)
    lost = lost_a_peer(error) or str(error.__dict__.get("first_failure", rank)) != rank
    # torch's agent compares when processes ended, in whole seconds: ranks that fail because of this one may end
    # earlier, and then the agent ends this one, perhaps while it writes. So the note appears only when complete.
    try:
        moment = Note(*json.loads(note.read_text())).moment if note.exists() else time.time()
        partial.write_text(json.dumps(Note(moment, exit_code, lost, "".join(lines))))
        partial.replace(note)
    except OSError as cause:
        say(f"{note} cannot be written ({cause}); nobody will know why rank {rank} failed", directly=True)


LOST, LATE = "lost", "late"
# What a text in an error means of another rank, and where the text comes from.
SIGNS = {
    "Connection closed by peer": LOST,  # gloo/transport/tcp/pair.cc
    "onnection reset by peer": LOST,  # the same: the system's text for ECONNRESET
    "Broken pipe": LOST,  # the same: the system's text for EPIPE
    "remote process exited or there was a network error": LOST,  # nccl src/init.cc: ncclGetErrorString
    "a remote process exiting prematurely": LOST,  # torch/csrc/distributed/c10d/NCCLUtils.cpp
    "Timed out waiting": LATE,  # gloo/transport/tcp/unbound_buffer.cc
    "Application timeout caused pair closure": LATE,  # the same
    "Watchdog caught collective operation timeout": LATE,  # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
}


def meaning_of(text: str) -> Optional[str]:
    """Return the meaning, LOST or LATE, of the first of `SIGNS` that `text` contains; else None. Local."""
    return next((meaning for sign, meaning in SIGNS.items() if sign in text), None)


def lost_a_peer(error: Optional[BaseException]) -> bool:
    """Return whether `error`, its cause or its context only says that another process is gone. Local."""
    while error is not None:
        is_of_its_own = isinstance(error, BrokenPipeError)  # the program's own pipe
        if meaning_of(str(error)) == LOST and not is_of_its_own:
            return True
        error = error.__cause__ or error.__context__
    return False


def is_late(error: BaseException) -> bool:
    """Return whether `error` says that another rank timed out. Local."""
    return meaning_of(str(error)) == LATE
