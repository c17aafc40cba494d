"""Refuses modules that ranks cannot train together, with errors that say what to give `wrap_parallel` instead."""

from __future__ import annotations

from typing import Optional

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddpshim.errors import SyncError
from ddpshim.model.transparent import Transparent

# Names and not classes, because most programs never import them. Each shards parameters or reduces gradients itself.
_OTHERS = ("FullyShardedDataParallel", "FSDP", "FSDPModule", "ReplicateModule", "DDP", "DistributedDataParallel")


def check_kind(module: nn.Module, is_alone: bool) -> None:
    """Refuse a module whose gradients cannot be reduced or are reduced by another wrapper. Local.

    If `is_alone`, nothing will be reduced, and only modules that cannot be wrapped at all are refused.
    """
    if torch.is_inference_mode_enabled() and not is_alone:
        raise SyncError(
            "wrap_parallel under torch.inference_mode(): no gradient of the network would reach the other ranks. Call "
            "it outside of that block."
        )
    if not isinstance(module, nn.Module):
        raise SyncError(
            f"wrap_parallel got a {type(module).__name__}, which is not an nn.Module and has no parameters to "
            "train. Give it the network; give several networks one by one, or in an nn.ModuleDict."
        )
    for path, child in [("", module)] if is_alone else module.named_modules():
        if isinstance(child, Transparent):
            continue
        where = f"'{path}' of {type(module).__name__}" if path else type(child).__name__
        if isinstance(child, torch.jit.ScriptModule):
            raise SyncError(
                f"{where} is scripted or traced by torch.jit, so its gradients cannot be reduced from Python. Wrap "
                "the original module, and script or trace the result; or use torch.compile, before or after."
            )
        other = _other_way(child)
        if other is not None:
            raise SyncError(
                f"{where} is distributed already, by torch's {other}; its gradients would be reduced twice, or "
                "parts of different parameters mixed. Give wrap_parallel the bare module, and leave the other "
                "wrapper out (fully_shard, replicate, FSDP, DistributedDataParallel)."
            )
    for name, tensor in () if is_alone else (*module.named_parameters(), *module.named_buffers()):
        _check_tensor(f"'{name}' of {type(module).__name__}", tensor)


def _other_way(module: nn.Module) -> Optional[str]:
    """Return the name of torch's wrapper that distributes this module already; None if there is none."""
    for kind in type(module).__mro__:
        if kind.__name__ in _OTHERS and kind.__module__.startswith(("torch.distributed", "torch.nn.parallel")):
            return kind.__name__
    # torch before 2.2 keeps the class, and stores in the module what was applied to it.
    applied = (held for key, held in vars(module).items() if "composable" in key and isinstance(held, dict))
    return next((name for held in applied for name in ("replicate", "fully_shard") if name in held), None)


def _check_tensor(what: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise SyncError(
            f"{what} has no shape yet (a lazy module), so it cannot be compared or reduced. Run one batch through "
            "the network before wrap_parallel: with torch.no_grad(): net(batch)."
        )
    if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
        raise SyncError(
            f"{what} is a DTensor, of which each rank may hold a different part (fully_shard, tensor parallelism); "
            "wrap_parallel would mix gradients of different parts. Give it the network before that."
        )
    if tensor.is_meta:
        raise SyncError(
            f"{what} is on the meta device and has no values to train. Before wrap_parallel give it memory "
            "(net.to_empty(device=ddpshim.world().device)) and values (its reset_parameters(), or a checkpoint)."
        )
    if tensor.is_inference():
        raise SyncError(
            f"{what} was made under torch.inference_mode(); it can have no gradient. Build the network outside of that "
            "block."
        )
