"""Compares the results of one process and of ranks: weights, EMA, optimizers, losses, files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch

from evidence.differences import difference

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
    folder: Path  # of the sources, in which it ran
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


def probed(one: list[dict[str, Any]], two: list[dict[str, Any]], key: str) -> float:
    """Return the largest difference of the optimizers' weights or states; infinite if their structure differs."""
    if len(one) != len(two):
        return math.inf
    largest = 0.0
    for a, b in zip(one, two):
        if len(a[key]) != len(b[key]):
            return math.inf
        for x, y in zip(a[key], b[key]):
            if isinstance(x, torch.Tensor):
                largest = max(largest, difference(x, y))
                continue
            if x.keys() != y.keys():
                return math.inf
            for name, value in x.items():
                if isinstance(value, torch.Tensor):
                    largest = max(largest, difference(value, y[name]))
    return largest


def saved(one: Left, two: Left, ema: bool) -> tuple[Optional[float], list[str]]:
    """Return the largest difference in checkpoints, of averaged weights or of the rest, and unreadable files."""
    largest, wrong = None, []
    names = {without_clock(name): name for name in two.checkpoints}
    for name, tensors in one.checkpoints.items():
        other = two.checkpoints.get(names.get(without_clock(name), ""))
        if not isinstance(tensors, dict) or not isinstance(other, dict):
            wrong.append(
                f"{name}: {tensors if isinstance(tensors, str) else other if isinstance(other, str) else 'missing'}"
            )
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


def losses(one: list[list[float]], two: list[list[float]]) -> float:
    """Return the largest difference of a logged number, relative above 1; infinite if rows or columns are missing."""
    if len(one) != len(two) or any(len(a) != len(b) for a, b in zip(one, two)):
        return math.inf
    pairs = [(x, y) for a, b in zip(one, two) for x, y in zip(a, b)]
    return max((abs(x - y) / max(1.0, abs(x)) if x == x or y == y else 0.0 for x, y in pairs), default=0.0)
