"""Removes the private names of torch with which gradients are reduced, as a future torch may do.

With TESTS_PUBLIC_API in the environment every rank of a test runs without them:
TESTS_PUBLIC_API=1 python -m pytest tests/test_parallel.py
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpshim.model import seams

VARIABLE = "TESTS_PUBLIC_API"


def is_asked_for() -> bool:
    return VARIABLE in os.environ


def hide() -> None:
    """Hide them from ddpshim; torch's own DDP, with which tests compare, still works."""
    seams.REDUCER = (*seams.REDUCER, "hidden_by_a_test")
    seams.CALLBACK = "hidden_by_a_test"


def take_away() -> None:
    """Remove them from torch; its own DDP no longer works in this process."""
    reducer: Any = torch._C._distributed_c10d.Reducer
    for name in seams.REDUCER:
        delattr(reducer, name)
    for name in seams.WRAPPER:
        delattr(DistributedDataParallel, name)
    del torch._foreach_copy_, torch.distributed._broadcast_coalesced
    _without_callbacks()


def _without_callbacks() -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    names = [name for name in dir(engine) if not name.startswith("__") and name != "queue_callback"]
    others = types.SimpleNamespace(**{name: getattr(engine, name) for name in names})
    torch.autograd.Variable._execution_engine = others  # type: ignore[assignment]
