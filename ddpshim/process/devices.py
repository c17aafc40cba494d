"""Chooses a rank's device and backend."""

from __future__ import annotations

import copy
import os
import socket
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from ddpshim.errors import LaunchError
from ddpshim.process import messages
from ddpshim.process.say import say


def choose_backend(gpus: list[Optional[str]]) -> tuple[str, Optional[str]]:
    """Return the backend for ranks on these GPUs (identity, or None for the CPU), and why it is not nccl. Local."""
    on_gpu = [gpu for gpu in gpus if gpu is not None]
    if not on_gpu:
        return "gloo", None
    if len(on_gpu) < len(gpus):
        return "gloo", f"{len(gpus) - len(on_gpu)} of {len(gpus)} ranks have no GPU"
    if len(set(on_gpu)) < len(on_gpu):
        return "gloo", f"{len(on_gpu)} ranks share {len(set(on_gpu))} GPU{'s' * (len(set(on_gpu)) > 1)}"
    return "nccl", None


def agree_on_backend(store: Any, rank: int, world_size: int, device: torch.device) -> str:
    """Return the backend that all ranks choose, after they exchange their GPUs through the store (collective)."""
    store.set(f"gpu/{rank}", messages.packed(_gpu_identity(device)))
    gpus = [messages.unpacked(store.get(f"gpu/{other}"), other) for other in range(world_size)]
    backend, reason = choose_backend(gpus)
    if reason is not None and rank == 0:
        say(f"{reason}: gloo instead of nccl")
    return backend


def backend_of(device: torch.device) -> Optional[str]:
    """Return the backend for an accelerator other than CUDA, from torch's own list; None for CPUs and CUDA. Local.

    Raises LaunchError if torch has no backend for its memory.
    """
    if device.type in ("cpu", "cuda", "meta"):
        return None
    listed: Optional[str] = getattr(dist.Backend, "default_device_backend_map", {}).get(device.type)
    if listed in (None, "gloo"):  # gloo handles the memory of CPUs and CUDA GPUs only
        raise LaunchError(
            f"several ranks on {device.type}, for which this torch has no backend: the first collective would fail. "
            f"Train in one process on {device.type}, or call setup(device='cpu'), or setup(backend=...) with a "
            "plugin's backend."
        )
    return listed


def _gpu_identity(device: torch.device) -> Optional[str]:
    """Return a name for the physical GPU, the same in every process that sees it; None for the CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if " MIG " in properties.name:  # nccl refuses two parts of one GPU, and torch does not tell which parts are
        return f"{socket.gethostname()}/MIG"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{socket.gethostname()}/{getattr(properties, 'uuid', f'{visible}[{device.index}]')}"


def bind_device(rank: int, local_rank: int, device: Union[str, torch.device, None] = None) -> torch.device:
    """Return this rank's device, and make it current before anything else uses CUDA. Local.

    Raises LaunchError if `device` is a GPU and torch sees none.
    """
    has_gpu = torch.cuda.is_available()
    wanted = torch.device(("cuda" if has_gpu else "cpu") if device is None else device)
    if wanted.type != "cuda":
        return wanted
    if not has_gpu:
        raise LaunchError(
            f"device={str(wanted)!r} but torch sees no GPU on rank {rank}; the first tensor would fail. Leave "
            "device= out to use the CPU, or check the driver and CUDA_VISIBLE_DEVICES."
        )
    index = local_rank % torch.cuda.device_count() if wanted.index is None else wanted.index
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on `device`, so that nothing may be read from it. Local."""
    # A torch built without CUDA has the function too, but it raises.
    return device.type == "cuda" and torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


def computes_on(device: torch.device) -> dict[str, Any]:
    """Return the hardware and software that determine rounding: where they are equal, so are all bits. Local."""
    if device.type == "cuda":
        return {"GPU": torch.cuda.get_device_name(device), "torch": str(torch.__version__)}
    capability: Any = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "unknown")()
    return {"CPU": capability, "threads": torch.get_num_threads(), "torch": str(torch.__version__)}


def mapped(
    function: Callable[[Any], Any], value: Any, copies: Optional[list[Any]] = None, items: tuple[type, ...] = ()
) -> Any:
    """Return nested tuples, lists and dicts with each item replaced by `function` of it. Local.

    What has no replaced item is returned itself. `copies` receives (container, copy) of each copied list and dict.
    `items`: classes of tuples that are items.
    """
    if isinstance(value, dict):
        changed = {key: mapped(function, inner, copies, items) for key, inner in value.items()}
        if all(changed[key] is inner for key, inner in value.items()):
            return value
        made: Any = changed
        if type(value) is not dict:
            made = copy.copy(value)
            made.update(changed)
    elif isinstance(value, (tuple, list)) and not isinstance(value, items):
        parts = [mapped(function, inner, copies, items) for inner in value]
        if all(new is old for new, old in zip(parts, value)):
            return value
        made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    else:
        return function(value)
    if copies is not None and not isinstance(value, tuple):
        copies.append((value, made, copy.copy(made)))
    return made


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with all tensors on `device`; the same object if they already are. Local.

    Covers nested tuples, lists and dicts. A tensor that is already on the device is not copied, because the network may
    write into it. Others are moved in stream order, and gradients flow back through the move.
    """

    def move(x: Any) -> Any:
        if not isinstance(x, (torch.Tensor, PackedSequence)) or x.data.device == device:
            return x  # a PackedSequence itself has no `device`
        return x.to(device, non_blocking=True)  # type: ignore[arg-type]

    return mapped(move, value, items=(PackedSequence,))
