"""Lists the private names of torch that reduce gradients, and finds those that this torch lacks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpshim.errors import SyncError
from ddpshim.process.replaced import replaced

REDUCER = (
    "prepare_for_backward",
    "_autograd_hook",
    "_remove_autograd_hooks",
    "_rebuild_buckets",
    "_check_reducer_finalized",
)
WRAPPER = (
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_set_params_and_buffers_to_ignore_for_model",
)
BUCKET_CAP_MB = 25.0  # the default of torch's DDP


def refuse_unknown_torch() -> None:
    """Raise SyncError if this torch lacks private names that activating its reducer needs. Local."""
    reducer = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    names = [f"Reducer.{name}" for name in REDUCER if not hasattr(getattr(reducer, "Reducer", None), name)]
    names += [f"DistributedDataParallel.{n}" for n in WRAPPER if not hasattr(DistributedDataParallel, n)]
    names += [] if hasattr(torch.autograd.Variable, "_execution_engine") else ["Variable._execution_engine"]
    if names:
        raise SyncError(
            f"torch {torch.__version__} has no {', '.join(names)}, by which a backward pass activates DDP's reducer: "
            "gradients would not be reduced. Use a torch that it was tested with (python -m ddpshim docs limits)."
        )


def at_end_of_pass(call: Callable[[], None]) -> None:
    """Make the engine run `call` when the current backward pass has computed all gradients. Local."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def compiles_backward() -> bool:
    """Whether torch compiles backward passes now (compiled autograd), so that hooks run at tracing. Local."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


def copy_all(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each of `values` into its target, in one call if this torch has it. Local."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(targets), list(values))
    else:
        for target, value in zip(targets, values):
            target.copy_(value)


def ignore_in_wrapper(module: nn.Module, names: Sequence[str]) -> Callable[[], None]:
    """Make torch's DDP ignore the parameters of these names; return a function that undoes it. Local."""
    if not names:
        return lambda: None
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return lambda: delattr(module, "_ddp_params_and_buffers_to_ignore")


def nothing_sent_at_first() -> contextlib.AbstractContextManager[None]:
    """Within this block, torch's DDP sends no weights when it is made: for torch 2.1, which has no option for it."""
    wrapper = sys.modules[DistributedDataParallel.__module__]
    return replaced(wrapper, "_sync_module_states", lambda *args, **kwargs: None)
