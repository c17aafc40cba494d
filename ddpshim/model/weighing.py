"""Weights a rank's backward pass by its number of rows, if a batch does not divide evenly over the ranks.

Ranks average their gradients, so a rank with more rows of a batch must count more. The gradient of the loss starts at
the rank's weight (`ddpshim.job.shares.Share.weight`) instead of 1. Everything that is linear in it is then right too:
gradients accumulated over batches, and those that BatchNorm exchanges between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddpshim.errors import DataError
from ddpshim.job import shares
from ddpshim.process.job import current

_WAYS_OUT = "Use drop_last=True, or a batch size and a number of samples that divide evenly over the ranks."


def weighed(tensors: Any, gradients: Any = None, *more: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of torch.autograd.backward, weighted for this rank's rows of the current batch. Local.

    Call it if a batch may not divide evenly. Raises DataError if it is unknown which batch the loss was computed on.
    """
    sharing = current().part(shares.Sharing)
    _refuse_unknown(sharing)
    if sharing.share is not None and sharing.share.totals:
        gradients = _times(tensors, gradients, sharing.share.weight)
    return (tensors, gradients, *more), options


def _refuse_unknown(sharing: shares.Sharing) -> None:
    given = sharing.last_given
    what = ""
    if sharing.share is None and sharing.has_fetched_ahead:
        what = "the loader was asked for the next batch before this one was trained on"
    elif sharing.share is not None and given is not None:
        totals = {each.total for each in sharing.under_way() if each.feeds}
        if len(totals) > 1:
            what = f"batches of {' and '.join(map(str, sorted(totals)))} samples from several loaders are in use"
        elif given.num_since > 1 and given.passes_then == sharing.num_passes - 1:
            what = f"{given.num_since} batches were taken since the backward pass before"
    if what:
        raise DataError(
            f"a backward pass on a batch that may not divide over the ranks, and {what}: the weight of this rank's "
            f"rows is unknown, and gradients would be wrong. {_WAYS_OUT}"
        )


def _times(tensors: Any, gradients: Any, weight: float) -> Any:
    losses = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
    given: Sequence[Any] = [None] * len(losses)
    if gradients is not None:
        given = [gradients] if isinstance(gradients, torch.Tensor) else [*gradients]
    return [_scaled(loss, gradient, weight) for loss, gradient in zip(losses, given)]


def _scaled(loss: torch.Tensor, gradient: Any, weight: float) -> Any:
    if gradient is not None:
        return gradient * weight
    # For a loss that is not a scalar torch raises its own error.
    return torch.full_like(loss, weight, requires_grad=False) if loss.numel() == 1 and loss.requires_grad else None
