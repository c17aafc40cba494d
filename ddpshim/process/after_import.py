"""Calls a function when the program has imported a module; imports nothing itself."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Optional


def after_import(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` once the module `name` has been executed; now, if it has been imported already. Local.

    Returns a function that cancels this.
    """
    if name in sys.modules:
        call()
        return lambda: None
    finder = next((found for found in sys.meta_path if isinstance(found, _Finder) and found.name == name), None)
    if finder is None:
        finder = _Finder(name)
        sys.meta_path.insert(0, finder)
    finder.calls.append(call)
    return lambda: finder.forget(call)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds its module as Python would. It stays until the module is executed: many find a module and never import it.

    One for each name: several would find the module through each other.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Callable[[], None]] = []

    def forget(self, call: Callable[[], None]) -> None:
        if call in self.calls:
            self.calls.remove(call)
        if not self.calls and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                calls, self.calls = self.calls, []
                for call in calls:
                    call()

            loader.exec_module = execute_and_call
        return spec
