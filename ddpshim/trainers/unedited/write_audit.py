"""Sees by Python's audit hooks which files a program is about to write."""

from __future__ import annotations

import contextlib
import functools
import os
import posix
import stat
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Callable, Optional

from ddpshim.trainers.unedited.c_libraries import sqlite_file

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TEMPORARY = getattr(os, "O_TMPFILE", 0)
# Audit events of Python that write: for each path, its argument, and the one with the descriptor of its folder.
_WRITTEN: dict[str, tuple[tuple[int, Optional[int]], ...]] = {
    **dict.fromkeys(("open", "os.truncate", "sqlite3.connect"), ((0, None),)),
    **{"os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),)},
    **{"os.rename": ((0, 2), (1, 3)), "os.link": ((1, 3),), "os.symlink": ((1, 2),)},
}
See = Callable[[str, str, FrameType], None]
_see: Optional[See] = None


@contextlib.contextmanager
def watched(see: See) -> Iterator[None]:
    """Within this block, call `see` with the path, the event and the caller's frame before a file is written. Local."""
    global _see
    _listen()
    before, _see = _see, see
    try:
        yield
    finally:
        _see = before


@functools.cache
def _listen() -> None:
    sys.addaudithook(_on_event)  # cannot be removed, so it is added once per process


def _on_event(event: str, args: Any) -> None:
    if _see is not None and event in _WRITTEN:  # most events are others
        for path in _written_by(event, args):
            _see(path, event, sys._getframe(1))


def may_write(flags: int) -> bool:
    """Whether `os.open` with these flags may change a file that has a name."""
    return bool(flags & WRITES) and not (TEMPORARY and flags & TEMPORARY == TEMPORARY)


def _written_by(event: str, args: Any) -> Iterator[str]:
    """Yield the absolute paths that an audit event announces to write: of files, folders, or where nothing is."""
    if event == "open" and not (isinstance(args[2], int) and may_write(args[2])):
        return
    if event == "sqlite3.connect":
        file, is_read = sqlite_file(args[0])
        args = (None if is_read or not file else file,)
    for at, folder in _WRITTEN[event]:
        if isinstance(args[at], (str, bytes, os.PathLike)):
            path, descriptor = os.fsdecode(args[at]), -1 if folder is None else args[folder]
            if not os.path.isabs(path):
                above = posix.getcwd() if descriptor < 0 else posix.readlink(f"/proc/self/fd/{descriptor}")
                path = os.path.join(above, path)
            if not is_special(path):
                yield path


def is_special(path: str) -> bool:
    """Whether it is a pipe, a socket or a device."""
    try:
        mode = posix.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
