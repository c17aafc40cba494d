"""Wraps a network for several ranks, and refuses one that they would not share; see `wrap_parallel`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpshim.errors import SyncError
from ddpshim.job.collectives import broadcast_state
from ddpshim.job.world import World
from ddpshim.model import guard
from ddpshim.model.wrapper import BareModule, Transparent
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced

_BUCKET_CAP_MB = 25.0  # the default of torch's DDP
# Names and not classes, because most programs never import them. Each shards parameters or reduces gradients itself.
_OTHERS = ("FullyShardedDataParallel", "FSDP", "FSDPModule", "ReplicateModule", "DDP", "DistributedDataParallel")


def wrap(module: nn.Module, here: World, *, shard: Union[bool, Sequence[str]], sync_batchnorm: bool, **ddp: Any) -> Any:
    """Return `module` in the wrapper that reduces its gradients; arguments as of `wrap_parallel` (collective)."""
    _check_tensors(module, here)
    _check_same_structure(module, here)
    if here.options.exact is not None:  # the program holds whole batches: `ddpshim.rows.pieces` adds up gradients
        return _without_reduction(module)
    if current().next_number("wrapped networks") == 0:
        _refuse_ddp_around_wrapped()
        if here.options.guard:
            guard.watch_optimizers()
    has_batchnorm = any(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules())
    if sync_batchnorm and has_batchnorm and not current().door.computes_alike:  # else by a rule of `rows`
        from ddpshim.model import batchnorm

        batchnorm.sync()
    sends_buffers = ddp.pop("broadcast_buffers")
    if shard:
        from ddpshim.model.sharding import ShardedModule

        methods = [] if shard is True else [shard] if isinstance(shard, str) else [*shard]
        return ShardedModule(module, methods, sends_buffers)
    if has_nothing_to_reduce(module):
        return _without_reduction(module)
    if ddp["bucket_cap_mb"] is None and "bucket_cap_mb_list" not in ddp:
        ddp["bucket_cap_mb"] = best_bucket_cap_mb(module, dist.get_backend())
    if (wrapper := current().door.wrapper) is not None:
        changes = ("comm_hook", "mixed_precision", "process_group", "device_mesh")
        if (name := next((name for name in changes if ddp.get(name) is not None), None)) is not None:
            raise SyncError(
                f'wrap_parallel({name}=...) after setup(batch="global"): gradients are averaged without DDP there, '
                "so it would have no effect. Leave it out, or train by DDP: setup()."
            )
        return wrapper(module, ddp["bucket_cap_mb"], sends_buffers)
    from ddpshim.model.ddp import DistributedModule

    has_new_name = hasattr(DistributedDataParallel, "broadcast_buffers")  # a property, from torch 2.13 on
    ddp.setdefault("forward_sync_buffers" if has_new_name else "broadcast_buffers", sends_buffers)
    hook, state = ddp.pop("comm_hook"), ddp.pop("comm_hook_state")
    made = DistributedModule(module, **ddp)
    if hook is not None:
        made.register_comm_hook(state, hook)
    return made


def check_kind(module: nn.Module, is_alone: bool) -> None:
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


def has_nothing_to_reduce(module: nn.Module) -> bool:
    """Whether every parameter of `module` is frozen, or is reduced by another wrapper. Local."""
    return all(not p.requires_grad or guard.is_owned(p) for p in module.parameters())


def _without_reduction(module: nn.Module) -> BareModule:
    """Return `module` with the main rank's weights, and compare them from now on (collective)."""
    broadcast_state(module)
    guard.watch(module)
    return BareModule(module)


def best_bucket_cap_mb(module: nn.Module, backend: str) -> float:
    """Return the bucket size that hides most of the communication behind backward: torch's 25 MB, but with gloo. Local.

    gloo: a sixteenth of the model, between 1 and 25 MB. A message has little overhead, and ranks wait for the last
    bucket after backward: with 20M parameters, 25 MB is a third of all.
    """
    if backend != "gloo":
        return _BUCKET_CAP_MB
    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return min(max(num_bytes / 16 / 2**20, 1.0), _BUCKET_CAP_MB)


def _refuse_ddp_around_wrapped() -> None:
    """Refuse torch's DDP around a network that is reduced already, until `cleanup()`. Local."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs["module"]
        reduced = (name for name, p in module.named_parameters() if guard.is_owned(p))
        if not getattr(module, "_ddp_params_and_buffers_to_ignore", ()) and (name := next(reduced, None)) is not None:
            raise SyncError(
                f"{type(self).__name__} around a {type(module).__name__} whose '{name}' wrap_parallel reduces already: "
                "two reducers would write into one gradient, and ranks would train different models. Use what "
                "wrap_parallel gave back as it is, or leave wrap_parallel out."
            )
        original(self, *args, **kwargs)

    current().at_end.enter_context(replaced(DistributedDataParallel, "__init__", init))


def _check_tensors(module: nn.Module, here: World) -> None:
    """Refuse tensors that cannot be compared or reduced, or are on another rank's GPU. Local."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
            raise SyncError(
                f"'{name}' of {type(module).__name__} is a DTensor, of which each rank may hold a different part "
                "(fully_shard, tensor parallelism); wrap_parallel would mix gradients of different parts. Give it the "
                "network before that."
            )
    for name, p in module.named_parameters():
        if p.is_cuda and here.device.type == "cuda" and p.device != here.device:
            raise SyncError(
                f"parameter '{name}' is on {p.device}, but rank {here.rank} computes on {here.device}; ranks would "
                "share a GPU, and hang. Use 'cuda' or ddpshim.world().device instead of a fixed number."
            )
        if not p.is_cuda and here.backend == "nccl":
            raise SyncError(
                f"parameter '{name}' is on {p.device}, and nccl only reduces GPU memory. Call "
                ".to(ddpshim.world().device) before the network is wrapped, or trains; or hide the GPUs to train on "
                "the CPU: CUDA_VISIBLE_DEVICES= (empty)."
            )


def _check_same_structure(module: nn.Module, here: World) -> None:
    """Refuse modules whose tensors differ between ranks; warn if weights had different values (collective)."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # by torch's DDP
    parameters = {name: p for name, p in module.named_parameters() if name not in ignored}
    mine = {
        f"parameter '{name}'": f"is {tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in parameters.items()
    }
    # A buffer that one rank lacks would end the process without an error, in torch's broadcast.
    buffers = (pair for pair in module.named_buffers() if pair[0] not in ignored)
    mine.update((f"buffer '{name}'", f"is {tuple(b.shape)}, {b.dtype}") for name, b in buffers)
    with torch.no_grad():
        sums = {name: float(p.detach().abs().double().nansum()) for name, p in parameters.items()}
    of_ranks, sums_of_ranks = zip(*here.gather((mine, sums)))
    if any(theirs != of_ranks[0] for theirs in of_ranks):
        from ddpshim.model.equality import SAME_STATE, described

        raise SyncError(
            f"ranks wrap different {type(module).__name__}s: {described(dict(enumerate(of_ranks)))}; gradients of "
            f"different parameters would be averaged. {SAME_STATE}."
        )
    differing = [name for name in sums if len({theirs[name] for theirs in sums_of_ranks}) > 1]
    if differing and here.is_main:
        warnings.warn(
            f"weights differed between ranks before training (first: '{differing[0]}'); all ranks now have the "
            "main rank's. Copies made earlier (an EMA, a target network) still differ: seed what weights are drawn "
            "from, equally on all ranks (ddpshim.setup(seed=...) does), or make copies afterwards.",
            stacklevel=4,
        )
