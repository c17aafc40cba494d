"""Reads a small RLDS dataset in DROID's schema on ranks, through octo's own pipeline, on the CPU.

Needs requirements/rlds.txt, and the trees octo, dlimp and droid-9a29c83 in DDPSHIM_UPSTREAM.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, Optional

from tests.ranks import run_ranks

SOURCES = ("octo", "dlimp", "droid-9a29c83")
DATASETS = {"droid": 51, "lab": 20}  # episodes, of which octo trains on the first 95%
WEIGHTS = {"droid": 0.7, "lab": 0.3}
SHUFFLE_BUFFER_SIZE = 4000
DEADLINE_S = 540


class Reading(NamedTuple):
    episodes: Counter[tuple[str, int]]  # number of frames by (dataset, episode)
    order: list[tuple[int, int]]  # (episode, step) of each frame
    statistics: dict[str, Any]
    num_statistics: int  # how often this rank computed the statistics, or read octo's file of them
    growth_bytes: int  # increase of its peak memory while it read


def missing() -> Optional[str]:
    upstream = Path(os.environ.get("DDPSHIM_UPSTREAM", "/nowhere"))
    trees = [f"{upstream}/{name}" for name in SOURCES if not (upstream / name).is_dir()]
    packages = [name for name in ("tensorflow", "tensorflow_datasets") if importlib.util.find_spec(name) is None]
    return ", ".join([*packages, *trees]) or None


def add_sources() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path[:0] = [str(Path(os.environ["DDPSHIM_UPSTREAM"], name)) for name in SOURCES]
    warnings.simplefilter("ignore")  # from tensorflow's import


def build(folder: str, height: int = 18) -> None:
    """Write the datasets in another process, so that this one does not import tensorflow."""
    run_ranks(_build, 1, folder, height, timeout_s=DEADLINE_S)


def _build(folder: str, height: int) -> None:
    add_sources()
    from examples.rlds.build_dataset import build as write

    for name, num_episodes in DATASETS.items():
        write(folder, name, num_episodes, num_files=3, height=height)


def dataset_kwargs(folder: str, name: str) -> dict[str, Any]:
    from octo.utils.spec import ModuleSpec
    from robomimic.utils.rlds_utils import droid_dataset_transform

    is_absolute = [True] * 10
    return {
        "name": name,
        "data_dir": folder,
        "filter_functions": [ModuleSpec.create("robomimic.utils.rlds_utils:filter_success")] * (name == "droid"),
        "image_obs_keys": {"primary": "exterior_image_1_left", "secondary": "exterior_image_2_left"},
        "state_obs_keys": ["cartesian_position", "gripper_position"],
        "language_key": "language_instruction",
        "norm_skip_keys": ["proprio"],
        "action_proprio_normalization_type": "bounds",
        "absolute_action_mask": is_absolute,
        "action_normalization_mask": is_absolute,
        "standardize_fn": droid_dataset_transform,
    }


def mixture(maker: Any, folder: str, weights: dict[str, float], **options: Any) -> Any:
    """Return the dataset that DROID's train.py makes, but with the functions of `maker`, and small images."""
    from octo.data.utils.data_utils import combine_dataset_statistics

    kwargs = [dataset_kwargs(folder, name) for name in weights]
    statistics = combine_dataset_statistics([maker.make_dataset_from_rlds(**each, train=True)[1] for each in kwargs])
    frames = {"image_augment_kwargs": {}, "resize_size": {"primary": [16, 16], "secondary": [16, 16]}}
    return maker.make_interleaved_dataset(
        kwargs,
        list(weights.values()),
        **{
            "train": True,
            "shuffle_buffer_size": SHUFFLE_BUFFER_SIZE,
            "dataset_statistics": statistics,
            "traj_transform_kwargs": {
                "window_size": 2,
                "future_action_window_size": 15,
                "subsample_length": 100,
                "skip_unlabeled": True,
            },
            "frame_transform_kwargs": {**frames, "num_parallel_calls": 2},
            "traj_transform_threads": 4,
            "traj_read_threads": 4,
            **options,
        },
    )


def read(way: str, folder: str, num_frames: int, weights: dict[str, float], options: dict[str, Any]) -> Reading:
    """Read the first frames of this rank's stream. `way`: octo, "octo, then .shard", or ddpshim."""
    add_sources()
    import octo.data.dataset as octo_data

    from ddpshim import world
    from ddpshim.robomimic import droid

    num_statistics = 0
    compute = octo_data.get_dataset_statistics

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_statistics
        num_statistics += 1
        return compute(*args, **kwargs)

    octo_data.get_dataset_statistics = counted
    with contextlib.redirect_stdout(sys.stderr):  # octo prints the mixture each time
        dataset = mixture(droid if way == "ddpshim" else octo_data, folder, weights, **options)
    statistics = dataset.dataset_statistics
    if way == "octo, then .shard":
        dataset = dataset.shard(world().world_size, world().rank)
    elif way == "ddpshim":
        dataset = dataset.map(lambda frame: frame)  # as train.py does
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    episodes: Counter[tuple[str, int]] = Counter()
    order = []
    for _, frame in zip(range(num_frames), dataset.as_numpy_iterator()):
        episode, step = (round(128 * float(number)) for number in frame["observation"]["proprio"][-1][:2])
        episodes[frame["dataset_name"].decode(), episode] += 1
        order.append((episode, step))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Reading(episodes, order, statistics, num_statistics, 1024 * (peak - before))


def readings(
    way: str,
    num_ranks: int,
    folder: str,
    num_frames: int = 1000,
    weights: Optional[dict[str, float]] = None,
    **options: Any,
) -> list[Reading]:
    return run_ranks(read, num_ranks, way, folder, num_frames, weights or WEIGHTS, options, timeout_s=DEADLINE_S)  # type: ignore[no-any-return]
