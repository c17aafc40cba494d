"""Replaces Weights & Biases without a network: each logged row becomes a line of wandb.jsonl."""

import json
from typing import Any

config: dict[str, Any] = {}
_row: dict[str, float] = {}


class Settings:
    def __init__(self, **ignored: Any) -> None:
        pass


class Image:
    def __init__(self, *ignored: Any, **more: Any) -> None:
        pass


def login(*ignored: Any, **more: Any) -> None:
    pass


save = finish = login


def _is_one(value: Any) -> bool:
    """Return whether the value is a number of numpy's or torch's."""
    return hasattr(value, "item") and getattr(value, "ndim", 1) == 0


def log(row: dict[str, Any], commit: bool = True, **ignored: Any) -> None:
    """Adds numbers to a row, and writes the row when it is committed."""
    _row.update({key: float(value) for key, value in row.items() if isinstance(value, (int, float)) or _is_one(value)})
    if commit and _row:
        with open("wandb.jsonl", "a") as file:
            file.write(json.dumps(_row) + "\n")
        _row.clear()


class _Run:
    name = ""
    log = staticmethod(log)
    save = staticmethod(save)


run = _Run()


def init(*ignored: Any, **more: Any) -> _Run:
    return run
