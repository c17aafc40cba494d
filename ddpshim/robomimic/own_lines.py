"""Replaces names in an unedited trainer's module: the files it opens, its clock, what it does with an exception."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import time
import traceback
from types import ModuleType
from typing import Any, Callable, Optional

import torch
from torch.utils.data import DataLoader

from ddpshim.checkpoint import files as checkpoint
from ddpshim.job.group import world
from ddpshim.robomimic import calls as robomimic
from ddpshim.robomimic.replay import Replay
from ddpshim.trainers.swapping import swap


class Trainer:
    """The training that goes on in this process, as its calls show it."""

    def __init__(self) -> None:
        self.has_joined = False
        self.config: Any = None
        self.replay: Optional[Replay] = None
        self.models: list[Any] = []
        self.loaders: dict[int, tuple[Any, DataLoader[Any]]] = {}
        self.loggers: list[Any] = []
        self.has_resumed = self.has_ended = self.is_in_epoch = self.has_warned = False
        self.screen: Any = None  # standard output, while finished epochs are repeated
        self.changed: list[tuple[dict[str, Any], str, Any]] = []  # names of its modules, and what they were


trainer = Trainer()


_MISSING = object()


def replace_names(names: dict[str, Any]) -> None:
    """Give the trainer's module, whose names these are, what fits a rank under some of them. Launched runs only."""
    if not world().is_launched or _are_replaced(names):
        return
    files = {name: _once(getattr(shutil, name)) for name in ("copy", "copy2", "copytree", "move", "rmtree")}
    found = {
        "open": (_MISSING, _open),
        "time": (time, _Seen(time, time=_time)),
        "shutil": (shutil, _Seen(shutil, copyfile=_copyfile, **files)),
        "traceback": (traceback, _Seen(traceback, **{name: _fatal(name) for name in ("format_exc", "print_exc")})),
    }
    for name, (expected, put) in found.items():
        if names.get(name, _MISSING) is expected:
            trainer.changed.append((names, name, expected))
            names[name] = put
    swap("torch.save", inspect.unwrap(torch.save), _save, _are_replaced)


def _are_replaced(names: dict[str, Any]) -> bool:
    return any(names is changed for changed, _, _ in trainer.changed)


def give_back() -> None:
    """Give the trainer's modules their names back. Local."""
    for names, name, value in reversed(trainer.changed):
        names.pop(name, None) if value is _MISSING else names.__setitem__(name, value)
    trainer.changed.clear()


def replaced_names() -> list[str]:
    """A line for each name of the trainer that has been replaced."""
    does = {
        "open": "writes on the main rank alone",
        "time": "time() is the main rank's",
        "shutil": "copies, moves and removes on the main rank alone",
        "traceback": "an exception that the trainer catches and prints ends the job",
    }
    said = [f"{names.get('__name__')}.{name}: {does[name]}" for names, name, _ in trainer.changed]
    return [*said, "torch.save: where the trainer calls it, on the main rank alone, whole or not"] if said else []


class _Seen:
    """A module in which some names are ours."""

    def __init__(self, module: ModuleType, **ours: Any) -> None:
        self.__dict__.update(ours)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    # A trainer that knows of no ranks means each file once.
    writes = not world().is_main and set(mode) & set("wax+")
    if not set(mode) & set("wax"):
        checkpoint.flush()  # it may be what was just saved
    return open(os.devnull if writes else file, "w" + "b" * ("b" in mode) if writes else mode, *args, **kwargs)


def _time() -> float:
    return time.time() if trainer.replay is None else trainer.replay.now


def is_past() -> bool:
    """Whether the trainer is in an epoch that an earlier start of it has done. Local."""
    return trainer.replay is not None and trainer.replay.is_past


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on the main rank, and not in epochs that are done; what was saved before is on the disk by then."""

    @functools.wraps(function)
    def on_main(*args: Any, **kwargs: Any) -> Any:
        if not world().is_main or is_past():
            return None
        checkpoint.flush()
        return function(*args, **kwargs)

    return on_main


def _save(original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    if world().is_main and not is_past():
        checkpoint.save_whole(original, obj, f, *args, **kwargs)


def _copyfile(source: str, path: str, **options: Any) -> Any:
    if not is_past():
        robomimic.copyfile(source, path)
    return path


def _fatal(name: str) -> Callable[..., Any]:
    """The function of that name of `traceback`, before which the exception that is being handled ends the job."""

    def fail_first(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None and not trainer.has_ended:
            robomimic.failed(error)
        return getattr(traceback, name)(*args, **kwargs)

    return fail_first
