"""Fetches batches of robomimic's sequence datasets with one index per key instead of one call per sample.

Values, types and the order of keys equal those of the dataset's `__getitem__` and torch's default collate, bit for
bit: the dataset's code must be known here, and a few samples are compared before batches are fetched this way.
Otherwise they are fetched sample by sample, as without ddpshim.

Data that a dataset caches is in flat arrays (`node_memory`). Data that it reads from the file (`hdf5_cache_mode` null,
and images with "low_dim") is still read from there, through a memory map, and not loaded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import os
import random
import sys
import tokenize
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.utils.data import default_collate

from ddpshim.robomimic import node_memory
from ddpshim.robomimic.node_memory import left_as_found

# By the digest of SAMPLE_METHODS: whether SequenceDataset normalises observations; else the trainer does.
RELEASES = {
    "2942cf02e3487831": True,  # 0.3.0
    "4b587a7f1faca9e8": False,  # 0.4.0
    "81c972ac3cd0bf40": False,  # 0.5.0, and master at d309eae
    "c3144dba8022da45": False,  # the robocasa branch at 271a76c
}
# The methods of SequenceDataset that make a sample. In the releases above none draws random numbers.
SAMPLE_METHODS = (
    *("__len__", "__getitem__", "get_item", "get_sequence_from_demo", "get_obs_sequence_from_demo"),
    *("get_dataset_sequence_from_demo", "get_dataset_for_ep", "load_dataset_in_memory"),
)
META_METHODS = ("__len__", "__getitem__")
META_DIGEST = "0dc43ea475119bc0"  # of META_METHODS in all releases that have a MetaDataset, except DROID
_NUM_COMPARED_DEMOS = 3


class Unproven(Exception):
    """The batches of a dataset are not known to equal its own samples; the message says why."""


def concerns(dataset: Any) -> bool:
    """Whether `dataset` is robomimic's SequenceDataset or MetaDataset, or of a subclass of one. Local."""
    module = sys.modules.get("robomimic.utils.dataset")  # if it is not imported, no such dataset can exist
    kinds = [getattr(module, name, None) for name in ("SequenceDataset", "MetaDataset")]
    return isinstance(dataset, tuple(kind for kind in kinds if kind is not None))


class WindowFetcher(NamedTuple):
    """Implements `ddpshim.adapters.Fetcher` for one dataset."""

    dataset: Any

    def attach(self) -> Optional[str]:
        """Make torch's loaders fetch whole batches of the dataset. Local. Return the reason if they can't.

        Data that the dataset caches are flat arrays from then on.
        """
        dataset = self.dataset
        if getattr(vars(dataset).get("__getitems__"), "func", None) is _Samples:
            return None
        try:
            parts, normalizing = getattr(dataset, "datasets", [dataset]), _normalizing(dataset)
            for part in parts:
                node_memory.flatten(part)
            batches = WindowBatches(dataset, [*map(Windows, parts, normalizing)])
            batches.compare()
        except (Unproven, node_memory.Unlike) as reason:
            return str(reason)
        except Exception as error:  # an unfamiliar file, which the dataset itself may be able to read
            return f"{type(error).__name__}: {error}"
        dataset.__getitems__ = functools.partial(_Samples, batches)  # which torch's fetcher calls
        return None

    def collate(self) -> Callable[[Any], Any]:
        """Return the collate function for the loader."""
        return collate


def collate(samples: Any) -> Any:
    """Collate as torch does by default; for an attached dataset, without making single samples first. Local."""
    return samples.collated() if isinstance(samples, _Samples) else default_collate(samples)


class _Samples(Sequence[Any]):
    """The samples at `indices`: made by the dataset itself when accessed, or collated as one batch."""

    def __init__(self, batches: WindowBatches, indices: Sequence[int]) -> None:
        self._batches, self._indices = batches, indices

    def collated(self) -> Any:
        batch = self._batches.at(self._indices)
        return default_collate(self._all) if batch is None else batch

    @functools.cached_property
    def _all(self) -> list[Any]:
        return [self._batches.dataset[index] for index in self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, at: Any) -> Any:
        return self._all[at]


@functools.lru_cache(maxsize=32)
def digest(*functions: Any) -> str:
    """Return the digest of the source of plain functions, without blank lines; empty if a source is missing. Local."""
    try:
        lines = [line.rstrip() for function in functions for line in inspect.getsourcelines(function.__code__)[0]]
    except (OSError, SyntaxError, tokenize.TokenError):
        return ""
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]


def _normalizing(dataset: Any) -> list[bool]:
    """Return, of each SequenceDataset in `dataset`, whether it normalises; raise Unproven if its code is unknown."""
    if not concerns(dataset):
        raise Unproven(f"{type(dataset).__name__} is no dataset of robomimic's")
    parts, normalizing = [dataset], []
    if hasattr(dataset, "datasets"):
        if _digest(dataset, META_METHODS) != META_DIGEST:
            raise Unproven(f"the code of {type(dataset).__name__} is not one that is known here")
        parts = dataset.datasets
    for part in parts:
        normalizes = RELEASES.get(_digest(part, SAMPLE_METHODS))
        if normalizes is None:
            raise Unproven(f"the code of {type(part).__name__} is not one that is known here")
        if getattr(part, "shuffled_obs_key_groups", ()):
            raise Unproven(f"{type(part).__name__} swaps observations at random")
        normalizing.append(normalizes)
    return normalizing


def _digest(dataset: Any, names: Sequence[str]) -> str:
    """Return the digest of the source of the methods `names`; empty if one is not the class's or has no source."""
    functions = [getattr(type(dataset), name, None) for name in names]
    if any(name in vars(dataset) or not hasattr(function, "__code__") for name, function in zip(names, functions)):
        return ""
    return digest(*functions)


class Windows:
    """The windows of one SequenceDataset: rows of its demonstrations, padded by repeating the first and the last."""

    def __init__(self, dataset: Any, normalizes_obs: bool) -> None:
        import numpy as np

        self.dataset = dataset
        self._normalizes_obs = normalizes_obs and dataset.hdf5_normalize_obs
        self._settings = _settings(dataset)
        demos = dataset.demos
        self._starts = np.array([dataset._demo_id_to_start_indices[demo] for demo in demos])
        self._ends = np.array([*self._starts[1:], len(dataset)])
        self._lengths = np.array([dataset._demo_id_to_demo_length[demo] for demo in demos])
        self._first_rows = np.concatenate([[0], np.cumsum(self._lengths)[:-1]])
        self._before = dataset.n_frame_stack - 1
        self._offset = 0 if dataset.pad_frame_stack else self._before
        self._window = np.arange(-self._before, dataset.seq_length)
        self._goal = self._lengths - 1 - (0 if dataset.pad_seq_length else dataset.seq_length - 1)
        self._refuse_strange_tables()
        self._mapped: dict[str, _Region] = {}
        flat = {} if dataset.hdf5_cache is None else dataset.hdf5_cache.flat
        with left_as_found(dataset):
            self._stats = _stats(dataset)
            groups = ["obs", *(["next_obs"] if dataset.load_next_obs or dataset.goal_mode is not None else [])]
            of_groups = (f"{group}/{key}" for group in groups for key in dataset.obs_keys)
            for key in dict.fromkeys([*dataset.dataset_keys, *of_groups]):
                if key not in flat:
                    found = [dataset.hdf5_file[f"data/{demo}"].get(key) for demo in demos]
                    self._mapped[key] = _Region(dataset.hdf5_path, key, found, self._lengths)
        if dataset.hdf5_cache_mode == "all":  # its samples were cached with these statistics
            self._stats = copy.deepcopy(self._stats)
        self._languages = _languages(dataset)

    def _refuse_strange_tables(self) -> None:
        demos, demo_of = self.dataset.demos, self.dataset._index_to_demo_id
        if len(set(demos)) != len(demos) or any(
            demo_of.get(index) != demo
            for demo, start, end in zip(demos, self._starts, self._ends)
            for index in range(start, end)
        ):
            raise Unproven("its samples do not lie demonstration by demonstration")
        num = self._ends - self._starts
        if (num + self._offset > self._lengths).any() or not (num > 0).all():
            raise Unproven("a demonstration is shorter than what is stacked of it")

    def batch(self, at: Any) -> dict[str, Any]:
        """Return the collated samples at positions in this dataset. Local."""
        import numpy as np

        demo = np.searchsorted(self._starts, at, side="right") - 1
        length = self._lengths[demo][:, None]
        time = (at - self._starts[demo] + self._offset)[:, None] + self._window
        here = functools.partial(self._rows, demo[:, None], time.clip(0, length - 1))
        last = functools.partial(self._rows, demo, self._goal[demo])
        mask = ((time >= 0) & (time < length))[..., None]
        return _each(torch.from_numpy, self._sample(at, here, last, mask, demo))

    def _rows(self, demo: Any, time: Any, key: str) -> Any:
        """Return the rows of `key` at given times of given demonstrations."""
        if key in self._mapped:
            return self._mapped[key].take(demo, time)
        return self.dataset.hdf5_cache.flat[key].take(self._first_rows[demo] + time, axis=0)

    def _sample(self, at: Any, here: _Rows, last: _Rows, mask: Any, demo: Any) -> dict[str, Any]:
        """Build all samples of a batch at once, with the steps by which upstream builds one sample, in their order."""
        import numpy as np

        of = self._settings
        masked = {"pad_mask": mask} if of["get_pad_mask"] else {}
        keys: Sequence[str] = of["obs_keys"]
        meta: dict[str, Any] = {**{key: here(key) for key in of["dataset_keys"]}, **masked}
        meta["obs"] = self._normalized({**{key: here(f"obs/{key}") for key in keys}, **masked})
        if of["load_next_obs"]:
            meta["next_obs"] = self._normalized({**{key: here(f"next_obs/{key}") for key in keys}, **masked})
        if of["goal_mode"] is not None:
            always = {"pad_mask": np.ones((len(at), 1), bool)} if masked else {}
            meta["goal_obs"] = self._normalized({**{key: last(f"next_obs/{key}") for key in keys}, **always})
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
            meta["obs"][name] = np.repeat(rows[demo][:, None], len(self._window), axis=1)
        return meta

    def _normalized(self, obs: dict[str, Any]) -> dict[str, Any]:
        if self._normalizes_obs:
            for key, stats in ((key, self._stats["obs"][key]) for key in obs):
                obs[key] = (obs[key] - stats["mean"][0]) / stats["std"][0]
        return obs

    def is_current(self) -> bool:
        """Whether the dataset's settings and statistics have not changed since, or its samples are cached."""
        stats = _stats(self.dataset)
        is_same = all(stats[of] is self._stats[of] for of in stats) and _settings(self.dataset) == self._settings
        return is_same or self.dataset.hdf5_cache_mode == "all"

    def some(self) -> set[int]:
        """Return a few positions, those at the ends of demonstrations among them."""
        draw, num_demos = random.Random(0), len(self._starts)
        some = {0, num_demos - 1, *draw.sample(range(num_demos), min(num_demos, _NUM_COMPARED_DEMOS))}
        edges = {int(edge) for demo in some for edge in (self._starts[demo], self._ends[demo] - 1)}
        return {*edges, *(draw.randrange(len(self.dataset)) for _ in some)}


class WindowBatches:
    """The batches of a SequenceDataset, or of those in a MetaDataset, one after the other."""

    def __init__(self, dataset: Any, parts: Sequence[Windows]) -> None:
        import numpy as np

        self.dataset, self._parts = dataset, parts
        self._bins = np.cumsum([0, *(len(part.dataset) for part in parts)])
        if list(getattr(dataset, "_ds_ind_bins", self._bins)) != list(self._bins):
            raise Unproven("its samples do not lie dataset by dataset")

    def at(self, indices: Sequence[int]) -> Optional[dict[str, Any]]:
        """Return the collated samples at `indices`; None if only the dataset itself can make them. Local."""
        import numpy as np

        at = np.asarray(indices)
        is_strange = at.ndim != 1 or at.dtype.kind != "i" or not len(at) or at.min() < 0 or at.max() >= self._bins[-1]
        if is_strange or not all(part.is_current() for part in self._parts):
            return None
        part_of = np.searchsorted(self._bins, at, side="right") - 1
        places = [np.flatnonzero(part_of == number) for number in range(len(self._parts))]
        found = [part.batch(at[of] - start) for part, start, of in zip(self._parts, self._bins, places) if len(of)]
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        whole = found[0] if len(found) == 1 else _each(lambda *values: torch.cat(values)[back], *found)
        if hasattr(self.dataset, "datasets"):
            whole["index"] = torch.from_numpy(at.astype(np.int64))
        return whole

    def compare(self) -> None:
        """Raise Unproven unless a few samples equal the dataset's own, bit for bit. Local."""
        some = (int(start) + index for part, start in zip(self._parts, self._bins) for index in part.some())
        indices = sorted(some, reverse=True)  # the last dataset first
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(left_as_found(part.dataset))
            try:
                expected = default_collate([self.dataset[index] for index in indices])
            except Exception as error:
                # The training will raise the same error, as without ddpshim.
                kind = type(self.dataset).__name__
                raise Unproven(f"{kind} itself fails ({type(error).__name__}: {error})") from error
        found = self.at(indices)
        if found is None or not _is_same(found, expected):
            raise Unproven(f"samples {indices} of {type(self.dataset).__name__} come out different")


_Rows = Callable[[str], Any]  # of a key


class _Region:
    """The place in a file of one key's data, for all demonstrations; reads rows from there."""

    def __init__(self, path: str, key: str, found: Sequence[Any], lengths: Any) -> None:
        import numpy as np

        if any(data is None for data in found):
            raise Unproven(f"there are demonstrations without {key}")
        if len({(data.shape[1:], data.dtype) for data in found}) > 1:
            raise Unproven(f"{key} differs in shape or type from demonstration to demonstration")
        if any(len(data) < length for data, length in zip(found, lengths)):
            raise Unproven(f"{key} is shorter than its demonstration")
        offsets = [None if data.chunks or data.external or data.is_virtual else data.id.get_offset() for data in found]
        if None in offsets or found[0].file.userblock_size:
            raise Unproven(f"{key} is read from the file, where it is chunked or compressed")
        there = os.stat(path)  # identifies the file: a rewritten one must be mapped again
        self._file = path, there.st_ino, there.st_mtime_ns, there.st_size
        self._shape, self._dtype = found[0].shape[1:], found[0].dtype
        self._row_bytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        self._offsets = np.array(offsets)

    def take(self, demo: Any, time: Any) -> Any:
        rows = _rows_of(self._file, self._row_bytes)[self._offsets[demo] + time * self._row_bytes]
        return rows.view(self._dtype).reshape(*time.shape, *self._shape)


@functools.cache  # per process; forked processes share the pages
def _rows_of(file: tuple[str, int, int, int], row_bytes: int) -> Any:
    """Return a file as rows that overlap: row i has the `row_bytes` bytes from byte i on."""
    import numpy as np

    held = np.memmap(file[0], np.uint8, "r")
    row = np.dtype((np.void, row_bytes))
    return np.ndarray((len(held) - row_bytes + 1,), row, buffer=held, strides=(1,))


def _each(function: Callable[..., Any], *trees: dict[str, Any]) -> dict[str, Any]:
    """Apply `function` to each leaf of nested dictionaries that have the same keys."""
    made = {}
    for key, value in trees[0].items():
        values = [tree[key] for tree in trees]
        made[key] = _each(function, *values) if isinstance(value, dict) else function(*values)
    return made


def _settings(dataset: Any) -> dict[str, Any]:
    """Return the settings that affect a sample; a program may change them."""
    names = ["n_frame_stack", "seq_length", "pad_frame_stack", "pad_seq_length", "get_pad_mask", "goal_mode"]
    names += ["load_next_obs", "obs_keys", "dataset_keys", "hdf5_normalize_obs", "hdf5_cache_mode", "hdf5_path"]
    return {**{name: getattr(dataset, name) for name in names}, "action_keys": getattr(dataset, "action_keys", None)}


def _stats(dataset: Any) -> dict[str, Any]:
    """Return the statistics by which observations and actions are normalised."""
    action = dataset.get_action_normalization_stats() if hasattr(dataset, "action_keys") else None
    return {"obs": dataset.obs_normalization_stats, "action": action}


def _languages(dataset: Any) -> Optional[tuple[str, Any]]:
    """Return the key and, for each demonstration, the embedding of its instruction; None if there are none."""
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
