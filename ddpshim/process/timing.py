"""Passes the phases of a training to the clock, while time is counted."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Optional, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """The clock that counts this process's time by phase: `ddpshim.job.meter.Clock`."""

    def begin(self, phase: str) -> None: ...

    def end(self) -> None: ...

    def call_network(self) -> None: ...

    def skip(self) -> None: ...


running: Optional[Clock] = None  # while time is counted


def measure_by(clock: Optional[Clock]) -> None:
    """Pass `counted` to `clock` from now on; None stops measuring. Local."""
    global running
    running = clock


def counted(phase: str) -> Any:
    """Return a context whose time counts as `phase` (of `ddpshim.job.meter.PHASES`), if time is measured. Local."""
    return contextlib.nullcontext() if running is None else _counted(running, phase)


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


@contextlib.contextmanager
def _counted(clock: Clock, phase: str) -> Any:
    clock.begin(phase)
    try:
        yield
    finally:
        clock.end()
