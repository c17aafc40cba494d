"""Defines what an adapter for a codebase may offer; `ddpshim.adapters` finds it.

Every function is optional, and is looked up when it is needed. What is not offered is as for any codebase.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Protocol

from ddpshim.data.fetching import Fetcher


class StandIns(Protocol):
    """What replaces functions of an installed trainer that nobody edits."""

    def begin(self) -> None:
        """Before the first module of the package is executed, or at once where it was."""

    def is_patched(self, name: str) -> bool:
        """Whether the module of that name is patched in memory, too, where a program of the user's own imports it."""

    def concerns(self, name: str) -> bool:
        """Whether the module of that name has something to replace. Its own imports must be few: it is asked often."""

    def hook(self, modules: Sequence[ModuleType]) -> list[str]:
        """Replace what there is in these modules, all or nothing; a line for each symbol. Raises HookError."""

    def unhook(self) -> None:
        """Give everything back. Raises HookError in the middle of a training on several ranks."""

    def replaced_names(self) -> list[str]:
        """A line for each name of the trainer's modules that was replaced beside the functions."""

    def end(self) -> None:
        """At the end of the program: leave the job. Raises nothing."""


class Adapter(Protocol):
    """The functions of an adapter's module."""

    def fetcher(self, dataset: Any) -> Optional[Fetcher]:
        """What gives whole batches of `dataset`, an object of the package; None where nothing does."""

    def draws_by_weight(self, sampler: Any) -> bool:
        """Whether `sampler`, a WeightedRandomSampler of the package's own, draws as torch's does."""

    def trainer(self) -> list[tuple[str, str]]:
        """The functions of the package that train, each with its module; without it every program that imports the
        package is taken for its trainer."""

    def rollouts(self) -> list[tuple[str, str]]:
        """The classes of the package, each with its module, whose subclasses make environments and play them in `run`:
        in an unedited program on the main rank alone, while others wait for what `run` returns."""

    def stand_ins(self) -> StandIns:
        """For trainers of the package that are installed and unedited."""

    def patch_sets(self) -> Path:
        """The folder of the package's patch sets, if ddpshim does not carry them: ``CODEBASE/VERSION/*.patch``."""

    def state_of_files(self) -> str:
        """Whether the installed package is patched, in a few words for a bug report."""

    def new_release(self, tree: str) -> tuple[list[str], int]:
        """A line for each thing that ddpshim relies on in a tree of the codebase; how many of them it lacks."""
