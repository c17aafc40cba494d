"""Knows the checkpoints that the program has saved, which the main rank alone writes, and waits for them."""

from __future__ import annotations

import os
import time
from typing import Any

from ddpshim.errors import SyncError
from ddpshim.job.world import World

_TICK_S = 0.05
_THREADS_S = 10.0  # by which a save in a thread may be later than one that the program began after it


class Saves:
    """The saved files by path, alike on all ranks: each makes the same calls. Local: `wait_for` alone waits."""

    def __init__(self, world: World) -> None:
        self._world, self._process = world, os.getpid()
        self._num = 0
        self._num_to: dict[str, int] = {}
        self._is_newer: dict[str, bool] = {}
        self._there: dict[str, tuple[int, int]] = {}  # the number of its save, among all and to that path

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_world": None, "_process": None}  # for a child, which waits for nobody

    def __contains__(self, path: str) -> bool:
        return path in self._there

    def is_newer(self, path: str) -> bool:
        """Whether the main rank has saved to it again by now, which this rank has not; after `wait_for`."""
        return path in self._there and self._is_newer.get(path, False)

    def in_folder(self, folder: str) -> list[str]:
        """The names of those in `folder`."""
        return [os.path.basename(path) for path in self._there if os.path.dirname(path) == folder]

    def note(self, path: str) -> None:
        """It is saved; on the main rank, it has been written."""
        self._num += 1
        self._num_to[path] = self._num_to.get(path, 0) + 1
        self._there[path] = self._num, self._num_to[path]
        if self._world.is_main:
            # In this order: who has seen the number looks for the name.
            self._world.count(f"saved to {path}", 1)
            self._world.count("saved", 1)

    def forget(self, path: str) -> None:
        """It was removed, or is overwritten."""
        self._there.pop(path, None)

    def move(self, source: str, to: str, keeps_source: bool = False) -> None:
        """It was moved, or the folder in which it is; on the main rank, it is there."""
        self.forget(to)
        for path in [path for path in self._there if f"{path}/".startswith(f"{source}/")]:
            self.note(to + path[len(source) :])
            if not keeps_source:
                self.forget(path)

    def wait_for(self, path: str) -> bool:
        """Until the main rank has written it; False where this process cannot tell. Raises SyncError if it will not."""
        if os.getpid() != self._process:
            return False  # a child, which shares its parent's connection
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
