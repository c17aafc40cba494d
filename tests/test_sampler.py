"""The sampler: orders, their split over ranks, and global random states that nobody notices to have moved."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ddpshim.data import permutation
from ddpshim.data import permutation as permutation_module
from ddpshim.data.epochs import EpochCounter, layers
from ddpshim.data.permutation import Computed, Permutation
from ddpshim.data.sampler import (
    DrawnOrder,
    SequentialOrder,
    ShardedBatchSampler,
    ShardedSampler,
    ShuffledOrder,
    SplitBatchSampler,
    draws_by_weight,
)
from ddpshim.data.split import Split
from ddpshim.data.weighted import WeightedDraws, WeightedOrder, Weights
from ddpshim.errors import DataError
from ddpshim.job.random_streams import PrivateRandom
from tests.shuffle_quality import ours, quality, randperm, windows


def global_draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def as_list(order):
    part = order[:]
    return part.tolist() if isinstance(part, torch.Tensor) else list(part)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_samples", [8, 9, 10, 16, 23, 24])
def test_shares_of_a_step_are_the_global_batch(num_samples, drop_last):
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(3))
    whole = [order[start : start + 8].tolist() for start in range(0, num_samples, 8)]
    for world_size in (1, 2, 4):
        splits = [Split(8, rank, world_size, drop_last) for rank in range(world_size)]
        assert len({split.num_steps(num_samples) for split in splits}) == 1
        num_steps = splits[0].num_steps(num_samples)
        assert num_steps == (num_samples // 8 if drop_last else len(whole))
        for step in range(num_steps):
            shares = [split.take(order, step) for split in splits]
            assert len({len(share) for share in shares}) == 1
            together = [shares[p % world_size][p // world_size] for p in range(len(shares[0]) * world_size)]
            missing = len(together) - len(whole[step])
            assert 0 <= missing < world_size
            assert together == whole[step] + order[:missing].tolist()
        for split in splits:
            seen = sum(len(split.take(order, step)) for step in range(num_steps))
            assert seen == split.num_samples_per_rank(num_samples)


def test_any_step_can_be_named_without_the_ones_before():
    sampler = ShardedSampler(ShuffledOrder(40, seed=1), Split(8, 1, 2, True))
    sampler.begin(3)
    whole = list(sampler.batches())
    sampler.epochs.set(3, start_step=2)
    sampler.begin(sampler.epochs.advance())
    assert list(sampler.batches()) == whole[2:]
    assert whole[4] == Split(8, 1, 2, True).take(ShuffledOrder(40, seed=1).draw(3), 4)
    sampler.begin(sampler.epochs.advance())
    assert len(list(sampler.batches())) == len(whole), "the pass after it is whole"


ORDERS = {
    "range": lambda size: range(size),
    "tensor": lambda size: torch.randperm(size, generator=torch.Generator().manual_seed(3)),
    "list": lambda size: [("demo", index) for index in range(size)],
    "shuffled": lambda size: Permutation(size, key=3),
    "weighted": lambda size: WeightedDraws(Weights(torch.arange(9, dtype=torch.float64)), size, key=3),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_steps_taken_together_are_those_taken_one_by_one(kind, monkeypatch):
    monkeypatch.setattr(permutation_module, "NUM_AT_ONCE", 100)
    for size, split in (
        (1000, Split(8, 1, 2, True)),
        (1001, Split(8, 1, 2, False)),
        (301, Split(1, 0, 1, False)),
        (701, Split(600, 0, 1, False)),
        (1001, Split(40, 3, 4, False)),
    ):
        order = ORDERS[kind](size)
        one_by_one = [split.take(order, step) for step in range(split.num_steps(size))]
        assert list(split.batches(order)) == one_by_one
        assert list(split.batches(order, 5)) == one_by_one[5:]
        assert list(split.batches(order, len(one_by_one) + 1)) == []


class Recorded(Computed):
    """0, 1, 2, ... and which of them were asked for."""

    def __init__(self, length):
        self.length, self.asked = length, []

    def __len__(self):
        return self.length

    def at(self, positions):
        self.asked.append(positions.tolist())
        return positions


def test_a_pass_computes_what_it_gives_and_the_first_step_alone():
    split, order = Split(64, 1, 2, True), Recorded(10**12)
    steps = split.batches(order, start_step=10**9)
    assert next(steps) == list(range(64 * 10**9 + 1, 64 * 10**9 + 64, 2))
    assert order.asked == [list(range(64 * 10**9 + 1, 64 * 10**9 + 64, 2))]
    for _ in range(5000):
        next(steps)
    assert max(map(len, order.asked)) == 2**15, "more at once would cost memory, and be split over threads"
    assert len(order.asked) < 20, "each call has costs of its own"


def test_a_list_of_anything_splits_as_ints_do():
    order = [("demo", index) for index in range(7)]
    shares = [Split(4, rank, 2, False).take(order, 1) for rank in range(2)]
    assert shares == [[("demo", 4), ("demo", 6)], [("demo", 5), ("demo", 0)]]


def test_epochs_advance_and_can_be_set():
    epochs = EpochCounter()
    assert (epochs.current, epochs.advance(), epochs.advance()) == (0, 0, 1)
    epochs.set(7)
    assert (epochs.current, epochs.advance(), epochs.advance()) == (7, 7, 8)
    epochs.set(np.int64(8))
    assert epochs.advance() == 8


def test_shuffles_are_permutations_that_differ_by_seed_and_epoch():
    drawn = {(s, e): tuple(as_list(ShuffledOrder(50, s).draw(e))) for s in range(3) for e in range(3)}
    assert len(set(drawn.values())) == 9
    assert all(sorted(order) == list(range(50)) for order in drawn.values())
    assert drawn[1, 2] == tuple(as_list(ShuffledOrder(50, 1).draw(2)))


def test_permutations_hold_each_number_once():
    for size in (*range(1, 20), 4095, 4096, 4097, 123_457):
        for key in (0, 2**62):
            order = Permutation(size, key)
            assert sorted(as_list(order)) == list(range(size)), (size, key)
    whole = Permutation(123_457, 7)[:]
    assert Permutation(123_457, 7)[5:100_000:3].equal(whole[5:100_000:3])
    order = Permutation(123_457, 7)
    assert [order[i] for i in (0, 77, -1)] == whole[[0, 77, -1]].tolist()
    with pytest.raises(IndexError):
        order[123_457]
    far = Permutation(2**58, 7)[2**57 : 2**57 + 1000]
    assert len(set(far.tolist())) == 1000
    assert int(far.min()) >= 0
    assert int(far.max()) < 2**58


def test_shuffles_of_few_samples_are_all_equally_likely():
    counts = Counter(tuple(as_list(ShuffledOrder(5, 1).draw(epoch))) for epoch in range(2400))
    assert len(counts) == 120
    assert sum((count - 20) ** 2 / 20 for count in counts.values()) < 181  # 4 sigma; a network has more


def test_shuffles_are_as_good_as_randperms(monkeypatch):
    def farthest(make):
        return max(map(abs, quality(make(10_000), 10_000, 30, windows(10_000, 10_000)).values()))

    assert farthest(randperm) < 4.5
    assert farthest(ours) < 4.5
    monkeypatch.setattr(permutation, "_NUM_ROUNDS", 2)
    assert farthest(ours) > 20, "the statistics see nothing"


def chi_square(drawn, weights):
    """A z-score: how far the draws are from the weights."""
    expected = weights / weights.sum() * len(drawn)
    counts = torch.bincount(drawn, minlength=len(weights))
    assert counts[weights == 0].sum() == 0
    degrees = int((weights > 0).sum()) - 1
    found = ((counts - expected).square() / expected)[weights > 0].sum()
    return float(found - degrees) / math.sqrt(2 * degrees)


def test_weights_say_how_often():
    generator = torch.Generator().manual_seed(0)
    for size, scale in ((2, 1.0), (5, 1e-290), (16, 1.0), (17, 1e300), (1000, 1.0)):
        weights = torch.rand(size, generator=generator, dtype=torch.float64) + 0.01
        weights[torch.rand(size, generator=generator) < 0.3] = 0
        weights[-1] = 3
        drawn = WeightedDraws(Weights(weights * scale), 20_000, key=size)[:]
        assert abs(chi_square(drawn, weights)) < 4, (size, scale)
    late = torch.zeros(40, dtype=torch.float64)
    late[[20, 37]] = torch.tensor([0.1, 0.3], dtype=torch.float64)
    where = torch.tensor([0, 0.2, 0.3, 1 - 2**-53], dtype=torch.float64)
    assert Weights(late).find(where).tolist() == [20, 20, 37, 37]
    tiny = Weights(torch.tensor([1, 1e-15], dtype=torch.float64))
    assert not tiny._rows.frac().any(), "sums of others than whole numbers depend on the machine"
    # Many small weights beside a large one.
    weights = torch.full((10**5,), 4e-6, dtype=torch.float64)
    weights[77] = 1
    drawn = WeightedDraws(Weights(weights), 10_000, key=1)[:]
    share = 1 / 1.4
    assert abs(int((drawn == 77).sum()) - 10_000 * share) < 4 * math.sqrt(10_000 * share * (1 - share))
    pairs = WeightedDraws(Weights(torch.ones(4, dtype=torch.float64)), 20_000, key=2)[:].view(-1, 2)
    assert abs(chi_square(pairs[:, 0] * 4 + pairs[:, 1], torch.ones(16))) < 4


def test_more_categories_than_torch_can_draw_from():
    size = 2**24 + 3
    weights = Weights(torch.ones(1, dtype=torch.float64).expand(size))
    sought = torch.tensor([0, 12_345_678, 2**24, size - 1])
    assert weights.find((sought + 0.5) / size).equal(sought)
    assert weights.find(sought.double() / size).equal(sought), "the first of its share"


def test_draws_have_all_the_bits_of_float64():
    class Exactly:
        def find(self, fractions):
            return (fractions * 2**53).long()

    assert WeightedDraws(Exactly(), 1000, key=3)[:].equal(Permutation(2**53, 3)[:1000])


def test_weights_count_as_they_are_when_a_pass_begins():
    weights = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)
    order = WeightedOrder(WeightedRandomSampler(weights, 50), 0)
    first = order.draw(0)
    weights[:] = torch.tensor([0, 0, 1, 1])
    assert set(as_list(first)) == {0, 1}
    assert set(as_list(order.draw(0))) == {2, 3}
    weights[:] = torch.tensor([1, 1, 0, 0])
    assert as_list(order.draw(0)) == as_list(first) != as_list(order.draw(1))
    assert as_list(WeightedOrder(WeightedRandomSampler(weights, 50), 1).draw(0)) != as_list(first)


@pytest.mark.parametrize("weights", [[1.0, -1], [1, math.nan], [math.inf, 1], [0, 0], []])
def test_weights_that_say_nothing(weights):
    with pytest.raises(DataError, match=f"has {len(weights)} weights, from .* Make them finite"):
        WeightedOrder(WeightedRandomSampler(weights, 4), 0).draw(0)


def test_the_main_ranks_weights_count():
    mains, own = WeightedRandomSampler([1.0, 1, 0], 50), WeightedRandomSampler([0.0, 1, 1], 50)
    expected, sent, asked = as_list(WeightedOrder(mains, 0).draw(3)), [], []

    def run_on_main(function):
        asked.append(function())
        return mains.weights

    def gather(value):
        sent.append(value)
        return [sent[0], value]

    for sampler, count in ((mains, 0), (own, 1)):
        assert as_list(WeightedOrder(sampler, 0, gather, run_on_main).draw(3)) == expected
        assert len(asked) == count
    assert asked[0].equal(own.weights)


def test_samplers_that_draw_by_weight():
    upstreams = type("CustomWeightedRandomSampler", (NumpyWeighted,), {"__module__": "robomimic.utils.dataset"})
    assert draws_by_weight(WeightedRandomSampler([1.0], 1))
    assert not draws_by_weight(WeightedRandomSampler([1.0], 1, replacement=False))
    assert not draws_by_weight(NumpyWeighted([1.0], 1))
    assert not draws_by_weight(upstreams([1.0], 1)), "another __iter__ than robomimic's"
    assert not draws_by_weight(RandomSampler(range(3)))


def test_private_random_continues_and_leaves_no_trace():
    private, before = PrivateRandom(5), global_draws()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with private.swapped_in():
        first = global_draws()
    seen = []

    def draw_and_fail():
        with private.swapped_in():
            seen.append(global_draws())
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    second = seen[0]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    again = PrivateRandom(5)
    with again.swapped_in():
        assert (global_draws(), global_draws()) == (first, second)
    assert len({before, first, second}) == 3


class NumpyWeighted(WeightedRandomSampler):
    """As robomimic 0.5's CustomWeightedRandomSampler: from numpy's global generator."""

    def __iter__(self):
        p = self.weights.numpy() / torch.sum(self.weights).numpy()
        drawn = np.random.choice(len(self.weights), size=self.num_samples, p=p, replace=self.replacement)
        return iter(torch.from_numpy(drawn).tolist())


class PythonShuffled:
    def __len__(self):
        return 30

    def __iter__(self):
        return iter(random.sample(range(30), 30))


SEEDABLE = {
    "random": lambda: RandomSampler(range(30)),
    "own generator": lambda: RandomSampler(range(30), generator=torch.Generator().manual_seed(9)),
    "replacement": lambda: RandomSampler(range(30), replacement=True, num_samples=25),
    "weighted": lambda: WeightedRandomSampler([0.1] * 20 + [1.0] * 10, 40),
    "subset": lambda: SubsetRandomSampler([3, 5, 8, 13, 21, 2, 1, 0]),
    "numpy": lambda: NumpyWeighted(torch.rand(30, generator=torch.Generator().manual_seed(0)), 40),
    "python": PythonShuffled,
    "batches": lambda: BatchSampler(RandomSampler(range(30), generator=torch.Generator()), 4, True),
}


@pytest.mark.parametrize("name", SEEDABLE)
def test_a_draw_is_a_function_of_seed_and_epoch(name):
    sampler = SEEDABLE[name]()
    own = [layer.generator for layer in layers(sampler) if getattr(layer, "generator", None) is not None]
    global_draws()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    own_before = [generator.get_state().tolist() for generator in own]
    first = as_list(DrawnOrder(sampler, 0).draw(0))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert [generator.get_state().tolist() for generator in own] == own_before
    global_draws()
    assert as_list(DrawnOrder(SEEDABLE[name](), 0).draw(0)) == first
    assert as_list(DrawnOrder(sampler, 0).draw(0)) == first
    assert as_list(DrawnOrder(sampler, 0).draw(1)) != first
    assert as_list(DrawnOrder(sampler, 1).draw(0)) != first
    assert len(first) == len(sampler)


def test_draws_travel_as_tensors():
    sent = []

    def run_on_main(function, *args):
        sent.append(function(*args))
        return sent[-1]

    mixed = [1, np.int32(2), torch.tensor(3)]
    assert as_list(DrawnOrder(mixed, 0, run_on_main).draw(0)) == [1, 2, 3]
    assert DrawnOrder([[1, 2], [3]], 0, run_on_main).draw(0) == [[1, 2], [3]]
    assert DrawnOrder([[], [3]], 0, run_on_main).draw(0) == [[], [3]]
    assert DrawnOrder([("a", 1), "b"], 0, run_on_main).draw(0) == [("a", 1), "b"]
    assert [type(packed).__name__ for _, packed in sent] == ["Tensor", "tuple", "tuple", "list"]


def test_the_samplers_epoch_is_set_also_inside_a_batch_sampler():
    class Epochs:
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 4

        def __iter__(self):
            return iter(range(self.epoch, self.epoch + 4))

    assert DrawnOrder(BatchSampler(Epochs(), 2, True), 0).draw(5) == [[5, 6], [7, 8]]


class Sized:
    def __init__(self, length, indices):
        self.length, self.indices = length, indices

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.indices)


def test_a_draw_is_as_long_as_the_sampler_says():
    assert as_list(DrawnOrder(Sized(3, iter(int, 1)), 0).draw(0)) == [0, 0, 0]
    with pytest.raises(DataError, match="gave 2 indices in epoch 4 where its __len__ says 3"):
        DrawnOrder(Sized(3, [1, 2]), 0).draw(4)
    with pytest.raises(DataError, match="generator has no __len__; ranks could not agree"):
        DrawnOrder((index for index in range(3)), 0)


def test_sampler_gives_a_pass_as_often_as_it_is_asked():
    sampler = ShardedSampler(ShuffledOrder(12, seed=0), Split(4, 0, 2, True))
    assert list(sampler) == list(sampler)
    assert list(ShardedBatchSampler(sampler)) == [list(sampler)[i : i + 2] for i in (0, 2, 4)]
    assert (len(sampler), len(ShardedBatchSampler(sampler)), sampler.epoch) == (6, 3, 0)
    ShardedBatchSampler(sampler).set_epoch(4)
    assert sampler.epoch == 4


def test_an_iterator_keeps_the_pass_it_was_made_for():
    sampler = ShardedSampler(ShuffledOrder(12, seed=0), Split(4, 0, 2, True))
    sampler.begin(0)
    early, expected = iter(sampler), list(sampler)
    sampler.begin(1)
    assert list(early) == expected != list(sampler)


def test_batch_sampler_shares():
    batches = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]]
    shares = [SplitBatchSampler(DrawnOrder(batches, 0), rank, 2, EpochCounter()) for rank in range(2)]
    assert list(shares[0]) == [[0, 2], [4], [6, 8, 10]]
    assert list(shares[1]) == [[1, 3], [5], [7, 9, 11]]
    assert len(shares[0]) == 3
    odd = SplitBatchSampler(DrawnOrder([[0, 1], [2, 3, 4]], 0), 0, 2, EpochCounter())
    with pytest.raises(DataError, match=r"Batch 1 of the batch_sampler has 3 indices, .* over 2 ranks"):
        odd.begin(0)


def test_sequential_order_costs_nothing():
    order = SequentialOrder(10**12)
    assert Split(8, 1, 2, True).take(order.draw(0), 10**11) == [8 * 10**11 + i for i in (1, 3, 5, 7)]
