"""Finds the adapter that knows the objects of a package, so that nothing but an adapter knows a codebase.

An adapter is a module with any of the functions of :class:`ddpshim.trainers.interface.Adapter`. ddpshim's own are
listed here; others come by the entry point group `ddpshim.trainers`: the name is the package, the value the module.
None is imported before a program holds an object of its package.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Optional

GROUP = "ddpshim.trainers"
_BUILT_IN = {
    **{package: f"ddpshim.{package}.adapter" for package in ("robomimic", "lerobot", "openpi", "diffusion_policy")},
    "diffusion_policy_3d": "ddpshim.diffusion_policy.adapter",
}


@functools.lru_cache(maxsize=1)
def packages() -> dict[str, str]:
    """The module of the adapter for each package that has one. Local."""
    found: Any = metadata.entry_points()
    # Python 3.9: a dict of groups.
    others = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())
    return {**{point.name: point.value for point in others}, **_BUILT_IN}


def function(package: str, name: str) -> Optional[Any]:
    """What the adapter for `package` offers under `name`; None without one. Local."""
    module = packages().get(package)
    return None if module is None else getattr(importlib.import_module(module), name, None)


def has_trainer(package: str) -> bool:
    """Whether the package's trainer is for an adapter to distribute; not where an adapter says it has none. Local."""
    trainer = function(package, "trainer")
    return package in packages() and (trainer is None or bool(trainer()))


def functions_for(value: Any, name: str) -> Iterator[Any]:
    """What adapters offer under `name` for objects of the class of `value` or of one it is derived from. Local."""
    for package in dict.fromkeys(str(kind.__module__).partition(".")[0] for kind in type(value).__mro__):
        offered = function(package, name)
        if offered is not None:
            yield offered
