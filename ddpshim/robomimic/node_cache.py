"""Keeps one copy per node of the data that robomimic's datasets cache in memory (`hdf5_cache_mode`).

Upstream's dataset code is unchanged: it reads from a mapping with the interface of its own cache.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

import torch

from ddpshim.data.node_memory import SharedArrays, shared_arrays
from ddpshim.errors import DataError
from ddpshim.job.world import World
from ddpshim.process.replaced import replaced
from ddpshim.robomimic import known


class _Unlike(DataError):
    """A demonstration's arrays differ from the first one's in name, type or shape, so they cannot share one array."""


class Waiting:
    """Datasets that were made without their cache, each with its loader and its layout."""

    def __init__(self) -> None:
        self.datasets: list[tuple[Any, _Loader, _Shape]] = []
        self.problem: Optional[str] = None  # why they cannot share


@contextlib.contextmanager
def without_cache(kind: Any) -> Iterator[Waiting]:
    """In this block, make datasets of this kind (robomimic's SequenceDataset) without a cache, for `share`. Local."""
    waiting = Waiting()
    init, load = vars(kind)["__init__"], vars(kind)["load_dataset_in_memory"]
    modes: dict[int, str] = {}

    @functools.wraps(load)
    def load_later(dataset: Any, **options: Any) -> Any:
        if dataset.hdf5_cache_mode is None:  # a fork of robomimic loads the data as a trial, and discards it
            return load(dataset, **options)
        loader = _Loader(load, dataset, options)
        try:
            waiting.datasets.append((dataset, loader, _Shape(dataset, loader)))
        except _Unlike as unlike:
            waiting.problem = str(unlike)
        # With "all", upstream would now make a list of all windows.
        modes[id(dataset)], dataset.hdf5_cache_mode = dataset.hdf5_cache_mode, "low_dim"
        return None

    @functools.wraps(init)
    def init_and_restore(dataset: Any, *args: Any, **options: Any) -> None:
        try:
            init(dataset, *args, **options)
        finally:
            mode = modes.pop(id(dataset), None)
        dataset.hdf5_cache_mode = mode or dataset.hdf5_cache_mode

    with replaced(kind, "__init__", init_and_restore), replaced(kind, "load_dataset_in_memory", load_later):
        yield waiting


class _Loader:
    """Loads demonstrations as the dataset would have loaded them."""

    def __init__(self, load: Callable[..., Any], dataset: Any, options: dict[str, Any]) -> None:
        self._load, self._dataset, self._options = load, dataset, options
        self._is_known = hasattr(load, "__code__") and known.digest(load) == known.LOAD_DIGEST

    def loaded(self, name: str, **options: Any) -> dict[tuple[str, ...], Any]:
        """Return the arrays that upstream would cache of one demonstration, by path, as its own function loads them."""
        asked = {**self._options, "demo_list": [name], "hdf5_file": self._dataset.hdf5_file, **options}
        with contextlib.redirect_stdout(io.StringIO()):  # it prints for each call
            return _leaves(self._load(self._dataset, **asked)[name])

    def found(self, name: str) -> dict[tuple[str, ...], Any]:
        """Return the same; if upstream's code is known, observations are datasets of the file that are not read yet."""
        if not self._is_known:
            return self.loaded(name)
        demo, keys = self._dataset.hdf5_file[f"data/{name}"], self._options["obs_keys"]
        groups = ("obs", "next_obs") if self._options["load_next_obs"] else ("obs",)
        return {
            **self.loaded(name, obs_keys=()),
            **{(group, key): demo[f"{group}/{key}"] for group in groups for key in keys},
        }


def _put(arrays: SharedArrays, name: str, start: int, data: Any, file: int) -> None:
    """Write `data`, an array or a dataset of the open `file`, into the array `name` from byte `start` on."""
    plain = data.dtype.kind in "iuf" and hasattr(data, "id") and not data.external and not data.is_virtual
    offset = data.id.get_offset() if plain and data.chunks is None and not data.file.userblock_size else None
    if offset is not None:
        arrays.copy(name, start, file, offset, data.size * data.dtype.itemsize)
    elif data.size:
        arrays.write(name, start, data[()].reshape(-1))


def share(waiting: Waiting, here: World, *, directory: Optional[str] = None) -> Optional[str]:
    """Give the waiting datasets one cache per node; else return why it would differ from upstream's (collective).

    Raises:
        DataError: the node has no room.
        Exception: any error of upstream's own loading.
    """
    # All ranks decide alike: otherwise some would load while others wait in a collective.
    problem = next(filter(None, here.gather(waiting.problem)), None)
    if problem is not None or not waiting.datasets:
        return problem
    specs = {f"{n}/{name}": it for n, (_, _, shape) in enumerate(waiting.datasets) for name, it in shape.specs.items()}

    def fill(arrays: SharedArrays, part: int, num_parts: int) -> None:
        nonlocal problem
        for n, (dataset, loader, shape) in enumerate(waiting.datasets):
            file = os.open(dataset.hdf5_path, os.O_RDONLY)
            try:
                for index in range(part, len(shape.names), num_parts):
                    found = loader.found(shape.names[index])
                    shape.check(index, found)
                    for path, data in found.items():
                        _put(arrays, f"{n}/{'/'.join(path)}", shape.starts[index] * _row_bytes(data), data, file)
            except _Unlike as unlike:
                problem = str(unlike)
                return
            finally:
                os.close(file)
                dataset.close_and_delete_hdf5_handle()

    arrays = shared_arrays(specs, fill, directory=directory, world=here)
    problem = next(filter(None, here.gather(problem)), None)
    if problem is not None:
        return problem
    for n, (dataset, _, shape) in enumerate(waiting.datasets):
        dataset.hdf5_cache = Demos(arrays, n, shape)
        if dataset.hdf5_cache_mode == "all":
            dataset.getitem_cache = _Items(dataset)
    return None


class _Shape:
    """The layout of a dataset: its demonstrations, and the arrays that each of them has. Local: reads the first one."""

    def __init__(self, dataset: Any, loader: _Loader) -> None:
        self.path = dataset.hdf5_path
        self.names: list[str] = list(dataset.demos)
        lengths = (int(dataset._demo_id_to_demo_length[name]) for name in self.names)
        self.starts = [0, *itertools.accumulate(lengths)]
        first = loader.loaded(self.names[0])
        self.kinds = {path: (array.dtype.str, tuple(array.shape[1:])) for path, array in first.items()}
        for path, array in first.items():
            if array.dtype.hasobject:
                raise _Unlike(f"{self.path} holds objects in {'/'.join(path)}, which no array of bytes can")
        # As bytes, since older torch versions lack some of numpy's types.
        self.specs: dict[str, tuple[Sequence[int], torch.dtype]] = {
            "/".join(path): ((self.starts[-1] * _row_bytes(array),), torch.uint8) for path, array in first.items()
        }
        self.check(0, first)

    def check(self, index: int, found: Mapping[tuple[str, ...], Any]) -> None:
        """Raise _Unlike if a demonstration's arrays, by path, differ from the first one's in name, type or shape."""
        for path in set(found) ^ set(self.kinds):
            raise _Unlike(f"{self.path}: only one of {self.names[0]} and {self.names[index]} has {'/'.join(path)}")
        length = self.starts[index + 1] - self.starts[index]
        for path, array in found.items():
            dtype, rest = self.kinds[path]
            if array.dtype.str != dtype or array.shape != (length, *rest):
                raise _Unlike(
                    f"{self.path}: {'/'.join(path)} of {self.names[index]} is {array.dtype.str}{list(array.shape)}, "
                    f"not {dtype}{[length, *rest]} as after {self.names[0]} and the number of its samples"
                )


def _leaves(tree: Mapping[Any, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the arrays in nested mappings, by path, without a demonstration's attributes, which nothing reads."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        inner = (*path, key)
        if isinstance(value, Mapping):
            found.update({} if key == "attrs" else _leaves(value, inner))
        else:
            found[inner] = value
    return found


def _row_bytes(array: Any) -> int:
    return int(array.dtype.itemsize * math.prod(array.shape[1:]))


class Demos(Mapping[str, Any]):
    """A `SequenceDataset.hdf5_cache` whose arrays are read-only views of the node's copy.

    `cache[demo]["obs"][key]` is (T, ...), and so is `cache[demo][key]`.
    """

    def __init__(self, arrays: SharedArrays, number: int, shape: _Shape) -> None:
        self._arrays, self._number, self._shape = arrays, number, shape
        self._place = {name: index for index, name in enumerate(shape.names)}
        self.flat: dict[tuple[str, ...], Any] = {}  # (T of all demonstrations, ...) by path
        self._tree: dict[str, Any] = {}
        for path, (dtype, rest) in shape.kinds.items():
            flat = arrays[f"{number}/{'/'.join(path)}"].numpy().view(dtype).reshape((shape.starts[-1], *rest))
            flat.flags.writeable = False  # a write would be seen by all ranks
            self.flat[path], branch = flat, self._tree
            for key in path[:-1]:
                branch = branch.setdefault(key, {})
            branch[path[-1]] = flat

    def __getitem__(self, name: str) -> _Demo:
        index = self._place[name]
        return _Demo(self._tree, slice(self._shape.starts[index], self._shape.starts[index + 1]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __reduce__(self) -> Any:
        return Demos, (self._arrays, self._number, self._shape)


class _Demo(Mapping[str, Any]):
    """One demonstration, or a group in it."""

    __slots__ = ("_rows", "_tree")

    def __init__(self, tree: Mapping[str, Any], rows: slice) -> None:
        self._tree, self._rows = tree, rows

    def __getitem__(self, key: str) -> Any:
        found = self._tree[key]
        return _Demo(found, self._rows) if isinstance(found, dict) else found[self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)


class Flat(dict[str, Any]):
    """The arrays of a dataset's cache by name, such as `obs/eef`; in a dataset of datasets, `1:obs/eef`.

    Passing it to another process copies no data.
    """

    def __init__(self, dataset: Any) -> None:
        is_several = hasattr(dataset, "datasets")
        parts = enumerate(dataset.datasets) if is_several else [("", dataset)]
        self.__setstate__({f"{name}:" if is_several else "": part.hdf5_cache for name, part in parts})

    def __setstate__(self, caches: dict[str, Demos]) -> None:
        self._caches = caches
        named = ((prefix, path, flat) for prefix, cache in caches.items() for path, flat in cache.flat.items())
        self.update({prefix + "/".join(path): flat for prefix, path, flat in named})

    def __reduce__(self) -> Any:
        return Flat.__new__, (Flat,), self._caches


def trim(waiting: Waiting) -> None:
    """Replace the datasets' tables, which have an entry for each sample, by computed ones. Local."""
    for dataset, _, _ in waiting.datasets:
        dataset._index_to_demo_id = _DemoOfIndex(dataset)


class _DemoOfIndex(Mapping[int, str]):
    """A `SequenceDataset._index_to_demo_id` that is computed: a table takes 100 bytes per index in every process."""

    def __init__(self, dataset: Any) -> None:
        self._names = list(dataset.demos)
        self._starts = [dataset._demo_id_to_start_indices[name] for name in self._names]
        self._length = int(dataset.total_num_sequences)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self._length:
            raise KeyError(index)
        return str(self._names[bisect_right(self._starts, index) - 1])

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))

    def __len__(self) -> int:
        return self._length


class _Items(Sequence[Any]):
    """A `SequenceDataset.getitem_cache` that makes each window on access."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset.get_item(range(len(self))[index])

    def __len__(self) -> int:
        return int(self._dataset.total_num_sequences)
