"""Keeps one copy of an array per node, in memory, for all its ranks and data workers; also of what robomimic caches.

The arrays are in a file without a name. The ranks of a node open it through the rank that made it, and workers inherit
or receive its descriptor. The kernel frees it when the last of these processes ends, even in a crash.

Of a robomimic dataset, all demonstrations lie one after the other in each array. Upstream's dataset code is unchanged:
it reads from a mapping with the interface of its own cache.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
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
from ddpshim.process.observed import called
from ddpshim.process.replaced import replaced
from ddpshim.process.say import described, say_once, size

_ALIGNMENT = 64
_SHARED_MEMORY = "/dev/shm"

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
    makes, arrays = here.rank == ranks[0], list[SharedArrays]()
    pid, descriptor = _on_each_rank(here, lambda: (os.getpid(), _make(num_bytes) if makes else -1))[ranks[0]]

    def see_and_fill() -> None:
        arrays.append(SharedArrays(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), specs))
        fill(arrays[0], ranks.index(here.rank), len(ranks))

    try:
        _on_each_rank(here, see_and_fill)
    finally:
        if makes:
            os.close(descriptor)
    return arrays[0]


class SharedArrays(Mapping[str, torch.Tensor]):
    """Tensors by name, in one file. Made by `shared_arrays`; sending it to another process copies no data."""

    def __init__(self, descriptor: int, specs: Mapping[str, Spec]) -> None:
        self.descriptor, self._specs = descriptor, dict(specs)
        weakref.finalize(self, os.close, descriptor)
        offsets, num_bytes = _layout(specs)
        memory = mmap.mmap(descriptor, num_bytes)
        self._arrays = {
            name: torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offsets[name]).view(*shape)
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


def _on_each_rank(here: World, function: Callable[[], Any]) -> list[Any]:
    """Return the result of `function` on each rank (collective); an exception on one rank is raised on all."""
    error: Optional[BaseException] = None
    value = None
    try:
        value = function()
    except BaseException as raised:  # raised below, because the other ranks wait in the gather
        error = raised
    failed = None if error is None else (type(error).__name__, described(error), str(error))
    everyones = here.gather((value, failed))
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(everyones):
        if problem is not None:
            kind, shown, text = problem
            lost = f"rank {rank} could not make the arrays that a node shares ({shown}); rank {here.rank} would hang."
            ours = {"DataError": DataError, "Unlike": Unlike}.get(kind)
            told = WorldError(f"{lost} See that rank's traceback.") if ours is None else ours(f"on rank {rank}: {text}")
            raise failure.caused_by(rank, told)
    return [value for value, _ in everyones]


# The data that robomimic's datasets cache (`hdf5_cache_mode`)

_Load = Callable[[str], dict[str, Any]]  # from a demonstration's name to its arrays, by path


class Unlike(DataError):
    """A demonstration's arrays differ from the first one's in name, type or shape, so they cannot share one array."""


@contextlib.contextmanager
def shared_cache(kind: Any, here: World) -> Iterator[None]:
    """In this block, making a dataset of this kind (robomimic's SequenceDataset) is collective, and it gets its cache.

    Where demonstrations differ, each rank loads its own copy, as upstream does, and a line says so. Raises DataError if
    the node has no room, and any error of upstream's own loading.
    """
    init, load = vars(kind)["__init__"], vars(kind)["load_dataset_in_memory"]

    @functools.wraps(load)
    def load_shared(dataset: Any, **options: Any) -> Any:
        if dataset.hdf5_cache_mode is None:  # a fork of robomimic loads the data as a trial, and discards it
            return load(dataset, **options)
        one, found = functools.partial(_loaded, load, dataset, options), list[_Shape]()
        try:
            _on_each_rank(here, lambda: found.append(_Shape(dataset, one)))
            (shape,) = found
            arrays = shared_arrays(shape.specs, functools.partial(shape.fill, one), world=here)
        except Unlike as unlike:
            if here.is_main:
                say_once(f"{unlike}: each rank loads its own copy, as upstream does")
            return load(dataset, **options)
        if dataset.hdf5_cache_mode == "all":  # upstream would now make a list of all windows
            dataset.hdf5_cache_mode, dataset.getitem_cache = "low_dim", _Items(dataset)
        return Demos(arrays, shape)

    def restore(dataset: Any, _: Any) -> None:
        if hasattr(dataset, "getitem_cache"):
            dataset.hdf5_cache_mode = "all"

    with replaced(kind, "__init__", called(init, after=restore)), replaced(kind, "load_dataset_in_memory", load_shared):
        yield


def _loaded(load: Callable[..., Any], dataset: Any, options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arrays that upstream would cache of one demonstration, by path, as its own function loads them."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints for each call
        found = load(dataset, **{**options, "demo_list": [name], "hdf5_file": dataset.hdf5_file})
    return _leaves(found[name])


def flatten(dataset: Any) -> None:
    """Give a dataset that caches its data flat arrays in this process instead, if it has none. Local.

    Raises Unlike if its demonstrations differ.
    """
    if dataset.hdf5_cache_mode is None or isinstance(dataset.hdf5_cache, Demos):
        return
    options = {"obs_keys": dataset.obs_keys_in_memory}
    options.update({name: getattr(dataset, name) for name in ("dataset_keys", "load_next_obs")})
    with left_as_found(dataset):
        one = functools.partial(_loaded, type(dataset).load_dataset_in_memory, dataset, options)
        shape = _Shape(dataset, one)
        arrays = {name: torch.empty(*size, dtype=dtype, device="cpu") for name, (size, dtype) in shape.specs.items()}
        shape.fill(one, arrays)
    dataset.hdf5_cache = Demos(arrays, shape)
    if dataset.hdf5_cache_mode == "all":
        dataset.getitem_cache = _Items(dataset)


@contextlib.contextmanager
def left_as_found(dataset: Any) -> Iterator[None]:
    """Close the file that `dataset` opens in this block: workers must not inherit it. Local."""
    was_open = dataset._hdf5_file is not None
    try:
        yield
    finally:
        if not was_open:
            dataset.close_and_delete_hdf5_handle()


class _Shape:
    """The layout of a dataset: its demonstrations, and the arrays that each of them has. Local: reads the first one."""

    def __init__(self, dataset: Any, one: _Load) -> None:
        self.path = dataset.hdf5_path
        self.names: list[str] = list(dataset.demos)
        lengths = (int(dataset._demo_id_to_demo_length[name]) for name in self.names)
        self.starts = [0, *itertools.accumulate(lengths)]
        first = one(self.names[0])
        self.kinds = {path: (array.dtype.str, tuple(array.shape[1:])) for path, array in first.items()}
        for path, array in first.items():
            if array.dtype.hasobject:
                raise Unlike(f"{self.path} holds objects in {path}, which no array of bytes can")
        # As bytes, since older torch versions lack some of numpy's types.
        self.specs: dict[str, tuple[Sequence[int], torch.dtype]] = {
            path: ((self.starts[-1] * _row_bytes(array),), torch.uint8) for path, array in first.items()
        }
        self.check(0, first)

    def fill(self, one: _Load, arrays: Mapping[str, torch.Tensor], part: int = 0, num_parts: int = 1) -> None:
        """Write each `num_parts`-th demonstration into the arrays."""
        for index in range(part, len(self.names), num_parts):
            found = one(self.names[index])
            self.check(index, found)
            for path, data in found.items():
                start, end = (row * _row_bytes(data) for row in self.starts[index : index + 2])
                arrays[path].numpy()[start:end] = data.reshape(-1).view("u1")

    def check(self, index: int, found: Mapping[str, Any]) -> None:
        """Raise Unlike if a demonstration's arrays, by path, differ from the first one's in name, type or shape."""
        for path in set(found) ^ set(self.kinds):
            raise Unlike(f"{self.path}: only one of {self.names[0]} and {self.names[index]} has {path}")
        length = self.starts[index + 1] - self.starts[index]
        for path, array in found.items():
            dtype, rest = self.kinds[path]
            if array.dtype.str != dtype or array.shape != (length, *rest):
                raise Unlike(
                    f"{self.path}: {path} of {self.names[index]} is {array.dtype.str}{list(array.shape)}, "
                    f"not {dtype}{[length, *rest]} as after {self.names[0]} and the number of its samples"
                )


def _leaves(tree: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Return the arrays in nested mappings, by path, without a demonstration's attributes, which nothing reads."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            found[group + key] = value
        elif key != "attrs":
            found.update(_leaves(value, f"{group}{key}/"))
    return found


def _row_bytes(array: Any) -> int:
    return int(array.dtype.itemsize * math.prod(array.shape[1:]))


class Demos(Mapping[str, Any]):
    """A `SequenceDataset.hdf5_cache` whose arrays are read-only views of flat ones.

    `cache[demo]["obs"][key]` is (T, ...), and so is `cache[demo][key]`. Passing it to another process copies no data
    that is shared.
    """

    def __init__(self, arrays: Mapping[str, torch.Tensor], shape: _Shape) -> None:
        self._arrays, self._shape = arrays, shape
        self._place = {name: index for index, name in enumerate(shape.names)}
        self.flat: dict[str, Any] = {}  # (T of all demonstrations, ...), by path, such as `obs/eef`
        self._tree: dict[str, Any] = {}
        for path, (dtype, rest) in shape.kinds.items():
            flat = arrays[path].numpy().view(dtype).reshape((shape.starts[-1], *rest))
            flat.flags.writeable = False  # a write would be seen by all ranks
            self.flat[path], branch = flat, self._tree
            *groups, name = path.split("/")
            for group in groups:
                branch = branch.setdefault(group, {})
            branch[name] = flat

    def __getitem__(self, name: str) -> dict[str, Any]:
        index = self._place[name]
        return _cut(self._tree, slice(self._shape.starts[index], self._shape.starts[index + 1]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __reduce__(self) -> Any:
        return Demos, (self._arrays, self._shape)


def _cut(tree: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {key: _cut(held, rows) if isinstance(held, dict) else held[rows] for key, held in tree.items()}


class _Items(Sequence[Any]):
    """A `SequenceDataset.getitem_cache` that makes each window on access."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset.get_item(range(len(self))[index])

    def __len__(self) -> int:
        return int(self._dataset.total_num_sequences)
