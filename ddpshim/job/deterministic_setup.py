"""Sets up a process for the option `exact`, so that a rank's results do not depend on the number of ranks."""

from __future__ import annotations

import os

import torch

from ddpshim.errors import LaunchError, OptionsError
from ddpshim.job.world import World
from ddpshim.process.devices import computes_on

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_ALLOWED = (":4096:8", ":16:8")  # cuBLAS then adds in a fixed order, as NVIDIA's and torch's pages say


def compute_alike(here: World, exact: int) -> None:
    """Fix threads and kernels for `exact` virtual ranks (collective).

    Uses OMP_NUM_THREADS threads (default 1) on the CPU, and deterministic algorithms on GPUs.

    Raises OptionsError if the number of ranks does not divide `exact`, or no launcher started this process, and
    LaunchError, on all ranks, if their devices differ or cuBLAS may choose its order.
    """
    if not here.is_launched or exact % here.world_size:
        found = f"{here.world_size} ranks" if here.is_launched else "a process without a launcher"
        sizes = ", ".join(str(size) for size in range(1, exact + 1) if exact % size == 0)
        raise OptionsError(
            f"exact={exact} in {found}: {exact} virtual ranks cannot be divided evenly, so the experiment would "
            f"change. Start python -m ddpshim run --nproc N PROGRAM, with N one of {sizes}."
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
            "sums would depend on where each virtual rank runs. Give all ranks equal devices and software."
        )
