"""Replaces names in other packages temporarily: everything that ddpshim changes there goes through `replaced`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

_ABSENT = object()


class StandIns(dict[int, Any]):
    """The values that were replaced in a block, by their id, each with the one in its place."""

    now: Optional[StandIns] = None

    def __init__(self) -> None:
        super().__init__()
        self._before: list[Any] = []  # alive: an id would be given again

    def add(self, before: Any, value: Any) -> None:
        if callable(before):  # another module may have True, a number or a text for any reason
            self[next((first for first, last in self.items() if last is before), id(before))] = value
            self._before.append(before)


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
