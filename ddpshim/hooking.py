"""When robomimic is hooked: as each module that concerns us is loaded, or at once where it has been already.

Imports nothing but the standard library until a program imports robomimic; one that doesn't is left alone.
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
from typing import Any, Optional

from ddpshim.errors import OptionsError
from ddpshim.swapping import at_stand_aside

VARIABLE = "DDPSHIM_HOOKS"
_PACKAGE = "robomimic"


class _State:
    finder: Optional[_Finder] = None
    said: list[str]
    reason = "ddpshim.auto has not been imported"

    def __init__(self) -> None:
        self.said = []


_state = _State()


def activate() -> None:
    """Hook the installed robomimic, now or when it is imported. Local.

    Nothing in a data worker or another child of multiprocessing, nor with DDPSHIM_HOOKS=off. Raises HookError where
    robomimic has been imported and is not one that the hooks know.
    """
    if _state.finder is not None:
        return
    choice = os.environ.get(VARIABLE, "on").strip().lower()
    if choice not in ("on", "off"):
        raise OptionsError(f"{VARIABLE}={choice!r}: robomimic would be hooked or not by chance. Use on or off.")
    if choice == "off":
        _state.reason = f"{VARIABLE}=off"
        return
    if _is_child():
        _state.reason = "this is a child of multiprocessing, which does not train"
        return
    _state.finder = _Finder()
    at_stand_aside(_give_back)
    loaded = [module for name, module in sys.modules.items() if name.startswith(f"{_PACKAGE}.")]
    if _PACKAGE in sys.modules:
        try:
            _hook([module for module in loaded if module is not None], sys.modules[_PACKAGE])
        except BaseException:
            _state.finder = None
            raise
    sys.meta_path.insert(0, _state.finder)
    # Before threads are joined, for the job may have to be ended, and that takes one. (atexit would be too late.)
    threading._register_atexit(_end)  # type: ignore[attr-defined]


def deactivate() -> None:
    """Give robomimic back as it was. Local. Raises HookError in the middle of a training on several ranks."""
    if _state.finder is not None and _state.finder.has_begun:
        from ddpshim import hooks

        hooks.unhook()
    if _state.finder in sys.meta_path:
        sys.meta_path.remove(_state.finder)
    _state.finder, _state.reason = None, "it was deactivated"
    _state.said.clear()


def is_active() -> bool:
    """Whether robomimic is hooked, or will be when it is imported. Local."""
    return _state.finder is not None


def report() -> list[str]:
    """A line for each symbol that is hooked so far, and what that does; or why there is none. Local."""
    if _state.finder is None:
        return [f"not active: {_state.reason}"]
    if not _state.finder.has_begun:
        return ["active, but robomimic has not been imported"]
    from ddpshim import hooks

    return [*_state.said, *hooks.led_aside()]


def _is_child() -> bool:
    # A spawned worker executes the main module before it knows its parent.
    is_inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_inheriting or multiprocessing.parent_process() is not None


def _give_back() -> None:
    deactivate()
    _state.reason = "the trainer does by itself what the hooks are for"


def _end() -> None:
    if _state.finder is not None and _state.finder.has_begun:
        from ddpshim import hooks

        hooks.end()


def _hook(modules: Sequence[ModuleType], package: Optional[ModuleType] = None) -> None:
    """Hook `modules`; `package` where the package itself was loaded before us."""
    from ddpshim import hooks, robomimic

    assert _state.finder is not None
    if package is not None:
        hooks.begin(package.__path__[0])
        robomimic.hush()
    _state.said += hooks.hook(modules)
    _state.finder.has_begun = True


class _Finder(importlib.abc.MetaPathFinder):
    """Has modules of robomimic found as ever, and hooks them when they have been executed."""

    has_begun = False
    _is_looking = False

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if self._is_looking or name.partition(".")[0] != _PACKAGE or not (name == _PACKAGE or self._concerns(name)):
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
        if name == _PACKAGE:
            self._begin(spec)
        else:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_hook(module: ModuleType) -> None:
                execute(module)
                _hook([module])

            loader.exec_module = execute_and_hook
        return spec

    def _concerns(self, name: str) -> bool:
        from ddpshim import hooks

        return name in hooks.CONCERNED or name.startswith(hooks.ALGORITHMS)

    def _begin(self, spec: ModuleSpec) -> None:
        from ddpshim import hooks, robomimic

        hooks.begin(next(iter(spec.submodule_search_locations or ())))
        robomimic.hush()
        self.has_begun = True
