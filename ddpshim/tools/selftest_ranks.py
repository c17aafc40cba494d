"""Tests how ranks start, meet and add: a program that the self-test runs on all ranks.

With the argument FILE the main rank writes its results there; without it, rank 1 kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddpshim.errors import WorldError
from ddpshim.job.group import cleanup, setup
from ddpshim.job.world import World

_DIES_AT = 5  # sum


def main(file: Path) -> None:
    """Write a JSON line for each check that passed, on the main rank (collective)."""
    begun = time.perf_counter()
    world = setup(seed=1)
    for name, check in {"start": _start, "all-reduce": _all_reduce}.items():
        detail = check(world)
        world.barrier()
        if world.is_main:
            with file.open("a") as lines:
                line = {"name": name, "seconds": time.perf_counter() - begun, "detail": detail}
                lines.write(json.dumps(line) + "\n")
        begun = time.perf_counter()
    cleanup()


def _start(world: World) -> str:
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    devices = ", ".join(dict.fromkeys(f"{where} ({what})" for where, what in world.gather((str(world.device), name))))
    return f"{world.backend} on {devices}"


def _all_reduce(world: World) -> str:
    megabytes = 256 if world.backend == "nccl" else 4
    # Integers far below 2**24, so their sums are exact in float32.
    pattern = (torch.arange(megabytes * 250_000, device=world.device) % 251).float()
    reduced = pattern * (world.rank + 1)
    dist.all_reduce(reduced)
    num_wrong = int((reduced != pattern * (world.world_size * (world.world_size + 1) // 2)).sum())
    if num_wrong:
        raise WorldError(
            f"all-reduce of {megabytes} MB over {world.backend} gave {num_wrong} wrong numbers of {len(pattern)}; "
            "gradients would be wrong. Try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, to find the faulty link; "
            "nccl-tests measures each."
        )
    return f"{megabytes} MB"


def die() -> None:
    """Add until rank 1 kills itself (collective)."""
    world, number = setup(seed=1), 0
    while True:
        world.sum(1)
        number += 1
        if number == _DIES_AT and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1])) if sys.argv[1:] else die()
