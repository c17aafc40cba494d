"""Splits the records of tensorflow_datasets over ranks: each reads its share before anything is decoded."""

from __future__ import annotations

from typing import Any, Optional

from ddpshim.data.dataset_fingerprint import refuse_unlike
from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world
from ddpshim.job.noise import use_own_batches
from ddpshim.job.world import World
from ddpshim.process.seeds import derive_seed


def shard_tfdata(
    builder: Any,
    split: Any,
    *,
    shuffle_buffer_size: Optional[int] = None,
    drop_last: bool = True,
    seed: Optional[int] = None,
    world: Optional[World] = None,
    **reading: Any,
) -> Any:
    """Return a tf.data.Dataset of this rank's share of a split (collective). With one process, all of it.

    Each rank reads a contiguous share, with its files in any order. 10 elements, 2 ranks: rank 0 sees 0 to 4, rank 1
    sees 5 to 9. A tf.data.Dataset itself is refused.

    Args:
        builder: of tensorflow_datasets.
        split: as the builder takes it: "train", "train[:95%]", a ReadInstruction.
        shuffle_buffer_size: of all ranks together; each rank shuffles in its part of it, in its own order, which is
            new in each pass. None does not shuffle.
        drop_last: True: ranks get equally many elements, and those left over are dropped. False is for a dataset that
            repeats forever: in a single pass some ranks would see one more, and wait for the others.
        seed: default the world's.
        reading: other arguments of the builder's `as_dataset` (shuffle_files, decoders, read_config).

    Raises:
        DataError: it is not a builder, ranks read different data, or there are fewer elements than ranks.
    """
    here = current_or_new_world() if world is None else world
    if world is None:
        use_own_batches()
    if not hasattr(builder, "as_dataset"):
        raise DataError(
            f"{type(builder).__name__} is not a builder of tensorflow_datasets: ranks might see its elements in "
            "different orders, and their shares would overlap. Give the builder; or, where a tf.data.Dataset is read "
            "in a fixed order, before any shuffle, take dataset.shard(world.world_size, world.rank)."
        )
    dataset = builder.as_dataset(split=share_of_split(builder, split, here, drop_last), **reading)
    if shuffle_buffer_size is None:
        return dataset
    own_seed = derive_seed(here.seed or 0 if seed is None else seed, "tf.data", here.rank)
    return dataset.shuffle(divided(shuffle_buffer_size, here.world_size), seed=own_seed)


def divided(total: int, num_ranks: int) -> int:
    """Return one rank's part of a buffer or of threads that all ranks share, rounded up, so at least 1."""
    return max(1, -(-total // num_ranks))


def share_of_split(builder: Any, split: Any, here: World, drop_last: bool = False) -> Any:
    """Return this rank's contiguous share of `split`, as a split of the same builder (collective).

    Raises:
        DataError: no split, fewer examples than ranks, or a different number of examples on another rank.
    """
    import tensorflow_datasets as tfds

    if split is None:
        raise DataError(
            f"split=None with the builder of {builder.info.full_name}; all its splits would be read as one. Name a "
            f"split: {', '.join(sorted(builder.info.splits))}."
        )
    num_examples = builder.info.splits[split].num_examples
    facts = {"data": builder.info.full_name, "split": str(split), "number of examples": num_examples}
    refuse_unlike(here.gather(facts), "Give every rank the same split of the same data.")
    if num_examples < here.world_size:
        raise DataError(
            f"Split {split} of {builder.info.full_name} has {num_examples} examples for {here.world_size} ranks; "
            f"some ranks would have nothing to train on. Use at most {num_examples} ranks, or leave this dataset out."
        )
    return tfds.even_splits(split, n=here.world_size, drop_remainder=drop_last)[here.rank]
