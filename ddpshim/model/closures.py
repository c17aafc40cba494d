"""Gives an optimizer with a closure (LBFGS) the loss of the whole batch, as in one process."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from ddpshim.job import exchange
from ddpshim.model import guard


def share(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Return the arguments of an optimizer's step, in which the closure returns the mean of the ranks' losses.

    Local; the closure is then collective. A line search on a rank's own loss would stop at a different point on each
    rank. None, so that nothing changes, if no wrapper reduces a parameter of the optimizer.
    """
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
        mean = exchange.add_up(own, owner.process_group) / owner.process_group.size()
        return mean.to(loss.dtype).to(loss.device) if isinstance(loss, torch.Tensor) else mean.item()

    return shared
