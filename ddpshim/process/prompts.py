"""Leaves the time at a prompt out of the measured time of a step."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

from ddpshim.process import timing

T = TypeVar("T")


def uncounted(prompt: Callable[..., T]) -> Callable[..., T]:
    """Return `prompt`, whose time counts as no phase: a user thinks. Local."""

    @functools.wraps(prompt)
    def ask(*args: Any, **kwargs: Any) -> T:
        try:
            return prompt(*args, **kwargs)
        finally:
            if timing.running is not None:
                timing.running.skip()

    return ask
