"""Defines the functions that an adapter for a codebase may have; `ddpshim.adapters` finds the adapter.

Every function is optional and is looked up when needed. Without it, the codebase is treated as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional, Protocol

from ddpshim.data.share_loader import Fetcher


class Adapter(Protocol):
    """The functions of an adapter's module."""

    def fetcher(self, dataset: Any) -> Optional[Fetcher]:
        """Return a `Fetcher` of whole batches for `dataset`, an object of the package; None if there is none."""

    def problems(self, module: str, arguments: Sequence[str]) -> Iterator[str]:
        """Yield the reasons why `python -m module` of the package cannot start with these arguments, a line each.

        Without it, only the module is checked before ranks start. It should import little, and nothing of the package.
        """

    def rollouts(self) -> list[tuple[str, str]]:
        """Return (module, class) for each class whose subclasses make environments and play them in `run`.

        In an unedited program they play only on the main rank, while other ranks wait for the result of `run`.
        """

    def patch_sets(self) -> Path:
        """Return the folder of patch sets that ddpshim does not contain: ``CODEBASE/VERSION/*.patch``."""

    def state_of_files(self) -> str:
        """Return, in a few words for a bug report, whether the installed package is patched."""

    def logged(self, folder: Path) -> list[dict[str, Any]]:
        """Return the epochs and evaluations of a run in one process, from the log in `folder`; [] without one.

        They are records (`ddpshim.observe.records`) of the kinds epoch and rollout, with the time 0.
        """
