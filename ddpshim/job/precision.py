"""Sets how a rank computes: autocast for the option `precision`, the same kernels on any rank for `exact`."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch

from ddpshim.errors import LaunchError, OptionsError
from ddpshim.process.devices import computes_on
from ddpshim.process.job import Job
from ddpshim.process.observed import observe

if TYPE_CHECKING:
    from ddpshim.job.world import World

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_ALLOWED = (":4096:8", ":16:8")  # cuBLAS then adds in a fixed order, as NVIDIA's and torch's pages say


def compute_alike(here: World, exact: int) -> None:
    """Fix threads and kernels for the option `exact` (collective).

    Uses OMP_NUM_THREADS threads (default 1) on the CPU, and deterministic algorithms on GPUs.

    Raises OptionsError if the number of ranks does not divide `exact` or no launcher started this process, and
    LaunchError, on all ranks, if their devices differ or cuBLAS may choose its order.
    """
    if not here.is_launched or exact % here.world_size:
        found = f"{here.world_size} ranks" if here.is_launched else "a process without a launcher"
        sizes = ", ".join(str(size) for size in range(1, exact + 1) if exact % size == 0)
        raise OptionsError(
            f"exact={exact} in {found}: {exact} virtual ranks do not spread evenly over them, so bits would depend on "
            f"the number of ranks. Start python -m ddpshim run --nproc N PROGRAM, with N one of {sizes}."
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
            "sums would depend on where each virtual rank is computed. Give all ranks equal devices and software."
        )


class _Entered:
    is_so = False  # the program has used autocast


def autocast(here: World) -> Any:
    """See `World.autocast`."""
    if torch.is_grad_enabled():  # an evaluation before the training does not count
        here._job.part(_Entered).is_so = True
    if here.options.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(here.device.type, torch.bfloat16, cache_enabled=False)


def check_first_step(precision: str, job: Job) -> None:
    """Make an optimizer step raise OptionsError if the precision was not used before. Local."""
    entered = job.part(_Entered)

    def check(*_: Any) -> None:
        if not entered.is_so:
            raise OptionsError(
                f"precision={precision}, but this step was computed without it: the run would be no faster, "
                "and its records would name the wrong precision. A network uses it in its forward in training mode; if "
                "a loss calls other methods, compute it in `with ddpshim.world().autocast():`. Leave the option out if "
                "the program has its own autocast."
            )

    observe(job.at_end, before_step=check)
