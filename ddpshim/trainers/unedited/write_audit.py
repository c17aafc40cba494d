"""Sees writes by Python's audit hooks, and refuses a rank's that bypass the replaced functions. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import os
import posix
import stat
import sys
from collections.abc import Iterator
from typing import Any, Callable, Optional

from ddpshim import variables
from ddpshim.errors import SyncError
from ddpshim.process.users_line import users_line
from ddpshim.trainers.unedited.c_libraries import sqlite_file
from ddpshim.trainers.unedited.start import Start, start_again
from ddpshim.trainers.unedited.unmanaged_paths import WRITES, LeftAlone

# Audit events of Python that write, and the arguments that are paths.
_WRITTEN = {
    **dict.fromkeys(("open", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    **{"os.symlink": (1,), "sqlite3.connect": (0,)},
}
_BEFORE_TORCH = {"isaacgym"}  # refuse to be imported after torch
_is_private: Optional[Callable[[str, Any], bool]] = None


@contextlib.contextmanager
def refused(is_private: Callable[[str, Any], bool]) -> Iterator[None]:
    """Within this block, raise SyncError if the caller in `frame` writes to a path that is not `is_private`."""
    global _is_private
    _listen()
    before, _is_private = _is_private, is_private
    try:
        yield
    finally:
        _is_private = before


@functools.cache
def _listen() -> None:
    sys.addaudithook(_on_event)  # cannot be removed, so it is added once per process


def _on_event(event: str, args: Any) -> None:
    is_private = _is_private
    if is_private is None or event not in _WRITTEN:  # most events are others
        return
    for name in written_by(event, args):
        if not is_private(name, sys._getframe(1)):
            raise SyncError(
                f"{users_line()} writes to {name} ({event}) through a function that ddpshim cannot intercept, on a "
                "rank that is not main; all ranks would write there and corrupt the file. Use open or sqlite3.connect, "
                f"or call os functions as os.NAME (os.mkdir), or write only if os.environ['{variables.RANK}'] is '0'."
            )


def begin_before_writing(start: Start) -> None:
    """Restart this rank, with torch imported first, if it is to write a file before. Local.

    Ranks meet when torch is imported. Before, each would write the file, perhaps under another name (a time).
    """
    left = LeftAlone()

    def see(event: str, args: Any) -> None:
        is_early = "torch" not in sys.modules and _BEFORE_TORCH.isdisjoint(sys.modules)
        if is_early and os.getpid() == start.process:
            for path in written_by(event, args):
                frame = sys._getframe(1)
                if not (left.has(path) or left.takes_note(path, frame) or left.is_asked_by(frame)):
                    os.chdir(start.folder)
                    start_again(start.argv, {**start.environ, variables.TORCH_FIRST: "yes"})

    sys.addaudithook(see)


def written_by(event: str, args: Any) -> list[str]:
    """Return the files (absolute paths) that an audit event announces to write; they are regular or do not exist."""
    if event not in _WRITTEN or (event == "open" and not (isinstance(args[2], int) and args[2] & WRITES)):
        return []
    # Names relative to an open folder are already redirected: opening the folder was.
    if event == "sqlite3.connect":
        file, is_read = sqlite_file(args[0])
        args = (None if is_read or not file else file,)
    elif event not in ("open", "os.truncate") and args[-1] >= 0:
        return []
    paths = [args[at] for at in _WRITTEN[event] if isinstance(args[at], (str, bytes, os.PathLike))]
    return list(filter(_is_file_or_absent, (os.path.join(posix.getcwd(), os.fsdecode(path)) for path in paths)))


def _is_file_or_absent(path: str) -> bool:
    try:
        return stat.S_ISREG(posix.stat(path).st_mode)
    except OSError:
        return True
