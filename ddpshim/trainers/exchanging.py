"""Replaces names in a trainer's modules when the trainer reads its config, and restores them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Callable

from ddpshim.trainers.swapping import swap_back


class ByItsConfig:
    """A trainer's :class:`ddpshim.trainers.interface.StandIns` that swaps one function, which reads the config.

    That function's stand-in calls `put` for each name that it replaces.
    """

    def __init__(self, config: str, swap_in: Callable[[ModuleType], str]) -> None:
        """`config`: name of the function's module; `swap_in`: swaps it and returns a line, or raises HookError."""
        self._config, self._swap_in = config, swap_in
        self._before: list[tuple[dict[str, Any], str, Any]] = []  # (names of a module, name, previous value)

    def begin(self) -> None:
        """Do nothing. Called before the first module of the package is loaded. Local."""

    def is_patched(self, name: str) -> bool:
        """Return False: no module of the package is patched. Local."""
        return False

    def concerns(self, name: str) -> bool:
        """Whether the module of that name has something to replace. Local."""
        return name == self._config

    def hook(self, modules: Sequence[ModuleType]) -> list[str]:
        """Swap the function if its module is among `modules`; return a line for it. Local.

        Raises HookError, with nothing changed, if the function has other parameters than expected.
        """
        return [self._swap_in(module) for module in modules if module.__name__ == self._config]

    def put(self, names: dict[str, Any], name: str, value: Any) -> None:
        """Replace `name` in `names`, the globals of a module. Local."""
        self._before.append((names, name, names[name]))
        names[name] = value

    def unhook(self) -> None:
        """Restore everything. Local."""
        swap_back()
        while self._before:
            names, name, value = self._before.pop()
            names[name] = value

    def replaced_names(self) -> list[str]:
        """Return a line for each name that was replaced. Local."""
        return [f"{names.get('__name__')}.{name}: on all ranks as in one process" for names, name, _ in self._before]

    def end(self) -> None:
        """Leave the job. Called at the end of the program; raises nothing."""
        if self._before:
            from ddpshim.job.group import cleanup

            cleanup()
