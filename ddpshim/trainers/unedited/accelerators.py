"""Makes Hugging Face's accelerate see one process, so that ddpshim distributes its programs like any other.

So the batch size is that of the program's loader, and files are written once. A program that divides its model
(DeepSpeed, FSDP, Megatron, tensor parallelism) is left to accelerate.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any, Callable

from ddpshim.process.after_import import after_import
from ddpshim.process.replaced import replaced

_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "PMI_",
    "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_",
)
_STRATEGIES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "TP")
_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")


@contextlib.contextmanager
def in_one_process() -> Iterator[None]:
    """Within this block, accelerate finds no launcher and makes no process group. Local."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_LAUNCHERS)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def strategies() -> list[str]:
    """Return the names of the environment variables that make accelerate divide the model. Local."""
    names = [f"ACCELERATE_USE_{name}" for name in _STRATEGIES]
    return [name for name in names if os.environ.get(name, "false").lower() in ("1", "true")]


@contextlib.contextmanager
def shown_one_process(leave_alone: Callable[[str], Any]) -> Iterator[None]:
    """Within this block, accelerate behaves on each rank as in one process, also if it is imported later.

    If the program makes accelerate divide the model, `leave_alone` is called with the reason.
    """
    with contextlib.ExitStack() as until:

        def put() -> None:
            state = sys.modules["accelerate.state"].PartialState
            accelerator = sys.modules["accelerate.accelerator"].Accelerator
            make, begin = accelerator.__init__, state.__init__

            @functools.wraps(make)
            def made(self: Any, *args: Any, **kwargs: Any) -> None:
                asked = [*strategies(), *(name for name in _PLUGINS if kwargs.get(name) is not None)]
                if asked:
                    leave_alone(f"accelerate divides its model ({', '.join(asked)})")
                make(self, *args, **kwargs)

            @functools.wraps(begin)
            def begun(self: Any, *args: Any, **kwargs: Any) -> None:
                with in_one_process():
                    begin(self, *args, **kwargs)

            until.enter_context(replaced(accelerator, "__init__", made))
            until.enter_context(replaced(state, "__init__", begun))

        until.callback(after_import("accelerate", put))
        yield
