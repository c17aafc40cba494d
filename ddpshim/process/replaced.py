"""Replaces names in other packages temporarily: everything that ddpshim changes there goes through `replaced`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Optional

from ddpshim.process.users_line import is_pythons

_ABSENT = object()


class StandIns:
    """The values that were replaced in a block, by identity, each with the one in its place."""

    now: Optional[StandIns] = None

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, Any]] = {}

    def add(self, before: Any, value: Any) -> None:
        if callable(before):  # another module may have True, a number or a text for any reason
            first = next((first for first, last in self._of.values() if last is before), before)
            self._of[id(first)] = first, value

    @contextlib.contextmanager
    def where_imported(self) -> Iterator[None]:
        """Within this block, also modules that imported a replaced name before find the other value. Local."""
        with contextlib.ExitStack() as undo:
            for name, module in [*sys.modules.items()]:
                file = getattr(module, "__file__", None)
                if not file or is_pythons(file) or name.partition(".")[0] in ("torch", "ddpshim"):
                    continue
                for inner, found in [*vars(module).items()]:
                    before, value = self._of.get(id(found), (_ABSENT, None))
                    if before is found:
                        undo.enter_context(replaced(module, inner, value))
            yield


@contextlib.contextmanager
def noted() -> Iterator[StandIns]:
    """Yield the values that are replaced within this block. Local."""
    StandIns.now = made = StandIns()
    try:
        yield made
    finally:
        StandIns.now = None


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Within the block, `owner` (a module, a class, an object) has `value` as `name`; yields the previous value. Local.

    The name is restored exactly: if the owner only inherited it, it is inherited again.
    """
    kept = vars(owner).get(name, _ABSENT)
    before = getattr(owner, name, None)
    if StandIns.now is not None:
        StandIns.now.add(before, value)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        if kept is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, kept)
