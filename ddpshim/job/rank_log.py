"""Writes a rank's output to a file: all of it under `ddpshim run`, else only Python's. Imports no torch."""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

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


def copy_output(folder: str, rank: int) -> Callable[[], None]:
    """Also write Python's output from now on to `folder`/rank_N.log; returns a function that undoes it. Local.

    An existing file is appended to. Output of C libraries is not in it. While an exception propagates, nothing is
    undone.
    """
    os.makedirs(folder, exist_ok=True)
    # Buffered by line, so that a killed process leaves what it printed.
    file = open(os.path.join(folder, f"rank_{rank}.log"), "a", buffering=1)  # noqa: SIM115 - for as long as the world
    before = sys.stdout, sys.stderr
    ours = _Both(sys.stdout, file), _Both(sys.stderr, file)
    sys.stdout, sys.stderr = ours

    def restore() -> None:
        if sys.exc_info()[1] is not None:
            return  # the traceback is printed later
        # Another stream (a trainer's logger) may have replaced ours, and still write to it.
        if sys.stdout is ours[0]:
            sys.stdout = before[0]
        if sys.stderr is ours[1]:
            sys.stderr = before[1]
        for stream in ours:
            stream.files.clear()
        file.close()

    return restore


def _log() -> Path:
    return Path(os.environ[RANK_LOGS], f"rank_{os.environ.get('RANK') or os.environ[RANK]}.log")


class _Both:
    """A stream that also writes to a file; all other attributes are the stream's."""

    def __init__(self, stream: Any, file: Any) -> None:
        self._stream, self.files = stream, [file]

    def write(self, text: str) -> int:
        for file in self.files:
            file.write(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
