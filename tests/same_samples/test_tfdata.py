"""shard_tfdata: which elements of a split each rank reads. Needs tensorflow; skipped where it is missing."""

import importlib.util
import os

import pytest

from ddpshim import DataError, shard_tfdata
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


def test_a_builders_share_is_read_by_one_rank(builder):
    read = [numbers(share) for share in shares(2, lambda: builder, split="train", shuffle_files=True)]
    assert [len(share) for share in read] == [25, 25]
    assert len({*read[0], *read[1]}) == 50
    of_part = [numbers(share) for share in shares(2, lambda: builder, split="train[:95%]", drop_last=False)]
    assert [len(share) for share in of_part] == [24, 24]
    assert sorted(of_part[0] + of_part[1]) == sorted(numbers(builder.as_dataset("train[:95%]").as_numpy_iterator()))


def test_a_builder_wants_a_split_with_something_for_each_rank(tf, builder):
    with pytest.raises(DataError, match=r"split=None.*Name a split: train"):
        shares(2, lambda: builder, split=None)
    with pytest.raises(DataError, match="has 51 examples for 52 ranks"):
        shares(52, lambda: builder, split="train")
    with pytest.raises(DataError, match=r"is not a builder of tensorflow_datasets, .* take dataset.shard"):
        shares(2, lambda: tf.data.Dataset.range(9), split="train")


class Odd:
    """Rank 0 of two; the other rank's facts are those of `other`."""

    rank, world_size, seed, is_main = 0, 2, 0, True

    def __init__(self, other):
        self.other = other

    def gather(self, facts):
        return [facts, self.other]


def test_ranks_compare_what_they_read(tf, builder):
    elsewhere = {"data": "numbers/1.0.0", "split": "train", "number of examples": 50}
    with pytest.raises(DataError, match="Ranks disagree on the number of examples: 51 on rank 0, 50 on rank 1"):
        shard_tfdata(builder, "train", world=Odd(elsewhere))


def test_the_shuffle_buffer_is_divided_and_ranks_shuffle_differently(tf, builder):
    sides = side_by_side(2)
    datasets = [shard_tfdata(builder, "train", shuffle_buffer_size=20, world=world) for world in sides]
    passes = [[numbers(dataset.as_numpy_iterator()) for dataset in datasets] for _ in range(2)]
    for orders in passes:
        for start, order in zip((0, 25), orders):
            assert sorted(order) == list(range(start, start + 25))
            # What comes k-th was among the first k + 10: no rank holds more than half of the 20.
            assert max(element - start - position for position, element in enumerate(order)) < 10
    assert len({tuple(order) for orders in passes for order in orders}) == 4
    again = shard_tfdata(builder, "train", shuffle_buffer_size=20, world=side_by_side(2)[0])
    assert numbers(again.as_numpy_iterator()) == passes[0][0]
