"""Decides whether two runs are equal: tensors by name, nested states, rows of numbers, and lines of a log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

TIMES_ROUNDING = 10.0


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinite if shapes, or places of NaN, differ."""
    if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    apart = one.double() - other.double()
    return float(apart[one != other].nan_to_num().abs().max()) if bool((one != other).any()) else 0.0


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference between tensors of the same name; different names are an error."""
    if one.keys() != other.keys():
        raise AssertionError(f"different networks: {sorted(one.keys() ^ other.keys())}")
    return max(difference(tensor, other[name]) for name, tensor in one.items())


def nested_difference(one: Any, other: Any) -> float:
    """Return the largest difference of the tensors in lists and mappings; infinite if their structure differs."""
    if isinstance(one, torch.Tensor):
        return difference(one, other)
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return math.inf
        one, other = list(one.values()), [other[key] for key in one]
    elif not isinstance(one, (list, tuple)):
        return 0.0
    if len(one) != len(other):
        return math.inf
    return max(map(nested_difference, one, other), default=0.0)


def numbers_differ(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of a number, relative above 1; infinite if rows or columns are missing."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return math.inf
    pairs = [(x, y) for a, b in zip(one, other) for x, y in zip(a, b)]
    return max((abs(x - y) / max(1.0, abs(x)) if x == x or y == y else 0.0 for x, y in pairs), default=0.0)


def logs_differ(lines: Sequence[str], others: Sequence[str]) -> str:
    """Return how the lines of two logs differ: not at all, in the last digit or by 1e-5 of a number, or by more."""
    number = re.compile(r"(-?\d+)(?:\.(\d+))?(?:e([+-]\d+))?")
    if lines == others:
        return "same text"
    if [number.sub("", line) for line in lines] != [number.sub("", line) for line in others]:
        return "**differs**"
    pairs = [*zip(number.finditer(" ".join(lines)), number.finditer(" ".join(others)))]
    off = [(abs(float(a[0]) - float(b[0])), float(b[0]), b) for a, b in pairs]
    if all(by < 1.5 * 10.0 ** (int(b[3] or 0) - len(b[2] or "")) for by, _, b in off):
        return "last digit"
    return shown(max(by / max(abs(value), 1e-3) for by, value, _ in off), 1e-5)


def names_differ(one: set[str], other: set[str]) -> str:
    return f"**{sorted(one ^ other)}**" if one ^ other else "same"


def is_rounding(by: float, rounded: float, times: float = TIMES_ROUNDING) -> bool:
    """Whether a difference is no more than `times` that of a run of one process that only rounds otherwise."""
    return by <= times * rounded < math.inf


def shown(by: float, most: float) -> str:
    """Return a difference as text, in bold if it is more than it may be."""
    return f"{by:.0e}" if by <= most else f"**{by:.0e}**"
