"""Records how and why a rank failed, so that `python -m ddpshim run` can show the first failure (`first_failure`).

Each rank writes one file, once, when an exception leaves the program or is given to `ddpshim.abort`.
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
        exit_code: the process's exit code.
        lost_a_peer: whether the error only says that another rank is gone, or has failed.
        traceback: as Python prints it; empty for a SystemExit.
    """

    moment: float
    exit_code: int
    lost_a_peer: bool
    traceback: str


def write(error: BaseException, exit_code: int, *, knows_cause: bool = False) -> None:
    """Write this rank's note, if `run` started it; only with `knows_cause` it replaces an earlier note. Local.

    Raises nothing if it cannot be written: the rank must end anyway, and `run` then uses its exit code.
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
        partial.write_text(json.dumps(Note(time.time(), exit_code, lost, "".join(lines))))
        partial.replace(note)
    except OSError as cause:
        say(f"{note} cannot be written ({cause}); `run` will not know why rank {rank} failed", directly=True)
