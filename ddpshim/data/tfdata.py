"""Splits a tf.data pipeline over ranks: each reads its share of the records before anything is decoded.

tensorflow and tensorflow_datasets are imported inside the functions only.
"""

from __future__ import annotations

import hashlib
from typing import Any, Optional

from ddpshim.data import advice
from ddpshim.data.dataset_fingerprint import refuse_unlike
from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world
from ddpshim.job.noise import use_own_batches
from ddpshim.job.world import World
from ddpshim.process.seeds import derive_seed


def shard_tfdata(
    source: Any,
    split: Any = None,
    *,
    shuffle_buffer_size: Optional[int] = None,
    drop_last: bool = True,
    seed: Optional[int] = None,
    world: Optional[World] = None,
    **reading: Any,
) -> Any:
    """Return a tf.data.Dataset of this rank's share of `source` (collective).

    Call it where records are read, before anything parses or decodes them. From a builder of tensorflow_datasets each
    rank reads a contiguous share of `split`, with its files in any order. From a tf.data.Dataset rank r gets every W-th
    element, from the r-th on. That is only right if all ranks see the same order: a read that is shuffled without a
    seed, or not deterministic, is refused, and ranks compare the operations and constants of their graphs. Options set
    later on the result act on the whole pipeline: do not set `deterministic`.

    10 elements, 2 ranks: rank 0 sees 0 2 4 6 8, rank 1 sees 1 3 5 7 9. With one process, all of it.

    Args:
        split: for a builder, as it takes it: "train", "train[:95%]", a ReadInstruction.
        shuffle_buffer_size: of all ranks together; each rank shuffles in its part of it, in its own order, which is
            new in each pass. None does not shuffle.
        drop_last: True: ranks get equally many elements, and those left over are dropped. False is for a dataset that
            repeats forever: in a single pass some ranks would see one more, and wait for the others.
        seed: default the world's.
        reading: for a builder: other arguments of its `as_dataset` (shuffle_files, decoders, read_config).

    Raises:
        DataError: the order of reading may differ between ranks, ranks read different data, or there are
            fewer elements than ranks.
    """
    here = current_or_new_world() if world is None else world
    if world is None:
        use_own_batches()
    if hasattr(source, "as_dataset"):
        dataset = source.as_dataset(split=share_of_split(source, split, here, drop_last), **reading)
    elif split is not None or reading:
        given = ", ".join([*(["split"] if split is not None else []), *reading])
        raise DataError(
            f"{given} was given with a {type(source).__name__}, which is already a tf.data.Dataset; it would have "
            "no effect. Leave it out, or give the builder."
        )
    else:
        dataset = _every_nth(source, here, drop_last) if here.world_size > 1 else source
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


def _every_nth(dataset: Any, here: World, drop_last: bool) -> Any:
    import tensorflow as tf

    functions = _functions(dataset)
    # Compared first, because a rank that raised earlier would leave the others waiting here.
    facts = {"graph of the dataset": _digest(functions)}
    advised = "Build the same dataset on every rank: the same files in the same order, the same seeds."
    refuse_unlike(here.gather(facts), advised)
    _refuse_unordered(functions, dataset.options().deterministic is False)
    slow = sorted({node.op for nodes in functions for node in nodes if node.op.startswith(("Decode", "ParseE"))})
    if slow and here.is_main:
        advice.give(
            f"{', '.join(slow)} before shard_tfdata: each rank does that for all {here.world_size}; shard first"
        )
    num_elements = int(dataset.cardinality())
    if 0 <= num_elements < here.world_size:
        raise DataError(
            f"The dataset has {num_elements} elements for {here.world_size} ranks; some would train on none. Use at "
            f"most {num_elements} ranks, or more elements."
        )
    if not drop_last or num_elements == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(here.world_size, here.rank)
    is_tuple = isinstance(dataset.element_spec, tuple)
    # Complete rounds of one element per rank, because the number of elements may be unknown.
    rounds = dataset.window(here.world_size, drop_remainder=True)
    return rounds.flat_map(lambda *parts: tf.data.Dataset.zip(parts if is_tuple else parts[0]).skip(here.rank).take(1))


def _functions(dataset: Any) -> list[list[Any]]:
    """Return the operations of `dataset`, and those of each function that it calls."""
    import tensorflow as tf

    variant = tf.data.experimental.to_variant(dataset)
    ignore_state = 1  # of lookup tables and counters: only operations are compared
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=ignore_state)
    graph = tf.compat.v1.GraphDef.FromString(text.numpy())
    return [list(graph.node), *(list(function.node_def) for function in graph.library.function)]


def _constants(nodes: list[Any]) -> dict[str, Any]:
    """Return the tensor of each constant, as a protobuf message, by the name of the operation."""
    import tensorflow as tf

    handles = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)  # addresses in this process
    constants = [node for node in nodes if node.op == "Const" and node.attr["dtype"].type not in handles]
    return {node.name: node.attr["value"].tensor for node in constants}


def _digest(functions: list[list[Any]]) -> str:
    """Return a hash of operations and constants that ignores the names that tensorflow gave them."""
    operations = [node.op.encode() for nodes in functions for node in nodes]
    values = [tensor.SerializeToString() for nodes in functions for tensor in _constants(nodes).values()]
    return hashlib.sha256(b"\n".join(sorted([*operations, *values]))).hexdigest()[:12]


def _refuse_unordered(functions: list[list[Any]], is_default_unordered: bool) -> None:
    """Raise DataError if two processes might see the elements in different orders."""
    import tensorflow as tf

    found = []
    for nodes in functions:
        constants = _constants(nodes)
        for node in nodes:
            # Two seeds, after the input and the buffer size, or first; both 0 means a random seed from the system.
            first = 2 if node.op.startswith("Shuffle") else 0 if node.op.startswith("RandomDataset") else None
            names = [] if first is None else [name.split(":")[0] for name in node.input[first:][:2]]
            if first is not None and not any(tf.make_ndarray(constants[name]) for name in names if name in constants):
                found.append(f"{node.op} without a seed")
            says = node.attr["deterministic"].s if "deterministic" in node.attr else b"true"
            if says == b"false" or (says == b"default" and is_default_unordered):
                found.append(f"{node.op} with deterministic=False")
    if found:
        raise DataError(
            f"{', '.join(sorted(set(found)))} before the shard: each rank reads in a different order, so the shares "
            "overlap; some elements would be seen twice and some never. Shard what is read in a fixed order "
            "(shuffle_files=False, deterministic=True) and shuffle afterwards, or give a builder."
        )
