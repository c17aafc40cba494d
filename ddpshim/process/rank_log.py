"""Writes a rank's output to a file under `ddpshim run`. Imports no torch."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from ddpshim.variables import RANK, RANK_LOGS


def has_log() -> bool:
    """Return whether all output of this rank goes to its own file. Local."""
    return RANK_LOGS in os.environ


def link_log(folder: str) -> None:
    """Give this rank's log a second name in `folder`: rank_0.log, or rank_0.2.log beside an earlier job's. Local.

    Does nothing if `run` did not start this process, or without logs. Both names are one growing file; if the file
    system cannot do that (two disks), the second is a symbolic link.
    """
    if not has_log():
        return
    log = _log()
    os.makedirs(folder, exist_ok=True)
    for number in itertools.count(1):
        name = Path(folder, log.name if number == 1 else f"{log.stem}.{number}.log")
        if name.exists() and name.samefile(log):
            return  # a restarted rank
        with suppress(FileExistsError):
            try:
                os.link(log, name)
            except FileExistsError:
                raise
            except OSError:
                name.symlink_to(log)
            return


def redirect_output() -> None:
    """Redirect file descriptors 1 and 2 to this rank's log, if it has one. Local.

    This includes output of libraries, of workers and of a crashing interpreter.
    """
    if not has_log():
        return
    file = os.open(_log(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _log() -> Path:
    return Path(os.environ[RANK_LOGS], f"rank_{os.environ.get('RANK') or os.environ[RANK]}.log")
