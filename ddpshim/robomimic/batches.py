"""Fetches batches of robomimic's sequence datasets by one index for each key, not one call for each sample.

Values, types and the order of keys are those of its own `__getitem__` and of torch's default collate, bit for bit: the
code of the dataset must be one that is known here, and a few samples of it are compared before it is relied upon.
Whatever is not proven so is fetched sample by sample, as ever.

What a dataset keeps in memory lies in flat arrays, all demonstrations one after the other. `Plan.specs` says which, so
that they can be placed where several processes see them. What it reads from the file (`hdf5_cache_mode` null, and
images with "low_dim") is still read from there, through a memory map: nothing of it is loaded.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.utils.data import default_collate, get_worker_info

from ddpshim.data import mailbox
from ddpshim.robomimic import known

Specs = dict[str, tuple[tuple[int, ...], Any]]  # what is held of all demonstrations: (shape, numpy dtype)
Arrays = Mapping[str, Any]  # numpy arrays of these shapes and dtypes

_NUM_COMPARED_DEMOS = 3


class Unproven(Exception):
    """Why the batches of a dataset are not known to be equal."""


def concerns(dataset: Any) -> bool:
    """Whether `dataset` is a SequenceDataset or MetaDataset of robomimic's, or of a class derived from one. Local."""
    module = sys.modules.get("robomimic.utils.dataset")  # nobody has one who has not imported it
    kinds = [getattr(module, name, None) for name in ("SequenceDataset", "MetaDataset")]
    return isinstance(dataset, tuple(kind for kind in kinds if kind is not None))


def is_known(dataset: Any) -> bool:
    """Whether the code of `dataset` is known, and so to draw no random numbers. Local."""
    if not concerns(dataset):
        return False
    try:
        _refuse_unknown(dataset)
    except Unproven:
        return False
    return True


def plan(dataset: Any) -> Plan:
    """How to fetch batches of `dataset`; the layout of its file is read, and none of its data. Local.

    Raises Unproven where they are not known to be those of the dataset itself.
    """
    if not concerns(dataset):
        raise Unproven(f"{type(dataset).__name__} is no dataset of robomimic's")
    _refuse_unknown(dataset)
    return _Several(dataset) if hasattr(dataset, "datasets") else _Windows(dataset)


def attach(dataset: Any, planned: Optional[Plan] = None, arrays: Optional[Arrays] = None) -> Optional[str]:
    """Have torch's loaders fetch `dataset` by the batch, with :class:`Collate`. Local. Returns why not, if it can't be.

    What the dataset itself held of its data it holds no more: its caches become views of `arrays`.

    Args:
        planned: what :func:`plan` returned.
        arrays: what `planned.fill` has filled already, in memory that other processes share, say.
    """
    if isinstance(vars(dataset).get("__getitems__"), _Fetch):
        return None
    try:
        planned = plan(dataset) if planned is None else planned
        if arrays is None:
            arrays = planned.new_arrays()
            planned.fill(arrays)
        planned.compare(arrays)
    except Unproven as reason:
        return str(reason)
    except Exception as error:  # of a file like none that is known; the dataset itself may well read it
        return f"{type(error).__name__}: {error}"
    planned.take_over(arrays)
    dataset.__getitems__ = _Fetch(dataset, planned, arrays)
    return None


class Collate:
    """torch's default collate; of what an attached dataset gives, without making the samples first. Local."""

    def __init__(self) -> None:
        self._mailbox: Optional[mailbox.Mailbox] = None
        self._num_batches = 0

    def expect(self, dataset: Any, batch_size: int, num_workers: int, prefetch_factor: Optional[int]) -> None:
        """Make room for the batches of workers that stay for all epochs: no two passes run at once. Local."""
        fetch = vars(dataset).get("__getitems__")
        if isinstance(fetch, _Fetch):
            num_bytes = mailbox.num_bytes(fetch([0] * batch_size).collated())
            if num_bytes <= mailbox.MAX_BYTES:
                ahead = 2 if prefetch_factor is None else prefetch_factor
                self._mailbox = mailbox.Mailbox(num_workers, ahead, num_bytes)

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, _Samples):
            return default_collate(samples)
        batch, worker = samples.collated(), get_worker_info()
        if worker is None:
            return batch
        self._num_batches += 1
        return mailbox.Packed(batch, self._mailbox, worker.id, self._num_batches)


class Plan:
    """How to fetch batches of one dataset: what must be held for it, and where it is found in that."""

    specs: Specs

    def new_arrays(self) -> dict[str, Any]:
        """Arrays in this process's memory, to be filled. Local."""
        import numpy as np

        return {key: np.empty(shape, dtype) for key, (shape, dtype) in self.specs.items()}

    def fill(self, arrays: Arrays) -> None:
        """Copy the data into `arrays`, from the dataset's cache or from the file. Local."""
        raise NotImplementedError

    def batch(self, arrays: Arrays, indices: Sequence[int]) -> Optional[dict[str, Any]]:
        """The collated samples at `indices`; None where only the dataset itself knows what they are. Local."""
        raise NotImplementedError

    def compare(self, arrays: Arrays) -> None:
        """Raise Unproven unless a few samples are, bit for bit, what the dataset gives. Local."""
        raise NotImplementedError

    def take_over(self, arrays: Arrays) -> None:
        """Have the dataset's own caches be views of `arrays`. Local."""
        raise NotImplementedError


class _Windows(Plan):
    """The windows of one SequenceDataset: rows of its demonstrations, of which the first and the last repeat."""

    def __init__(self, dataset: Any) -> None:
        import numpy as np

        self._dataset = dataset
        self._normalizes_obs = _release(dataset).normalizes_obs and dataset.hdf5_normalize_obs
        self._settings = _settings(dataset)
        demos = dataset.demos
        self._starts = np.array([dataset._demo_id_to_start_indices[demo] for demo in demos])
        self._lengths = np.array([dataset._demo_id_to_demo_length[demo] for demo in demos])
        self._rows = np.concatenate([[0], np.cumsum(self._lengths)[:-1]])
        self._before = dataset.n_frame_stack - 1
        self._offset = 0 if dataset.pad_frame_stack else self._before
        self._window = np.arange(-self._before, dataset.seq_length)
        self._goal = self._lengths - 1 - (0 if dataset.pad_seq_length else dataset.seq_length - 1)
        self._refuse_strange_tables()
        self.specs: Specs = {}
        self._mapped: dict[str, _Region] = {}
        with _left_as_found(dataset), contextlib.ExitStack() as opened:
            self._stats = _stats(dataset)
            find = _Finder(dataset, opened)
            for key in self._keys():
                self._place(key, [find(demo, key) for demo in demos])
        if dataset.hdf5_cache_mode == "all":  # its samples are what they were when it was made
            self._stats = copy.deepcopy(self._stats)
        self._languages = _languages(dataset)

    def _keys(self) -> list[str]:
        of = self._dataset
        groups = ["obs", *(["next_obs"] if of.load_next_obs or of.goal_mode is not None else [])]
        return list(dict.fromkeys([*of.dataset_keys, *(f"{group}/{key}" for group in groups for key in of.obs_keys)]))

    def _refuse_strange_tables(self) -> None:
        of, ends = self._dataset, [*self._starts[1:], len(self._dataset)]
        demo_of = of._index_to_demo_id
        if len(set(of.demos)) != len(of.demos) or any(
            demo_of.get(index) != demo
            for demo, start, end in zip(of.demos, self._starts, ends)
            for index in range(start, end)
        ):
            raise Unproven("its samples do not lie demonstration by demonstration")
        last = ends - self._starts + self._offset
        if (last > self._lengths).any() or not (ends > self._starts).all():
            raise Unproven("a demonstration is shorter than what is stacked of it")

    def _place(self, key: str, found: list[Any]) -> None:
        """Take note of where the data of all demonstrations under `key` are to be held, or are in the file."""
        import numpy as np

        of, group = self._dataset, key.rpartition("/")[0]
        in_memory = of.hdf5_cache_mode is not None and (not group or key[len(group) + 1 :] in of.obs_keys_in_memory)
        if any(data is None for data in found) and (group or not in_memory):
            raise Unproven(f"there are demonstrations without {key}")
        kinds = {(data.shape[1:], data.dtype.str) if data is not None else ((1,), "<f4") for data in found}
        if in_memory and not group:
            kinds = {(shape, "<f4") for shape, _ in kinds}  # whatever the file says
        if len(kinds) > 1:
            raise Unproven(f"{key} differs in shape or type from demonstration to demonstration")
        ((shape, dtype),) = kinds
        if any(data is not None and len(data) < length for data, length in zip(found, self._lengths)):
            raise Unproven(f"{key} is shorter than its demonstration")
        kind = np.dtype(dtype)
        if kind.kind not in "biuf" or not kind.isnative or 0 in shape:
            raise Unproven(f"{key} holds {kind} of shape {shape}")
        if in_memory:
            self.specs[key] = (int(self._lengths.sum()), *shape), kind
        else:
            self._mapped[key] = _Region(of.hdf5_path, key, found)

    def fill(self, arrays: Arrays) -> None:
        of = self._dataset
        with contextlib.ExitStack() as opened:
            find = _Finder(of, opened)
            for key in self.specs:
                for demo, row, length in zip(of.demos, self._rows, self._lengths):
                    data = find(demo, key)
                    arrays[key][row : row + length] = 0 if data is None else data[:length]

    def batch(self, arrays: Arrays, indices: Sequence[int]) -> Optional[dict[str, Any]]:
        import numpy as np

        at = np.asarray(indices)
        if at.ndim != 1 or at.dtype.kind != "i" or not len(at) or at.min() < 0 or at.max() >= len(self._dataset):
            return None
        if self._dataset.hdf5_cache_mode != "all" and not self._is_current():
            return None
        demo = np.searchsorted(self._starts, at, side="right") - 1
        length = self._lengths[demo][:, None]
        time = (at - self._starts[demo] + self._offset)[:, None] + self._window
        here = _Rows(self._mapped, arrays, demo, self._rows, time.clip(0, length - 1))
        last = _Rows(self._mapped, arrays, demo, self._rows, self._goal[demo])
        mask = ((time >= 0) & (time < length))[..., None]
        return _tensors(self._sample(at, here, last, mask, demo))

    def _sample(self, at: Any, here: _Rows, last: _Rows, mask: Any, demo: Any) -> dict[str, Any]:
        """All samples of a batch as if they were one, in the order in which upstream puts one together."""
        import numpy as np

        of = self._settings
        masked = {"pad_mask": mask} if of["get_pad_mask"] else {}
        keys: Sequence[str] = of["obs_keys"]
        meta: dict[str, Any] = {**{key: here[key] for key in of["dataset_keys"]}, **masked}
        meta["obs"] = self._normalized({**{key: here[f"obs/{key}"] for key in keys}, **masked})
        if of["load_next_obs"]:
            meta["next_obs"] = self._normalized({**{key: here[f"next_obs/{key}"] for key in keys}, **masked})
        if of["goal_mode"] is not None:
            always = {"pad_mask": np.ones((len(at), 1), bool)} if masked else {}
            meta["goal_obs"] = self._normalized({**{key: last[f"next_obs/{key}"] for key in keys}, **always})
        if of["action_keys"] is not None:
            actions = []
            for key in of["action_keys"]:
                values = meta[key] if meta[key].ndim > 2 else meta[key][..., None]
                stats = self._stats["action"][key]
                actions.append((values - stats["offset"][0]) / stats["scale"][0])
            meta["actions"] = np.concatenate(actions, axis=-1)
            meta["index"] = at.astype(np.int64)
        if self._languages is not None:
            name, rows = self._languages
            length = here.time.shape[1]
            meta["obs"][name] = np.repeat(rows[demo][:, None], length, axis=1)
        return meta

    def _normalized(self, obs: dict[str, Any]) -> dict[str, Any]:
        if self._normalizes_obs:
            for key, stats in ((key, self._stats["obs"][key]) for key in obs):
                obs[key] = (obs[key] - stats["mean"][0]) / stats["std"][0]
        return obs

    def _is_current(self) -> bool:
        """Whether the dataset is what it was; its users may set what they like."""
        stats = _stats(self._dataset)
        return all(stats[of] is self._stats[of] for of in stats) and _settings(self._dataset) == self._settings

    def compare(self, arrays: Arrays) -> None:
        draw, num_demos = random.Random(0), len(self._starts)
        some = {0, num_demos - 1, *draw.sample(range(num_demos), min(num_demos, _NUM_COMPARED_DEMOS))}
        ends = [*self._starts[1:], len(self._dataset)]
        edges = {int(edge) for demo in some for edge in (self._starts[demo], ends[demo] - 1)}
        indices = sorted({*edges, *(draw.randrange(len(self._dataset)) for _ in some)})
        _compare(self, self._dataset, arrays, indices)

    def take_over(self, arrays: Arrays) -> None:
        of = self._dataset
        if of.hdf5_cache_mode == "all":
            of.getitem_cache = _Items(self, arrays, len(of))
        elif isinstance(of.hdf5_cache, dict):  # else its arrays are views already
            for key, array in arrays.items():
                group, _, name = key.rpartition("/")
                for demo, row, length in zip(of.demos, self._rows, self._lengths):
                    held = of.hdf5_cache[demo]
                    (held[group] if group else held)[name] = array[row : row + length]


class _Several(Plan):
    """A MetaDataset: its datasets one after the other."""

    def __init__(self, dataset: Any) -> None:
        import numpy as np

        self._dataset = dataset
        self._bins = np.asarray(dataset._ds_ind_bins)
        self._parts = [_Windows(part) for part in dataset.datasets]
        if list(self._bins) != [0, *np.cumsum([len(part) for part in dataset.datasets])]:
            raise Unproven("its samples do not lie dataset by dataset")
        self.specs = {f"{n}:{key}": spec for n, part in enumerate(self._parts) for key, spec in part.specs.items()}

    def _of_part(self, arrays: Arrays, number: int) -> dict[str, Any]:
        return {key: arrays[f"{number}:{key}"] for key in self._parts[number].specs}

    def fill(self, arrays: Arrays) -> None:
        for number, part in enumerate(self._parts):
            part.fill(self._of_part(arrays, number))

    def batch(self, arrays: Arrays, indices: Sequence[int]) -> Optional[dict[str, Any]]:
        import numpy as np

        at = np.asarray(indices)
        if at.ndim != 1 or at.dtype.kind != "i" or not len(at) or at.min() < 0 or at.max() >= self._bins[-1]:
            return None
        part_of = np.searchsorted(self._bins, at, side="right") - 1
        batches, places = [], []
        for number in np.unique(part_of):
            where = np.flatnonzero(part_of == number)
            batch = self._parts[number].batch(self._of_part(arrays, number), at[where] - self._bins[number])
            if batch is None:
                return None
            batches.append(batch)
            places.append(where)
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        whole: dict[str, Any] = _joined(batches, back)
        whole["index"] = torch.from_numpy(at.astype(np.int64))
        return whole

    def compare(self, arrays: Arrays) -> None:
        for number, part in enumerate(self._parts):
            part.compare(self._of_part(arrays, number))
        edges = {int(edge) for start, end in zip(self._bins, self._bins[1:]) for edge in (start, end - 1)}
        _compare(self, self._dataset, arrays, sorted(edges, key=lambda index: -index))

    def take_over(self, arrays: Arrays) -> None:
        for number, part in enumerate(self._parts):
            part.take_over(self._of_part(arrays, number))


class _Rows:
    """What is found under a key at given times of given demonstrations."""

    def __init__(self, mapped: dict[str, _Region], arrays: Arrays, demo: Any, rows: Any, time: Any) -> None:
        self.time = time
        self._mapped, self._arrays = mapped, arrays
        self._demo = demo if time.ndim == 1 else demo[:, None]
        self._rows = rows[self._demo] + time

    def __getitem__(self, key: str) -> Any:
        region = self._mapped.get(key)
        return self._arrays[key].take(self._rows, axis=0) if region is None else region.take(self._demo, self.time)


class _Region:
    """Where the data of all demonstrations under one key lie in a file, and what is read from there."""

    def __init__(self, path: str, key: str, found: Sequence[Any]) -> None:
        import numpy as np

        offsets = [None if data.chunks or data.external or data.is_virtual else data.id.get_offset() for data in found]
        if None in offsets or found[0].file.userblock_size:
            raise Unproven(f"{key} is read from the file, where it is chunked or compressed")
        self._file, self._shape, self._dtype = _File.at(path), found[0].shape[1:], found[0].dtype
        self._row_bytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        self._offsets = np.array(offsets)

    def take(self, demo: Any, time: Any) -> Any:
        rows = _rows_of(self._file, self._row_bytes)[self._offsets[demo] + time * self._row_bytes]
        return rows.view(self._dtype).reshape(*time.shape, *self._shape)


class _File(NamedTuple):
    """A path, and what was there: a file that was written anew is another one."""

    path: str
    number: int
    changed_ns: int
    num_bytes: int

    @classmethod
    def at(cls, path: str) -> _File:
        found = os.stat(path)
        return cls(path, found.st_ino, found.st_mtime_ns, found.st_size)


_maps: dict[tuple[_File, int], Any] = {}  # of this process; a fork sees the same pages


def _rows_of(file: _File, row_bytes: int) -> Any:
    """The bytes of a file from each of its bytes on, as rows that overlap."""
    import numpy as np

    if (file, row_bytes) not in _maps:
        held = np.memmap(file.path, np.uint8, "r")
        row = np.dtype((np.void, row_bytes))
        _maps[file, row_bytes] = np.ndarray((len(held) - row_bytes + 1,), row, buffer=held, strides=(1,))
    return _maps[file, row_bytes]


class _Finder:
    """Finds the data of one demonstration: in the dataset's cache, else in its file, which is opened when needed."""

    def __init__(self, dataset: Any, opened: contextlib.ExitStack) -> None:
        self._dataset, self._opened = dataset, opened
        self._file: Any = None

    def __call__(self, demo: str, key: str) -> Any:
        of, (group, _, name) = self._dataset, key.rpartition("/")
        if of.hdf5_cache is not None:
            held = of.hdf5_cache[demo]
            cached = (held.get(group, {}) if group else held).get(name)
            if cached is not None:
                return cached
        if self._file is None:
            import h5py

            # Not the dataset's own handle: workers must not inherit one.
            file = h5py.File(of.hdf5_path, "r", swmr=of.hdf5_use_swmr, libver="latest")
            self._file = self._opened.enter_context(file)
        return self._file[f"data/{demo}"].get(key)


class _Fetch:
    """What torch's fetcher calls as `dataset.__getitems__`."""

    def __init__(self, dataset: Any, planned: Plan, arrays: Arrays) -> None:
        self._dataset, self._plan, self._arrays = dataset, planned, arrays

    def __call__(self, indices: Sequence[int]) -> _Samples:
        return _Samples(self._dataset, self._plan, self._arrays, indices)


class _Samples(Sequence[Any]):
    """The samples at `indices`, made by the dataset itself when they are looked at; or all of them collated."""

    def __init__(self, dataset: Any, planned: Plan, arrays: Arrays, indices: Sequence[int]) -> None:
        self._dataset, self._plan, self._arrays, self._indices = dataset, planned, arrays, indices
        self._made: Optional[list[Any]] = None

    def collated(self) -> Any:
        batch = self._plan.batch(self._arrays, self._indices)
        return default_collate(self._all()) if batch is None else batch

    def _all(self) -> list[Any]:
        if self._made is None:
            self._made = [self._dataset[index] for index in self._indices]
        return self._made

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, at: Any) -> Any:
        return self._all()[at]


class _Items(Sequence[Any]):
    """The samples of a dataset that cached them all, made from its arrays when they are asked for."""

    def __init__(self, planned: Plan, arrays: Arrays, num_samples: int) -> None:
        self._plan, self._arrays, self._num_samples = planned, arrays, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, at: Any) -> Any:
        batch = self._plan.batch(self._arrays, [range(self._num_samples)[at]])
        assert batch is not None
        return _first(batch)


def _tensors(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: _tensors(v) if isinstance(v, dict) else torch.from_numpy(v) for key, v in tree.items()}


def _joined(batches: list[dict[str, Any]], order: torch.Tensor) -> dict[str, Any]:
    """The samples of all `batches`, in an order of their own."""
    return {
        key: _joined([batch[key] for batch in batches], order)
        if isinstance(value, dict)
        else torch.cat([batch[key] for batch in batches])[order]
        for key, value in batches[0].items()
    }


def _first(tree: dict[str, Any]) -> dict[str, Any]:
    """The first sample of a batch, as it was before it was collated."""
    first: dict[str, Any] = {}
    for key, value in tree.items():
        first[key] = _first(value) if isinstance(value, dict) else value[0].numpy()
    return {**first, "index": int(first["index"])} if "index" in first else first


def _refuse_unknown(dataset: Any) -> None:
    parts, kind = [dataset], type(dataset).__name__
    if hasattr(dataset, "datasets"):
        if _digest(dataset, known.META_METHODS) != known.META_DIGEST:
            raise Unproven(f"the code of {kind} is not one that is known here")
        parts = dataset.datasets
    for part in parts:
        _release(part)
        if getattr(part, "shuffled_obs_key_groups", ()):
            raise Unproven(f"{type(part).__name__} swaps observations at random")


def _release(dataset: Any) -> known.Release:
    """That of a SequenceDataset; raises Unproven where its code is not known."""
    release = known.release_of(_digest(dataset, known.SAMPLE_METHODS))
    if release is None:
        raise Unproven(f"the code of {type(dataset).__name__} is not one that is known here")
    return release


def _digest(dataset: Any, names: Sequence[str]) -> str:
    """Of the source of the methods `names`; empty where one is none of the class's, or unknown."""
    functions = [getattr(type(dataset), name, None) for name in names]
    if any(name in vars(dataset) or not hasattr(function, "__code__") for name, function in zip(names, functions)):
        return ""
    return known.digest(*functions)


def _settings(dataset: Any) -> dict[str, Any]:
    """What decides about a sample, and anybody may set."""
    names = ["n_frame_stack", "seq_length", "pad_frame_stack", "pad_seq_length", "get_pad_mask", "goal_mode"]
    names += ["load_next_obs", "obs_keys", "dataset_keys", "hdf5_normalize_obs", "hdf5_cache_mode", "hdf5_path"]
    return {**{name: getattr(dataset, name) for name in names}, "action_keys": getattr(dataset, "action_keys", None)}


def _stats(dataset: Any) -> dict[str, Any]:
    """What observations and actions are normalised by."""
    action = dataset.get_action_normalization_stats() if hasattr(dataset, "action_keys") else None
    return {"obs": dataset.obs_normalization_stats, "action": action}


def _languages(dataset: Any) -> Optional[tuple[str, Any]]:
    """The key and, for each demonstration, the embedding of its instruction, where there are any."""
    import numpy as np

    of_demo = getattr(dataset, "_demo_id_to_demo_lang_emb", {})
    if getattr(dataset, "_lang_emb", None) is not None:
        of_demo = dict.fromkeys(dataset.demos, dataset._lang_emb)
    if not of_demo:
        return None
    if not all(demo in of_demo for demo in dataset.demos):
        raise Unproven("there are demonstrations without an instruction")
    module = sys.modules[type(dataset).get_item.__module__]
    name = getattr(module, "LANG_EMB_KEY", None) or module.LangUtils.LANG_EMB_OBS_KEY
    return name, np.stack([np.tile(of_demo[demo], (1, 1))[0] for demo in dataset.demos])


@contextlib.contextmanager
def _left_as_found(dataset: Any) -> Iterator[None]:
    """Close the file again that `dataset` opens meanwhile: workers must not inherit it."""
    was_open = dataset._hdf5_file is not None
    try:
        yield
    finally:
        if not was_open:
            dataset.close_and_delete_hdf5_handle()


def _compare(planned: Plan, dataset: Any, arrays: Arrays, indices: list[int]) -> None:
    with contextlib.ExitStack() as stack:
        for part in getattr(dataset, "datasets", [dataset]):
            stack.enter_context(_left_as_found(part))
        try:
            expected = default_collate([dataset[index] for index in indices])
        except Exception as error:
            # Where it fails is the user's to see: in the training, as without us.
            raise Unproven(f"{type(dataset).__name__} itself fails ({type(error).__name__}: {error})") from error
    found = planned.batch(arrays, indices)
    if found is None or not _is_same(found, expected):
        raise Unproven(f"samples {indices} of {type(dataset).__name__} come out different")


def _is_same(found: Any, expected: Any) -> bool:
    """Whether both have the same keys in the same order, types, shapes and bits."""
    if isinstance(expected, dict):
        same_keys = isinstance(found, dict) and list(found) == list(expected)
        return same_keys and all(_is_same(found[key], value) for key, value in expected.items())
    return (
        isinstance(found, torch.Tensor)
        and isinstance(expected, torch.Tensor)
        and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        and found.numpy().tobytes() == expected.numpy().tobytes()
    )
