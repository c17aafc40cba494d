"""Gathers, sums and averages tensors over all ranks."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist

from ddpshim.job.world import World, as_divisor
from ddpshim.process.job import current
from ddpshim.process.messages import begin_gather


def table(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the tensors of all ranks, of one shape, joined in a new first dimension (collective)."""
    here, own = current().world, own.detach()
    if here is None or here.world_size == 1:
        return own.unsqueeze(0)
    everyones = own.new_empty((dist.get_world_size(group), *own.shape))
    begin_gather([*everyones.unbind()], own.contiguous(), group).wait()
    return everyones


def add_up(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of all ranks' tensors, as a new tensor (collective)."""
    total = own.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def new_group(backend: Optional[str] = None) -> Any:
    """Return another process group of all ranks, with the first one's timeout and default backend (collective)."""
    timeout = current().timeout
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    return dist.new_group(backend=backend, **options)


class _Group:
    """The process group for messages within forward and backward passes, separate from the buckets' group."""

    def __init__(self) -> None:
        self.made = new_group()


def group() -> Any:
    """Return the group for messages within forward and backward passes (the first call is collective)."""
    return current().part(_Group).made


def mean_over(here: World, total: Any, count: Any) -> Any:
    """See `World.mean_over`."""
    if not isinstance(total, torch.Tensor):
        of_all = here.sum({"total": float(total), "count": float(count)})
        return of_all["total"] / of_all["count"]
    counted = as_divisor(count, total)
    if here.world_size == 1:
        return total / counted
    own = torch.stack(torch.broadcast_tensors(total.detach().to(counted.dtype), counted))
    total_of_all, over_all = add_up(own, group())
    mean: torch.Tensor = total * here.world_size / over_all  # the ranks' gradients are averaged
    with torch.no_grad():  # the gradient stays that of this rank's part
        return mean.copy_(total_of_all / over_all)
