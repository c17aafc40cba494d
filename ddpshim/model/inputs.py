"""Moves the arguments of a wrapped network to the network's device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with all tensors on `device`; the same object if they already are. Local.

    Covers nested tuples, lists and dicts. A tensor that is already on the device is not copied, because the network may
    write into it. Others are moved in stream order, and gradients flow back through the move.
    """
    if isinstance(value, (torch.Tensor, PackedSequence)):
        there = value.data.device  # a PackedSequence itself has no `device`
        return value if there == device else value.to(device, non_blocking=True)  # type: ignore[arg-type]
    if isinstance(value, (tuple, list)):
        items = _moved_items(value, device)
        if items is value:
            return value
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)
    if isinstance(value, dict):
        keys, old = list(value), list(value.values())
        new = _moved_items(old, device)
        if new is old:
            return value
        filled = copy.copy(value)  # a defaultdict's constructor takes no items
        filled.update(zip(keys, new))
        return filled
    return value


def _moved_items(items: Sequence[Any], device: torch.device) -> Sequence[Any]:
    """Return `items` with each moved; `items` itself if none was."""
    new = [moved(item, device) for item in items]
    return new if any(one is not other for one, other in zip(new, items)) else items
