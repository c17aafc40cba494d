"""Computes losses of coupled samples over the global batch."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ddpshim.errors import DataError
from ddpshim.job import exchange, shares
from ddpshim.job.exchange import group
from ddpshim.job.world import World, world

T = TypeVar("T")


def all_gather(here: World, x: torch.Tensor) -> torch.Tensor:
    """See `World.all_gather`."""
    num = exchange.size(here)
    if num == 1:
        return x
    at_hand = shares.at_hand()
    if at_hand is None:  # else they are shares of one batch
        _check_equal_numbers(x)
    elif at_hand.totals:
        return _all_gather_unevenly(here, x, at_hand)
    gathered: torch.Tensor = _Gather.apply(x, exchange.number(here), num, group())  # type: ignore[no-untyped-call]
    return gathered


def _all_gather_unevenly(here: World, x: torch.Tensor, at_hand: shares.Share) -> torch.Tensor:
    """Return `all_gather` of a batch that W does not divide: pads to equal numbers of rows, and removes the padding."""
    num_samples, size = at_hand.num_samples(x.shape[0]), here.world_size
    if num_samples is None:
        raise DataError(
            f"all_gather of {x.shape[0]} rows, and this rank has {at_hand.num_rows} of a batch of "
            f"{at_hand.totals[0]}: it is unknown which samples they belong to. Gather tensors with a row for each "
            "sample, or use drop_last=True."
        )
    total, num_each = at_hand.total(num_samples), x.shape[0] // num_samples
    most = -(-total // size) * num_each
    padded = torch.cat([x, x.new_zeros(most - x.shape[0], *x.shape[1:])])
    gathered: torch.Tensor = _Gather.apply(padded, here.rank, size, group())  # type: ignore[no-untyped-call]
    of_ranks = [len(range(rank, total, size)) * num_each for rank in range(size)]
    kept = [row * size + rank for row in range(most) for rank in range(size) if row < of_ranks[rank]]
    return gathered[torch.tensor(kept, device=x.device)]


def _check_equal_numbers(x: torch.Tensor) -> None:
    """Raise DataError, on all ranks, if their numbers of rows differ: gloo would end the process (collective)."""
    counted = torch.tensor([x.shape[0]], device=x.device)
    counts = [int(count) for count in exchange.gather(counted, group(), "numbers of rows")]
    if len(set(counts)) > 1:
        told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        raise DataError(
            f"all_gather of different numbers of rows ({told}): they do not form one batch. Gather the rows of a "
            "batch inside the loop, while it is at hand; or sum over each rank's rows (World.mean_over)."
        )


def whole_batch(loss: Callable[..., T]) -> Callable[..., T]:
    """Return a function that computes `loss` on every rank over the global batch, as one process does (collective).

    For any loss that is not a mean over samples: masked or weighted means, samples that are compared with each other,
    batch statistics. Tensor arguments whose first dimension is the rank's batch, or a multiple of it, are gathered as
    by `World.all_gather`; others are passed unchanged. Its random draws are the same on all ranks.

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

        is_of_all = _are_of_all(at_hand, tensors) if at_hand.totals else {}

        def gathered(given: Any) -> Any:
            has_rows = isinstance(given, torch.Tensor) and given.dim()
            num_samples = at_hand.num_samples(given.shape[0]) if has_rows else None
            if num_samples is None or not is_of_all.get(id(given), True):
                return given
            by_sample = given.reshape(num_samples, -1, *given.shape[1:])
            return all_gather(here, by_sample).reshape(-1, *given.shape[1:])

        of_all, named = [*map(gathered, arguments)], {name: gathered(given) for name, given in options.items()}
        with shares.without_batch():
            return loss(*of_all, **named)

    return over_all


def _are_of_all(at_hand: shares.Share, tensors: list[torch.Tensor]) -> dict[int, bool]:
    """Return, by id, whether each tensor holds the batch on all ranks, whose numbers of rows differ (collective)."""
    num_each = torch.zeros(len(tensors), dtype=torch.int64, device="cpu" if not tensors else tensors[0].device)
    for i, given in enumerate(tensors):
        num_samples = at_hand.num_samples(given.shape[0]) if given.dim() else None
        num_each[i] = 0 if num_samples is None else given.shape[0] // num_samples
    table = torch.stack(exchange.gather(num_each, group(), "numbers of rows")).tolist()
    return {id(given): len(set(of_ranks)) == 1 for given, of_ranks in zip(tensors, zip(*table))}


def _batch_at_hand(tensors: list[torch.Tensor]) -> Optional[shares.Share]:
    """Return this rank's share of the current batch, else one with the rows of the first tensor that has any."""
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
