"""Passes events of a training to the recorder and the clock, if they exist."""

from __future__ import annotations

import contextlib
from typing import Any, Optional, Protocol


class Records(Protocol):
    """The recorder of a run: `ddpshim.observe.records`, once recording has begun."""

    def note(self, kind: str, **values: Any) -> None: ...

    def end(self, how: str, **values: Any) -> None: ...


class Clock(Protocol):
    """The clock that counts this process's time by phase: `ddpshim.job.meter.Clock`."""

    def begin(self, phase: str) -> None: ...

    def end(self) -> None: ...

    def call_network(self) -> None: ...


_records: Optional[Records] = None
running: Optional[Clock] = None  # while time is counted


def record_to(records: Optional[Records]) -> None:
    """Pass `note` and `end` to `records` from now on; None stops recording. Local."""
    global _records
    _records = records


def measure_by(clock: Optional[Clock]) -> None:
    """Pass `counted` to `clock` from now on; None stops measuring. Local."""
    global running
    running = clock


def is_recorded() -> bool:
    """Return whether this run is recorded. Local."""
    return _records is not None


def note(kind: str, **values: Any) -> None:
    """Record an event, if this run is recorded. Local."""
    if _records is not None:
        _records.note(kind, **values)


def end(how: str, **values: Any) -> None:
    """Record how the run ends on this rank, once: the first call counts. Local."""
    if _records is not None:
        _records.end(how, **values)


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
