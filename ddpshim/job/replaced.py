"""Replaces names in other packages temporarily: everything that ddpshim changes there goes through `replaced`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Optional

_ABSENT = object()
_STDLIB = os.path.dirname(os.__file__) + os.sep


class StandIns:
    """The values that were replaced in a block, by identity, each with the one in its place."""

    now: Optional[StandIns] = None

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, Any]] = {}

    def add(self, before: Any, value: Any) -> None:
        if before is not None:
            self._of[id(before)] = before, value

    @contextlib.contextmanager
    def where_imported(self) -> Iterator[None]:
        """Within this block, also modules that imported a replaced name before find the other value. Local."""
        with contextlib.ExitStack() as undo:
            for name, module in [*sys.modules.items()]:
                if name.partition(".")[0] in ("torch", "ddpshim") or not _is_installed_apart(module):
                    continue
                for inner, found in [*getattr(module, "__dict__", {}).items()]:
                    before, value = self._of.get(id(found), (_ABSENT, None))
                    if before is found:
                        undo.enter_context(replaced(module, inner, value))
            yield


def _is_installed_apart(module: Any) -> bool:
    """Whether a module is not Python's own. Local."""
    path = getattr(module, "__file__", None) or ""
    inside = path[len(_STDLIB) :] if path.startswith(_STDLIB) else None
    return bool(path) and (inside is None or inside.startswith(("site-packages", "dist-packages")))


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
