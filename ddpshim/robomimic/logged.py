"""Reads the numbers of a run from robomimic's own log, where ddpshim did not record it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ddpshim.reading import read_bytes

# As scripts/train.py of robomimic 0.2 to 0.5 prints them, on lines of their own.
_BLOCK = re.compile(
    r"^(?:(?P<phase>Train|Validation) Epoch (?P<epoch>\d+)"
    r"|Epoch (?P<after>\d+) Rollouts took [^\n]*\nEnv: (?P<environment>[^\n]*))\n(?P<metrics>\{$.*?^\})$",
    re.MULTILINE | re.DOTALL,
)
_PHASES = {"Train": "training", "Validation": "validation"}


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return the numbers in `folder`/logs/log.txt as records; [] without it, or if ddpshim trained the run."""
    try:
        text = read_bytes(folder / "logs" / "log.txt").decode(errors="replace")
    except OSError:
        return []
    found = []
    for block in _BLOCK.finditer(text) if "\nddpshim: " not in text else ():
        try:
            metrics = json.loads(block["metrics"])
        except ValueError:  # another process wrote into the middle
            continue
        record: dict[str, Any] = {"time": 0.0, "epoch": int(block["epoch"] or block["after"])}
        if block["phase"]:
            record.update(kind="epoch", phase=_PHASES[block["phase"]], mean=metrics)
        else:
            record.update(kind="rollout", environment=block["environment"], metrics=metrics)
        found.append(record)
    return found
