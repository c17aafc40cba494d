"""Finds the adapter for a package's objects, so that only adapters depend on a codebase.

ddpshim's own adapters are listed here; others are registered in the entry point group `ddpshim.trainers`: the name is
the package, the value the module. An adapter is imported when one of its functions is looked up, not before. It is a
module with any of these functions; without one of them, the codebase is treated as any other:

- `fetcher(dataset) -> Optional[Fetcher]`: a fetcher of whole batches for an object of the package.
- `problems(module, arguments) -> Iterator[str]`: why `python -m module` of the package cannot start with these
  arguments, a line each. Without it, only the module is checked. It should import nothing of the package.
- `rollouts() -> list[tuple[str, str]]`: (module, class) for each class whose subclasses make environments and play them
  in `run`. In an unedited program they play only on the main rank, while other ranks wait for the result of `run`.
- `patch_sets() -> Path`: the folder of patch sets that ddpshim does not contain: ``CODEBASE/VERSION/*.patch``.
"""

from __future__ import annotations

import functools
import importlib
from importlib import metadata
from typing import Any, Callable, Optional, Protocol

GROUP = "ddpshim.trainers"


class Fetcher(Protocol):
    """Gives whole batches of one dataset, with the values, types and order of keys of torch's collate."""

    def attach(self) -> Optional[str]:
        """Make torch's loaders fetch the dataset by the batch; return the reason if that is impossible. Local."""

    def collate(self) -> Callable[[Any], Any]:
        """Return the loader's `collate_fn`; it also accepts samples that were fetched one by one."""


@functools.lru_cache(maxsize=1)
def packages() -> dict[str, str]:
    """Return the name of the adapter's module for each package that has an adapter. Local."""
    found: Any = metadata.entry_points()
    # Python 3.9: a dict of groups.
    others = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())
    return {**{point.name: point.value for point in others}, "robomimic": "ddpshim.robomimic"}


def function(package: str, name: str) -> Optional[Any]:
    """Return the function `name` of the adapter for `package`; None if there is no adapter or function. Local."""
    module = packages().get(package)
    return None if module is None else getattr(importlib.import_module(module), name, None)


def fetcher_of(dataset: Any) -> Optional[Fetcher]:
    """Return the fetcher of `dataset`, by an adapter for its class or a base class; None if there is none. Local."""
    for package in dict.fromkeys(str(kind.__module__).partition(".")[0] for kind in type(dataset).__mro__):
        offer = function(package, "fetcher")
        fetcher: Optional[Fetcher] = None if offer is None else offer(dataset)
        if fetcher is not None:
            return fetcher
    return None
