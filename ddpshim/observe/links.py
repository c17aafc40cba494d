"""Measures how long messages between all ranks of a job take, for `python -m ddpshim predict`."""

from __future__ import annotations

import time
from typing import Optional

import torch
import torch.distributed as dist

from ddpshim.job.world import World
from ddpshim.observe.ring_model import Link

MESSAGES_BYTES = (4, 4 * 2**20)
_NUM_TIMES = (9, 4)  # the first opens connections; the fastest counts, because ranks may start at different times


def measure(here: World) -> Optional[Link]:
    """Return the link of a ring that fits the times of messages of two sizes; None with one rank (collective)."""
    if here.world_size == 1:
        return None
    seconds = []
    for num_bytes, num_times in zip(MESSAGES_BYTES, _NUM_TIMES):
        message = torch.zeros(num_bytes // 4, device=here.device)
        seconds.append(min(_all_reduce_s(message) for _ in range(num_times)))
    return link_of(here.world_size, *seconds)


def link_of(world_size: int, small_s: float, large_s: float) -> Link:
    """Return the link of a ring in which the messages of `MESSAGES_BYTES` take these seconds. Local."""
    hops = 2 * (world_size - 1)
    slope = max((large_s - small_s) / (MESSAGES_BYTES[1] - MESSAGES_BYTES[0]), 1e-15)
    return Link(hops / world_size / slope, max(0.0, small_s - slope * MESSAGES_BYTES[0]) / hops)


def _all_reduce_s(message: torch.Tensor) -> float:
    start = time.perf_counter()
    dist.all_reduce(message)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
