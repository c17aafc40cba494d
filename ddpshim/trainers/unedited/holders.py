"""Replaces Python functions in all modules that hold them: where they are defined, and where they were imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from ddpshim.process.replaced import replaced

# The import system, ddpshim and private modules keep the real functions.
_KEEP_REAL = ("posix", "importlib", "zipimport", "ddpshim")
_KEEP_IN_CLASSES = ("pathlib", "glob", "tempfile")  # hold functions as class attributes or default arguments


@contextlib.contextmanager
def in_place(stand_ins: dict[int, Any]) -> Iterator[None]:
    """Within this block, replace each function by its stand-in; `stand_ins` is keyed by the function's id."""
    with contextlib.ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            is_private = package.startswith("_") and package != "__main__"
            if module is None or is_private or package in _KEEP_REAL:
                continue
            held = list(getattr(module, "__dict__", {}).items())
            for attribute, value in held:
                if id(value) in stand_ins:
                    undo.enter_context(replaced(module, attribute, stand_ins[id(value)]))
            for _, value in held if package in _KEEP_IN_CLASSES else ():
                if isinstance(value, type) and value.__module__ == name:
                    _replace_in(value, stand_ins, undo)
        yield


def _replace_in(kind: type, stand_ins: dict[int, Any], undo: contextlib.ExitStack) -> None:
    for attribute, value in list(vars(kind).items()):
        value = getattr(value, "__func__", value)
        if id(value) in stand_ins:
            undo.enter_context(replaced(kind, attribute, staticmethod(stand_ins[id(value)])))
        elif isinstance(value, FunctionType) and value.__defaults__:
            undo.callback(setattr, value, "__defaults__", value.__defaults__)
            value.__defaults__ = tuple(stand_ins.get(id(default), default) for default in value.__defaults__)
