"""Passes events of a training to the recorder, if the run is recorded."""

from __future__ import annotations

from typing import Any

_records: Any = None


def record_to(records: Any) -> None:
    """Pass `note` and `end` to `records` (`ddpshim.observe.records`) from now on; None stops recording. Local."""
    global _records
    _records = records


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
