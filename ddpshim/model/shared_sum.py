"""Adds up tensors of several processes of one machine through shared memory, in one order.

Sockets would copy every byte through the kernel twice. Here each process writes its tensors, adds up one part of the
tensors of all processes, and reads the sums.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Optional

import torch
import torch.distributed as dist

from ddpshim.job.world import World

MESSAGE_BYTES = 4 * 1024 * 1024  # per virtual rank


class SharedSum:
    """Memory for one message of each of `num_leaves` virtual ranks, made by `make`.

    There are two halves, used in turn, so that no process writes where another may still read.
    """

    def __init__(self, memory: torch.Tensor, num_leaves: int, here: World) -> None:
        self._halves = memory.view(2, num_leaves, -1)
        self._here, self._num_sums = here, 0

    def means(self, leaves: Sequence[Sequence[torch.Tensor]], mean: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        """Overwrite this process's tensors with `mean` of all virtual ranks' tensors (collective).

        Args:
            leaves: for each virtual rank of this process, its tensors, all of one dtype.
            mean: writes the mean of a list of tensors into the first one.
        """
        flat = [[tensor.reshape(-1) for tensor in of_virtual] for of_virtual in leaves]
        for part in _parts([tensor.numel() for tensor in flat[0]], MESSAGE_BYTES // flat[0][0].element_size()):
            self._means_of([[of_virtual[i][start:end] for i, start, end in part] for of_virtual in flat], mean)
        for tensor, its in zip(chain.from_iterable(leaves), chain.from_iterable(flat)):
            if tensor.data_ptr() != its.data_ptr():  # not contiguous, so `its` is a copy
                tensor.copy_(its.view(tensor.shape))

    def _means_of(self, leaves: Sequence[Sequence[torch.Tensor]], mean: Callable[..., Any]) -> None:
        num, sizes = self._here.world_size, [tensor.numel() for tensor in leaves[0]]
        half = self._halves[self._num_sums % 2].view(leaves[0][0].dtype)
        self._num_sums += 1
        for i, of_virtual in enumerate(leaves):
            mine = half[self._here.rank + i * num]
            torch.cat(list(of_virtual), out=mine[: sum(sizes)])
        self._wait()
        each = -(-sum(sizes) // num)
        start, end = self._here.rank * each, min((self._here.rank + 1) * each, sum(sizes))
        if start < end:
            mean(half[:, start:end].unbind(0))  # written into the first virtual rank's place
        self._wait()
        for of_virtual in leaves:
            for tensor, value in zip(of_virtual, half[0, : sum(sizes)].split(sizes)):
                tensor.copy_(value)

    def _wait(self) -> None:
        dist.barrier()


def make(here: World, num_leaves: int) -> Optional[SharedSum]:
    """Return memory shared by the ranks if all of them are on this machine's CPU; else None (collective)."""
    if here.world_size == 1 or here.local_world_size != here.world_size or here.device.type != "cpu":
        return None
    size = 2 * num_leaves * MESSAGE_BYTES
    path = here.broadcast(_allocate(size) if here.is_main else None)
    memory = None if path is None else torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    here.barrier()
    if path is not None and here.is_main:
        os.unlink(path)  # the memory stays while a process has it mapped
    return None if memory is None else SharedSum(memory, num_leaves, here)


def _parts(sizes: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield groups of (index of a tensor, start, end) that have at most `limit` numbers together."""
    group: list[tuple[int, int, int]] = []
    room = limit
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + room)
            group.append((i, start, end))
            room -= end - start
            start = end
            if not room:
                yield group
                group, room = [], limit
    if group:
        yield group


def _allocate(size: int) -> Optional[str]:
    """Return the path of a file in memory with `size` bytes allocated; None if there is no room."""
    with contextlib.suppress(OSError, AttributeError):
        handle, path = tempfile.mkstemp(prefix="ddpshim-sum-", dir="/dev/shm")
        try:
            os.posix_fallocate(handle, 0, size)
            return path
        except OSError:
            os.unlink(path)
        finally:
            os.close(handle)
    return None
