"""What a run of a trainer left: checkpoints, logged numbers, files, and the states of its optimizers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from evidence.compare import difference

# Dates, times, seconds since 1970, and the first eight digits of a UUID.
CLOCK = [
    r"\d{4}[._-]\d{2}[._-]\d{2}",
    r"\d{2}[.:_-]\d{2}[.:_-]\d{2}",
    r"(?<!\d)1\d{9}(?!\d)",
    r"(?<=-)[0-9a-f]{8}(?=/|$)",
]
SPEED = re.compile(r"time|SPS|mfu")  # logged numbers that the clock gives
PACE = re.compile(r"\bt(?:ime)?: *[\d.]+|\[[^\]]*(?:it/s|s/it)[^\]]*\]")  # the same in printed lines
NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?|\bnan\b|\binf\b")


@dataclass
class Left:
    """The results of one run."""

    exit_code: int
    probes: dict[int, list[dict[str, Any]]]  # rank: its optimizers
    checkpoints: dict[str, Any]  # file: tensors by name, or why it could not be read
    files: dict[str, Path]  # names without the time
    printed: str
    edited: list[str] = field(default_factory=list)  # upstream files that have changed
    seconds: float = 0.0


def without_clock(name: str) -> str:
    for pattern in CLOCK:
        name = re.sub(pattern, "TIME", name)
    return name


def saved(one: Left, two: Left, ema: bool) -> tuple[Optional[float], list[str]]:
    """Return the largest difference in checkpoints, of averaged weights or of the rest, and unreadable files."""
    largest, wrong = None, []
    names = {without_clock(name): name for name in two.checkpoints}
    for name, tensors in one.checkpoints.items():
        other = two.checkpoints.get(names.get(without_clock(name), ""))
        if not isinstance(tensors, dict) or not isinstance(other, dict):
            why = [text for text in (tensors, other) if isinstance(text, str)] or ["missing"]
            wrong.append(f"{name}: {why[0]}")
            continue
        if tensors.keys() != other.keys():
            wrong.append(f"{name}: other keys")
            continue
        for key, tensor in tensors.items():
            if ("ema" in (name + key)) == ema:
                largest = max(largest or 0.0, difference(tensor, other[key]))
    return largest, wrong


def rows(left: Left, pattern: str) -> list[list[float]]:
    """Return the numbers that the trainer logged, by row: from JSON lines, or from printed lines with a pattern."""
    found = []
    if pattern:
        for line in left.printed.splitlines():
            line = PACE.sub("", line.split("\r")[-1])
            if re.search(pattern, line):
                found.append([float(number) for number in NUMBER.findall(line)])
        return [row for row, last in zip(found, [None, *found]) if row != last]  # a progress bar repeats its line
    for name in sorted(left.files):
        if name.endswith((".json.txt", ".jsonl")):
            for line in left.files[name].read_text().splitlines():
                found.append([float(value) for key, value in sorted(json.loads(line).items()) if not SPEED.search(key)])
    return found
