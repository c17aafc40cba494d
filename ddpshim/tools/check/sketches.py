"""Summarizes a tensor in nine numbers, enough to estimate the norm of the difference of two tensors.

A sketch is the sum of a tensor's entries with random signs, for eight sets of signs: the root mean square of the
differences of two sketches estimates the norm of the tensors' difference (Alon, Matias and Szegedy, "The space
complexity of approximating the frequency moments", 1996). Uses none of the program's random generators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Optional

import torch

NUM_SIGNS = 8


@functools.lru_cache(maxsize=64)
def _signs(size: int) -> torch.Tensor:
    # Signs are hashes of positions (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014),
    # because torch's random functions may be replaced in this process.
    mixed = torch.arange(1, NUM_SIGNS * size + 1, device="cpu").view(NUM_SIGNS, size) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return ((mixed >> 40 & 1) * 2 - 1).to(torch.int8)


def sketch(tensor: Optional[torch.Tensor]) -> Optional[list[float]]:
    """Return the norm of `tensor` followed by its sketch; None for None. Local."""
    if tensor is None:
        return None
    with torch.no_grad():
        values = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        flat = values.reshape(-1).to("cpu", torch.float64)
        sums = [float((flat * signs).sum()) for signs in _signs(flat.numel())] if flat.numel() else [0.0] * NUM_SIGNS
        return [float(flat.norm()), *sums]


def distance(one: Any, other: Any) -> float:
    """Return the norm of two tensors' difference; None counts as zeros, and NaN differs from numbers by infinity."""
    if one is None or other is None:
        return float((one or other or [0.0])[0])
    apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(one[1:], other[1:])) / NUM_SIGNS)
    if apart != apart:
        return 0.0 if str(one) == str(other) else math.inf
    return apart


def difference(one: Any, other: Any) -> float:
    """Return the norm of two tensors' difference relative to the first; infinity if one is None and the other not 0."""
    apart = distance(one, other)
    if one is None or other is None:
        return math.inf if apart else 0.0
    return apart / one[0] if one[0] else (math.inf if apart else 0.0)


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the best factor in `other` = factor * `one`, and what remains of `other`, relative to `one`."""
    square = sum(a * a for a in one[1:])
    factor = sum(a * b for a, b in zip(one[1:], other[1:])) / square if square else 0.0
    left = math.sqrt(sum((factor * a - b) ** 2 for a, b in zip(one[1:], other[1:])) / (square or 1.0))
    return factor, left
