"""Refuses a rank's writes that bypass the replaced functions, using Python's audit hooks; the main rank may write."""

from __future__ import annotations

import contextlib
import functools
import os
import posix
import stat
import sys
from collections.abc import Iterator
from typing import Any, Callable, Optional

from ddpshim.errors import SyncError
from ddpshim.process.users_line import users_line
from ddpshim.trainers.unedited.main_file_log import WRITES

_PATHS = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),
}
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
    if is_private is None or (event != "open" and event not in _PATHS):
        return
    if event == "open":
        paths = [args[0]] if isinstance(args[2], int) and args[2] & WRITES else []
    else:
        # Names relative to an open folder are already redirected: opening the folder was.
        is_by_descriptor = event != "os.truncate" and args[-1] >= 0
        paths = [] if is_by_descriptor else [args[at] for at in _PATHS[event]]
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)):
            name = os.path.join(posix.getcwd(), os.fsdecode(path))
            if not is_private(name, sys._getframe(1)) and _is_file_or_absent(name):
                raise SyncError(
                    f"{users_line()} writes to {name} ({event}) through a function that ddpshim cannot "
                    "intercept, on a rank that is not main; all ranks would write there and corrupt the file. Use "
                    "open, or call os functions as os.NAME (os.mkdir), or write only on the main rank (RANK in "
                    "os.environ)."
                )


def _is_file_or_absent(path: str) -> bool:
    """Whether `path` is a regular file or does not exist."""
    try:
        return stat.S_ISREG(posix.stat(path).st_mode)
    except OSError:
        return True
