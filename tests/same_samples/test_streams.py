"""Seeds derived from one another, and draws that leave the process's own random states alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ddpshim.process.job import derive_seed, seed_everything
from ddpshim.process.random_streams import seed_own_streams, shared_random_streams


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def _draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_derived_seeds_are_the_same_on_every_machine_differ_and_fit() -> None:
    assert derive_seed(0) == 4761921975702974394
    assert derive_seed(1, "rank", 3) == 2483789335798615982
    seeds = [derive_seed(seed, "rank", rank) for seed in range(50) for rank in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_seed_everything() -> None:
    seed_everything(7)
    drawn = _draw()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert drawn == _draw()


def test_a_rank_that_gets_its_own_stream_inside_a_shared_one_has_it_afterwards() -> None:
    seed_own_streams(3)
    own = _draw()
    with shared_random_streams(7):
        alike = _draw()
    with shared_random_streams(7):
        with shared_random_streams(-8):
            seed_own_streams(3)
        assert _draw() == alike
    assert _draw() == own
    left = _states()
    with pytest.raises(KeyError), shared_random_streams(2**63 - 1):
        raise KeyError(_draw())
    assert _states() == left
