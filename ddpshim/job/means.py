"""Computes means over the entries of all ranks: masked means, sums of weights."""

from __future__ import annotations

from typing import Any

import torch

from ddpshim.job import exchange, shares
from ddpshim.job.job import current
from ddpshim.job.process_group import new_group
from ddpshim.job.world import World, as_divisor


class _Group:
    """The process group for messages within forward and backward passes; None before its first use."""

    def __init__(self) -> None:
        self.group: Any = None


def group() -> Any:
    """Return the group for messages within forward and backward passes, separate from the buckets' group.

    The first call is collective.
    """
    made = current().part(_Group)
    if made.group is None:
        made.group = new_group()
    return made.group


def mean_over(here: World, total: Any, count: Any) -> Any:
    """See `World.mean_over`."""
    num, at_hand = exchange.size(here), shares.at_hand()
    weight = 1.0 if at_hand is None else at_hand.weight  # 0 if this rank repeats a row of another rank
    if not isinstance(total, torch.Tensor):
        sums = {"total": float(total), "count": float(count)}
        of_all = here.sum(sums if weight else dict.fromkeys(sums, 0.0))
        return of_all["total"] / of_all["count"]
    counted = as_divisor(count, total)
    if num == 1:
        return total / counted
    own = torch.stack(torch.broadcast_tensors(total.detach().to(counted.dtype), counted))
    own = own if weight else torch.zeros_like(own)
    total_of_all, over_all = exchange.add_up(own, group(), "a mean over all samples")
    # The backward pass multiplies by `weight`, which is right for a mean over the rank's rows: undo it here.
    mean: torch.Tensor = total * (num / weight if weight else 0.0) / over_all
    with torch.no_grad():  # the gradient stays that of this rank's part
        return mean.copy_(total_of_all / over_all)
