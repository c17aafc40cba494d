"""Computes in the precision of the options, and refuses to train where nobody entered it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpshim.errors import OptionsError
from ddpshim.job.job import Job
from ddpshim.options import Options


class _Entered:
    """Whether somebody computed in the precision that was asked for."""

    def __init__(self) -> None:
        self.is_so = False


def autocast(options: Options, device: torch.device, job: Job) -> Any:
    """See `World.autocast`."""
    job.part(_Entered).is_so = True
    if options.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def check_first_step(options: Options, job: Job) -> None:
    """Have the first step of an optimizer raise OptionsError where `autocast` was not called before. Local."""
    if options.precision == "float32":
        return

    entered = job.part(_Entered)

    def check(*_: Any) -> None:
        if not entered.is_so:
            raise OptionsError(
                f"precision={options.precision}, but this step was computed without it: nothing would be faster, and "
                "the records would say another precision than that of the run. Compute the loss in "
                "`with ddpshim.world().autocast():`, or drop the option where the program has its own."
            )

    hook = register_optimizer_step_pre_hook(check)
    job.at_end.callback(hook.remove)
