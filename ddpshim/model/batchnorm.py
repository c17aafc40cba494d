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

from ddpshim.job import collectives
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced

_WIDE = (torch.float32, torch.float64)


def sync() -> None:
    """Compute BatchNorm's statistics over all ranks until `cleanup()` (collective).

    A forward in training mode on a rank's share of a batch is then collective too.
    """
    if current().next_number("synced batchnorm") == 0:
        collectives.group()  # made now, on all ranks
        current().at_end.enter_context(replaced(functional, "batch_norm", _stand_in(functional.batch_norm)))


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
        if not training or not torch.is_grad_enabled():
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        return over_ranks(input, running_mean, running_var, weight, bias, momentum, eps, collectives.group())

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
    counts: Optional[tuple[int, ...]] = None,  # of each rank's values of a channel, if they are known
) -> torch.Tensor:
    """Return `batch_norm` in training of this rank's rows `x`, normalised over those of all ranks (collective)."""
    wide = x if x.dtype in _WIDE else x.float()
    weight, bias = (one if one is None or one.dtype == wide.dtype else one.to(wide.dtype) for one in (weight, bias))
    out, mean, variance, count = _Normalise.apply(wide, weight, bias, eps, group, counts)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            if running_mean.dtype != mean.dtype:
                mean, variance = mean.to(running_mean.dtype), variance.to(running_mean.dtype)
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(variance * (count / (count - 1)), momentum)
    return out if wide is x else out.to(x.dtype)  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """Returns BatchNorm of x over all ranks, and the mean, variance and number of values of each channel.

    Gradients are of the sum of the ranks' losses, because DDP divides by the number of ranks afterwards. Two of torch's
    kernels compute a rank's part: that of evaluation, and that of the gradients of weight and bias.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, group: Any, counts: Any) -> Any:
        num = x.shape[1]
        variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        own = [mean, variance]
        if counts is None:
            own.append(mean.new_full((1,), float(x.numel() // num)))
        table = collectives.table(torch.cat(own), group)
        if counts is None:
            total: Any = table[:, -1].sum()
            part_of_rank = table[:, -1] / total
        else:
            total, part_of_rank = _of_known(counts, x.dtype, x.device)
        if x.numel() <= num and total <= 1:  # in this order: the host waits for a GPU only if it has one value
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        means, parts = table[:, :num], part_of_rank.unsqueeze(1)
        mean = (parts * means).sum(0)  # no matrix product: autocast would round it
        variance = (parts * (means - mean).square_().add_(table[:, num : 2 * num])).sum(0)
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt_())
        ctx.group, ctx.total, ctx.eps, ctx.has_bias = group, total, eps, bias is not None
        ctx.mark_non_differentiable(mean, variance, *([total] if counts is None else []))
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        # Of the bias: the sum of the gradient. Of the weight: the sum of the gradient times (x - mean) * scale.
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, scale, True, ctx.eps, [False, True, True]
        )
        others = of_weight if weight is not None else None, of_bias if ctx.has_bias else None, None, None, None
        sums = collectives.add_up(torch.stack([of_bias, of_weight]), ctx.group)
        level, along = sums.div_(-ctx.total).unbind()
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = (x - mean.view(shape)).mul_((along * scale).view(shape)).add_(gradient).add_(level.view(shape))
        return centred.mul_((scale if weight is None else scale * weight).view(shape)), *others


@functools.lru_cache(maxsize=256)
def _of_known(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[int, torch.Tensor]:
    """Return the sum of the ranks' numbers of values, and each rank's part of it."""
    total = sum(counts)
    return total, torch.tensor([count / total for count in counts], dtype=dtype, device=device)
