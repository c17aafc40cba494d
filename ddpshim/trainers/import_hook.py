"""Hooks an unedited trainer: each module as it is imported, or at once if it has been.

Imports nothing but the standard library until a program imports a package that an adapter has stand-ins for; a program
that does not is left alone.
"""

from __future__ import annotations

import importlib.abc
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional

from ddpshim import adapters
from ddpshim.errors import OptionsError
from ddpshim.trainers.swapping import at_stand_aside
from ddpshim.variables import HOOKS

if TYPE_CHECKING:
    from ddpshim.trainers.interface import StandIns


class _State:
    finder: Optional[_Finder] = None
    said: list[str]
    reason = "ddpshim.auto has not been imported"

    def __init__(self) -> None:
        self.said = []


_state = _State()


def activate() -> None:
    """Hook the installed trainer that an adapter knows, now or when it is imported. Local.

    Nothing in a data worker or another child of multiprocessing, nor with DDPSHIM_HOOKS=off. Raises HookError where
    it has been imported and is not one that the hooks know.
    """
    if _state.finder is not None:
        return
    choice = os.environ.get(HOOKS, "on").strip().lower()
    if choice not in ("on", "off"):
        raise OptionsError(f"{HOOKS}={choice!r}: the trainer would be hooked or not by chance. Use on or off.")
    if choice == "off":
        _state.reason = f"{HOOKS}=off"
        return
    if _is_child():
        _state.reason = "this is a child of multiprocessing, which does not train"
        return
    _state.finder = _Finder()
    at_stand_aside(_give_back)
    for package in adapters.packages():
        stand_ins = _stand_ins(package) if package in sys.modules else None
        if stand_ins is not None:
            loaded = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
            try:
                stand_ins.begin(sys.modules[package].__path__[0])
                _hook(stand_ins, [module for module in loaded if module is not None])
            except BaseException:
                _state.finder = None
                raise
    sys.meta_path.insert(0, _state.finder)
    # Before threads are joined, for the job may have to be ended, and that takes one. (atexit would be too late.)
    threading._register_atexit(_end)  # type: ignore[attr-defined]


def deactivate() -> None:
    """Give the trainer back as it was. Local. Raises HookError in the middle of a training on several ranks."""
    for stand_ins in _begun():
        stand_ins.unhook()
    if _state.finder in sys.meta_path:
        sys.meta_path.remove(_state.finder)
    _state.finder, _state.reason = None, "it was deactivated"
    _state.said.clear()


def is_active() -> bool:
    """Whether a trainer is hooked, or will be when it is imported. Local."""
    return _state.finder is not None


def report() -> list[str]:
    """A line for each symbol that is hooked so far, and what that does; or why there is none. Local."""
    if _state.finder is None:
        return [f"not active: {_state.reason}"]
    if not _begun():
        return [f"active, but {' or '.join(adapters.packages())} has not been imported"]
    return [*_state.said, *(line for stand_ins in _begun() for line in stand_ins.replaced_names())]


def _is_child() -> bool:
    # A spawned worker executes the main module before it knows its parent.
    is_inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_inheriting or multiprocessing.parent_process() is not None


def _give_back() -> None:
    deactivate()
    _state.reason = "the trainer does by itself what the hooks are for"


def _end() -> None:
    for stand_ins in _begun():
        stand_ins.end()


def _stand_ins(package: str) -> Optional[StandIns]:
    offer = adapters.function(package, "stand_ins")
    return None if offer is None else offer()


def _begun() -> list[StandIns]:
    return [] if _state.finder is None else _state.finder.begun


def _hook(stand_ins: StandIns, modules: Sequence[ModuleType]) -> None:
    assert _state.finder is not None
    _state.said += stand_ins.hook(modules)
    if stand_ins not in _state.finder.begun:
        _state.finder.begun.append(stand_ins)


class _Finder(importlib.abc.MetaPathFinder):
    """Has modules found as ever, and hooks those that concern an adapter when they have been executed."""

    _is_looking = False

    def __init__(self) -> None:
        self.begun: list[StandIns] = []

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        package = name.partition(".")[0]
        if self._is_looking or package not in adapters.packages():
            return None
        stand_ins = _stand_ins(package)
        if stand_ins is None or not (name == package or stand_ins.concerns(name)):
            return None
        self._is_looking = True
        try:
            finders = (finder for finder in sys.meta_path if finder is not self)
            found = (finder.find_spec(name, path, target) for finder in finders)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        if name == package:
            stand_ins.begin(next(iter(spec.submodule_search_locations or ())))
            if stand_ins not in self.begun:
                self.begun.append(stand_ins)
        else:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_hook(module: ModuleType) -> None:
                execute(module)
                _hook(stand_ins, [module])

            loader.exec_module = execute_and_hook
        return spec
