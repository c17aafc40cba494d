"""Finds the adapter for a package's objects, so that only adapters depend on a codebase.

An adapter is a module with any of the functions of :class:`Adapter`. ddpshim's own are listed here; others are
registered in the entry point group `ddpshim.trainers`: the name is the package, the value the module. An adapter is
imported when one of its functions is looked up, not before.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Protocol

if TYPE_CHECKING:
    from ddpshim.data.loader_builder import Fetcher

GROUP = "ddpshim.trainers"
_BUILT_IN = {
    "robomimic": "robomimic.adapter",
    **dict.fromkeys(("diffusion_policy", "diffusion_policy_3d"), "diffusion_policy"),
}


@functools.lru_cache(maxsize=1)
def packages() -> dict[str, str]:
    """Return the name of the adapter's module for each package that has an adapter. Local."""
    found: Any = metadata.entry_points()
    # Python 3.9: a dict of groups.
    others = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())
    ours = {package: f"ddpshim.{module}" for package, module in _BUILT_IN.items()}
    return {**{point.name: point.value for point in others}, **ours}


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


def fetcher_of(dataset: Any) -> Optional[Fetcher]:
    """Return the fetcher of `dataset`; None if no adapter has one. Local."""
    found = (offer(dataset) for offer in functions_for(dataset, "fetcher"))
    return next((fetcher for fetcher in found if fetcher is not None), None)


class Adapter(Protocol):
    """The functions of an adapter's module; without one of them, the codebase is treated as any other."""

    def fetcher(self, dataset: Any) -> Optional[Fetcher]:
        """Return a `Fetcher` of whole batches for `dataset`, an object of the package; None if there is none."""

    def problems(self, module: str, arguments: Sequence[str]) -> Iterator[str]:
        """Yield the reasons why `python -m module` of the package cannot start with these arguments, a line each.

        Without it, only the module is checked before ranks start. It should import little, and nothing of the package.
        """

    def batch_size(self, arguments: Sequence[str]) -> Optional[int]:
        """Return the batch size of the package's trainer with these arguments; None if it is unknown.

        If the ranks do not divide it, and with the option `exact`, a trainer that is patched in memory holds whole
        batches; what the set calls must then do as without a launcher (`ddpshim.job.world.world_of_shares`).
        """

    def rollouts(self) -> list[tuple[str, str]]:
        """Return (module, class) for each class whose subclasses make environments and play them in `run`.

        In an unedited program they play only on the main rank, while other ranks wait for the result of `run`.
        """

    def patch_sets(self) -> Path:
        """Return the folder of patch sets that ddpshim does not contain: ``CODEBASE/VERSION/*.patch``."""

    def state_of_files(self) -> str:
        """Return, in a few words for a bug report, whether the installed package is patched."""
