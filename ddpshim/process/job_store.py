"""Reads and writes the job's key-value store, without waiting for a key that is not there."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, Callable, Optional, TypeVar

from packaging.version import Version

from ddpshim.process.job import current

T = TypeVar("T")

_DEADLINE_S = 5.0


def is_there(store: Any, key: str) -> bool:
    """Return whether `store` holds `key`. Local."""
    with contextlib.suppress(RuntimeError, ValueError):
        if hasattr(store, "check"):
            return bool(store.check([key]))
        store.wait([key], timedelta(seconds=0.1))  # torch 2.1 has no check(); a late answer counts as no
        return True
    return False


def claim(store: Any, key: str, value: str) -> str:
    """Set `key` of `store` to `value` unless another process has set it; returns the value it then holds. Local."""
    import torch  # not at the top: the self-test's ranks import torch while this process imports it

    # torch before 2.4 creates compare_set's result without holding Python's lock (GIL). A result of one character, as
    # most ranks are, crashes Python 3.10 (segmentation fault); while other threads run, no version of Python is safe.
    if Version(torch.__version__).release >= (2, 4):
        return str(store.compare_set(key, "", value).decode(errors="replace"))
    if store.add(f"{key}/claims", 1) == 1:
        store.set(key, value)
    return str(store.get(key).decode(errors="replace"))  # waits until the first process has set it


def ask_store(ask: Callable[[Any], T]) -> Optional[T]:
    """Return `ask(store)`; None without a store, or if the process that serves it has ended."""
    if (watched := current().watched) is not None:
        with contextlib.suppress(RuntimeError, ValueError):
            watched.store.set_timeout(timedelta(seconds=_DEADLINE_S))
            return ask(watched.store)
    return None
