"""Makes BatchNorm normalise over the global batch, as one process does, on the CPU and on GPUs.

torch's SyncBatchNorm runs on GPUs only, and pickled modules contain its class. Here layers are not changed;
torch.nn.functional.batch_norm is replaced until `cleanup()`. Means and variances are combined as by Chan, Golub and
LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ddpshim.job import exchange, shares
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced


class _Synced:
    """The group of ranks over which BatchNorm computes statistics in a job; None before `sync`."""

    def __init__(self) -> None:
        self.group: Any = None


def sync(process_group: Any = None) -> None:
    """Compute BatchNorm's statistics over the ranks of `process_group` (default all) until `cleanup()` (collective).

    A forward in training mode on a rank's share of a batch is then collective too.
    """
    job = current()
    synced = job.part(_Synced)
    if synced.group is not None:
        return
    synced.group = process_group if process_group is not None else exchange.group()
    job.at_end.enter_context(replaced(functional, "batch_norm", _stand_in(functional.batch_norm)))


def _stand_in(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def batch_norm(
        input: torch.Tensor,
        running_mean: Optional[torch.Tensor],
        running_var: Optional[torch.Tensor],
        weight: Optional[torch.Tensor] = None,
        bias: Optional[torch.Tensor] = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if not training or not shares.has_share():
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        group = current().part(_Synced).group
        return over_ranks(input, running_mean, running_var, weight, bias, momentum, eps, group)

    return batch_norm


def over_ranks(
    x: torch.Tensor,
    running_mean: Optional[torch.Tensor],
    running_var: Optional[torch.Tensor],
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    momentum: float,
    eps: float,
    group: Any,
) -> torch.Tensor:
    """Return `batch_norm` in training of this rank's rows `x`, normalised over those of all ranks (collective)."""
    normed, mean, variance, count = _Normalise.apply(x, eps, group)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean), momentum)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var), momentum)
    shape = [1, -1] + [1] * (x.dim() - 2)
    if weight is not None:
        normed = normed * weight.view(shape)
    return normed if bias is None else normed + bias.view(shape)  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """Returns (x - mean) / deviation for each channel, over all ranks, and the mean, variance and number of values.

    Gradients are of the sum of the ranks' losses, because DDP divides by the number of ranks afterwards.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, group: Any) -> Any:
        exchange.refuse_two_ways_on_one_gpu(x)
        dimensions = [0, *range(2, x.dim())]
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        mean = wide.mean(dimensions)
        squares = (wide - _like(mean, x)).square().sum(dimensions)
        at_hand = shares.at_hand()
        ctx.counts = at_hand is None or at_hand.num_counted > 0  # else its rows repeat another rank's
        count = x.numel() // x.shape[1] if ctx.counts else 0
        squares = squares if ctx.counts else squares * 0
        own = torch.cat([mean, squares, mean.new_full((1,), float(count))])
        table = torch.stack(exchange.gather(own, group, "the statistics of a batch"))
        counts, means = table[:, -1:], table[:, : x.shape[1]]
        total = counts.sum()
        if count <= 1 and total <= 1:  # in this order: the host waits for a GPU only if it has one value
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        mean = (means * counts).sum(0) / total
        variance = (table[:, x.shape[1] : -1].sum(0) + ((means - mean).square() * counts).sum(0)) / total
        scale = (variance + eps).rsqrt()
        normed = (wide - _like(mean, x)) * _like(scale, x)
        ctx.save_for_backward(normed, scale)
        ctx.group, ctx.total, ctx.dtype = group, total, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return normed.to(x.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        normed, scale = ctx.saved_tensors
        dimensions = [0, *range(2, normed.dim())]
        gradient = gradient.to(normed.dtype)
        own = torch.stack([gradient.sum(dimensions), (gradient * normed).sum(dimensions)])
        sums = exchange.add_up(own, ctx.group, "the gradient of the statistics of a batch")
        mean, along = sums / ctx.total
        if not ctx.counts:
            return torch.zeros_like(gradient).to(ctx.dtype), None, None
        centred = gradient - _like(mean, normed) - normed * _like(along, normed)
        return (centred * _like(scale, normed)).to(ctx.dtype), None, None


def _like(of_channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return of_channels.view([1, -1] + [1] * (x.dim() - 2))
