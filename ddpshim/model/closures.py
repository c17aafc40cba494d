"""Gives an optimizer with a closure (LBFGS) the loss of the whole batch, as in one process."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpshim.job import exchange
from ddpshim.job.job import current
from ddpshim.model import guard


class _Sharing:
    """Whether closures return shared losses in a job."""

    is_on = False


def share_losses() -> None:
    """Make closures of optimizer steps return the mean of the ranks' losses, until `cleanup()`. Local.

    A line search on a rank's own loss would stop at a different point on each rank.
    """
    sharing = current().part(_Sharing)
    if not sharing.is_on:
        sharing.is_on = True
        current().at_end.callback(register_optimizer_step_pre_hook(_share).remove)


def _share(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    owners = (guard.owner_of(p) for group in optimizer.param_groups for p in group["params"])
    owner = next((owner for owner in owners if owner is not None), None)
    if owner is None:
        return None
    shared = _shared(closure, owner)
    return ((args[0], shared, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": shared})


def _shared(closure: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    @functools.wraps(closure)
    def shared(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        if not isinstance(loss, (float, torch.Tensor)) or (isinstance(loss, torch.Tensor) and loss.numel() != 1):
            return loss
        own = torch.as_tensor(loss, dtype=torch.float64).detach().to(owner.device)
        mean = exchange.add_up(own, owner.process_group, "the loss of a closure") / owner.process_group.size()
        return mean.to(loss.dtype).to(loss.device) if isinstance(loss, torch.Tensor) else mean.item()

    return shared
