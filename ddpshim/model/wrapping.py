"""Wraps a network for several ranks; see `wrap_parallel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.job.world import World
from ddpshim.model import guard, torch_private
from ddpshim.model.broadcasting import broadcast_state
from ddpshim.model.reducer import DistributedModule
from ddpshim.model.unsupported import check_device, check_same_structure, watch_wrapping
from ddpshim.model.wrapper import BareModule
from ddpshim.process.job import current
from ddpshim.process.observed import observe


def wrap(
    module: nn.Module,
    here: World,
    *,
    find_unused_parameters: bool,
    static_graph: bool,
    gradient_as_bucket_view: bool,
    bucket_cap_mb: Optional[float],
    broadcast_buffers: bool,
    sync_batchnorm: bool,
    comm_hook: Any,
    comm_hook_state: Any,
    process_group: Any,
    shard: Union[bool, Sequence[str]],
) -> Any:
    """Return `module` in the wrapper that reduces its gradients; the arguments are those of `wrap_parallel`
    (collective)."""
    check_device(module, here)
    if process_group is None:
        check_same_structure(module, here)
    if here.options.exact is not None:  # the program holds whole batches: `ddpshim.rows.pieces` adds up gradients
        broadcast_state(module)
        guard.watch(module)
        return BareModule(module)
    if bucket_cap_mb is None:
        bucket_cap_mb = best_bucket_cap_mb(module, dist.get_backend(process_group))
    if sync_batchnorm and _has_batchnorm(module):
        from ddpshim.model import batchnorm

        batchnorm.sync(process_group)
    if here.options.guard:
        guard.watch_optimizers()
    _share_losses()
    watch_wrapping()
    if shard:
        from ddpshim.model.sharding import ShardedModule

        return ShardedModule(
            module,
            methods=[] if shard is True else [shard] if isinstance(shard, str) else [*shard],
            sync_buffers=broadcast_buffers,
        )
    if has_nothing_to_reduce(module):
        broadcast_state(module, process_group)
        if process_group is None:
            guard.watch(module)
        return BareModule(module)
    return DistributedModule(
        module,
        strict=not find_unused_parameters,
        same_every_time=static_graph,
        sync_buffers=broadcast_buffers,
        is_guarded=here.options.guard,
        comm_hook=comm_hook,
        comm_hook_state=comm_hook_state,
        process_group=process_group if process_group is not None else dist.group.WORLD,
        # A program for one process may keep gradients over the next backward pass.
        gradient_as_bucket_view=gradient_as_bucket_view and not current().holds_whole_batches,
        **({} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}),
    )


def _share_losses() -> None:
    """Make closures of optimizer steps (LBFGS) return the mean of the ranks' losses, until `cleanup()`. Local."""
    if current().next_number("shared losses of closures") == 0:
        observe(current().at_end, before_step=_share_loss)


def _share_loss(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if len(args) < 2 and kwargs.get("closure") is None:
        return None
    from ddpshim.model import closures

    return closures.share(optimizer, args, kwargs)


def best_bucket_cap_mb(module: nn.Module, backend: str) -> Optional[float]:
    """Return the bucket size that hides most of the communication behind backward; None for torch's 25 MB. Local.

    gloo: a sixteenth of the model, between 1 and 25 MB. A message has little overhead, and ranks wait for the last
    bucket after backward: with 20M parameters, 25 MB is a third of all.
    """
    if backend != "gloo":
        return None
    return min(max(_num_bytes(module) / 16 / 2**20, 1.0), torch_private.BUCKET_CAP_MB)


def _num_bytes(module: nn.Module) -> int:
    """Return the bytes of the gradients of `module`."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def _has_batchnorm(module: nn.Module) -> bool:
    """Whether a layer of `module` normalises over the batch. Local."""
    return any(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules())


def has_nothing_to_reduce(module: nn.Module) -> bool:
    """Whether every parameter of `module` is frozen, or is reduced by another wrapper. Local."""
    return all(not p.requires_grad or guard.is_owned(p) for p in module.parameters())
