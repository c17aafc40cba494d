"""Loads the names that a package re-exports on first use, and suggests the nearest one for a name that is unknown.

So `import ddpshim` does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def load(package: str, homes: Mapping[str, str], name: str, names: dict[str, Any]) -> Any:
    """Return `name` from the module `homes[name]` of `package`, and store it in `names`. Local.

    For a package's `__getattr__`. Raises AttributeError, with the nearest name, if `homes` has no such name.
    """
    if name not in homes:
        error = AttributeError(f"module {package!r} has no attribute {name!r}")
        # `from ddpshim import reading` asks for the module too, before it is imported.
        if not name.startswith("_") and "importlib" not in sys._getframe(2).f_code.co_filename:
            error.args = (error.args[0] + nearest(name, [*homes]),)
            error.name = name  # or Python 3.10 and later would add a suggestion of their own, in some tracebacks
        raise error
    names[name] = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
    return names[name]


def nearest(name: str, known: list[str]) -> str:
    """Return the end of a message about an unknown name, which suggests the nearest known one; may be empty."""
    import difflib

    is_program = name.endswith(".py") and "run" in known
    near = [f"run {name}"] if is_program else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
