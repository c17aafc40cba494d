"""shard_tfdata: which elements of a tf.data pipeline each rank reads. Needs tensorflow; skipped where it is missing."""

import importlib.util
import os

import pytest

from ddpshim import DataError, shard_tfdata, world
from tests.ranks import run_ranks
from tests.same_samples.test_loader import side_by_side

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # tensorflow's own, while it is imported
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("tensorflow", "tensorflow_datasets"))),
        reason="needs tensorflow and tensorflow-datasets (requirements/rlds.txt)",
    ),
]


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def builder(tf, tmp_path_factory):
    import tensorflow_datasets as tfds

    numbers = list(enumerate({"number": number} for number in range(51)))
    return tfds.dataset_builders.store_as_tfds_dataset(
        name="numbers",
        version="1.0.0",
        features=tfds.features.FeaturesDict({"number": tf.int64}),
        split_datasets={"train": numbers},
        data_dir=str(tmp_path_factory.mktemp("tfds")),
        download_config=tfds.download.DownloadConfig(num_shards=3),
    )


def shares(num_ranks, make, **options):
    """What each of the ranks reads; `make` builds its dataset."""
    made = [shard_tfdata(make(), world=world, **options) for world in side_by_side(num_ranks)]
    return [list(dataset.as_numpy_iterator()) for dataset in made]


def numbers(elements):
    return [int(element["number"]) for element in elements]


def in_parallel(tf, deterministic):
    """20 numbers that are read from 4 places at once."""
    places = tf.data.Dataset.range(4)
    options = {"cycle_length": 4, "num_parallel_calls": 4, "deterministic": deterministic}
    return places.interleave(lambda place: tf.data.Dataset.range(5 * place, 5 * place + 5), **options)


def test_every_nth_element_and_equally_many_for_all(tf):
    assert shares(2, lambda: tf.data.Dataset.range(11)) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    # How many are left by a filter, nobody knows before the end.
    assert shares(3, lambda: tf.data.Dataset.range(9).filter(lambda i: i > 0)) == [[1, 4], [2, 5], [3, 6]]
    assert shares(2, lambda: tf.data.Dataset.range(3), drop_last=False) == [[0, 2], [1]]
    forever = tf.data.Dataset.range(3).repeat()
    assert shares(2, lambda: shard_tfdata(forever, world=side_by_side(1)[0]).take(4)) == [[0, 2], [1, 0]]


@pytest.mark.parametrize("structure", [lambda i: (i, i + 1), lambda i: {"a": {"b": i}}, lambda i: (i,)])
def test_elements_keep_their_structure(tf, structure):
    whole = tf.data.Dataset.range(6).map(structure)
    dataset = shard_tfdata(whole, world=side_by_side(2)[1])
    assert dataset.element_spec == whole.element_spec
    assert list(dataset.as_numpy_iterator()) == [structure(i) for i in (1, 3, 5)]


def test_a_builders_share_is_read_by_one_rank(builder):
    read = [numbers(share) for share in shares(2, lambda: builder, split="train", shuffle_files=True)]
    assert [len(share) for share in read] == [25, 25]
    assert len({*read[0], *read[1]}) == 50
    of_part = [numbers(share) for share in shares(2, lambda: builder, split="train[:95%]", drop_last=False)]
    assert [len(share) for share in of_part] == [24, 24]
    assert sorted(of_part[0] + of_part[1]) == sorted(numbers(builder.as_dataset("train[:95%]").as_numpy_iterator()))


REFUSED = {
    "a shuffle": (lambda tf: tf.data.Dataset.range(9).shuffle(3), "ShuffleDatasetV3 without a seed"),
    "a shuffle of files": (lambda tf: tf.data.Dataset.list_files("/*"), "ShuffleDatasetV3 without a seed"),
    "a nested shuffle": (
        lambda tf: tf.data.Dataset.range(9).flat_map(lambda i: tf.data.Dataset.range(i).shuffle(3)),
        "ShuffleDatasetV3 without a seed",
    ),
    "a mixture": (
        lambda tf: tf.data.Dataset.sample_from_datasets([tf.data.Dataset.range(9)] * 2, [0.5, 0.5]),
        "RandomDataset without a seed",
    ),
    "a parallel read in any order": (
        lambda tf: in_parallel(tf, deterministic=False),
        "ParallelInterleaveDatasetV4 with deterministic=False",
    ),
    "options that allow it": (
        lambda tf: in_parallel(tf, deterministic=None).with_options(unordered(tf)),
        "ParallelInterleaveDatasetV4 with deterministic=False",
    ),
    "too few": (lambda tf: tf.data.Dataset.range(1), "1 elements for 2 ranks"),
}


def unordered(tf):
    options = tf.data.Options()
    options.deterministic = False
    return options


@pytest.mark.parametrize("case", REFUSED)
def test_a_read_in_an_order_of_its_own_is_refused(tf, case):
    make, says = REFUSED[case]
    with pytest.raises(DataError, match=says):
        shares(2, lambda: make(tf))


def test_a_read_in_a_fixed_order_is_not_refused(tf):
    for deterministic in (True, None):
        read = shares(2, lambda said=deterministic: in_parallel(tf, said))
        assert sorted(read[0] + read[1]) == list(range(20))
    read = shares(2, lambda: tf.data.Dataset.range(20).shuffle(5, seed=3))
    assert sorted(read[0] + read[1]) == list(range(20))


def test_a_builder_wants_a_split_with_something_for_each_rank(tf, builder):
    with pytest.raises(DataError, match=r"split=None.*Name a split: train"):
        shares(2, lambda: builder)
    with pytest.raises(DataError, match="has 51 examples for 52 ranks"):
        shares(52, lambda: builder, split="train")
    with pytest.raises(DataError, match="split, shuffle_files was given with a"):
        shares(2, lambda: tf.data.Dataset.range(9), split="train", shuffle_files=True)


class Odd:
    """Rank 0 of two; the other rank's facts are those of `other`."""

    rank, world_size, seed, is_main = 0, 2, 0, True

    def __init__(self, other):
        self.other = other

    def gather(self, facts):
        return [facts, self.other if self.other is not None else facts]


def test_ranks_compare_what_they_read(tf, builder):
    seen = []

    class Recorder(Odd):
        def gather(self, facts):
            seen.append(facts)
            return super().gather(facts)

    def files(*names):
        return tf.data.Dataset.from_tensor_slices(list(names)).map(lambda name: name + ".txt")

    for order in (("a", "b"), ("b", "a"), ("a", "b")):
        shard_tfdata(files(*order), world=Recorder(None))
    assert seen[0] != seen[1]
    assert seen[0] == seen[2]
    with pytest.raises(DataError, match="Ranks disagree on the graph of the dataset"):
        shard_tfdata(files("a", "b"), world=Odd(seen[1]))
    elsewhere = {"data": "numbers/1.0.0", "split": "train", "number of examples": 50}
    with pytest.raises(DataError, match="Ranks disagree on the number of examples: 51 on rank 0, 50 on rank 1"):
        shard_tfdata(builder, "train", world=Odd(elsewhere))


def test_decoding_for_all_ranks_is_advised_against(tf, capsys):
    records = tf.data.Dataset.from_tensors("").repeat(4).map(lambda record: tf.io.decode_raw(record, tf.uint8))
    shares(2, lambda: records)
    assert "DecodeRaw before shard_tfdata: each rank does that for all 2; shard first" in capsys.readouterr().err


def test_the_shuffle_buffer_is_divided_and_ranks_shuffle_differently(tf):
    make = lambda: tf.data.Dataset.range(200)  # noqa: E731
    datasets = [shard_tfdata(make(), shuffle_buffer_size=20, world=world) for world in side_by_side(2)]
    passes = [[[int(i) // 2 for i in dataset.as_numpy_iterator()] for dataset in datasets] for _ in range(2)]
    assert all(sorted(order) == list(range(100)) for both in passes for order in both)
    assert len({tuple(order) for both in passes for order in both}) == 4
    for order in (order for both in passes for order in both):
        # What comes k-th was among the first k + 10: no rank holds more than half of the 20.
        ahead = [element - position for position, element in enumerate(order)]
        assert 5 < max(ahead) < 10
    again = shard_tfdata(make(), shuffle_buffer_size=20, world=side_by_side(2)[0])
    assert [int(i) // 2 for i in again.as_numpy_iterator()] == passes[0][0]


def _read_by_rank():
    import warnings

    warnings.simplefilter("ignore")
    import tensorflow as tf

    if world().rank == 0:  # what a rank did before does not make its graph another one
        tf.data.Dataset.range(3).map(lambda i: i + 1)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(20), 10 * tf.range(20)), -1)
    looked_up = in_parallel(tf, deterministic=True).map(lambda i: table.lookup(tf.cast(i, tf.int32)))
    shuffled = tf.data.Dataset.range(20).cache().shuffle(4, seed=3)
    return [[int(i) for i in shard_tfdata(dataset).as_numpy_iterator()] for dataset in (looked_up, shuffled)]


def test_two_processes_see_one_graph():
    (first, second), (third, fourth) = run_ranks(_read_by_rank, 2, timeout_s=300)
    assert sorted(first + third) == list(range(0, 200, 10))
    assert sorted(second + fourth) == list(range(20))
