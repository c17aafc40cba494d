"""Keeps one copy of an array per node, in memory, for all its ranks and data workers.

The arrays are in a file without a name. The ranks of a node open it through the rank that made it, and workers inherit
or receive its descriptor. The kernel frees it when the last of these processes ends, even in a crash.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import DataError, WorldError
from ddpshim.failures import failure
from ddpshim.job.group import world as current_world
from ddpshim.job.world import World
from ddpshim.process import machine
from ddpshim.process.say import described, size

_ALIGNMENT = 64
_SHARED_MEMORY = "/dev/shm"
_WHAT = "make the arrays that a node shares"

Spec = tuple[Sequence[int], torch.dtype]


def is_supported() -> bool:
    """Whether processes of this system can open each other's files, as on Linux. Local."""
    return os.path.exists("/proc/self/fd") and os.path.exists("/proc/self/ns/pid")


def shared_arrays(
    specs: Mapping[str, Spec],
    fill: Callable[[SharedArrays, int, int], None],
    *,
    world: Optional[World] = None,
) -> SharedArrays:
    """Return arrays shared by all processes of this node, filled once (collective; the same with one process).

    They are for reading: all ranks and workers of the node see a write, at an undefined time. Spawned and forked
    workers share the memory if they receive the arrays themselves, not views of them.

    Args:
        specs: (shape, dtype) by name; the same on every rank.
        fill: called on each rank as `fill(arrays, part, num_parts)`, where `num_parts` is the number of ranks on its
            node; it writes its part. Bytes that no rank writes are zero.

    Raises:
        DataError: there is no room, the specs differ between ranks, or the system is not Linux; on every rank.
        WorldError: `fill` failed on another rank. There, its own exception is raised.
    """
    if not is_supported():
        raise DataError(
            f"this is {sys.platform}, and processes share arrays through Linux's /proc; each would hold a copy. Use "
            "Linux (on Windows: WSL), or load the data as tensors."
        )
    here = current_world() if world is None else world
    specs = dict(sorted(specs.items()))  # names from a set have a different order on each rank
    num_bytes = _layout(specs)[1]
    looks = here.gather((_node(), [(name, tuple(shape), str(dtype)) for name, (shape, dtype) in specs.items()]))
    odd = next((rank for rank, look in enumerate(looks) if look[1] != looks[0][1]), None)
    if odd is not None:
        raise DataError(
            f"shared_arrays of {len(looks[0][1])} arrays on rank 0 and of others on rank {odd} "
            f"({sorted(set(looks[0][1]) ^ set(looks[odd][1]))[:2]}); a rank would confuse one array with another. "
            "Give every rank the same specs, and every node the same files."
        )
    ranks = [rank for rank, look in enumerate(looks) if look[0] == _node()]
    arrays: Optional[SharedArrays] = None

    def make() -> tuple[int, int]:
        nonlocal arrays
        arrays = SharedArrays(_make(num_bytes), specs)
        return os.getpid(), arrays.descriptor

    def see() -> None:
        nonlocal arrays
        if arrays is None:
            pid, descriptor = made[ranks[0]]
            arrays = SharedArrays(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), specs)

    made = on_each_rank(here, _WHAT, make if here.rank == ranks[0] else lambda: None)
    on_each_rank(here, _WHAT, see)
    assert arrays is not None
    on_each_rank(here, _WHAT, fill, arrays, ranks.index(here.rank), len(ranks))
    return arrays


class SharedArrays(Mapping[str, torch.Tensor]):
    """Tensors by name, in one file. Made by `shared_arrays`; sending it to another process copies no data."""

    def __init__(self, descriptor: int, specs: Mapping[str, Spec]) -> None:
        self.descriptor, self._specs = descriptor, dict(specs)
        weakref.finalize(self, os.close, descriptor)
        self._offsets, num_bytes = _layout(specs)
        memory = mmap.mmap(descriptor, num_bytes)
        self._arrays = {
            name: torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=self._offsets[name]).view(*shape)
            if math.prod(shape)
            else torch.empty(*shape, dtype=dtype, device="cpu")  # torch refuses an empty buffer
            for name, (shape, dtype) in specs.items()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __reduce__(self) -> Any:
        # multiprocessing's own way to send a descriptor, which spawn, forkserver and its queues support.
        return _handed_over, (reduction.DupFd(self.descriptor), self._specs)

    def __deepcopy__(self, memo: Any) -> SharedArrays:
        return self


def _handed_over(descriptor: Any, specs: Mapping[str, Spec]) -> SharedArrays:
    return SharedArrays(descriptor.detach(), specs)


def _layout(specs: Mapping[str, Spec]) -> tuple[dict[str, int], int]:
    """Return the offset of each array, and the bytes of all; at least 1, because 0 bytes cannot be mapped."""
    offsets, end = {}, 0
    for name, (shape, dtype) in specs.items():
        offsets[name] = end
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(1, end)


def _node() -> tuple[str, int]:
    """Return the machine's boot and pid namespace; processes that have both in common can open each other's files."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.stat("/proc/self/ns/pid").st_ino


def _make(num_bytes: int) -> int:
    """Return the descriptor of a nameless file of this size in memory. Local. Raises DataError if there is no room."""
    memory, has_memfd = machine.memory(), hasattr(os, "memfd_create")
    left = math.inf if memory.available_bytes is None else memory.available_bytes
    if not has_memfd:
        left = min(left, shutil.disk_usage(_SHARED_MEMORY).free)
    if num_bytes > left:
        of = "" if memory.limit_bytes is None else f", with its limit of {size(memory.limit_bytes)} for a container"
        raise DataError(
            f"one copy of the data for this node takes {size(num_bytes)}, and memory has {size(left)} available{of}; "
            "the kernel would kill a rank that loads it. Make room, or load less (robomimic: "
            "train.hdf5_cache_mode='low_dim', or null)."
        )
    # memfd_create needs no /dev/shm (64 MB in a Docker container). Python of conda-forge may lack it.
    if has_memfd:
        descriptor = os.memfd_create("ddpshim")
    else:
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY) as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)  # pages are allocated when they are filled
    return descriptor


def on_each_rank(here: World, what: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of `function` on each rank (collective); an exception on one rank is raised on all."""
    error: Optional[BaseException] = None
    value = None
    try:
        value = function(*args)
    except BaseException as raised:  # raised below, because the other ranks wait in the gather
        error = raised
    failed = None if error is None else (isinstance(error, DataError), described(error), str(error))
    everyones = here.gather((value, failed))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(everyones):
        if problem is not None:
            is_ours, shown, text = problem
            lost = f"rank {rank} could not {what} ({shown}); rank {here.rank} would hang. See that rank's traceback."
            raise failure.caused_by(rank, DataError(f"on rank {rank}: {text}") if is_ours else WorldError(lost))
    return [value for value, _ in everyones]
