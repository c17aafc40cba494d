"""Moves what a wrapped network is called with to the network's device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def moved(value: Any, device: torch.device) -> Any:
    """`value` with all tensors on `device`; the same object where they are there already. Local.

    Looks into tuples, lists and dicts, however deep. A tensor that is there is not copied: the network may write into
    it. Others follow in the order of the stream, gradients flow back through the move.
    """
    if isinstance(value, (torch.Tensor, PackedSequence)):
        there = value.data.device  # which a packed sequence has not itself
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
    """Each of `items` moved; `items` itself where nothing was."""
    new = [moved(item, device) for item in items]
    return new if any(one is not other for one, other in zip(new, items)) else items
