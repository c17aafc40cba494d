"""Tests how ranks meet and add: a program that the self-test runs on all ranks, with a file for its results."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist

from ddpshim.errors import WorldError
from ddpshim.job.group import cleanup, setup
from ddpshim.job.world import World

_MOST_S = 5.0  # a larger sum is left out if it would take longer


def main(file: Path, timeout_s: float) -> None:
    """Write a JSON line for each check that passed, on the main rank (collective)."""
    begun = time.perf_counter()
    world = setup(seed=1, timeout_s=timeout_s, side_timeout_s=timeout_s)
    checks: dict[str, Callable[[World], str]] = {"start": _start, "values": _values, "all-reduce": _all_reduce}
    for name, check in checks.items():
        detail = check(world)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the check that caused an error reports it
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
    return f"{world.backend or 'one process'} on {devices}"


def _values(world: World) -> str:
    size, everyone = world.world_size, list(range(world.world_size))
    _expect("gather", world.gather(world.rank), everyone)
    _expect("broadcast from each rank", [world.broadcast(world.rank, src) for src in everyone], everyone)
    _expect("sum of integers", world.sum(2**60 + world.rank), size * 2**60 + sum(everyone))
    _expect("sum of floats", world.sum(0.1 * (world.rank + 1)), math.fsum(0.1 * (rank + 1) for rank in everyone))
    _expect("sum of a tensor", world.sum(torch.tensor([1, world.rank])).tolist(), [size, sum(everyone)])
    _expect("run_on_main", world.run_on_main(lambda: int(os.environ.get("RANK", 0))), 0)
    return "gather, broadcast, sum, run_on_main"


def _expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise WorldError(
            f"{what}: found {found}, expected {expected}; metrics and decisions would differ between ranks. Report "
            "this as a bug, with the output of `python -m ddpshim selftest --env`."
        )


def _all_reduce(world: World) -> str:
    if world.world_size == 1:
        return "one rank has nobody to add with"
    measured, before, seconds = [], 4, 0.0
    latency_s = _seconds_each(torch.zeros(1, device=world.device), 20)
    for megabytes in (4, 64, 256) if world.backend == "nccl" else (4,):
        if max(world.gather(seconds)) * megabytes / before > _MOST_S:
            break
        before = megabytes
        # Integers far below 2**24, so their sums are exact in float32.
        pattern = (torch.arange(megabytes * 250_000, device=world.device) % 251).float()
        reduced = pattern * (world.rank + 1)
        dist.all_reduce(reduced)
        num_wrong = int((reduced != pattern * (world.world_size * (world.world_size + 1) // 2)).sum())
        if num_wrong:
            raise WorldError(
                f"all-reduce of {megabytes} MB over {world.backend} gave {num_wrong} wrong numbers of "
                f"{len(pattern)}; gradients would be wrong. Try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, to find "
                "the faulty link; nccl-tests measures each."
            )
        seconds = _seconds_each(pattern.zero_(), 3 if megabytes == 4 else 10)
        # The bus bandwidth of nccl-tests: the rate on each link, comparable for any number of ranks.
        bandwidth = 2 * (world.world_size - 1) / world.world_size * 4 * len(pattern) / seconds / 1e9
        measured.append(f"{bandwidth:.1f} GB/s at {megabytes} MB")
    return f"latency {latency_s * 1e3:.2f} ms, bus bandwidth {', '.join(measured)}"


def _seconds_each(tensor: torch.Tensor, num_rounds: int) -> float:
    wait: Callable[[], Any] = torch.cuda.synchronize if tensor.is_cuda else int
    for _ in range(2):  # connections are made in the first one
        dist.all_reduce(tensor)
    wait()
    started = time.perf_counter()
    for _ in range(num_rounds):
        dist.all_reduce(tensor)
    wait()
    return (time.perf_counter() - started) / num_rounds


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
