"""Passes on what happens in a training to whoever records or measures it; does nothing where nobody does."""

from __future__ import annotations

import contextlib
from typing import Any, Optional, Protocol


class Records(Protocol):
    """What a process writes down of a run: `ddpshim.observe.records`, once it was begun."""

    def note(self, kind: str, **values: Any) -> None: ...

    def end(self, how: str, **values: Any) -> None: ...


class Clock(Protocol):
    """What counts the time of this process by phases: `ddpshim.job.meter.Clock`."""

    def begin(self, phase: str) -> None: ...

    def end(self) -> None: ...

    def call_network(self) -> None: ...


_records: Optional[Records] = None
running: Optional[Clock] = None  # while time is counted


def record_to(records: Optional[Records]) -> None:
    """From here on `note` and `end` are passed on to `records`; None: to nobody. Local."""
    global _records
    _records = records


def measure_by(clock: Optional[Clock]) -> None:
    """From here on `counted` is passed on to `clock`; None: to nobody. Local."""
    global running
    running = clock


def is_recorded() -> bool:
    """Whether somebody listens to `note`. Local."""
    return _records is not None


def note(kind: str, **values: Any) -> None:
    """Record an event, where somebody listens. Local."""
    if _records is not None:
        _records.note(kind, **values)


def end(how: str, **values: Any) -> None:
    """Record how the run ends on this rank, once: the first call counts. Local."""
    if _records is not None:
        _records.end(how, **values)


def counted(phase: str) -> Any:
    """A context whose time counts to `phase` (of `ddpshim.job.meter.PHASES`) where somebody measures, else nothing."""
    return contextlib.nullcontext() if running is None else _counted(running, phase)


@contextlib.contextmanager
def _counted(clock: Clock, phase: str) -> Any:
    clock.begin(phase)
    try:
        yield
    finally:
        clock.end()
