"""Random numbers: with whole batches those of a plain process without ddpshim; with shares each rank's own."""

from __future__ import annotations

import contextlib
import functools
import io
import random
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import ddpshim
from ddpshim import variables
from ddpshim.process.job import seed_everything
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
SEED, NUM_SAMPLES, BATCH = 3, 103, 24


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(6, 16), nn.Dropout(0.3)
        self.attends = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.remembers, self.last = nn.LSTM(16, 8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.first(x).relu())[:, None].expand(-1, 5, -1)
        hidden, _ = self.remembers(self.attends(hidden + 0.1 * torch.randn_like(hidden)))
        return self.last(hidden[:, -1])  # type: ignore[no-any-return]


def _clean() -> Any:
    x = torch.linspace(-1, 1, NUM_SAMPLES * 6, dtype=torch.float64).view(-1, 6)
    return TensorDataset(x, x[:, :2].sin(), torch.arange(NUM_SAMPLES))


class _Augmented(Dataset[Any]):
    """Adds noise from all global generators to samples."""

    def __init__(self) -> None:
        self._clean = _clean()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y, number = self._clean[index]
        return x + 0.1 * (random.random() + np.random.rand() + float(torch.randn(()))), y, number


def _mixed(samples: list[Any]) -> Any:
    """Collates, and mixes each sample with one that is drawn."""
    x, y, number = default_collate(samples)
    return 0.8 * x + 0.2 * x[torch.randperm(len(x))], y, number


class _Combined(Dataset[Any]):
    """Fetches whole batches, and gives a sample the target of the next one of its batch."""

    def __init__(self, noise: float = 0.0) -> None:
        self._clean, self._noise = _clean(), noise

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitems__(self, indices: list[int]) -> list[Any]:
        x, y, number = self._clean[torch.tensor(indices)]
        noise = self._noise * torch.randn(x.shape) if self._noise else 0.0
        return [*zip(x + noise, y.roll(1, 0), number)]


DATA: dict[str, Callable[[], Any]] = {
    **{"combined": _Combined, "combined by workers": lambda: _Combined(0.1)},
    "combined, in a subset": lambda: Subset(_Combined(0.1), range(5, 67)),
    **dict.fromkeys(("augmented", "augmented by workers"), _Augmented),
}


class _OneByOne:
    """A sampler of the user's own that draws as it goes."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(NUM_SAMPLES, ())) for _ in range(72))

    def __len__(self) -> int:
        return 72


class _AtOnce:
    """A batch sampler of the user's own that draws when it is asked for an iterator."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[*range(16 * i, 16 * i + 16)] for i in torch.randperm(6).tolist()])

    def __len__(self) -> int:
        return 6


FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}  # those of a rank of a test would start slowly
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled, the last batch is short": lambda: {"batch_size": BATCH, "shuffle": True},
    "in order": lambda: {"batch_size": BATCH},
    "a generator": lambda: {"batch_size": 40, "shuffle": True, "generator": torch.Generator().manual_seed(8)},
    "with replacement": lambda: {"batch_size": BATCH, "sampler": RandomSampler(range(NUM_SAMPLES), True, 96)},
    "weighted": lambda: {"batch_size": BATCH, "sampler": WeightedRandomSampler(list(range(1, NUM_SAMPLES + 1)), 96)},
    "subset": lambda: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(5, 100))},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(NUM_SAMPLES)), BATCH, True)},
    "of the user": lambda: {"batch_size": BATCH, "sampler": _OneByOne()},
    "drawn at once": lambda: {"batch_sampler": _AtOnce()},
    "drawn at once, for workers that stay": lambda: {"batch_sampler": _AtOnce(), **FORKED, "persistent_workers": True},
    "augmented": lambda: {"batch_size": BATCH, "shuffle": True},
    "augmented by workers": lambda: {"batch_size": 13, "shuffle": True, **FORKED, "persistent_workers": True},
    "drawn when collated": lambda: {"batch_size": BATCH, "shuffle": True, "collate_fn": _mixed},
    "combined": lambda: {"batch_size": 16, "shuffle": True},
    "combined, in a subset": lambda: {"batch_size": 15, "shuffle": True},
    "combined by workers": lambda: {"batch_size": 16, "shuffle": True, **FORKED},
}


def _train(kind: str) -> Any:
    """The weights, the samples of each step, the state of the generator and the losses after three epochs.

    The second one trains nothing; with workers it is the first one, by which workers that stay are seeded.
    """
    net: Any = _Net()
    loader: Any = torch.utils.data.DataLoader(DATA.get(kind, _clean)(), **KINDS[kind]())
    optimizer, samples, losses = torch.optim.Adam(net.parameters(), 1e-3), [], []
    for epoch in range(3):
        for x, y, index in loader:
            samples.append(index.tolist())
            if epoch == (0 if kind.endswith("by workers") else 1):
                with torch.no_grad():
                    losses.append(net(x).mean().item())
                continue
            timesteps = torch.randint(0, 100, (len(x),))
            noised = x + 0.1 * torch.randn(x.shape)
            kept = torch.multinomial(torch.rand(len(x), 5).add(0.1), 1)[:, 0]
            loss = ((net(noised) - y) ** 2).mean(1).mul(1 + timesteps / 100).mul(1 + 0.1 * kept).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return torch.cat([p.detach().flatten() for p in net.parameters()]), samples, torch.get_rng_state(), losses


@functools.cache
def _plain(kind: str) -> Any:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        seed_everything(SEED)
        return _train(kind)
    finally:
        torch.set_default_dtype(torch.float32)


def _rank_trains(kinds: list[str]) -> list[Any]:
    found = []
    for kind in kinds:
        ddpshim.cleanup()
        ddpshim.setup(batch="global", seed=SEED, device="cpu")
        torch.set_default_dtype(torch.float64)
        found.append(_train(kind))
    return found


def test_whole_batches_train_what_a_plain_process_trains() -> None:
    ranks = run_ranks(_rank_trains, 2, [*KINDS], timeout_s=240, environ={variables.ROWS: "all"})
    for kind, *of_ranks in zip(KINDS, *ranks):
        weights, samples, state, losses = _plain(kind)
        for own_weights, own_samples, own_state, own_losses in of_ranks:
            assert own_samples == samples, kind
            assert torch.equal(own_state, state), kind
            assert torch.allclose(own_weights, weights, rtol=0, atol=1e-11), kind
            assert torch.equal(own_weights, of_ranks[0][0]), kind
            assert own_losses == pytest.approx(losses, abs=1e-11), kind


# With shares, streams stay as the program seeds them.


def _hand_port(draws: str, splits: bool, seeds_by_rank: bool = False) -> Any:
    """Train by slices of a permutation: the samples of this rank, its noise, the weights, and what was printed."""
    here = ddpshim.world()
    x = torch.linspace(-1, 1, 96 * 4, dtype=torch.float64).view(96, 4)
    net = ddpshim.wrap_parallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    if splits:
        ddpshim.split_random_streams()
    if seeds_by_rank:
        torch.manual_seed(SEED + here.rank)
    batch = 12
    optimizer, samples, noises = torch.optim.SGD(net.parameters(), 0.1), [], []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for epoch in range(3):
            with ddpshim.shared_random_streams(epoch) if splits else contextlib.nullcontext():
                order = torch.randperm(96)
            for step in range(96 // batch):
                own = order[step * batch : (step + 1) * batch][here.rank :: here.world_size]
                samples.append(own.tolist())
                noise = torch.zeros(len(own), 4)
                if draws == "torch":
                    noise = torch.randn(len(own), 4)
                elif draws == "numpy":
                    noise = torch.tensor(np.random.randn(len(own), 4))
                noises.append(noise.tolist())
                optimizer.zero_grad()
                (net(x[own] + 0.1 * noise) - x[own].sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
        here.barrier()
    return samples, noises, torch.cat([p.detach().flatten() for p in net.parameters()]), said.getvalue()


def _cases() -> list[Any]:
    found = []
    for draws, splits in CASES:
        ddpshim.cleanup()
        ddpshim.setup(seed=SEED, device="cpu")
        found.append(_hand_port(draws, splits))
    return found


CASES = [(draws, splits) for draws in ("nothing", "torch", "numpy") for splits in (False, True)]


@pytest.fixture(scope="module")
def ported() -> dict[Any, Any]:
    """By number of ranks and case, what ranks returned."""
    return {size: dict(zip(CASES, zip(*run_ranks(_cases, size)))) for size in (1, 3)}


@pytest.mark.parametrize("case", CASES)
def test_a_permutation_that_ranks_slice_is_right(ported: dict[Any, Any], case: tuple[str, bool]) -> None:
    ranks, [alone] = ported[3][case], ported[1][case]
    together = [sorted(i for share in shares for i in share) for shares in zip(*(rank[0] for rank in ranks))]
    assert together == [sorted(batch) for batch in alone[0]] or case == ("torch", False)
    for epoch in range(3):
        assert sorted(i for batch in together[8 * epoch : 8 * epoch + 8] for i in batch) == [*range(96)]
    if case[0] == "nothing":  # a permutation alone is no noise
        assert [rank[3] for rank in ranks] == [""] * 3
    if case == ("nothing", False):
        assert all(torch.allclose(rank[2], alone[2], rtol=0, atol=1e-13) for rank in ranks)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "nothing"])
def test_equal_noise_is_said_once_and_split_streams_are_the_ranks_own(ported: dict[Any, Any], case: Any) -> None:
    ranks = ported[3][case]
    first, *others = ([noise for of_step in rank[1] for noise in of_step] for rank in ranks)
    assert [first == other for other in others] == [not case[1]] * 2
    line = f"ranks 0, 1, 2 use the same random numbers in each step ({case[0]}'s): equal noise and dropout masks"
    assert [rank[3].count(line) for rank in ranks] == [not case[1], 0, 0]
    assert "Call ddpshim.split_random_streams() once all networks are built" in ranks[0][3] or case[1]


def test_ranks_that_seed_by_rank_hear_nothing() -> None:
    ranks = run_ranks(_hand_port, 2, "torch", False, True)
    assert [said for *_, said in ranks] == ["", ""]
    assert ranks[0][1][0] != ranks[1][1][0]
