"""Sets how a rank computes: autocast and a GradScaler for the option `precision`, equal kernels for `exact`.

With `precision` it raises an error if the program trains without them; with `exact` a rank's results do not depend on
the number of ranks.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch

from ddpshim.errors import LaunchError, OptionsError
from ddpshim.options import Options
from ddpshim.process.devices import computes_on
from ddpshim.process.job import Job, current
from ddpshim.process.observed import observe

if TYPE_CHECKING:
    from ddpshim.job.world import World

_GradScaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_FIRST_SCALE = 2.0**16  # torch's own
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_ALLOWED = (":4096:8", ":16:8")  # cuBLAS then adds in a fixed order, as NVIDIA's and torch's pages say


def compute_alike(here: World, exact: int) -> None:
    """Fix threads and kernels for the option `exact` (collective).

    Uses OMP_NUM_THREADS threads (default 1) on the CPU, and deterministic algorithms on GPUs.

    Raises OptionsError if the number of ranks does not divide `exact`, no launcher started this process, or ranks hold
    shares of batches, and LaunchError, on all ranks, if their devices differ or cuBLAS may choose its order.
    """
    if not here.is_launched or exact % here.world_size:
        found = f"{here.world_size} ranks" if here.is_launched else "a process without a launcher"
        sizes = ", ".join(str(size) for size in range(1, exact + 1) if exact % size == 0)
        raise OptionsError(
            f"exact={exact} in {found}: {exact} pieces of a batch cannot be divided evenly, so bits would depend on "
            f"the number of ranks. Start python -m ddpshim run --nproc N PROGRAM, with N one of {sizes}."
        )
    if not current().holds_whole_batches:
        raise OptionsError(
            f"exact={exact} with shares of batches: a mean over a share is rounded by the share's size, so bits would "
            'depend on the number of ranks. Call ddpshim.setup(batch="global"), or start the program for one process, '
            "unedited, by `python -m ddpshim run` (robomimic as released, without patches on disk)."
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if here.device.type == "cuda":
        if os.environ.get(_CUBLAS) not in _ALLOWED:
            raise LaunchError(
                f"exact={exact} on a GPU with {_CUBLAS}={os.environ.get(_CUBLAS)!r}: cuBLAS may sum in a different "
                f"order in the next run. Export {_CUBLAS}={_ALLOWED[0]} before the job (`ddpshim run` does)."
            )
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    kinds = here.gather(computes_on(here.device))
    odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise LaunchError(
            f"exact={exact} with rank 0 on {kinds[0]} and rank {odd} on {kinds[odd]}: they round differently, so "
            "sums would depend on where each piece is computed. Give all ranks equal devices and software."
        )


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
