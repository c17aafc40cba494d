"""Lets only the main rank write, in a program that does not know of ranks: torch.save, torch.load, os.mkdir."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any, Callable

import torch

from ddpshim.checkpoint import files as checkpoint
from ddpshim.errors import SyncError
from ddpshim.job.replaced import replaced
from ddpshim.job.world import World

_TICK_S = 0.05


class OneWriter:
    """Puts its own `save`, `load` and `mkdir` in the place of torch's and Python's. Local: ranks wait only to load.

    Files that a dataset keeps for its samples are left alone (`is_reading`, and data workers): each rank has others.
    """

    def __init__(self, world: World, started: float, is_reading: Callable[[], bool]) -> None:
        """`started`: a moment before the ranks of this `world` met, by the clock of files."""
        self._world, self._started, self._is_reading = world, started, is_reading
        self._process = os.getpid()
        self._save, self._load, self._mkdir = torch.save, torch.load, os.mkdir
        self._numbers: dict[str, int] = {}  # of the last save to each path, among all saves of the program
        self._num_saves = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In this block the program's calls come here."""
        with contextlib.ExitStack() as undo:
            for module in (torch, torch.serialization):
                undo.enter_context(replaced(module, "save", self.save))
                undo.enter_context(replaced(module, "load", self.load))
            undo.enter_context(replaced(os, "mkdir", self.mkdir))
            accessor = getattr(pathlib, "_NormalAccessor", None)
            if accessor is not None:  # Python 3.9 and 3.10: Path.mkdir has its own name for os.mkdir
                undo.enter_context(replaced(accessor, "mkdir", staticmethod(self.mkdir)))
            if not self._world.is_main:
                os.environ["WANDB_MODE"] = "disabled"  # each rank would be a run of its own
            yield

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """torch.save; to a path, the main rank's alone, and the file is whole or absent."""
        if not self._is_shared(f):
            self._save(obj, f, *args, **kwargs)
            return
        path = os.path.abspath(f)
        self._num_saves += 1
        self._numbers[path] = self._num_saves
        if self._world.is_main:
            checkpoint.save_whole(self._save, obj, path, *args, **kwargs)
            # In this order: who has seen the number looks for the name.
            self._world.count(f"saved to {path}", 1)
            self._world.count("saved", 1)

    def load(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """torch.load; of a path that the program has saved to, when the main rank has written it."""
        if self._is_shared(f) and not self._world.is_main:
            self._wait_for(os.path.abspath(f))
        return self._load(f, *args, **kwargs)

    def mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """os.mkdir; a directory that a peer has made since the start is as good as one's own."""
        try:
            self._mkdir(path, *args, **kwargs)
        except FileExistsError:
            with contextlib.suppress(OSError):
                if os.path.isdir(path) and os.stat(path).st_ctime >= self._started:
                    return
            raise

    def _is_shared(self, f: Any) -> bool:
        """Whether all ranks mean the same file by `f`."""
        if not isinstance(f, (str, os.PathLike)) or os.getpid() != self._process or self._is_reading():
            return False
        return os.path.isfile(f) or not os.path.exists(f)  # no pipe, no device

    def _wait_for(self, path: str) -> None:
        number, timeout_s = self._numbers.get(path), self._world.options.timeout_s
        if number is None:
            return  # it was there before
        end = time.monotonic() + timeout_s
        while self._world.count("saved") < number and time.monotonic() < end:
            time.sleep(_TICK_S)
        num_saves = self._world.count("saved")
        if num_saves < number or not self._world.count(f"saved to {path}"):
            raise SyncError(
                f"rank {self._world.rank} is to load {path}, its save number {number}, but of the main rank's "
                f"{num_saves} saves none that it waited for (up to {timeout_s:g} s) was to that path; it would load "
                "another model, or none. Let names and decisions be alike on all ranks: by no clock, and by no loss "
                "of a training pass, of which each rank sees its share."
            )
