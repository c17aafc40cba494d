"""Tells the other ranks what the main rank changes on disk: the previous state of files, and checkpoints it has saved.

Before the main rank changes a path for the first time, it puts the path's state into the job's store; other ranks read
it if a file on disk looks newer than the job. So each rank sees the files as they were when the job began, whichever
rank is ahead, and `exists`, `glob` and `listdir` give the same answers.
"""

from __future__ import annotations

import _io
import contextlib
import functools
import os
import posix
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType
from typing import Any, Callable, NamedTuple, Optional

from ddpshim.errors import SyncError
from ddpshim.job.collectives import main_sets
from ddpshim.job.world import World
from ddpshim.process import messages
from ddpshim.process.job_store import is_there
from ddpshim.process.replaced import replaced
from ddpshim.trainers.unedited.file_calls import LeftAlone

_MOST_BYTES = 64 << 10  # larger files are sent without content: other ranks know only that they existed
_MOST_BYTES_KEPT = 4 << 20  # of a database, which all ranks open to change it; torch's store takes 8 MB
_SLACK_S = 60.0  # the clock of a file server may be behind by this
_LOOK_EVERY_S = 1.0
_THREADS_S = 10.0  # a save in a thread may end this much later than one that began after it


class Before(NamedTuple):
    """The state of `path` before the main rank changed it."""

    path: str
    kind: str  # nothing, folder, link or file; "shared": from now on all ranks see the main rank's file at `path`
    content: Optional[bytes] = None  # a link's target or a file's bytes; None for a large file
    size: int = 0
    modified_ns: int = 0
    mode: int = 0


class MainsChanges:
    """Sends changes with `tell` on the main rank, receives them with `news` on the others. Local: never waits.

    Inactive in child processes: they share their rank's connection to the store and must not use it.
    """

    def __init__(self, world: World, started: float) -> None:
        """`started`: time before the ranks of this `world` met, by the clock of the file system."""
        self._world, self._since = world, started - _SLACK_S
        self._process, self._lock = os.getpid(), threading.RLock()
        self._sent: dict[str, str] = {}
        self._num_read, self._is_apart = 0, False

    def __getstate__(self) -> dict[str, Any]:
        return {"_process": None}  # inactive in a child process

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the main rank's changes are shown to all ranks."""
        return replaced(self, "_is_apart", True)

    def tell(self, path: str, most_bytes: int = _MOST_BYTES) -> None:
        """Send the state of `path` (absolute, its folder without links). Call before the main rank changes it."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._is_apart:
                before = Before(path, "shared")
            elif path in self._sent or any(self._sent.get(str(above)) == "nothing" for above in PurePath(path).parents):
                return  # told already, or in a folder that the main rank has made, which other ranks do not see
            else:
                before = state_of(path, most_bytes)
                self._sent[path] = before.kind
            number = self._world.count("files changed")
            self._world._job.store.set(f"files changed/{number}", messages.packed([*before]))
            self._world.count("files changed", 1)  # last: a rank that sees the new number reads the message

    def tell_all(self, path: str) -> None:
        """`tell` for `path` and, if it is a folder, for everything in it. Call before it is moved."""
        self.tell(path)
        if self._sent.get(path) == state_of(path).kind == "folder":
            for name in posix.listdir(path):
                self.tell_all(os.path.join(path, name))

    def remove_new(self) -> None:
        """Remove what the main rank has made where nothing was: a restarted program would make it again. Local."""
        for path in [path for path, kind in self._sent.items() if kind == "nothing"]:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    posix.unlink(path)

    def states(self) -> dict[str, Any]:
        """Return {path: (mtime, size, inode)} of the paths that other ranks do not see as they are on disk."""
        found, waiting = dict[str, Any](), [*self._sent]
        while waiting:
            path = waiting.pop()
            with contextlib.suppress(OSError):
                info = posix.lstat(path)
                if stat.S_ISDIR(info.st_mode) and self._sent.get(path, "nothing") == "nothing":
                    waiting += [os.path.join(path, name) for name in posix.listdir(path)]
                found[path] = info.st_mtime_ns, info.st_size, info.st_ino
        return found

    def may_have_changed(self, path: str) -> bool:
        """Whether `path` may have changed since the job began, by the clock of its file system."""
        if os.getpid() != self._process:
            return False
        while True:
            try:
                info = posix.lstat(path)
            except OSError:
                if path == os.path.dirname(path):
                    return False
                path = os.path.dirname(path)  # if it was removed, its folder has changed
            else:
                return max(info.st_ctime, info.st_mtime) >= self._since

    def news(self) -> Iterator[Before]:
        """Yield the changes that the main rank has sent since the last call."""
        if os.getpid() != self._process:
            return
        with self._lock:
            for number in range(self._num_read, self._world.count("files changed")):
                self._num_read = number + 1
                message: Any = messages.unpacked(self._world._job.store.get(f"files changed/{number}"), 0)
                yield Before(*message)


def state_of(path: str, most_bytes: int = -1) -> Before:
    """Return the current state of `path`, with a file's content if that has at most so many bytes. Local."""
    try:
        info = posix.lstat(path)
    except OSError:
        return Before(path, "nothing")
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISDIR(info.st_mode):
        return Before(path, "folder", mode=mode)
    if stat.S_ISLNK(info.st_mode):
        return Before(path, "link", os.fsencode(posix.readlink(path)))
    content = None
    if info.st_size <= most_bytes and stat.S_ISREG(info.st_mode):
        with _io.open(path, "rb") as file:
            content = file.read(most_bytes)
    return Before(path, "file", content, info.st_size, info.st_mtime_ns, mode)


class MainsWrites:
    """On the main rank: reports files to the other ranks before the program writes them. Local."""

    def __init__(self, changes: MainsChanges, saves: MainsSaves, left: LeftAlone) -> None:
        self._changes, self._saves, self._left = changes, saves, left

    def see(self, path: str, event: str, frame: FrameType, source: str) -> None:
        """Report what an audit event announces to write (`file_calls.watched`)."""
        if self._left.takes_note(path, frame) or self._left.has(path) or self._left.is_asked_by(frame):
            return
        found = without_links(path, follows=event in ("open", "kept", "os.truncate", "sqlite3.connect"))
        self._changes.tell(found, _MOST_BYTES_KEPT if event == "kept" else _MOST_BYTES)
        if event not in ("os.rename", "os.link"):
            self._saves.forget(found)

    def stand_ins(self) -> dict[int, Any]:
        """Return functions that report a move when it is done, by the id of the function that each replaces."""
        return {id(real): functools.partial(self._move, real) for real in (posix.rename, posix.replace, posix.link)}

    def _move(self, real: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> None:
        keeps_source = real is posix.link
        given = [os.path.abspath(os.fsdecode(path)) for path in (src, dst)]
        source, to = without_links(given[0], keeps_source), without_links(given[1], follows=False)
        is_asked = self._left.is_asked_by(sys._getframe(1))
        if not (keeps_source or is_asked or self._left.has(given[0])):
            self._changes.tell_all(source)
        real(src, dst, **kwargs)
        if not (is_asked or any(map(self._left.has, given))):
            self._saves.move(source, to, keeps_source)


def without_links(path: str, follows: bool) -> str:
    """Return an absolute path without links; `follows`: also resolve its last part."""
    folder, name = os.path.split(path)
    return os.path.realpath(path) if follows else os.path.join(os.path.realpath(folder), name)


class MainsSaves:
    """The saved files by path, the same on all ranks, which make the same calls. Local; only `wait_for` waits."""

    def __init__(self, world: World) -> None:
        self._world, self._process = world, os.getpid()
        self._num = 0
        self._num_to: dict[str, int] = {}
        self._there: dict[str, int] = {}  # the number of its last save, among all

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_world": None, "_process": None}  # a child process does not wait

    def __contains__(self, path: str) -> bool:
        return path in self._there

    def is_newer(self, path: str) -> bool:
        """Whether the main rank has saved to `path` more often than this rank; False in a child process."""
        is_known = path in self._there and os.getpid() == self._process
        return is_known and is_there(self._world._job.store, self._key(path, self._num_to[path] + 1))

    def note(self, path: str) -> None:
        """Record a save to `path`. On the main rank, call it after the file is written."""
        self._num += 1
        self._num_to[path] = self._num_to.get(path, 0) + 1
        self._there[path] = self._num
        if os.getpid() == self._process and self._world.is_main:
            self._world._job.store.set(self._key(path, self._num_to[path]), messages.packed([*state_of(path)]))
            self._world.count("saved", 1)

    def _key(self, path: str, number: int) -> str:
        return messages.key(f"save {number} to {path}")

    def state(self, path: str) -> Before:
        """Return what the main rank had at `path` after this save. Valid after `wait_for`."""
        message: Any = messages.unpacked(self._world._job.store.get(self._key(path, self._num_to[path])), 0)
        return Before(*message)

    def forget(self, path: str) -> None:
        """Drop `path`, which was removed or overwritten."""
        self._there.pop(path, None)

    def move(self, source: str, to: str, keeps_source: bool = False) -> None:
        """Record that a file, or a folder with files, was moved. On the main rank, call it after the move."""
        self.forget(to)
        for path in [path for path in self._there if f"{path}/".startswith(f"{source}/")]:
            self.note(to + path[len(source) :])
            if not keeps_source:
                self.forget(path)

    def wait_for(self, path: str) -> bool:
        """Wait until the main rank has written `path`; return False in a child process, which cannot wait.

        Raises SyncError if the main rank does not write it in time, and WorldError if a rank has failed.
        """
        if os.getpid() != self._process:
            return False  # a child shares its parent's connection to the store and must not use it
        here, number, timeout_s = self._world, self._there[path], self._world.options.timeout_s
        key, end = self._key(path, self._num_to[path]), time.monotonic() + timeout_s
        while not main_sets(here, key, min(end, time.monotonic() + _LOOK_EVERY_S)):
            if time.monotonic() > end:
                raise SyncError(
                    f"rank {here.rank} is to load {path}, its save number {number}, but of the main rank's "
                    f"{here.count('saved')} saves none that it waited for (up to {timeout_s:g} s) was to that path; it "
                    "would load a different model, or none. Make file names and decisions equal on all ranks: do not "
                    "base them on local numbers, or on files that another job makes in this folder meanwhile."
                )
            if here.count("saved") >= number:
                end = min(end, time.monotonic() + _THREADS_S)
        return True
