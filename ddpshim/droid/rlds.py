"""Reads DROID's RLDS data through octo: each rank its share of the trajectories, all ranks one mixture.

What hunks of `robomimic/scripts/train.py` call in place of octo's functions and torch's loader, with their arguments.
Without a launcher each does what those do. tensorflow, octo and dlimp are imported inside the functions only.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

from torch.utils.data import DataLoader, IterableDataset

from ddpshim.data.loader import make_loader
from ddpshim.data.parts import divide
from ddpshim.data.tfdata import divided, share_of_split
from ddpshim.errors import DataError
from ddpshim.job.group import world
from ddpshim.job.random_streams import derive_seed
from ddpshim.job.replaced import replaced


def make_dataset_from_rlds(name: str, data_dir: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """octo's dataset of trajectories, those of this rank's share, and the statistics of all trajectories (collective).

    The share is an even part of the split, taken before anything is read or decoded. Statistics that are not given are
    the main rank's on every rank: it computes them, or finds octo's file of them. Each rank's own would differ, as
    octo reads in no fixed order and the last digits of a sum depend on it.

    Raises:
        DataError: the split has fewer trajectories than there are ranks.
    """
    from octo.data import dataset as octo_data

    make = octo_data.make_dataset_from_rlds if not world().is_launched else _share_maker(octo_data)
    return make(name, data_dir, **options)  # type: ignore[no-any-return]


def make_interleaved_dataset(
    dataset_kwargs_list: Sequence[dict[str, Any]],
    sample_weights: Optional[Sequence[float]] = None,
    *,
    train: bool,
    **options: Any,
) -> Any:
    """octo's mixture of datasets, made of this rank's share of the trajectories of each (collective).

    All numbers are those of one process: the shuffle buffer and the batch (where there is one) are divided over the
    ranks, threads and tf.data's memory for buffers over the ranks of this node. Each rank draws from its shares with
    the weights given, so all of them together do. What is drawn (mixture, shuffle, subsampling, augmentation) differs
    by rank, and from one start to the next: `tf.random.set_seed` gets a new number. No seed would make two runs alike,
    as octo reads in no fixed order.

    Raises:
        DataError: a dataset has fewer trajectories than there are ranks, or the batch does not divide.
    """
    from octo.data import dataset as octo_data

    if world().is_launched:
        dataset = _make_shares(octo_data, dataset_kwargs_list, sample_weights, {"train": train, **options})
    else:
        dataset = octo_data.make_interleaved_dataset(dataset_kwargs_list, sample_weights, train=train, **options)
    num_frames = _num_frames(dataset, dataset_kwargs_list, train)
    if num_frames is not None:
        dataset.num_frames = num_frames
    return dataset


def num_samples(dataset: Any) -> int:
    """The frames that this rank has in a pass over a mixture, for `len()` of a torch dataset around it. Local.

    `dataset` comes from :func:`make_interleaved_dataset`, by any number of `map`s. Its stream does not end; a pass
    is each dataset's transitions in the split times its weight, as DROID has it, over the number of ranks.

    Raises:
        TypeError: it comes from somewhere else, so nobody knows.
    """
    while not hasattr(dataset, "num_frames"):
        inputs = dataset._inputs()
        if len(inputs) != 1:
            raise TypeError(
                f"{type(dataset).__name__} was not made by ddpshim.droid.rlds.make_interleaved_dataset, so its "
                "length is unknown"
            )
        dataset = inputs[0]
    return int(dataset.num_frames) // world().world_size


def loader(dataset: Any, batch_size: int, **options: Any) -> DataLoader[Any]:
    """torch's DataLoader; launched, one over this rank's share with its part of the batch (collective).

    Iterating raises DataError where a dataset of the mixture has nothing for this rank: octo's filters left none of its
    share.
    """
    here = world()
    if not here.is_launched:
        return DataLoader(dataset, batch_size=batch_size, **options)
    share = _Endless(dataset)
    return make_loader(share, batch_size, already_sharded=True, drop_last=False, world=here, **options)


class _Endless(IterableDataset[Any]):
    """`dataset`, whose end is an error: octo repeats what it reads, unless there is nothing to read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        yield from self._dataset
        here = world()
        raise DataError(
            f"The mixture ended on rank {here.rank}: filters (success, language) left this rank no trajectory of "
            f"one dataset; ranks would train on different mixtures. Use fewer than {here.world_size} ranks, or leave "
            "out the dataset with few trajectories."
        )


def _make_shares(octo_data: Any, dataset_kwargs_list: Any, sample_weights: Any, options: dict[str, Any]) -> Any:
    import tensorflow as tf
    from dlimp import DLataset

    here, share = world(), {**options}
    share["shuffle_buffer_size"] = divided(options["shuffle_buffer_size"], here.world_size)
    if options.get("batch_size") is not None:
        share["batch_size"] = divide(options["batch_size"], here.world_size)
    for name in ("traj_transform_threads", "traj_read_threads"):
        if options.get(name) is not None:
            # octo wants one for each dataset
            share[name] = max(len(dataset_kwargs_list), divided(options[name], here.local_world_size))
    frames = dict(options.get("frame_transform_kwargs", {}))
    if frames.get("num_parallel_calls", tf.data.AUTOTUNE) != tf.data.AUTOTUNE:
        frames["num_parallel_calls"] = divided(frames["num_parallel_calls"], here.local_world_size)
    share["frame_transform_kwargs"] = frames

    tf.random.set_seed(derive_seed(here.broadcast(secrets.randbits(63)), "tf.data", here.rank))
    # octo would go on without a dataset that has nothing for this rank, and this rank's mixture be another one.
    mix = staticmethod(functools.partial(DLataset.sample_from_datasets, stop_on_empty_dataset=True))
    make_share = replaced(octo_data, "make_dataset_from_rlds", _share_maker(octo_data))
    with make_share, replaced(DLataset, "sample_from_datasets", mix):
        made = octo_data.make_interleaved_dataset(dataset_kwargs_list, sample_weights, **share)
    budget = tf.data.Options()
    budget.autotune.ram_budget = divided(made.options().autotune.ram_budget, here.local_world_size)
    dataset = made.with_options(budget)
    dataset.dataset_statistics, dataset.sample_weights = made.dataset_statistics, made.sample_weights
    return dataset


def _share_maker(octo_data: Any) -> Callable[..., Any]:
    """octo's make_dataset_from_rlds, for this rank's share (collective)."""
    from dlimp import DLataset

    make, read, here = octo_data.make_dataset_from_rlds, DLataset.from_rlds, world()

    def make_share(name: str, data_dir: str, **options: Any) -> Any:
        if options.get("dataset_statistics") is None:
            options["dataset_statistics"] = here.run_on_main(lambda: make(name, data_dir, **options)[1])
        with replaced(DLataset, "from_rlds", staticmethod(read_share)):
            return make(name, data_dir, **options)

    def read_share(builder: Any, split: Any, **reading: Any) -> Any:
        return read(builder, split=share_of_split(builder, split, here), **reading)

    return make_share


def _num_frames(dataset: Any, dataset_kwargs_list: Sequence[dict[str, Any]], train: bool) -> Optional[float]:
    """Each dataset's transitions in the split that octo reads, times its weight; None if the statistics do not say."""
    import numpy as np
    import tensorflow_datasets as tfds

    statistics = dataset.dataset_statistics
    if isinstance(statistics, str):  # a file, for octo to read
        return None
    # One for all datasets, in which the numbers are lists, or one for each.
    is_one = isinstance(statistics, dict)
    nums = np.ravel(statistics["num_transitions"] if is_one else [each["num_transitions"] for each in statistics])
    if len(nums) != len(dataset_kwargs_list):
        return None
    total = 0.0
    for options, weight, num_transitions in zip(dataset_kwargs_list, dataset.sample_weights, nums):
        splits = tfds.builder(options["name"], data_dir=options["data_dir"]).info.splits
        names = ("train", "val") if "val" in splits else ("train[:95%]", "train[95%:]")
        read = splits[names[0] if train else names[1]].num_examples
        total += float(weight) * int(num_transitions) * read / splits.total_num_examples
    return total
