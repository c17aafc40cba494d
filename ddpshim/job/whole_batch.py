"""Computes over the batch of all ranks what is no mean of the ranks' means: masked means, coupled samples."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ddpshim.errors import DataError
from ddpshim.job import exchange, shares
from ddpshim.job.group import new_group, world
from ddpshim.job.job import current
from ddpshim.job.world import World

T = TypeVar("T")


class _Group:
    """The process group of what is exchanged in the middle of a forward or backward pass; None before its first use."""

    def __init__(self) -> None:
        self.group: Any = None


def group() -> Any:
    """The group for messages inside of forward and backward passes: they must not cross those of buckets (collective).

    Collective in the first call alone.
    """
    made = current().part(_Group)
    if made.group is None:
        made.group = new_group()
    return made.group


def mean_over(here: World, total: torch.Tensor, count: Any) -> torch.Tensor:
    """See `World.mean_over`."""
    is_tensor = isinstance(count, torch.Tensor)  # else filled in where it is needed: a copy would be waited for
    counted = count.detach().to(total) if is_tensor else total.detach().new_full((), float(count))
    num = exchange.size(here)
    if num == 1:
        return total / counted
    return total * num / exchange.add_up(counted, group(), "a mean over all samples")


def all_gather(here: World, x: torch.Tensor) -> torch.Tensor:
    """See `World.all_gather`."""
    num = exchange.size(here)
    if num == 1:
        return x
    if shares.at_hand() is None:  # else they are: they are shares of one batch
        _check_equal_numbers(x)
    gathered: torch.Tensor = _Gather.apply(x, exchange.number(here), num, group())  # type: ignore[no-untyped-call]
    return gathered


def _check_equal_numbers(x: torch.Tensor) -> None:
    """Raise DataError, on all ranks, where their numbers of rows differ: gloo would end the process (collective)."""
    counted = torch.tensor([x.shape[0]], device=x.device)
    counts = [int(count) for count in exchange.gather(counted, group(), "numbers of rows")]
    if len(set(counts)) > 1:
        told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        raise DataError(
            f"all_gather of different numbers of rows ({told}): they cannot be put together. Pad them to the same "
            "number and mask what was added, or let the loss be a sum over each rank's rows (World.mean_over)."
        )


def whole_batch(loss: Callable[..., T]) -> Callable[..., T]:
    """`loss`, computed on every rank over the batch of all ranks (collective): exactly that of one process.

    For any loss that is no mean over samples: masked or weighted means, samples that are compared with each other,
    statistics of the batch. Tensors among its arguments whose first dimension is the rank's batch, or a multiple of it,
    are gathered as `World.all_gather` does; others are handed on. What it draws is drawn alike on all ranks.

    >>> import ddpshim
    >>> masked = ddpshim.whole_batch(lambda x, mask: (x * mask).sum() / mask.sum())
    >>> masked(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0]))
    tensor(2.)
    """

    @functools.wraps(loss)
    def over_all(*arguments: Any, **options: Any) -> T:
        tensors = [given for given in (*arguments, *options.values()) if isinstance(given, torch.Tensor)]
        at_hand, here = _batch_at_hand(tensors), world()
        if exchange.size(here) == 1 or at_hand is None:
            return loss(*arguments, **options)

        def gathered(given: Any) -> Any:
            has_rows = isinstance(given, torch.Tensor) and given.dim()
            num_samples = at_hand.num_samples(given.shape[0]) if has_rows else None
            if num_samples is None:
                return given
            by_sample = given.reshape(num_samples, -1, *given.shape[1:])
            return all_gather(here, by_sample).reshape(-1, *given.shape[1:])

        with shares.without_batch():
            return loss(*map(gathered, arguments), **{name: gathered(given) for name, given in options.items()})

    return over_all


def _batch_at_hand(tensors: list[torch.Tensor]) -> Optional[shares.Share]:
    """This rank's share of the batch at hand, else one with as many samples as the first tensor that has any."""
    here, num_rows = world(), next((given.shape[0] for given in tensors if given.dim() and given.shape[0]), None)
    alone = None if num_rows is None else shares.Share(here.rank, here.world_size, num_rows)
    return shares.at_hand() or alone


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int, num: int, among: Any) -> torch.Tensor:
        exchange.refuse_two_ways_on_one_gpu(x)
        ctx.number, ctx.num, ctx.group = number, num, among
        parts = exchange.gather(x.contiguous(), among, "a batch of all samples")
        return torch.stack(parts, 1).reshape(-1, *x.shape[1:]).clone()  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = exchange.add_up(gradient.contiguous(), ctx.group, "the gradient of a batch of all samples")
        return total[ctx.number :: ctx.num], None, None, None
