"""Keeps the data that robomimic's datasets cache (`hdf5_cache_mode`) in flat arrays, one copy per node.

In each array all demonstrations lie one after the other. Upstream's dataset code is unchanged: it reads from a mapping
with the interface of its own cache.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import DataError
from ddpshim.job.world import World
from ddpshim.process.replaced import replaced
from ddpshim.robomimic.node_memory import SharedArrays, shared_arrays

Load = Callable[[str], dict[str, Any]]  # from a demonstration's name to its arrays, by path


class Unlike(DataError):
    """A demonstration's arrays differ from the first one's in name, type or shape, so they cannot share one array."""


class Waiting:
    """Datasets that were made without their cache, each with a function that loads a demonstration, and its layout."""

    def __init__(self) -> None:
        self.datasets: list[tuple[Any, Load, _Shape]] = []
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
        one = functools.partial(_loaded, load, dataset, options)
        try:
            waiting.datasets.append((dataset, one, _Shape(dataset, one)))
        except Unlike as unlike:
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


def _loaded(load: Callable[..., Any], dataset: Any, options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arrays that upstream would cache of one demonstration, by path, as its own function loads them."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints for each call
        found = load(dataset, **{**options, "demo_list": [name], "hdf5_file": dataset.hdf5_file})
    return _leaves(found[name])


def share(waiting: Waiting, here: World) -> Optional[str]:
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
        for n, (dataset, one, shape) in enumerate(waiting.datasets):
            try:
                shape.fill({name: arrays[f"{n}/{name}"] for name in shape.specs}, one, part, num_parts)
            except Unlike as unlike:
                problem = str(unlike)
                return
            finally:
                dataset.close_and_delete_hdf5_handle()

    arrays = shared_arrays(specs, fill, world=here)
    problem = next(filter(None, here.gather(problem)), None)
    if problem is not None:
        return problem
    for n, (dataset, _, shape) in enumerate(waiting.datasets):
        _give(dataset, Demos(arrays, f"{n}/", shape))
    return None


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
        shape.fill(arrays, one)
    _give(dataset, Demos(arrays, "", shape))


@contextlib.contextmanager
def left_as_found(dataset: Any) -> Iterator[None]:
    """Close the file that `dataset` opens in this block: workers must not inherit it. Local."""
    was_open = dataset._hdf5_file is not None
    try:
        yield
    finally:
        if not was_open:
            dataset.close_and_delete_hdf5_handle()


def _give(dataset: Any, cache: Demos) -> None:
    dataset.hdf5_cache = cache
    if dataset.hdf5_cache_mode == "all":
        dataset.getitem_cache = _Items(dataset)


class _Shape:
    """The layout of a dataset: its demonstrations, and the arrays that each of them has. Local: reads the first one."""

    def __init__(self, dataset: Any, one: Load) -> None:
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

    def fill(self, arrays: Mapping[str, torch.Tensor], one: Load, part: int = 0, num_parts: int = 1) -> None:
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

    Attributes:
        flat: (T of all demonstrations, ...), by path, such as `obs/eef`.
    """

    def __init__(self, arrays: Mapping[str, torch.Tensor], prefix: str, shape: _Shape) -> None:
        self._arrays, self._prefix, self._shape = arrays, prefix, shape
        self._place = {name: index for index, name in enumerate(shape.names)}
        self.flat: dict[str, Any] = {}
        self._tree: dict[str, Any] = {}
        for path, (dtype, rest) in shape.kinds.items():
            flat = arrays[prefix + path].numpy().view(dtype).reshape((shape.starts[-1], *rest))
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
        return Demos, (self._arrays, self._prefix, self._shape)


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
