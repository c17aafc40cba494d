"""Refuses modules that ranks cannot train together, with errors that say what to give `wrap_parallel` instead."""

from __future__ import annotations

from typing import Optional

import torch
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.model.wrapper import Transparent

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
    if not is_alone:
        from ddpshim.model.unsupported import check_tensors

        check_tensors(module)


def _other_way(module: nn.Module) -> Optional[str]:
    """Return the name of torch's wrapper that distributes this module already; None if there is none."""
    for kind in type(module).__mro__:
        if kind.__name__ in _OTHERS and kind.__module__.startswith(("torch.distributed", "torch.nn.parallel")):
            return kind.__name__
    # torch before 2.2 keeps the class, and stores in the module what was applied to it.
    applied = (held for key, held in vars(module).items() if "composable" in key and isinstance(held, dict))
    return next((name for held in applied for name in ("replicate", "fully_shard") if name in held), None)
