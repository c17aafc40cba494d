"""Replaces names in an unedited trainer's module: how it opens files, its clock, and how it handles exceptions."""

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
    """The state of this process's training, derived from the trainer's calls."""

    def __init__(self) -> None:
        self.has_joined = False
        self.config: Any = None
        self.replay: Optional[Replay] = None
        self.models: list[Any] = []
        self.loaders: dict[int, tuple[Any, DataLoader[Any]]] = {}
        self.loggers: list[Any] = []
        self.has_resumed = self.has_ended = self.is_in_epoch = self.has_warned = False
        self.screen: Any = None  # standard output, while finished epochs are repeated
        self.changed: list[tuple[dict[str, Any], str, Any]] = []  # (a module's globals, name, previous value)


trainer = Trainer()


_MISSING = object()


def replace_names(names: dict[str, Any]) -> None:
    """Replace some `names` of the trainer's module by versions for a rank. Does nothing without a launcher."""
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
    """Restore the names of the trainer's modules. Local."""
    for names, name, value in reversed(trainer.changed):
        names.pop(name, None) if value is _MISSING else names.__setitem__(name, value)
    trainer.changed.clear()


def replaced_names() -> list[str]:
    """Return a line for each name of the trainer that has been replaced."""
    does = {
        "open": "writes on the main rank alone",
        "time": "time() is the main rank's",
        "shutil": "copies, moves and removes on the main rank alone",
        "traceback": "an exception that the trainer catches and prints ends the job",
    }
    lines = [f"{names.get('__name__')}.{name}: {does[name]}" for names, name, _ in trainer.changed]
    return [*lines, "torch.save: where the trainer calls it, on the main rank alone, whole or not"] if lines else []


class _Seen:
    """A module in which some names are replaced."""

    def __init__(self, module: ModuleType, **ours: Any) -> None:
        self.__dict__.update(ours)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    # A trainer that was written for one process means each file to be written once.
    writes = not world().is_main and set(mode) & set("wax+")
    if not set(mode) & set("wax"):
        checkpoint.flush()  # the file may still be written in the background
    return open(os.devnull if writes else file, "w" + "b" * ("b" in mode) if writes else mode, *args, **kwargs)


def _time() -> float:
    return time.time() if trainer.replay is None else trainer.replay.now


def is_past() -> bool:
    """Whether the trainer is in an epoch that an earlier start has finished. Local."""
    return trainer.replay is not None and trainer.replay.is_past


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, limited to the main rank and unfinished epochs; it waits until earlier saves are on disk."""

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
    """Return `traceback`'s function of that name, which first ends the job with the exception being handled."""

    def fail_first(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None and not trainer.has_ended:
            robomimic.failed(error)
        return getattr(traceback, name)(*args, **kwargs)

    return fail_first
