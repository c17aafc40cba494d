"""Has W&B and Trackio log the main rank's run alone. With no `world`, in a run of a proof, nothing is sent."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from typing import Any, Optional

from ddpshim.job.world import World
from ddpshim.process.job import current
from ddpshim.rows.tensor import Counts, on_whole


def share_wandb(world: Optional[World]) -> None:
    """Make W&B log on the main rank only what needs all ranks: batches, and gradients, which its hooks read."""
    wandb: Any = sys.modules["wandb"]
    is_main = world is not None and world.is_main
    init: Any = getattr(wandb, "init", None)

    def begin(*args: Any, **kwargs: Any) -> Any:
        run = init(*args, **(kwargs if is_main else {**kwargs, "mode": "disabled"}))  # which overrides WANDB_MODE
        log = run.log
        run.log = wandb.log = lambda *given, **options: on_whole(log, given, options)
        if not is_main and hasattr(getattr(wandb, "sdk", None), "_watch"):
            vars(run).setdefault("_torch_history", None)  # has the same hooks, which never log
            run.watch = wandb.watch = lambda models, criterion=None, log="gradients", *_, **__: wandb.sdk._watch(
                run, models, criterion, log, sys.maxsize
            )
            run.unwatch = wandb.unwatch = functools.partial(wandb.sdk._unwatch, run)
        return run

    if init is not None:
        wandb.init = begin


def share_trackio(world: Optional[World]) -> None:
    """Make Trackio, which cannot be disabled, send only the main rank's run, and give all ranks its name."""
    trackio: Any = sys.modules["trackio"]
    init, counts = getattr(trackio, "init", None), current().part(Counts)
    if init is None:
        return

    @functools.wraps(init)
    def begin(*args: Any, **kwargs: Any) -> Any:
        own = []

        def alone() -> str:
            with counts.alone():
                own.append(init(*args, **kwargs))
            return str(own[0].name)

        given = {**inspect.signature(init).bind(*args, **kwargs).arguments}
        if world is not None and (world.is_main or counts.is_in_lock_step()):
            given["name"] = world.run_on_main(alone) if counts.is_in_lock_step() else alone()
            if own:
                return own[0]
        with contextlib.ExitStack() as undo:
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
                if variable in os.environ:
                    undo.callback(os.environ.__setitem__, variable, os.environ.pop(variable))
            return init(**{key: given[key] for key in ("project", "name", "group", "config") if key in given})

    trackio.init = begin
