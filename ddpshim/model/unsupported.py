"""Refuses networks that differ between ranks, are on a wrong device, or are wrapped a second time."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddpshim.errors import SyncError
from ddpshim.job.world import World
from ddpshim.model import guard
from ddpshim.model.wrapper import Transparent
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced


def check_tensors(module: nn.Module) -> None:
    """Refuse tensors that cannot be compared or reduced. Local."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _check_tensor(f"'{name}' of {type(module).__name__}", tensor)


def _check_tensor(what: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise SyncError(
            f"{what} has no shape yet (a lazy module), so it cannot be compared or reduced. Run one batch through "
            f"the network before {_remedy('wrap')}: with torch.no_grad(): net(batch)."
        )
    if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
        raise SyncError(
            f"{what} is a DTensor, of which each rank may hold a different part (fully_shard, tensor parallelism); "
            "wrap_parallel would mix gradients of different parts. Give it the network before that."
        )
    if tensor.is_meta:
        raise SyncError(
            f"{what} is on the meta device and has no values to train. Before {_remedy('wrap')} give it memory "
            f"(net.to_empty(device={_remedy('device')})) and values (its reset_parameters(), or a checkpoint)."
        )
    if tensor.is_inference():
        raise SyncError(
            f"{what} was made under torch.inference_mode(); it can have no gradient. Build the network outside of that "
            "block."
        )


def watch_wrapping() -> None:
    """Refuse torch's DDP around a network that is reduced already, until `cleanup()`. Local."""
    original = DistributedDataParallel.__init__
    if current().next_number("watched wrapping"):
        return

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs["module"]
        reduced = (name for name, p in module.named_parameters() if guard.is_owned(p))
        if not isinstance(self, Transparent) and (name := next(reduced, None)) is not None:
            raise SyncError(
                f"{type(self).__name__} around a {type(module).__name__} whose '{name}' wrap_parallel reduces already: "
                "two reducers would write into one gradient, and ranks would train different models. Use what "
                "wrap_parallel gave back as it is, which is a DistributedDataParallel, or leave wrap_parallel out."
            )
        original(self, *args, **kwargs)

    current().at_end.enter_context(replaced(DistributedDataParallel, "__init__", init))


def needs_default_stream(device: torch.device, backend: str) -> bool:
    """Whether reduced gradients on `device` are only safe to use on its default stream. Local.

    gloo copies them back on its own streams, and torch's reducer waits for a future that is bound to no stream, so only
    the default stream waits for the copies. Fixed in torch 2.11 (https://github.com/pytorch/pytorch/pull/170812).
    """
    return device.type == "cuda" and backend == "gloo" and Version(torch.__version__).release < (2, 11)


def check_stream(device: torch.device) -> None:
    """Raise SyncError if a backward pass ends on a stream other than the default one of `device`. Local."""
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        raise SyncError(
            f"a backward pass on a CUDA stream of its own, through gloo, with torch {torch.__version__}: gradients "
            "would be read before they are copied back from the other ranks, and ranks would train different models. "
            "Upgrade to torch 2.11, give each rank a GPU of its own (then it is nccl), or call backward() outside of "
            "torch.cuda.stream(...)."
        )


def check_device(module: nn.Module, here: World) -> None:
    """Refuse parameters that are on another rank's GPU, or on the CPU with nccl. Local."""
    for name, p in module.named_parameters():
        if p.is_cuda and here.device.type == "cuda" and p.device != here.device:
            raise SyncError(
                f"parameter '{name}' is on {p.device}, but rank {here.rank} computes on {here.device}; ranks would "
                f"share a GPU, and hang. {_remedy('gpu')}."
            )
        if not p.is_cuda and here.backend == "nccl":
            raise SyncError(
                f"parameter '{name}' is on {p.device}, and nccl only reduces GPU memory. Call "
                f".to({_remedy('device')}) before {_remedy('wrap')}."
            )


def check_same_structure(module: nn.Module, here: World) -> None:
    """Refuse modules whose tensors differ between ranks; warn if weights had different values (collective)."""
    mine: dict[str, Any]
    mine = {name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()}
    # A buffer that one rank lacks would end the process without an error, in torch's broadcast.
    mine.update((f"buffer {name}", (tuple(b.shape), str(b.dtype))) for name, b in module.named_buffers())
    with torch.no_grad():
        sums = {name: float(p.detach().abs().double().sum()) for name, p in module.named_parameters()}
    everyone = here.gather((mine, sums))
    for rank, (theirs, _) in enumerate(everyone):
        odd = [name for name in {**everyone[0][0], **theirs} if everyone[0][0].get(name) != theirs.get(name)]
        if odd:
            raise SyncError(
                f"ranks 0 and {rank} wrap different {type(module).__name__}s: '{odd[0]}' is "
                f"{everyone[0][0].get(odd[0], 'missing')} and {theirs.get(odd[0], 'missing')}; gradients of "
                f"different parameters would be averaged. {_remedy('same state')}."
            )
    first = everyone[0][1]
    differing = [
        name for name in first if any(sums[name] != first[name] and sums[name] == sums[name] for _, sums in everyone)
    ]
    if differing and here.is_main:
        warnings.warn(
            f"weights differed between ranks before training (first: '{differing[0]}'); all ranks now have the "
            "main rank's. Copies made earlier (an EMA, a target network) still differ: "
            f"{_remedy('same weights')}.",
            stacklevel=4,
        )


def _remedy(name: str) -> str:
    from ddpshim.process.remedies import remedy  # only an error needs it

    return remedy(name)
