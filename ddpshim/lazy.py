"""Loads the names that a package re-exports on first use, so that `import ddpshim` does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def load(package: str, homes: Mapping[str, str], name: str, names: dict[str, Any]) -> Any:
    """Return `name` from the module `homes[name]` of `package`, and store it in `names`. Local.

    For a package's `__getattr__`. Raises AttributeError if `homes` has no such name.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    names[name] = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
    return names[name]
