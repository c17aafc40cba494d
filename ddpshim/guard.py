"""The runtime check that no optimizer steps on gradients that are one rank's alone. It repairs nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpshim.errors import SyncError
from ddpshim.group import on_cleanup

_OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"


class Reduced(Protocol):
    """What the check asks of a wrapper that reduces gradients."""

    module: nn.Module
    has_unreduced_gradients: bool
    num_reductions: int

    @property
    def is_armed(self) -> bool: ...


# Which wrapper reduces a parameter's gradient, by the parameter's id: tensors compare by element, and a
# wrapper keeps its parameters alive until it disowns them.
_owners: dict[int, Reduced] = {}
_handles: list[Any] = []  # of the optimizer hooks, while they are registered


def own(wrapper: Reduced, parameters: Iterable[torch.Tensor]) -> None:
    """Take note that `wrapper` reduces these gradients. Local."""
    _owners.update((id(p), wrapper) for p in parameters)


def disown(parameters: Iterable[torch.Tensor]) -> None:
    """Forget who reduces these gradients. Local."""
    for p in parameters:
        _owners.pop(id(p), None)


def is_owned(parameter: torch.Tensor) -> bool:
    """Whether a wrapper reduces this parameter's gradient already. Local."""
    return id(parameter) in _owners


def watch_optimizers() -> None:
    """Have every optimizer step in this process checked, until `cleanup()`; not with DDPSHIM_GUARD=0. Local."""
    if _handles or os.environ.get("DDPSHIM_GUARD") == "0":
        return
    _handles.append(register_optimizer_step_pre_hook(_check_step))
    _handles.append(register_optimizer_step_post_hook(_check_closure))
    on_cleanup(_unwatch)


def _unwatch() -> None:
    while _handles:
        _handles.pop().remove()


def _check_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A closure makes its gradients inside the step: look at them afterwards."""
    if len(args) > 1 or kwargs.get("closure") is not None:
        _check_step(optimizer, args, kwargs)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step whose gradients were not reduced over the ranks."""
    step = f"{type(optimizer).__name__}.step()"
    owners = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            owner = _owners.get(id(p))
            if owner is None:
                raise SyncError(
                    f"{step}: parameter {position} of group {number} ({_describe(p)}) has a gradient that is this "
                    "rank's alone; ranks would train different models. Pass the module that holds it to wrap_parallel "
                    f"before training, again if it was unfrozen or added after the wrap ({_OPT_OUT})."
                )
            owners[id(owner)] = owner
    for wrapped in owners.values():
        name = type(wrapped.module).__name__
        if wrapped.is_armed:
            raise SyncError(
                f"{step}: a backward pass of {name} never finished (an exception inside it was caught?); its peers "
                "still wait for its gradients. Let the exception end the job."
            )
        if wrapped.has_unreduced_gradients:
            raise SyncError(
                f"{step} after a backward pass of {name} under no_sync(); ranks would step on different gradients. "
                "Leave no_sync() for the last backward pass before a step."
            )
        if wrapped.num_reductions == 0:
            raise SyncError(
                f"{step}: the gradients of {name} never went through a backward pass (torch.autograd.grad, or .grad "
                f"set by hand); ranks would train different models. Call loss.backward() ({_OPT_OUT})."
            )


def _describe(parameter: torch.Tensor) -> str:
    """The parameter's name where a wrapped module knows it, else its shape."""
    for wrapped in {id(w): w for w in _owners.values()}.values():
        for name, other in wrapped.module.named_parameters():
            if other is parameter:
                return f"'{name}' of {type(wrapped.module).__name__}"
    return f"shape {tuple(parameter.shape)}, in no wrapped module"
