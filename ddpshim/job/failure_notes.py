"""Writes down how and why a rank failed, for `python -m ddpshim run` to say which was the first, and to show it.

Each rank writes one file, once, where its exception left the program or was handed to `ddpshim.abort`.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from ddpshim import variables
from ddpshim.job.peer_errors import lost_a_peer
from ddpshim.job.say import say


class Note(NamedTuple):
    """How a rank failed.

    Attributes:
        moment: in seconds since 1970.
        exit_code: of the process, which ends now.
        lost_a_peer: the error only says that another rank is gone.
        traceback: as Python prints it; empty for a SystemExit.
    """

    moment: float
    exit_code: int
    lost_a_peer: bool
    traceback: str


def write(error: BaseException, exit_code: int, *, knows_cause: bool = False) -> None:
    """Write this rank's note, if `run` started it and it is the first one, or one that `knows_cause` of that. Local.

    Raises nothing where it cannot be written: the rank has to end all the same, and `run` then goes by its exit code.
    """
    folder = os.environ.get(variables.RUN_DIR)
    if folder is None or "RANK" not in os.environ:
        return
    rank = os.environ["RANK"]
    note, partial = Path(folder, f"failed.{rank}"), Path(folder, f"partial.{rank}")
    if note.exists() and not knows_cause:
        return
    lines = [] if isinstance(error, SystemExit) else traceback.format_exception(type(error), error, error.__traceback__)
    # torch's agent goes by the end of the process, in whole seconds: ranks that fail because of this one may end
    # earlier, and then the agent ends this one, perhaps while it writes.
    try:
        partial.write_text(json.dumps(Note(time.time(), exit_code, lost_a_peer(error), "".join(lines))))
        partial.replace(note)
    except OSError as cause:
        say(f"{note} cannot be written ({cause}); `run` will not know why rank {rank} failed", directly=True)


def read(run_dir: str) -> dict[int, Note]:
    """The notes of the ranks that wrote one, by rank. Local."""
    return {int(file.suffix[1:]): Note(*json.loads(file.read_text())) for file in Path(run_dir).glob("failed.*")}


def forget(run_dir: str) -> None:
    """Remove all notes: the ranks are about to be restarted, and some may never write one. Local."""
    for file in Path(run_dir).glob("failed.*"):
        file.unlink()
