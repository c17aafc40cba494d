"""Implements `wrap_parallel`: chooses a network's wrapper, and refuses modules that ranks cannot train together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, TypeVar, Union, cast

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpshim.job.group import current_or_new_world
from ddpshim.model.wrapper import BareModule, Transparent
from ddpshim.process.job import current

M = TypeVar("M", bound=nn.Module)


def wrap_parallel(
    module: M,
    *,
    find_unused_parameters: Optional[bool] = None,
    gradient_as_bucket_view: bool = True,
    bucket_cap_mb: Optional[float] = None,
    broadcast_buffers: bool = True,
    sync_batchnorm: bool = True,
    comm_hook: Any = None,
    comm_hook_state: Any = None,
    shard: Union[bool, Sequence[str]] = False,
    **ddp: Any,
) -> M:
    """Return `module` in torch's DistributedDataParallel, for networks of which every rank trains a copy.

    Collective on several ranks: all get the main rank's parameters and buffers. Random streams stay as they are; a line
    says if ranks draw equal noise (`ddpshim.split_random_streams`). Without a launcher the result is DataParallel if
    the process sees several GPUs and the module is on one, else a plain wrapper. After `setup(batch="global")`,
    gradients are averaged without DDP.

    The result has `.module`; attributes, methods and indexing reach the module, then DDP (`register_comm_hook`);
    `state_dict` keys are the bare module's. The reducer is prepared when a backward pass begins and not in `forward`.
    So `net.compute_loss(batch)`, several forward or backward passes and `.module` train alike. With the option
    `precision`, forward in training mode runs under autocast.

    Args:
        module: on this rank's device (`World.device`), with the same parameters on every rank.
        find_unused_parameters: None (default): each backward pass may leave out other parameters, on each rank, but no
            rank the whole network; those that no rank used keep their gradient, so None stays None. False or True: as
            in DDP. False saves one small message in each pass; True sends all gradients after the pass.
        gradient_as_bucket_view: gradients are views of the communication buckets (default); saves one copy of them.
        bucket_cap_mb: size of a bucket; default `best_bucket_cap_mb`.
        broadcast_buffers: copy the main rank's buffers to all ranks after each synchronised backward pass (default), so
            that one rank alone may run the network. DDP copies them in `forward`.
        sync_batchnorm: BatchNorm layers normalise over the batch of all ranks, as in one process (default). Their
            forward in training mode is then collective. Applies to all networks of the process.
        comm_hook: for `DistributedDataParallel.register_comm_hook`, with `comm_hook_state`.
        shard: True: each rank holds a part of the parameters, gradients and optimizer state, through torch's
            `fully_shard` (torch 2.6 or later; for networks that do not fit). Build optimizers afterwards; every forward
            pass and `state_dict()` is collective (`python -m ddpshim docs launch`). Or names of methods that train
            beside forward: ["compute_loss"].
        ddp: any other option of DistributedDataParallel (static_graph, mixed_precision).

    Raises:
        SyncError: parameters are not on this rank's device, or differ between ranks in name, shape or dtype; ranks
            cannot share the module: it is scripted, or distributed already.
        TypeError: DistributedDataParallel has no such option.
    """
    given = {**locals(), **ddp}
    del given["module"], given["ddp"]
    if ddp:
        from ddpshim.model.ddp import check_options

        check_options(ddp)
    here = current_or_new_world()
    is_alone = here.world_size == 1
    if isinstance(module, Transparent):
        if is_alone:
            return module
        from ddpshim.model.wrapping import has_nothing_to_reduce

        if has_nothing_to_reduce(module.module):
            return module
        module = module.module  # wrapped before a parameter was unfrozen, or in a world that has ended
    if isinstance(module, DataParallel):
        module = module.module
    is_plain = isinstance(module, nn.Module) and not isinstance(module, (ScriptModule, DistributedDataParallel))
    if not is_alone or not is_plain:
        from ddpshim.model.wrapping import check_kind

        check_kind(module, is_alone)
    if shard:
        from ddpshim.model.sharding import check_shard

        refused = {"exact": here.options.exact, "comm_hook": comm_hook, **ddp}
        check_shard([name for name, value in refused.items() if value is not None])
    if is_alone:
        several = not here.is_launched and torch.cuda.is_available() and torch.cuda.device_count() > 1
        wrapped: Any = BareModule(module)
        if several and any(p.is_cuda for p in module.parameters()):
            wrapped.__dict__["_run"] = DataParallel(module)  # of forward: any other method runs on the first GPU
    else:
        from ddpshim.model import wrapping

        wrapped = wrapping.wrap(module, here, **given)
    current().has_networks = True
    if here.is_launched:
        from ddpshim.shares.streams import watch_noise

        watch_noise()
    if here.options.precision != "float32":  # forward in training mode then uses it
        wrapped.__dict__["_autocast"] = here.autocast
    return cast(M, wrapped)  # it is no instance of M, but has all that M has
