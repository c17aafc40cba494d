"""Chooses a rank's device and backend."""

from __future__ import annotations

import os
import socket
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from ddpshim.errors import LaunchError
from ddpshim.process import messages
from ddpshim.process.say import say


def choose_backend(gpus: list[Optional[str]]) -> tuple[str, Optional[str]]:
    """Return the backend for ranks on these GPUs (identity, or None for the CPU), and why it is not nccl. Local.

    >>> choose_backend(["a:0", "a:1"])
    ('nccl', None)
    >>> choose_backend(["a:0", "a:0"])
    ('gloo', '2 ranks share 1 GPU')
    """
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
    wanted = torch.device(device) if device is not None else None
    if wanted is not None and wanted.type != "cuda":
        return wanted
    if not torch.cuda.is_available():
        if wanted is not None:
            raise LaunchError(
                f"device={str(wanted)!r} but torch sees no GPU on rank {rank}; the first tensor would fail. Leave "
                "device= out to use the CPU, or check the driver and CUDA_VISIBLE_DEVICES."
            )
        return torch.device("cpu")
    asked = wanted.index if wanted is not None else None
    index = asked if asked is not None else local_rank % torch.cuda.device_count()
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
