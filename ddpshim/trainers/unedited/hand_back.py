"""Restarts each rank without ddpshim's changes if a program turns out to distribute itself.

One that uses Hugging Face's accelerate does not, unless it divides its model (DeepSpeed, FSDP, Megatron, tensor
parallelism): accelerate sees one process on each rank, so the batch size is that of the program's loader.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable, NoReturn, Optional

import torch.distributed as dist

from ddpshim import variables
from ddpshim.errors import SyncError
from ddpshim.job.group import cleanup, world
from ddpshim.process.after_import import after_import
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say_on_main
from ddpshim.process.users_line import users_line
from ddpshim.trainers.unedited.program import Start, start_again

_LAST_ANSWER_S = 0.2  # time for other ranks to read the last answer of the store, which the main rank hosts
_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_"),
    *("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"),
)
_STRATEGIES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "TP")
_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")


@contextlib.contextmanager
def noticed(start: Start) -> Iterator[None]:
    """Within this block, restart a program that creates a process group or calls ddpshim."""
    is_initialized = dist.is_initialized
    with contextlib.ExitStack() as until:

        def put(owner: Any, name: str, found: str) -> None:
            if hasattr(owner, name):
                until.enter_context(replaced(owner, name, _stand_in(start, getattr(owner, name), found)))

        def is_shown() -> bool:
            """False for the program, which would otherwise divide work or writing among ranks by itself."""
            asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
            return asks in ("torch", "ddpshim") and is_initialized()

        for name in ("init_process_group", "init_device_mesh"):
            put(dist, name, f"it calls torch.distributed.{name}")
        until.enter_context(replaced(dist, "is_initialized", is_shown))
        for name in ("setup", "wrap_parallel", "make_loader"):
            put(sys.modules["ddpshim"], name, f"it calls ddpshim.{name}")
        until.callback(after_import("accelerate", lambda: _show_accelerate_one_process(start, until)))
        yield


@contextlib.contextmanager
def in_one_process() -> Iterator[None]:
    """Within this block, no launcher is found in the environment. Local."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_LAUNCHERS)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _show_accelerate_one_process(start: Start, until: contextlib.ExitStack) -> None:
    """Make accelerate behave on each rank as in one process, until `until` ends."""
    state = sys.modules["accelerate.state"].PartialState
    accelerator = sys.modules["accelerate.accelerator"].Accelerator
    make, begin = accelerator.__init__, state.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        switches = [f"ACCELERATE_USE_{name}" for name in _STRATEGIES]
        asked = [name for name in switches if os.environ.get(name, "false").lower() in ("1", "true")]
        asked += [name for name in _PLUGINS if kwargs.get(name) is not None]
        if asked:
            leave_alone(start, f"accelerate divides its model ({', '.join(asked)})")
        make(self, *args, **kwargs)

    @functools.wraps(begin)
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        with in_one_process():
            begin(self, *args, **kwargs)

    until.enter_context(replaced(accelerator, "__init__", made))
    until.enter_context(replaced(state, "__init__", begun))


def _stand_in(start: Start, original: Callable[..., Any], found: str) -> Callable[..., Any]:
    def instead(*args: Any, **kwargs: Any) -> Any:
        asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        if asks == "ddpshim" or os.getpid() != start.process:
            return original(*args, **kwargs)
        leave_alone(start, found)

    return instead


def leave_alone(start: Start, found: str, error: Optional[Exception] = None) -> NoReturn:
    """Restart this rank without changes to the program (collective). Raises SyncError if networks were wrapped.

    `error`: with which the program ended, if it did.
    """
    here, line = world(), users_line(error=error)
    if current().has_networks:
        raise SyncError(
            f"{line}: {found}, after ddpshim has distributed it as a program for one process; both "
            f"would reduce gradients. Set {variables.UNEDITED}=off if the program distributes all its training "
            "itself; otherwise remove that call."
        )
    say_on_main(
        f"{line}: {found}, so the program distributes itself. ddpshim restarts it and leaves it "
        f"alone ({variables.UNEDITED}=off skips the restart)"
    )
    here.barrier()
    is_served_here = here.is_main
    start.take_back()
    cleanup()
    if is_served_here:
        time.sleep(_LAST_ANSWER_S)
    os.chdir(start.folder)
    start_again(start.argv, {**start.environ, variables.UNEDITED: "off"})


def leave_alone_if_it_joins(start: Start, error: Exception) -> None:
    """Restart a program that failed before it made a network and can make a process group: it may need a launcher."""
    if start.joins and not current().has_networks:
        leave_alone(start, f"{error!r} in one process, and it can make a process group", error)
