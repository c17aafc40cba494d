"""Implements `wrap_parallel`: chooses a network's wrapper, and refuses modules that ranks cannot train together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, TypeVar, Union, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ddpshim.errors import SyncError
from ddpshim.job.group import current_or_new_world
from ddpshim.model.wrapper import BareModule, Transparent
from ddpshim.process.job import current

M = TypeVar("M", bound=nn.Module)
# Names and not classes, because most programs never import them. Each shards parameters or reduces gradients itself.
_OTHERS = ("FullyShardedDataParallel", "FSDP", "FSDPModule", "ReplicateModule", "DDP", "DistributedDataParallel")


def wrap_parallel(
    module: M,
    *,
    gradient_as_bucket_view: bool = True,
    bucket_cap_mb: Optional[float] = None,
    broadcast_buffers: bool = True,
    find_unused_parameters: bool = True,
    static_graph: bool = False,
    sync_batchnorm: bool = True,
    comm_hook: Any = None,
    comm_hook_state: Any = None,
    shard: Union[bool, Sequence[str]] = False,
) -> M:
    """Return `module` in a wrapper for parallel training: DDP on several ranks, else DataParallel, else a plain one.

    Collective on several ranks: all get the main rank's parameters and buffers. Unless ranks draw what one process
    would, each also gets its own random streams (`ddpshim.split_random_streams`). DataParallel is used without a
    launcher, if the process sees several GPUs and the module is on one. The result has `.module`; attributes, methods
    and indexing reach the module; `state_dict` keys are the bare module's. The module itself is not changed and may be
    used beside the wrapper: its gradients are reduced too. Each backward pass may leave out other parameters: they keep
    their gradient (None stays None unless another rank used them). With the option `precision`, forward in training
    mode runs under autocast.

    Args:
        module: on this rank's device (`World.device`), with the same parameters on every rank.
        gradient_as_bucket_view: gradients are views of the communication buckets (default); saves one copy of them.
        bucket_cap_mb: size of a bucket; default `best_bucket_cap_mb`.
        broadcast_buffers: copy the main rank's buffers to all ranks after each synchronised backward pass (default).
        find_unused_parameters, static_graph: as in DDP, and without effect: each backward pass may use other
            parameters, at no cost.
        sync_batchnorm: BatchNorm layers normalise over the batch of all ranks, as in one process (default). Their
            forward in training mode is then collective. Applies to all networks of the process.
        comm_hook: for `DistributedDataParallel.register_comm_hook`, with `comm_hook_state`.
        shard: True: each rank holds a part of the parameters, gradients and optimizer state, through torch's
            `fully_shard` (torch 2.6 or later; for networks that do not fit). Build optimizers afterwards; every forward
            pass and `state_dict()` is collective (`python -m ddpshim docs launch`). Or names of methods that train
            beside forward: ["compute_loss"].

    Raises:
        SyncError: parameters are not on this rank's device, or differ between ranks in name, shape or dtype; ranks
            cannot share the module: it is scripted, or distributed already.
    """
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
    _check_kind(module, is_alone)
    if shard:
        from ddpshim.model.sharding import check_shard

        refused = {"exact": here.options.exact, "comm_hook": comm_hook}
        check_shard([name for name, value in refused.items() if value is not None])
    if is_alone:
        several = not here.is_launched and torch.cuda.is_available() and torch.cuda.device_count() > 1
        is_spread = several and any(p.is_cuda for p in module.parameters())
        wrapped: Any = DataParallelModule(module) if is_spread else BareModule(module)
    else:
        from ddpshim.model import wrapping

        wrapped = wrapping.wrap(
            module,
            here,
            shard=shard,
            sync_batchnorm=sync_batchnorm,
            broadcast_buffers=broadcast_buffers,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            comm_hook=comm_hook,
            comm_hook_state=comm_hook_state,
        )
    current().has_networks = True
    if here.is_launched:
        from ddpshim.job.noise import split_random_streams

        split_random_streams()
    if here.options.precision != "float32":  # forward in training mode then uses it
        wrapped.__dict__["_autocast"] = here.autocast
    return cast(M, wrapped)  # it is no instance of M, but has all that M has


def _check_kind(module: nn.Module, is_alone: bool) -> None:
    """Refuse a module whose gradients cannot be reduced or are reduced by another wrapper. Local.

    If `is_alone`, nothing will be reduced, and only modules that cannot be wrapped at all are refused.
    """
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


def _other_way(module: nn.Module) -> Optional[str]:
    """Return the name of torch's wrapper that distributes this module already; None if there is none."""
    for kind in type(module).__mro__:
        if kind.__name__ in _OTHERS and kind.__module__.startswith(("torch.distributed", "torch.nn.parallel")):
            return kind.__name__
    # torch before 2.2 keeps the class, and stores in the module what was applied to it.
    applied = (held for key, held in vars(module).items() if "composable" in key and isinstance(held, dict))
    return next((name for held in applied for name in ("replicate", "fully_shard") if name in held), None)


class DataParallelModule(BareModule):
    """A wrapper for one process on several GPUs: `forward` is spread over them, any other method runs on the first.

    torch's DataParallel is an attribute and not a base class: it looks up `dim`, `gather` and others on itself, and a
    module may have attributes of these names.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        mine = self.__dict__
        mine["_spread"] = DataParallel(module)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._spread(*args, **kwargs)
