"""Holds all state of this process's job; `cleanup()` replaces it with an empty one.

State that outlives a job belongs to the process: see the list in tests/test_layout.py.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from ddpshim.job.progress import Progress

if TYPE_CHECKING:
    from ddpshim.job.failure import Watched
    from ddpshim.job.world import World

P = TypeVar("P")


class Job:
    """A job, from before `setup()` to `cleanup()`.

    Attributes:
        world: what `setup` made; None before.
        left: the world of the job before this one: its rank is still true.
        store: keys and values that all ranks of this world, and no other world, see; None without other ranks.
        group: the default process group, if `setup` made it.
        control: the CPU group of World's own collectives.
        timeout: of training collectives, if `setup` made the group.
        has_networks: whether `wrap_parallel` was called, so that all ranks have the main rank's weights.
        has_own_batches: whether ranks train on batches that are not shares of one process's, each with its own noise.
        is_split: whether ranks have random streams of their own.
        watched: what `failure.arm` has put in place.
        before_end, at_end: what `end` calls, in reverse order.
        progress: what this rank has done so far.
    """

    def __init__(self) -> None:
        self.world: Optional[World] = None
        self.left: Optional[World] = None
        self.store: Any = None
        self.group: Any = None
        self.control: Any = None
        self.timeout: Optional[timedelta] = None
        self.has_networks = self.has_own_batches = self.is_split = False
        self.watched: Optional[Watched] = None
        self.before_end, self.at_end = contextlib.ExitStack(), contextlib.ExitStack()
        self.progress = Progress()
        self._numbers: dict[str, int] = {}
        self._parts: dict[type, Any] = {}

    def part(self, kind: type[P]) -> P:
        """This job's one object of that class, made on first use: a module's state in a job. Local."""
        made: Optional[P] = self._parts.get(kind)
        if made is None:
            made = self._parts[kind] = kind()
        return made

    def end(self) -> None:
        """Call everything registered for the end, and drop the modules' state. Local."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._parts.clear)
            stack.callback(self.at_end.close)
            self.before_end.close()

    def next_number(self, name: str) -> int:
        """How often this was called for `name` before: equal on ranks that call it equally often. Local."""
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        return number


_current = Job()


def current() -> Job:
    """The job that this process is in, or would join. Local."""
    return _current


def begin_next() -> Job:
    """Put an empty job in the place of the current one, which is returned. Local."""
    global _current
    ended, _current = _current, Job()
    return ended
