"""Provides autocast and the GradScaler for the option `precision`, and raises if the program trains without them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ddpshim.errors import OptionsError
from ddpshim.options import Options
from ddpshim.process.job import Job
from ddpshim.process.observed import observe

_GradScaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_FIRST_SCALE = 2.0**16  # torch's own
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Entered:
    """Whether the program has used autocast (`is_so`) and a GradScaler (`is_scaled`)."""

    def __init__(self) -> None:
        self.is_so = self.is_scaled = False


def autocast(options: Options, device: torch.device, job: Job) -> Any:
    """See `World.autocast`."""
    if torch.is_grad_enabled():  # an evaluation before the training does not count
        job.part(_Entered).is_so = True
    if options.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, _DTYPES[options.precision], cache_enabled=False)


class _Scaler(_GradScaler):  # type: ignore[misc]
    """A GradScaler for means over one of `num_ranks` shares: each sample's gradient is `num_ranks` times as large.

    So its scale is 1 / `num_ranks` of one process's, and gradients overflow at the same size as there. Files hold the
    scale of one process.
    """

    def __init__(self, num_ranks: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, init_scale=_FIRST_SCALE / num_ranks)
        self._num_ranks = num_ranks

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "scale": state["scale"] * self._num_ranks} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(
            {**state_dict, "scale": state_dict["scale"] / self._num_ranks} if state_dict else state_dict
        )


def grad_scaler(options: Options, device: torch.device, job: Job, num_ranks: int) -> Any:
    """See `World.grad_scaler`."""
    job.part(_Entered).is_scaled = True
    is_on = options.precision == "fp16"
    if hasattr(torch.amp, "GradScaler"):
        return _Scaler(num_ranks, device.type, enabled=is_on)
    if is_on and device.type != "cuda":
        raise OptionsError(
            f"precision=fp16 on {device.type} with torch {torch.__version__}, which scales losses only on GPUs: "
            "small gradients would become 0. Upgrade to torch 2.3, or use bf16."
        )
    return _Scaler(num_ranks, enabled=is_on)


def check_first_step(options: Options, job: Job) -> None:
    """Make the first optimizer step raise OptionsError if the precision was not used before. Local."""
    if options.precision == "float32":
        return

    entered = job.part(_Entered)

    def check(*_: Any) -> None:
        from ddpshim.process.remedies import remedy

        if not entered.is_so:
            raise OptionsError(
                f"precision={options.precision}, but this step was computed without it: the run would be no faster, "
                f"and its records would name the wrong precision. {remedy('autocast')}."
            )
        if options.precision == "fp16" and not entered.is_scaled:
            raise OptionsError(f"precision=fp16, but no loss was scaled: small gradients become 0. {remedy('scaler')}.")

    observe(job.at_end, before_step=check)
