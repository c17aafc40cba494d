"""Tells how far two tensors differ from nine numbers of each, and in which precision a loss was computed.

A sketch is the sum of a tensor's entries with random signs, for eight sets of signs: the root mean square of the
differences of two sketches estimates the norm of the tensors' difference (Alon, Matias and Szegedy, "The space
complexity of approximating the frequency moments", 1996). Uses none of the program's random generators.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Optional

import torch

NUM_SIGNS = 8
SINGLE = float(torch.finfo(torch.float32).eps)


@functools.lru_cache(maxsize=64)
def _signs(size: int) -> torch.Tensor:
    # A bit of each byte is the sign of an entry. A hash: torch's random functions may be replaced in this process.
    return torch.frombuffer(bytearray(hashlib.shake_256().digest(size)), dtype=torch.uint8)


def sketch(tensor: Optional[torch.Tensor]) -> Optional[list[float]]:
    """Return the norm of `tensor` followed by its sketch; None for None. Local."""
    if tensor is None:
        return None
    with torch.no_grad():
        values = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        flat = values.reshape(-1).to("cpu", torch.float64)
        if not flat.numel():
            return [0.0] * (1 + NUM_SIGNS)
        signs = _signs(flat.numel())
        return [float(flat.norm()), *(float(flat.where(signs >> i & 1 > 0, -flat).sum()) for i in range(NUM_SIGNS))]


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


def of_graph(losses: Sequence[Any]) -> torch.dtype:
    """Return the coarsest floating dtype among the results from which `losses` were computed. Local.

    With autocast it is bfloat16 or float16, although losses and gradients are float32. Only results that need a
    gradient are looked at: a frozen network in bfloat16 gives every process the same features.
    """
    seen, waiting = set(), [loss.grad_fn for loss in losses]
    coarsest = torch.float32
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        for about in getattr(node, "_input_metadata", None) or ():
            dtype = getattr(about, "dtype", None)
            if dtype is not None and dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(coarsest).eps:
                coarsest = dtype
    return coarsest


def eps_of(name: str) -> float:
    """Return the distance from 1 to the next number of the dtype with this name, "bfloat16"."""
    return float(torch.finfo(getattr(torch, name)).eps)
