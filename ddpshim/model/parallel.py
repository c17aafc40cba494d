"""Implements `wrap_parallel`: a DistributedDataParallel that reduces gradients whichever method computed the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, TypeVar, Union, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ddpshim.job.group import current_or_new_world
from ddpshim.job.group import world as current_world
from ddpshim.job.world import World
from ddpshim.model.kinds import check_kind
from ddpshim.model.wrapper import BareModule, Transparent
from ddpshim.process.job import current

M = TypeVar("M", bound=nn.Module)


def wrap_parallel(
    module: M,
    *,
    find_unused_parameters: bool = True,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = True,
    bucket_cap_mb: Optional[float] = None,
    broadcast_buffers: bool = True,
    sync_batchnorm: bool = True,
    comm_hook: Any = None,
    comm_hook_state: Any = None,
    process_group: Any = None,
    shard: Union[bool, Sequence[str]] = False,
    world: Optional[World] = None,
) -> M:
    """Return `module` in a wrapper for parallel training: DDP on several ranks, else DataParallel, else a plain one.

    Collective on several ranks: all get the main rank's parameters and buffers. Unless ranks draw what one process
    would, each also gets its own random streams (`ddpshim.split_random_streams`). DataParallel is used without a
    launcher, if the process sees several GPUs and the module is on one. The result has `.module`; attributes, methods
    and indexing reach the module; `state_dict` keys are the bare module's. The module itself is not changed and may be
    used beside the wrapper: its gradients are reduced too. With the
    option `precision`, forward in training mode runs under autocast.

    Args:
        module: on this rank's device (`World.device`), with the same parameters on every rank.
        find_unused_parameters: True (default): parameters that a backward pass leaves out keep their gradient
            (None stays None unless another rank used them). False: an error names a parameter that is left out.
        static_graph: a promise that every backward pass uses the same parameters; breaking it is an
            error. (torch's own static_graph does not synchronise methods that return torch.distributions.)
        gradient_as_bucket_view: gradients are views of the communication buckets (default); saves one copy of them.
        bucket_cap_mb: size of a bucket; default `best_bucket_cap_mb`.
        broadcast_buffers: copy the main rank's buffers to all ranks after each synchronised backward pass (default).
        sync_batchnorm: BatchNorm layers normalise over the batch of all ranks, as in one process (default). Their
            forward in training mode is then collective. Applies to all networks of the process.
        comm_hook: for `DistributedDataParallel.register_comm_hook`, with `comm_hook_state`.
        process_group: the ranks that share gradients; default all.
        shard: True: each rank holds a part of the parameters, gradients and optimizer state, through torch's
            `fully_shard` (torch 2.6 or later; for networks that do not fit). Build optimizers afterwards; every forward
            pass and `state_dict()` is collective (`python -m ddpshim docs launch`). Or names of methods that train
            beside forward: ["compute_loss"].
        world: default the one that `setup()` returned.

    Raises:
        SyncError: parameters are not on this rank's device, or differ between ranks in name, shape or dtype; ranks
            cannot share the module: it is scripted, lazy, on the meta device, or distributed already.
    """
    here = world or current_or_new_world()
    is_alone = here.world_size == 1 and here.options.exact is None
    if isinstance(module, Transparent):
        if is_alone:
            return module
        from ddpshim.model.wrapping import has_nothing_to_reduce

        if has_nothing_to_reduce(module.module):
            return module
        module = module.module  # wrapped before a parameter was unfrozen, or in a world that has ended
    if isinstance(module, DataParallel):
        module = module.module
    check_kind(module, is_alone)
    if shard:
        from ddpshim.model.sharding import check_shard

        refused = {"exact": here.options.exact, "comm_hook": comm_hook, "process_group": process_group}
        check_shard([name for name, value in refused.items() if value is not None])
    if is_alone:
        wrapped = _wrap_alone(module, here)
    else:
        from ddpshim.model import wrapping

        wrapped = wrapping.wrap(
            module,
            here,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            sync_batchnorm=sync_batchnorm,
            comm_hook=comm_hook,
            comm_hook_state=comm_hook_state,
            process_group=process_group,
            shard=shard,
        )
    current().has_networks = True
    if current_world().is_launched:
        from ddpshim.job.own_streams import split_random_streams

        split_random_streams()
    if here.options.precision != "float32":  # forward in training mode then uses it
        wrapped.__dict__["_autocast"] = here.autocast
    return cast(M, wrapped)  # it is no instance of M, but has all that M has


def _wrap_alone(module: nn.Module, here: World) -> Any:
    """Return `module` in the wrapper of one process. Local."""
    several = not here.is_launched and torch.cuda.is_available() and torch.cuda.device_count() > 1
    if several and any(p.is_cuda for p in module.parameters()):
        from ddpshim.model.data_parallel import DataParallelModule

        return DataParallelModule(module)
    return BareModule(module)
