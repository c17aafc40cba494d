"""Calls a function when the program has imported a module; imports nothing itself."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Optional


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call `call` when the module `name` has been executed: now, if it already is. Local."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(importlib.abc.MetaPathFinder):
    """Has modules found as ever; is gone when its own is executed. Many look for a module and do not import it."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call
        self._is_looking = False

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                self._call()

            loader.exec_module = execute_and_call
        return spec
