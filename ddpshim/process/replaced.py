"""Replaces names in other packages temporarily: everything that ddpshim changes there goes through `replaced`.

`after_import` calls a function when the program has imported a module, and imports nothing itself.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Optional

_ABSENT = object()


class StandIns(dict[int, Any]):
    """The values that were replaced in a block, by their id, each with the one in its place."""

    now: Optional[StandIns] = None

    def __init__(self) -> None:
        super().__init__()
        self._before: list[Any] = []  # alive: an id would be given again

    def add(self, before: Any, value: Any) -> None:
        if callable(before):  # another module may have True, a number or a text for any reason
            self[next((first for first, last in self.items() if last is before), id(before))] = value
            self._before.append(before)


@contextlib.contextmanager
def noted() -> Iterator[StandIns]:
    """Yield the values that are replaced within this block. Local."""
    outer, StandIns.now = StandIns.now, (made := StandIns())
    try:
        yield made
    finally:
        StandIns.now = outer


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Within the block, `owner` (a module, a class, an object) has `value` as `name`; yields the previous value. Local.

    The name is restored exactly: if the owner only inherited it, it is inherited again.
    """
    kept = vars(owner).get(name, _ABSENT)
    before = getattr(owner, name, None)
    if StandIns.now is not None:
        StandIns.now.add(before, value)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        if kept is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, kept)


def after_import(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` once the module `name` has been executed, or now; return a function that cancels this. Local."""
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
    """Finds its module as Python would, and stays until it is executed: many find a module and never import it.

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
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others if name == self.name)
        spec = next(filter(None, found), None)
        loader: Any = spec and spec.loader
        if loader is not None:
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
