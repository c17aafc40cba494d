"""Replaces names in other packages temporarily: everything that ddpshim changes there goes through `replaced`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Within the block, `owner` (a module, a class, an object) has `value` as `name`; yields the previous value. Local.

    The name is restored exactly: if the owner only inherited it, it is inherited again.
    """
    kept = vars(owner).get(name, _ABSENT)
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        if kept is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, kept)
