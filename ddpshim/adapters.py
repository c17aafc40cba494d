"""Finds the adapter for a package's objects, so that only adapters depend on a codebase.

An adapter is a module with any of the functions of :class:`ddpshim.trainers.interface.Adapter`. ddpshim's own are
listed here; others are registered in the entry point group `ddpshim.trainers`: the name is the package, the value the
module. An adapter is imported when one of its functions is looked up, not before.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Optional

GROUP = "ddpshim.trainers"
_BUILT_IN = {
    **{package: f"ddpshim.{package}.adapter" for package in ("robomimic", "diffusion_policy")},
    "diffusion_policy_3d": "ddpshim.diffusion_policy.adapter",
}


@functools.lru_cache(maxsize=1)
def packages() -> dict[str, str]:
    """Return the name of the adapter's module for each package that has an adapter. Local."""
    found: Any = metadata.entry_points()
    # Python 3.9: a dict of groups.
    others = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())
    return {**{point.name: point.value for point in others}, **_BUILT_IN}


def function(package: str, name: str) -> Optional[Any]:
    """Return the function `name` of the adapter for `package`; None if there is no adapter or function. Local."""
    module = packages().get(package)
    return None if module is None else getattr(importlib.import_module(module), name, None)


def functions_for(value: Any, name: str) -> Iterator[Any]:
    """Yield the function `name` of each adapter for the class of `value` or one of its base classes. Local."""
    for package in dict.fromkeys(str(kind.__module__).partition(".")[0] for kind in type(value).__mro__):
        offered = function(package, name)
        if offered is not None:
            yield offered
