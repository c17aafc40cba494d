"""Makes W&B, which only the main rank uses, see whole batches and all gradients."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ddpshim.rows.tensor import on_whole


def share(is_main: bool) -> None:
    """Make W&B log on the main rank only what needs all ranks: batches, and gradients, which its hooks read."""
    wandb: Any = sys.modules["wandb"]
    init: Any = getattr(wandb, "init", None)

    def begin(*args: Any, **kwargs: Any) -> Any:
        run = init(*args, **(kwargs if is_main else {**kwargs, "mode": "disabled"}))  # which overrides WANDB_MODE
        log = run.log
        run.log = wandb.log = lambda *given, **options: on_whole(log, given, options)
        if not is_main and hasattr(wandb.sdk, "_watch"):
            vars(run).setdefault("_torch_history", None)  # has the same hooks, which never log
            run.watch = wandb.watch = lambda models, criterion=None, log="gradients", *_, **__: wandb.sdk._watch(
                run, models, criterion, log, sys.maxsize
            )
            run.unwatch = wandb.unwatch = functools.partial(wandb.sdk._unwatch, run)
        return run

    if init is not None:
        wandb.init = begin
