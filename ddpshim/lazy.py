"""Loads the names that a package hands on when they are used: `import ddpshim` must take no second for torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def load(package: str, homes: Mapping[str, str], name: str, names: dict[str, Any]) -> Any:
    """The value of `name`, which the module `homes[name]` of `package` defines, kept in `names`. Local.

    For a package's `__getattr__`; raises AttributeError for any other name.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    names[name] = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
    return names[name]
