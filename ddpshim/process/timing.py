"""Passes the phases of a training to the clock, while time is counted."""

from __future__ import annotations

import contextlib
from typing import Any, Optional, Protocol


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


@contextlib.contextmanager
def _counted(clock: Clock, phase: str) -> Any:
    clock.begin(phase)
    try:
        yield
    finally:
        clock.end()
