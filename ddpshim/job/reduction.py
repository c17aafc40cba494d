"""Adds and averages Python numbers exactly, and tensors in the widest type of their kind, over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch

from ddpshim.errors import WorldError


def to_cpu(value: Any) -> Any:
    """Return `value` with its tensors, including those in a mapping, on the CPU and detached. Local."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    return value


def reduce(values: list[Any], mean: bool, like: Any) -> Any:
    """Return the sum or mean of one value of each rank, with the type of `like`. Local."""
    first = values[0]
    if any(isinstance(value, Mapping) for value in values):
        keys = [set(value) if isinstance(value, Mapping) else {type(value)} for value in values]
        for rank, other in enumerate(keys):
            if other != keys[0] or not isinstance(values[rank], Mapping):
                raise WorldError(
                    f"ranks reduce mappings with different keys (rank 0 and rank {rank} differ in "
                    f"{sorted(map(str, other ^ keys[0]))}); numbers of different things would be averaged. Log the "
                    "same keys on every rank."
                )
        return {key: reduce([value[key] for value in values], mean, like[key]) for key in like}
    if isinstance(first, torch.Tensor):
        if any(not isinstance(v, torch.Tensor) or v.shape != first.shape for v in values):
            raise WorldError(
                f"ranks reduce tensors of different shapes ({[tuple(getattr(v, 'shape', ())) for v in values]}); "
                "broadcasting would give wrong numbers. Reduce tensors of equal shapes."
            )
        if not any(v.is_complex() for v in values):
            is_float = any(v.is_floating_point() for v in values)
            total = torch.stack([v.to(torch.float64 if is_float else torch.int64) for v in values]).sum(0)
            if mean:
                total = total.double() / len(values)
            return total.to(like.device, like.dtype if like.is_floating_point() else total.dtype)
    if all(isinstance(v, Integral) for v in values):
        added = sum(int(v) for v in values)
        return added / len(values) if mean else added
    if all(isinstance(v, Real) for v in values):
        added_float = _sum_of_floats([float(v) for v in values])
        return added_float / len(values) if mean else added_float
    raise WorldError(
        f"cannot add values of type {sorted({type(v).__name__ for v in values})} over ranks; the result would be "
        "meaningless. Pass numbers, tensors or mappings of these, or use gather()."
    )


def _sum_of_floats(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities: show a loss that exploded, and do not end the job
        return float(sum(values))
