"""Distributes an unedited trainer: patches it in memory if it is the program, hooks its functions if one imports it.

Imports nothing but the standard library until a program imports a package that has an adapter; other programs are left
alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional

from ddpshim import adapters
from ddpshim.errors import HookError, OptionsError
from ddpshim.job import unshared
from ddpshim.trainers.swapping import at_stand_aside
from ddpshim.variables import HOOKS

if TYPE_CHECKING:
    from ddpshim.trainers.interface import StandIns
    from ddpshim.trainers.patching.in_memory import PatchedFiles


@dataclass
class _State:
    finder: Optional[_Finder] = None
    said: list[str] = field(default_factory=list)
    files: list[PatchedFiles] = field(default_factory=list)
    reason: str = "ddpshim.auto has not been imported"


_state = _State()


def activate() -> None:
    """Hook installed trainers that have an adapter, now or when they are imported. Local.

    Does nothing in a data worker or another child of multiprocessing, nor with DDPSHIM_HOOKS=off. Raises HookError if a
    trainer is already imported and does not match its hooks.
    """
    if _state.finder is not None:
        return
    choice = os.environ.get(HOOKS, "on").strip().lower()
    if choice not in ("on", "off"):
        raise OptionsError(f"{HOOKS}={choice!r}: whether to hook the trainer is unclear. Use on or off.")
    if choice == "off":
        _state.reason = f"{HOOKS}=off"
        return
    # A spawned worker executes the main module before `parent_process()` returns its parent.
    is_inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if is_inheriting or multiprocessing.parent_process() is not None:
        _state.reason = "this is a child of multiprocessing, which does not train"
        return
    unshared.watch()
    _state.finder = _Finder()
    at_stand_aside(_give_back)
    sys.meta_path.insert(0, _state.finder)
    for package in adapters.packages():
        if package in sys.modules:
            loaded = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
            try:
                stand_ins = _begin(package, sys.modules[package].__path__[0])
                if stand_ins is not None:
                    _hook(stand_ins, [module for module in loaded if module is not None])
            except BaseException:
                deactivate()
                raise
    # Runs before threads are joined, because ending the job may need a thread; atexit would be too late.
    threading._register_atexit(_end)  # type: ignore[attr-defined]


def deactivate() -> None:
    """Restore the trainer, except modules that were loaded patched: in one process they do the same. Local.

    Raises HookError during a training on several ranks.
    """
    for stand_ins in _begun():
        stand_ins.unhook()
    for finder in (_state.finder, *_state.files):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    _state.finder, _state.reason = None, "it was deactivated"
    _state.said.clear()
    _state.files.clear()


def is_active() -> bool:
    """Whether a trainer is hooked, or will be when it is imported. Local."""
    return _state.finder is not None


def report() -> list[str]:
    """Return a line for each function hooked and each module patched so far, or the reason why there is none. Local."""
    patched = [line for files in _state.files for line in files.report()]
    if _state.finder is None:
        return [*patched, f"not active: {_state.reason}"]
    if not (_begun() or patched):
        return [f"active, but {' or '.join(adapters.packages())} has not been imported"]
    return [*_state.said, *patched, *(line for stand_ins in _begun() for line in stand_ins.replaced_names())]


def set_in_memory(package: str) -> Optional[str]:
    """Return the name of the patch set that has patched modules of `package` in memory; None if none has. Local."""
    found = (files.set_name for files in _state.files if files.folder.name == package)
    return next((name for name in found if name is not None), None)


def _give_back() -> None:
    files, finder = [*_state.files], _state.finder
    at = sys.meta_path.index(finder) if finder in sys.meta_path else 0
    deactivate()
    _state.files = files  # modules that the trainer imports later must still be patched
    sys.meta_path[at:at] = files
    _state.reason = "the trainer itself does what the hooks do"


def _end() -> None:
    for stand_ins in _begun():
        stand_ins.end()


def program_in(path: str) -> Optional[str]:
    """Return the module name of the file `path` if a patch set of an installed package changes it; else None. Local."""
    file = Path(path).resolve()
    for package in adapters.packages() if _state.finder is not None else ():
        if package in file.parts and importlib.util.find_spec(package) is not None:
            for files in _state.files:
                name = files.module_at(file)
                if name is not None:
                    return name
    return None


def refused(name: str) -> Optional[HookError]:
    """Return the error if the module `name` could not be patched in memory; None if it was or need not be. Local."""
    module = sys.modules.get(name)
    found = (files.refuse(module) for files in _state.files if module is not None)
    return next((error for error in found if error is not None), None)


def _stand_ins(package: str) -> Optional[StandIns]:
    offer = adapters.function(package, "stand_ins")
    return None if offer is None else offer()


def _begin(package: str, folder: str) -> Optional[StandIns]:
    """Prepare patches and stand-ins of the package in `folder`, before its modules are loaded if possible."""
    from ddpshim.trainers.patching.in_memory import PatchedFiles

    stand_ins = _stand_ins(package)
    is_library = stand_ins.is_patched if stand_ins is not None else lambda name: False
    files = PatchedFiles(Path(folder), is_library=is_library)
    assert _state.finder is not None
    _state.files.append(files)
    _state.finder.begun[package] = stand_ins
    sys.meta_path.insert(sys.meta_path.index(_state.finder) + 1, files)
    if stand_ins is not None:
        stand_ins.begin()
    return stand_ins


def _begun() -> list[StandIns]:
    begun = {} if _state.finder is None else _state.finder.begun
    return [stand_ins for stand_ins in begun.values() if stand_ins is not None]


def _hook(stand_ins: StandIns, modules: Sequence[ModuleType]) -> None:
    _state.said += stand_ins.hook(modules)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find modules, and hooks those that concern an adapter after they were executed."""

    _is_looking = False

    def __init__(self) -> None:
        self.begun: dict[str, Optional[StandIns]] = {}

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        package = name.partition(".")[0]
        if self._is_looking or package not in adapters.packages():
            return None
        stand_ins = _stand_ins(package)
        if name != package and (stand_ins is None or not stand_ins.concerns(name)):
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
            if package not in self.begun:
                _begin(package, next(iter(spec.submodule_search_locations or ())))
        elif stand_ins is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_hook(module: ModuleType) -> None:
                execute(module)
                _hook(stand_ins, [module])

            loader.exec_module = execute_and_hook
        return spec
