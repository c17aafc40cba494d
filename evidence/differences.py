"""Compares what two runs left: tensors by name, and lines of a log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch


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


def logs_differ(lines: list[str], others: list[str]) -> str:
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
    largest = max(by / max(abs(value), 1e-3) for by, value, _ in off)
    return f"{largest:.0e}" if largest < 1e-5 else f"**{largest:.0e}**"
