"""Compares batched with sample-by-sample fetching, bit for bit, for every kind of robomimic's sequence datasets.

`python -m tests.sequences FOLDER` compares all kinds of the importable robomimic, and prints the results.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import default_collate

from ddpshim.robomimic import batches

LOW_DIM, IMAGE = ("eef_pos", "eef_quat", "object"), "agentview_image"
LENGTHS = (12, 6, 7, 9)
SHORT_LENGTHS = (12, 3, 1, 9)  # some shorter than a window
# Settings in addition to those of `make`; each is combined with each cache mode.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequences": {"seq_length": 5, "lengths": SHORT_LENGTHS},
    "whole sequences": {"seq_length": 5, "pad_seq_length": False},
    "stacked": {"frame_stack": 4, "lengths": SHORT_LENGTHS},
    "stacked sequences": {"frame_stack": 3, "seq_length": 4, "get_pad_mask": True, "lengths": SHORT_LENGTHS},
    "whole stacks": {"frame_stack": 3, "seq_length": 4, "pad_frame_stack": False, "pad_seq_length": False},
    "goals": {"goal_mode": "last", "seq_length": 3},
    "goals of whole sequences": {"goal_mode": "last", "seq_length": 3, "pad_seq_length": False, "get_pad_mask": True},
    "no next_obs": {"load_next_obs": False, "seq_length": 5, "lengths": SHORT_LENGTHS},
    "filter key": {"filter_by_attribute": "train", "seq_length": 3},
    "images": {"obs_keys": (*LOW_DIM, IMAGE), "seq_length": 3, "frame_stack": 2},
    "normalized": {"hdf5_normalize_obs": True},
    "normalized goals": {"hdf5_normalize_obs": True, "goal_mode": "last"},
}
SINCE_0_5: dict[str, dict[str, Any]] = {
    "min_max": {"action_config": {"actions": {"normalization": "min_max"}, "gripper": {"normalization": "gaussian"}}},
    "one action key": {"action_keys": ("gripper",), "seq_length": 4},
    "instruction": {"lang": "lift the cube", "seq_length": 4},
    "instruction of the dataset": {"dataset_lang": "lift the cube", "seq_length": 4},
    "demo limit": {"demo_limit": 2, "seq_length": 4},
}


def make_file(path: Path, lengths: tuple[int, ...] = LENGTHS, seed: int = 0, **storage: Any) -> Path:
    """Write demonstrations of these lengths, with numbers of several types, filter keys and images."""
    if path.exists():
        return path
    draw = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for number, length in enumerate(lengths):
            values: dict[str, Any] = {
                "actions": draw.normal(size=(length, 7)),
                "gripper": draw.normal(size=(length, 1)).astype("f4"),
                "rewards": draw.integers(0, 5, length),
            }
            for group in ("obs", "next_obs"):
                values[f"{group}/eef_pos"] = draw.normal(size=(length, 3))
                values[f"{group}/eef_quat"] = draw.normal(size=(length, 4)).astype("f4")
                values[f"{group}/object"] = draw.normal(size=(length, 10))
                values[f"{group}/{IMAGE}"] = draw.integers(0, 256, (length, 5, 4, 3), dtype=np.uint8)
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = length
            for key, value in values.items():
                demo.create_dataset(key, data=value, **storage)
        names = [f"demo_{number}".encode() for number in range(len(lengths))]
        file["mask/train"], file["mask/valid"] = names[::2], names[1::2]
    return path


@contextlib.contextmanager
def _silent() -> Any:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def begin() -> None:
    """Tell robomimic which observations are images; replace its language model, if any, by a table of numbers."""
    import robomimic.utils.obs_utils as ObsUtils

    with _silent():
        ObsUtils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": list(LOW_DIM), "rgb": [IMAGE]}})
    with contextlib.suppress(ImportError):
        lang: Any = importlib.import_module("robomimic.utils.lang_utils")
        lang.get_lang_emb = lambda text: torch.arange(6.0) + len(text)
        rows = SimpleNamespace(get_lang_emb=lambda texts: torch.tensor([[float(len(t)), 2.0] for t in texts]))
        lang.LangEncoder = lambda device: rows


def make(folder: Path, cache_mode: Any, kind: Any = None, lengths: tuple[int, ...] = LENGTHS, **settings: Any) -> Any:
    """Make a SequenceDataset of a release, or one of class `kind` if given."""
    from robomimic.utils.dataset import SequenceDataset

    kind = SequenceDataset if kind is None else kind
    name = settings.pop("file", None) or f"demos_{'_'.join(map(str, lengths))}.hdf5"
    options = {
        "hdf5_path": str(make_file(folder / name, lengths)),
        "obs_keys": LOW_DIM,
        # A missing key is zeros with a cache, and an error without.
        "dataset_keys": ("actions", "rewards", *(["missing"] if cache_mode else [])),
        "action_keys": ("actions", "gripper"),
        "action_config": {"actions": {"normalization": None}, "gripper": {"normalization": None}},
        "hdf5_cache_mode": cache_mode,
        **settings,
    }
    takes = inspect.signature(kind).parameters
    with _silent():
        return kind(**{key: value for key, value in options.items() if key in takes or key in settings})


def kinds() -> dict[str, dict[str, Any]]:
    from robomimic.utils.dataset import SequenceDataset

    takes = inspect.signature(SequenceDataset).parameters
    more = SINCE_0_5 if "action_keys" in takes else {}
    return {name: given for name, given in {**KINDS, **more}.items() if {*given} - {"lengths"} <= {*takes}}


def fetch(dataset: Any, indices: list[int]) -> Any:
    samples = dataset.__getitems__(indices) if hasattr(dataset, "__getitems__") else [dataset[i] for i in indices]
    return batches.collate(samples)


def is_same_batch(dataset: Any, other: Any) -> bool:
    """Whether a batch of all samples of `dataset`, some of them twice, equals the single samples of `other`."""
    draw = np.random.default_rng(1)
    indices = [*range(len(other)), *draw.integers(0, len(other), 10).tolist()]
    draw.shuffle(indices)
    expected = default_collate([other[index] for index in indices])
    return batches._is_same(fetch(dataset, indices), expected)


def look_at(folder: Path) -> dict[str, str]:
    """Return, for each kind of dataset, "same", "different", or why it is fetched sample by sample."""
    begin()
    found = {}
    for (name, settings), cache_mode in itertools.product(kinds().items(), ("all", "low_dim", None)):
        dataset, other = (make(folder, cache_mode, **settings) for _ in range(2))
        reason = batches.WindowFetcher(dataset).attach()
        found[f"{name}, {cache_mode}"] = reason or ("same" if is_same_batch(dataset, other) else "different")
    module: Any = importlib.import_module("robomimic.utils.dataset")
    if hasattr(module, "MetaDataset"):
        make_file(folder / "other.hdf5", LENGTHS, seed=1)
        normal = {"action_config": SINCE_0_5["min_max"]["action_config"], "seq_length": 4}
        for cache_mode in ("low_dim", None):
            metas = []
            for _ in range(2):
                parts = [make(folder, cache_mode, file=file, **normal) for file in (None, "other.hdf5")]
                with _silent():
                    metas.append(module.MetaDataset(parts, [1.0, 2.0]))
            reason = batches.WindowFetcher(metas[0]).attach()
            same = "same" if reason is None and is_same_batch(*metas) else "different"
            found[f"several, {cache_mode}"] = reason or same
    return found


if __name__ == "__main__":
    with _silent():
        seen = look_at(Path(sys.argv[1]))
    for line in (f"{name}: {what}" for name, what in seen.items()):
        print(line)
