"""Holds all state of this process's job, which `cleanup()` replaces by an empty one, and its seeds."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, Union

if TYPE_CHECKING:
    from ddpshim.failures.failure import Watched
    from ddpshim.job.world import World

P = TypeVar("P")


@dataclass(frozen=True)
class Door:
    """What a program holds of a batch, as `setup(batch=...)` says: "local", its share (torch's DDP), or "global", all.

    With "global", and so under `run`, each rank runs the program of one process, and gets what these functions make.
    """

    batch: str = "local"
    wrapper: Optional[Callable[..., Any]] = None  # reduces a network's gradients; None: DistributedDataParallel does
    loader: Optional[Callable[..., Any]] = None  # makes that of `make_loader`; None: one of this rank's shares
    joined: Optional[Callable[..., Any]] = None  # makes that of data of which each rank reads a part of its own

    @property
    def computes_alike(self) -> bool:
        """Whether all ranks draw and compute what one process would, also what no wrapper has reduced."""
        return self.batch == "global"


class Job:
    """A job, from before `setup()` to `cleanup()`."""

    def __init__(self, left: Optional[World] = None, watched: Optional[Watched] = None) -> None:
        self.world: Optional[World] = None  # that `setup` made
        self.left = left  # of the previous job; its rank remains valid
        self.door = Door()
        self.store: Any = None  # keys and values that all ranks of this world, and no other world, see
        self.second_store: Any = None  # another connection to it, for the thread that watches; None if torch makes none
        self.group: Any = None  # the default process group, if `setup` made it
        self.control: Any = None  # the CPU group of World's own collectives
        self.timeout: Optional[timedelta] = None  # how long training collectives wait, if `setup` made the group
        self.has_networks = False  # `wrap_parallel` was called, so that all ranks have the main rank's weights
        self.is_split = False  # ranks have random streams of their own
        self.watched = watched  # set by `failure.arm`; of a job that failed until the next one is armed
        self.num_collectives: Optional[int] = None  # of the default group when the job began; None if unknown
        # Callbacks that `leave`, and so `cleanup()`, calls, each stack in reverse order.
        self.before_end, self.at_end = contextlib.ExitStack(), contextlib.ExitStack()
        self._numbers: dict[str, int] = {}
        self._parts: dict[type, Any] = {}

    def part(self, kind: type[P]) -> P:
        """Return this job's one object of class `kind`, made on first use. It holds a module's state. Local."""
        made: Optional[P] = self._parts.get(kind)
        if made is None:
            made = self._parts[kind] = kind()
        return made

    def is_failing(self) -> bool:
        """Return whether an error is ending this rank. Local."""
        return self.watched is not None and self.watched.ending.locked()

    def next_number(self, name: str) -> int:
        """Return how often this was called for `name` before; equal on ranks that call it equally often. Local."""
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        return number


_current = Job()


def current() -> Job:
    """Return the job that this process is in, or that `setup` would join. Local."""
    return _current


def leave(ended: Job) -> None:
    """Call the callbacks of `before_end`, then of `at_end`, and replace the current job, `ended`, with an empty one.

    Local. Raises what a callback raises.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(begin_next, ended.left, ended.watched)
        stack.callback(ended._parts.clear)
        stack.callback(ended.at_end.close)
        ended.before_end.close()


def begin_next(left: Optional[World] = None, watched: Optional[Watched] = None) -> None:
    """Replace the current job with an empty one, after one whose world was `left`. Local."""
    global _current
    _current = Job(left, watched)


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), random, and numpy if it is loaded. Local."""
    import torch  # not at the top: a program decides when it is imported

    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def derive_seed(seed: int, *scope: Union[int, str]) -> int:
    """Return a 63-bit seed derived from `seed` and a purpose, the same on every machine. Local."""
    text = "/".join(str(part) for part in (seed, *scope)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
