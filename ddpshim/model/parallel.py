"""Implements `wrap_parallel`: a DistributedDataParallel that reduces gradients whichever method computed the loss."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from ddpshim import variables
from ddpshim.errors import SyncError
from ddpshim.job.group import current_or_new_world, split_random_streams
from ddpshim.job.job import current
from ddpshim.job.pace import Pace
from ddpshim.job.world import World
from ddpshim.model import batchnorm, closures, exact, guard, seams
from ddpshim.model.broadcasting import broadcast_state
from ddpshim.model.reducer import DistributedModule
from ddpshim.model.refused import check_device, check_kind, check_same_structure, watch_wrapping
from ddpshim.model.sharding import ShardedModule, check_shard
from ddpshim.model.transparent import BareModule, Transparent


def wrap_parallel(
    module: nn.Module,
    *,
    find_unused_parameters: Optional[bool] = None,
    static_graph: Optional[bool] = None,
    gradient_as_bucket_view: Optional[bool] = None,
    bucket_cap_mb: Optional[float] = None,
    broadcast_buffers: Optional[bool] = None,
    sync_batchnorm: Optional[bool] = None,
    comm_hook: Any = None,
    comm_hook_state: Any = None,
    process_group: Any = None,
    shard: Union[bool, Sequence[str]] = False,
    world: Optional[World] = None,
) -> Any:
    """Return `module` in a wrapper for parallel training: DDP on several ranks, else DataParallel, else a plain one.

    Collective on several ranks: all get the main rank's parameters and buffers. Unless ranks draw what one process
    would, each also gets its own random streams (`ddpshim.split_random_streams`). DataParallel is used without a
    launcher, if the process sees several GPUs and the module is on one. The result has `.module`; attributes, methods
    and indexing reach the module; `state_dict` keys are the bare module's. The module itself is not changed and may be
    used beside the wrapper: its gradients are reduced too. Arguments that are not given are taken from the world's
    `options`; with `precision`, forward in training mode runs under autocast.

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
            pass and `state_dict()` is collective (docs/sharding.md). Or names of methods that train beside forward:
            ["compute_loss"].
        world: default the one that `setup()` returned.

    Raises:
        SyncError: parameters are not on this rank's device, or differ between ranks in name, shape or dtype; ranks
            cannot share the module: it is scripted, lazy, on the meta device, or distributed already.
    """
    here = world or current_or_new_world()
    if isinstance(module, Transparent):
        if (here.world_size == 1 and here.options.exact is None) or _nothing_to_reduce(module.module):
            return module
        module = module.module  # wrapped before a parameter was unfrozen, or in a world that has ended
    if isinstance(module, DataParallel):
        module = module.module
    check_kind(module, is_alone=here.world_size == 1 and here.options.exact is None)
    if shard:
        refused = {"exact": here.options.exact, "comm_hook": comm_hook, "process_group": process_group}
        check_shard([name for name, value in refused.items() if value is not None])
    if here.options.exact is not None:
        if comm_hook is not None or process_group is not None:
            raise SyncError(
                f"wrap_parallel with a comm_hook or a process_group, and exact={here.options.exact}: gradients are "
                "summed in one order over all virtual ranks, so neither would be used. Leave them out, or leave the "
                "option out."
            )
        check_device(module, here)
        if here.world_size > 1:
            check_same_structure(module, here)
        broadcast_state(module)
        if current().holds_whole_batches:  # `ddpshim.rows.pieces` adds up the gradients
            guard.watch(module)
        else:
            if batchnorm.has_batchnorm(module):
                batchnorm.sync()
            exact.reduce(module)
        split_random_streams()
        return _in_precision(BareModule(module), here)
    given = here.options
    bucket_cap_mb = given.bucket_cap_mb if bucket_cap_mb is None else bucket_cap_mb
    if here.world_size == 1:
        _count_steps(module, here, bucket_cap_mb, here.backend or "")
        split_random_streams()
        several = not here.is_launched and torch.cuda.is_available() and torch.cuda.device_count() > 1
        if several and any(p.is_cuda for p in module.parameters()):
            return _in_precision(DataParallelModule(module), here)
        return _in_precision(BareModule(module), here)
    check_device(module, here)
    if process_group is None:
        check_same_structure(module, here)
    bucket_cap_mb = _count_steps(module, here, bucket_cap_mb, dist.get_backend(process_group))
    if _either(sync_batchnorm, given.sync_batchnorm) and batchnorm.has_batchnorm(module):
        batchnorm.sync(process_group)
    if given.guard:
        guard.watch_optimizers()
    closures.share_losses()
    watch_wrapping()
    wrapped: Any
    if shard:
        wrapped = ShardedModule(
            module,
            methods=[] if shard is True else [shard] if isinstance(shard, str) else [*shard],
            sync_buffers=_either(broadcast_buffers, given.broadcast_buffers),
        )
    elif _nothing_to_reduce(module):
        broadcast_state(module, process_group)
        if process_group is None:
            guard.watch(module)
        wrapped = BareModule(module)
    else:
        wrapped = DistributedModule(
            module,
            strict=not _either(find_unused_parameters, given.find_unused_parameters),
            same_every_time=_either(static_graph, given.static_graph),
            sync_buffers=_either(broadcast_buffers, given.broadcast_buffers),
            is_guarded=given.guard,
            comm_hook=comm_hook,
            comm_hook_state=comm_hook_state,
            process_group=process_group if process_group is not None else dist.group.WORLD,
            # A program for one process may keep gradients over the next backward pass.
            gradient_as_bucket_view=not current().holds_whole_batches
            and _either(gradient_as_bucket_view, given.gradient_as_bucket_view),
            **({} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}),
        )
    split_random_streams()
    return _in_precision(wrapped, here)


def _in_precision(wrapped: Any, here: World) -> Any:
    """Return `wrapped`; its forward in training mode now uses the option `precision`. Local."""
    if here.options.precision != "float32":
        wrapped.__dict__["_autocast"] = here.autocast
    return wrapped


def best_bucket_cap_mb(module: nn.Module, backend: str) -> Optional[float]:
    """Return the bucket size that hides most of the communication behind backward; None for torch's 25 MB. Local.

    gloo: a sixteenth of the model, between 1 and 25 MB. A message has little overhead, and ranks wait for the last
    bucket after backward: with 20M parameters, 25 MB is a third of all (`python -m benchmarks.overlap`).
    """
    if backend != "gloo":
        return None
    return min(max(_num_bytes(module) / 16 / 2**20, 1.0), seams.BUCKET_CAP_MB)


def _num_bytes(module: nn.Module) -> int:
    """Return the bytes of the gradients of `module`."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def _count_steps(module: nn.Module, here: World, bucket_cap_mb: Optional[float], backend: str) -> Optional[float]:
    """Start to diagnose the steps that train `module`, if the option is on; return its bucket size. Local."""
    if bucket_cap_mb is None:
        bucket_cap_mb = best_bucket_cap_mb(module, backend)
    if here.is_launched and here.options.diagnose and variables.CHECK not in os.environ:  # a proof's records are slow
        current().part(Pace).begin()
    return bucket_cap_mb


def _either(argument: Optional[bool], option: bool) -> bool:
    return option if argument is None else argument


def _nothing_to_reduce(module: nn.Module) -> bool:
    return all(not p.requires_grad or guard.is_owned(p) for p in module.parameters())


class DataParallelModule(BareModule):
    """A wrapper for one process on several GPUs: `forward` is spread over them, any other method runs on the first.

    torch's DataParallel is an attribute and not a base class: it looks up `dim`, `gather` and others on itself, and a
    module may have attributes of these names.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.__dict__["_spread"] = DataParallel(module)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._spread(*args, **kwargs)
