"""Ends a rank whose program trains in a child process: each rank would have one, which trains for itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

from ddpshim import variables
from ddpshim.errors import SyncError
from ddpshim.process.replaced import after_import
from ddpshim.process.say import say
from ddpshim.process.users_line import users_line


def watch_child(rank_process: int) -> None:
    """In a child process of a rank, end that rank if an optimizer of torch steps. Local."""
    if os.getpid() == rank_process:  # the rank copies a process that it has not started
        return

    def watch() -> None:
        data, optimizer = sys.modules["torch.utils.data"], sys.modules["torch.optim.optimizer"]

        def before_step(*step: Any) -> None:
            if data.get_worker_info() is None:  # else it is of the dataset
                refuse_training(rank_process)

        optimizer.register_optimizer_step_pre_hook(before_step)

    after_import("torch", watch)


def refuse_training(rank_process: int) -> NoReturn:
    """End this child process, which trains, and its rank, which may wait for it for ever. Local."""
    from ddpshim.failures import failure_notes

    error = SyncError(
        f"{users_line()}: a child process of the program trains. Each rank has such a child, which would train alone, "
        "on whole batches, and each would write the same files. Call the function in place of starting a process, one "
        "training after the other."
    )
    failure_notes.write(error, 1)
    say(f"rank {os.environ.get('RANK') or os.environ.get(variables.RANK)} failed: {error}", directly=True)
    with contextlib.suppress(ProcessLookupError):  # another child has ended it
        os.kill(rank_process, signal.SIGKILL)
    os._exit(1)
