"""Finds who holds a function of Python's: the module that defines it, and those that imported it from there."""

from __future__ import annotations

import sys
from typing import Any

# Python's own imports, and ours, use what they always used.
_NOT_LED = ("posix", "_io", "importlib", "zipimport", "_frozen_importlib", "_frozen_importlib_external", "ddpshim")
_KEEP_IN_CLASSES = ("pathlib", "glob")


def holders(stand_ins: dict[int, Any]) -> list[tuple[Any, str, Any]]:
    """(module or class, name, stand-in) of all that is held and has one; `stand_ins`: by the identity of a function."""
    found: list[tuple[Any, str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        package = module_name.partition(".")[0]
        if module is None or package in _NOT_LED:
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in stand_ins:
                found.append((module, name, stand_ins[id(value)]))
            elif package in _KEEP_IN_CLASSES and isinstance(value, type) and value.__module__ == module_name:
                for attribute, inner in list(vars(value).items()):
                    stand_in = stand_ins.get(id(getattr(inner, "__func__", inner)))
                    if stand_in is not None:
                        found.append((value, attribute, staticmethod(stand_in)))
    return found
