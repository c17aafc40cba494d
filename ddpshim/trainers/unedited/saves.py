"""Records the checkpoints that the program has saved, which only the main rank writes, and waits for them."""

from __future__ import annotations

import os
import time
from typing import Any

from ddpshim.errors import SyncError
from ddpshim.job.world import World

_TICK_S = 0.05
_THREADS_S = 10.0  # a save in a thread may end this much later than one that began after it


class Saves:
    """The saved files by path, the same on all ranks, which make the same calls. Local; only `wait_for` waits."""

    def __init__(self, world: World) -> None:
        self._world, self._process = world, os.getpid()
        self._num = 0
        self._num_to: dict[str, int] = {}
        self._is_newer: dict[str, bool] = {}
        self._there: dict[str, tuple[int, int]] = {}  # the number of its last save, among all and among those to it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_world": None, "_process": None}  # a child process does not wait

    def __contains__(self, path: str) -> bool:
        return path in self._there

    def is_newer(self, path: str) -> bool:
        """Whether the main rank has saved to `path` more often than this rank. Valid after `wait_for`."""
        return path in self._there and self._is_newer.get(path, False)

    def in_folder(self, folder: str) -> list[str]:
        """Return the names of the saved files in `folder`."""
        return [os.path.basename(path) for path in self._there if os.path.dirname(path) == folder]

    def note(self, path: str) -> None:
        """Record a save to `path`. On the main rank, call it after the file is written."""
        self._num += 1
        self._num_to[path] = self._num_to.get(path, 0) + 1
        self._there[path] = self._num, self._num_to[path]
        if self._world.is_main:
            # In this order: `wait_for` takes the total as proof that the count of each path is up to date.
            self._world.count(f"saved to {path}", 1)
            self._world.count("saved", 1)

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

        Raises SyncError if the main rank does not write it in time.
        """
        if os.getpid() != self._process:
            return False  # a child shares its parent's connection to the store and must not use it
        count, timeout_s = self._world.count, self._world.options.timeout_s
        number, number_to_path = self._there[path]
        end, is_late = time.monotonic() + timeout_s, False
        while (found := count(f"saved to {path}")) < number_to_path and time.monotonic() < end:
            if not is_late and count("saved") >= number:
                is_late, end = True, min(end, time.monotonic() + _THREADS_S)
            time.sleep(_TICK_S)
        self._is_newer[path] = found > number_to_path
        if found < number_to_path:
            raise SyncError(
                f"rank {self._world.rank} is to load {path}, its save number {number}, but of the main rank's "
                f"{count('saved')} saves none that it waited for (up to {timeout_s:g} s) was to that path; it would "
                "load a different model, or none. Make file names and decisions equal on all ranks: do not base "
                "them on a rank's own training loss."
            )
        return True
