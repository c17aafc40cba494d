"""The order of torch's sampler without its list, epochs, and global random states that a private one leaves alone."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from ddpshim.data.epochs import EpochCounter
from ddpshim.data.torchs_order import _Permuted, _without_lists
from ddpshim.process.random_streams import PrivateRandom


def global_draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(("size", "num_samples"), [(10, None), (10, 3), (10, 20), (10, 25), (1, None), (70_000, None)])
def test_a_permutation_is_torchs(size, num_samples, is_given):
    runs = []
    for change in (lambda sampler: sampler, _without_lists):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4) if is_given else None
        sampler = RandomSampler(range(size), num_samples=num_samples, generator=generator)
        passes = [list(change(BatchSampler(sampler, 4, drop_last))) for drop_last in (False, True, False)]
        after = [one.get_state().tolist() for one in (torch.default_generator, generator) if one is not None]
        runs.append((passes, list(change(sampler)), after))
    assert runs[0] == runs[1]
    assert runs[0][0][0] != runs[0][0][2] or size == 1


def test_other_samplers_stay():
    for sampler in (RandomSampler(range(9), True), SequentialSampler(range(9)), WeightedRandomSampler([1.0, 2.0], 5)):
        assert _without_lists(sampler) is sampler
    assert type(_without_lists(RandomSampler(range(9)))) is _Permuted


def test_epochs_advance_and_can_be_set():
    epochs = EpochCounter()
    assert (epochs.current, epochs.advance(), epochs.advance()) == (0, 0, 1)
    epochs.set(7)
    assert (epochs.current, epochs.advance(), epochs.advance()) == (7, 7, 8)
    epochs.set(np.int64(8))
    assert epochs.advance() == 8


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
