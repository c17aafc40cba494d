"""Knows whether this rank holds the lock of a file that all ranks share, such as that of a library's cache.

Ranks get such a lock one after the other, and the first does the work for all. While it does, it must not wait for the
main rank, which may wait for the lock; and what it asks, the others never ask.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from typing import Any, Callable

from ddpshim.trainers.unedited.holders import in_place
from ddpshim.trainers.unedited.unmanaged_paths import LeftAlone


class Locks:
    """Replaces `fcntl.flock` and `fcntl.lockf`, which tell it what the main thread locks. Local."""

    def __init__(self) -> None:
        self._places, self._held = LeftAlone(), dict[int, str]()  # the file of each locked descriptor

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this block, locks are noted."""
        with in_place({id(real): self._noted(real) for real in (fcntl.flock, fcntl.lockf)}):
            yield

    def held(self) -> str:
        """Return a file that the main thread, which asks, has locked; "" if there is none."""
        if not self._held or threading.current_thread() is not threading.main_thread():
            return ""
        return next((file for number, file in self._held.items() if _file_of(number) == file), "")  # else it is closed

    def _noted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(fd: Any, operation: int, *rest: Any) -> Any:
            answer = real(fd, operation, *rest)
            number = fd if isinstance(fd, int) else fd.fileno()
            file = _file_of(number)
            if operation & fcntl.LOCK_UN:
                self._held.pop(number, None)
            elif threading.current_thread() is threading.main_thread() and self._places.has(file):
                self._held[number] = file
            return answer

        return stand_in


def _file_of(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""
