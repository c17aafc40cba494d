"""Distinguishes valid records from junk: torn lines, files of another program. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LAST_MOMENT = 253402300799  # the end of the year 9999; time.gmtime fails beyond
_MOST_RANKS = 1 << 16


def is_sound(record: Any) -> bool:
    """Whether `record` has a kind, a time and, of an epoch, its number, and its known fields are valid. Local."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return False
    needed = {"time", "epoch"} if record["kind"] == "epoch" else {"time"}
    checks = {**_OF_ALL, **_OF_KIND.get(record["kind"], {})}
    return needed <= record.keys() and all(check(record[key]) for key, check in checks.items() if key in record)


Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e18 < value < 1e18


def _is_metric(value: Any) -> bool:
    return type(value) is float or _is_number(value)  # a loss may be infinite, or not a number


def _is_moment(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= _LAST_MOMENT


def _whole(least: int, most: int = 10**12) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _mapping_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _has_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(_or_none(_is_metric)(value.get(key)) for key in ("Success_Rate", "Return"))


_OF_ALL: dict[str, Check] = {"time": _is_moment}
_OF_KIND: dict[str, dict[str, Check]] = {
    "start": {
        "start": _whole(1),
        "rank": _whole(0, _MOST_RANKS),
        "world_size": _whole(1, _MOST_RANKS),
        "options": lambda value: isinstance(value, dict),
        "local_world_size": _whole(1, _MOST_RANKS),
        "cores": _whole(1),
    },
    "epoch": {
        "epoch": _whole(0),
        "own": _or_none(_mapping_of(_is_metric)),
        "mean": _or_none(_mapping_of(_is_metric)),
        "steps": _whole(0),
        "first_step": _whole(0),
        "samples": _or_none(_is_number),
        "curve": _list_of(_is_metric),
        "memory": _mapping_of(_or_none(_is_number)),
        "seconds": _mapping_of(_is_number),
    },
    "progress": {"loss": _or_none(_is_metric)},
    "guard": {"reductions": _whole(0)},
    "checkpoint": {"bytes": _or_none(_is_number), "seconds": _is_number},
    "rollout": {
        "epoch": _or_none(_whole(0)),
        "metrics": _has_metrics,
        "seconds": _is_number,
        "episodes": _or_none(_whole(0)),
        "interval": _or_none(lambda value: _list_of(_is_number)(value) and len(value) == 2),
        "returns": _or_none(_list_of(_is_metric)),
    },
    "end": {"first": _or_none(_whole(0))},
}
