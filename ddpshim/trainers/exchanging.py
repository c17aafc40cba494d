"""Exchanges names in a trainer's modules when the trainer reads its config, and gives them back."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Callable

from ddpshim.trainers.swapping import swap_back


class ByItsConfig:
    """Is a trainer's :class:`ddpshim.trainers.interface.StandIns`: one function of its config's module is swapped.

    What that function finds to exchange, it gives to `put`.
    """

    def __init__(self, config: str, swap_in: Callable[[ModuleType], str]) -> None:
        """`config`: the name of that module; `swap_in`: swaps its function, or raises HookError; a line about it."""
        self._config, self._swap_in = config, swap_in
        self._before: list[tuple[dict[str, Any], str, Any]] = []  # the owner's names, the name, what it held

    def begin(self) -> None:
        """Before the first module of the package is loaded: nothing to do. Local."""

    def is_patched(self, name: str) -> bool:
        """No module of the package is patched. Local."""
        return False

    def concerns(self, name: str) -> bool:
        """Whether the module of that name has something to replace. Local."""
        return name == self._config

    def hook(self, modules: Sequence[ModuleType]) -> list[str]:
        """Be called when the trainer reads its config; a line for that. Local.

        Raises HookError, with nothing changed, where the function is not the one that is known here.
        """
        return [self._swap_in(module) for module in modules if module.__name__ == self._config]

    def put(self, names: dict[str, Any], name: str, value: Any) -> None:
        """Exchange `name` among the `names` of a module. Local."""
        self._before.append((names, name, names[name]))
        names[name] = value

    def unhook(self) -> None:
        """Give everything back. Local."""
        swap_back()
        while self._before:
            names, name, value = self._before.pop()
            names[name] = value

    def replaced_names(self) -> list[str]:
        """A line for each name that was exchanged. Local."""
        return [f"{names.get('__name__')}.{name}: on all ranks as in one process" for names, name, _ in self._before]

    def end(self) -> None:
        """At the end of the program: leave the job. Raises nothing."""
        if self._before:
            from ddpshim.job.group import cleanup

            cleanup()
