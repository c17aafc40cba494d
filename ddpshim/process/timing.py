"""Passes the phases of a training to the clock (`ddpshim.job.meter.Clock`), while time is counted."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, TypeVar

T = TypeVar("T")
running: Any = None  # the clock, while time is counted


def measure_by(clock: Any) -> None:
    """Pass `counted` to `clock` from now on; None stops measuring. Local."""
    global running
    running = clock


def counted(phase: str) -> Any:
    """Return a context whose time counts as `phase` (of `ddpshim.job.meter.PHASES`), if time is measured. Local."""
    return contextlib.nullcontext() if running is None else _counted(running, phase)


@contextlib.contextmanager
def _counted(clock: Any, phase: str) -> Any:
    clock.begin(phase)
    try:
        yield
    finally:
        clock.end()


def uncounted(prompt: Callable[..., T]) -> Callable[..., T]:
    """Return `prompt`, whose time counts as no phase: a user thinks. Local."""

    @functools.wraps(prompt)
    def ask(*args: Any, **kwargs: Any) -> T:
        try:
            return prompt(*args, **kwargs)
        finally:
            if running is not None:
                running.skip()

    return ask
