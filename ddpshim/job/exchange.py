"""Gathers, sums and averages tensors over all ranks, or over all virtual ranks with the option `exact`.

Virtual rank i of process r of W is number r + i * W of V: its rows of a global batch are rows i, i + V / W, ... of the
process's. Sums are added in the order of these numbers, so that their bits do not depend on W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import torch
import torch.distributed as dist

from ddpshim.errors import SyncError
from ddpshim.job import shares
from ddpshim.job.world import World, as_divisor
from ddpshim.process.job import current
from ddpshim.process.messages import begin_gather

if TYPE_CHECKING:
    from ddpshim.job.virtual_rank_scheduler import Turns

T = TypeVar("T")


def turns() -> Optional[Turns]:
    """Return the turns of the current step; None if each rank is one virtual rank, or between steps. Local."""
    return current().turns


def size(here: World) -> int:
    """Return the number of ranks, or virtual ranks, that `gather` covers. Local."""
    playing = turns()
    return here.world_size * (1 if playing is None else playing.size)


def number(here: World) -> int:
    """Return this rank's, or virtual rank's, number among them. Local."""
    playing = turns()
    return here.rank if playing is None or playing.now is None else here.rank + playing.now * here.world_size


def gather(own: torch.Tensor, group: Any, what: str) -> list[torch.Tensor]:
    """Return the tensors of all ranks, of one shape, in rank order (collective).

    Args:
        group: for messages between processes; unused with one process.
        what: the name of these tensors, for messages.
    """
    playing = turns()
    if playing is None:
        return [*table(own, group, what)]
    return playing.meet(what, own.detach(), lambda of_process: _gather_of_processes(of_process, group))


def table(own: torch.Tensor, group: Any, what: str) -> torch.Tensor:
    """Return the tensors of all ranks, joined in a new first dimension (collective)."""
    return _everyones(own, group) if turns() is None else torch.stack(gather(own, group, what))


def add_up(own: torch.Tensor, group: Any, what: str) -> torch.Tensor:
    """Return the sum of all ranks' tensors, as a new tensor (collective)."""
    here = current().world
    if here is None or here.options.exact is None:
        total = own.detach().clone()
        dist.all_reduce(total, group=group)
        return total
    return in_order(gather(own, group, what))


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `parts`, added from first to last, as a new tensor. Local."""
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def in_order_of_numbers(of_processes: Sequence[Sequence[T]]) -> list[T]:
    """The values of all processes' virtual ranks, in the order of the virtual ranks' numbers. Local.

    Virtual rank i of process r of W is number r + i * W.
    """
    return [of_process[i] for i in range(len(of_processes[0])) for of_process in of_processes]


def refuse_two_ways_on_one_gpu(x: torch.Tensor) -> None:
    """Raise SyncError for an exchange within a backward pass between virtual ranks that share a GPU. Local."""
    playing = turns()
    if playing is not None and x.is_cuda:
        raise SyncError(
            f"{playing.size} virtual ranks on one GPU exchange values in the middle of a backward pass (BatchNorm, "
            "World.all_gather), for which torch has one thread per GPU: they would deadlock. Start as many ranks as "
            "the option exact says; they may share GPUs."
        )


def _gather_of_processes(of_process: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    return in_order_of_numbers([list(of_rank) for of_rank in _everyones(torch.stack([*of_process]), group)])


def _everyones(own: torch.Tensor, group: Any) -> torch.Tensor:
    here, own = current().world, own.detach()
    if here is None or here.world_size == 1:
        return own.unsqueeze(0)
    everyones = own.new_empty((dist.get_world_size(group), *own.shape))
    begin_gather([*everyones.unbind()], own.contiguous(), group).wait()
    return everyones


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
    num, at_hand = size(here), shares.at_hand()
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
    total_of_all, over_all = add_up(own, group(), "a mean over all samples")
    # The backward pass multiplies by `weight`, which is right for a mean over the rank's rows: undo it here.
    mean: torch.Tensor = total * (num / weight if weight else 0.0) / over_all
    with torch.no_grad():  # the gradient stays that of this rank's part
        return mean.copy_(total_of_all / over_all)
