"""Makes NCCL and torch log what they do, for the option `debug`."""

from __future__ import annotations

import os

import torch.distributed as dist

_VARIABLES = {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_SHOW_CPP_STACKTRACES": "1"}


def tell_all() -> None:
    """Set the variables that NCCL and torch read when a group is made; keeps those that the user has set. Local."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    dist.set_debug_level_from_env()
