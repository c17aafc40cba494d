"""The order and the noise of one process (noise=one_process), against a plain process without ddpshim."""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import ddpshim
from ddpshim.errors import SyncError
from ddpshim.job import noise, shared_draws
from ddpshim.options import Options
from ddpshim.process.job import seed_everything
from ddpshim.robomimic.session import _Metrics
from tests.ranks import errors_of, own_rows, run_ranks

pytestmark = pytest.mark.ranks
SEED, NUM_SAMPLES, BATCH = 3, 103, 24


def _join(**options: Any) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a rank may have workers
    ddpshim.cleanup()
    return ddpshim.setup(seed=SEED, device="cpu", options=Options(**options))


# The draws.


@pytest.mark.unit
def test_one_row_on_a_rank_whose_place_in_memory_is_unknown_is_refused() -> None:
    share = noise.Share(rank=1, world_size=2, num_rows=1)
    assert shared_draws._template(share, torch.ones(1, 3, 4), 0).stride() == (12, 4, 1)
    assert shared_draws._template(share, torch.ones(3, 1, 4), 1).stride() == (8, 4, 1)
    with pytest.raises(SyncError, match=r'setup\(batch="global"\)'):
        shared_draws._template(share, torch.ones(3, 1, 4).transpose(0, 1), 0)


def _draws(num_rows: int, mine: slice) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What each way to draw gives for rows `mine` of a batch, and the state of the generator after it."""
    low_dim, heads = (
        torch.arange(24 * 5.0).view(24, 5)[mine] / 100,
        torch.linspace(0, 1, 24 * 64).view(24, 2, 4, 8)[mine],
    )
    wide = low_dim[:, None].expand(-1, 3, -1)
    draws: dict[str, Callable[[], torch.Tensor]] = {
        "randn": lambda: torch.randn(num_rows, 3),
        "randn of a size": lambda: torch.randn(size=(num_rows, 3), dtype=torch.float64),
        "rand": lambda: torch.rand((num_rows, 2)),
        "randint": lambda: torch.randint(0, 99, (num_rows,)),
        "randint of a size": lambda: torch.randint(99, size=(num_rows, 2)),
        "randn_like": lambda: torch.randn_like(low_dim),
        "randn_like of what is laid out otherwise": lambda: torch.randn_like(heads.permute(0, 2, 3, 1)),
        "rand_like of what was expanded": lambda: torch.rand_like(wide),
        "randint_like": lambda: torch.randint_like(low_dim, 99),
        "normal of tensors": lambda: torch.normal(low_dim, low_dim + 1),
        "normal of a mean": lambda: torch.normal(low_dim, 2.0),
        "normal of a deviation": lambda: torch.normal(2.0, low_dim + 1),
        "normal of numbers": lambda: torch.normal(1.0, 2.0, (num_rows, 3)),
        "normal_": lambda: low_dim.clone().normal_(1, 2),
        "uniform_": lambda: low_dim.clone().uniform_(1, 2),
        "exponential_": lambda: low_dim.clone().exponential_(),
        "random_": lambda: torch.empty(num_rows, dtype=torch.int64).random_(9),
        "bernoulli_": lambda: low_dim.clone().bernoulli_(0.3),
        "bernoulli_ of tensors": lambda: low_dim.clone().bernoulli_(low_dim.clamp(0, 1)),
        "bernoulli": lambda: torch.bernoulli(low_dim.clamp(0, 1)),
        "multinomial": lambda: torch.multinomial(low_dim + 0.1, 1),
        "multinomial with replacement": lambda: (low_dim + 0.1).multinomial(3, replacement=True),
        "dropout": lambda: F.dropout(low_dim + 1),
        "dropout in place": lambda: F.dropout(low_dim + 1, 0.3, True, True),
        "dropout2d": lambda: F.dropout2d(heads + 1, 0.5),
        "alpha_dropout": lambda: F.alpha_dropout(low_dim + 1, 0.5, True),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3),
        "an LSTM with dropout": lambda: _recur(nn.LSTM, heads.flatten(2)),
        "a GRU with dropout": lambda: _recur(nn.GRU, heads.flatten(2)),
        "gumbel_softmax": lambda: F.gumbel_softmax(low_dim),
        "Normal": lambda: torch.distributions.Normal(low_dim, 1.0).rsample(),
        "Categorical": lambda: torch.distributions.Categorical(low_dim + 0.1).sample(),
        "Bernoulli": lambda: torch.distributions.Bernoulli(low_dim.clamp(0, 1)).sample(),
        "Laplace": lambda: torch.distributions.Laplace(low_dim, 1.0).rsample(),
        "Beta, one for all samples": lambda: torch.distributions.Beta(1.5, 1.0).sample((num_rows,)),
        "Gamma, one for all samples": lambda: torch.distributions.Gamma(2.0, 1.0).rsample((num_rows, 2)),
        "a sequence before the batch": lambda: _attend(low_dim),
        "numpy": lambda: torch.tensor(np.random.normal(1.0, 2.0, size=(num_rows, 3))),
        "numpy's randn": lambda: torch.tensor(np.random.randn(num_rows, 2)),
        "numpy's choice": lambda: torch.tensor(np.random.choice(9, num_rows)),
        "three rows of each sample": lambda: torch.randn(3 * num_rows, 4),
        "the batch second": lambda: torch.randn(7, num_rows).t(),
        "what no batch is in": lambda: torch.randn(7) + torch.randn(()) + torch.randn(3, 5).sum(),
        "evaluation": lambda: F.dropout2d(F.dropout(heads, 0.5, False), 0.5, False),
    }
    out = {}
    for name, draw in draws.items():
        torch.manual_seed(1)
        np.random.seed(1)
        drawn = draw()
        out[name] = drawn, torch.cat([torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))])
    return out


def _attend(x: torch.Tensor) -> torch.Tensor:
    """Drops units as layers do that have attended, where the batch comes second and its size divides the first."""
    with torch.random.fork_rng(devices=[]):
        attends = nn.MultiheadAttention(5, 1)
    sequence = x.expand(24, -1, -1)
    attends(sequence, sequence, sequence)
    return F.dropout(torch.ones_like(sequence)).transpose(0, 1)


def _recur(kind: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = kind(32, 4, 2, dropout=0.5, batch_first=True)
    output, after = net(x)
    after = after[0] if isinstance(after, tuple) else after
    return torch.cat([output.flatten(1), after.transpose(0, 1).flatten(1)], 1).detach()


def _rank_draws(num_rows: int) -> Any:
    here = _join()
    noise.share()
    num = num_rows // here.world_size
    noise.begin_batch(num)
    drawn = _draws(num, slice(here.rank * num, (here.rank + 1) * num))
    noise.end_batch()
    torch.manual_seed(1)
    return drawn, torch.randn(num_rows // here.world_size)


def test_each_rank_draws_its_rows_of_what_one_process_draws() -> None:
    plain = _draws(24, slice(None))
    for rank, (drawn, between_batches) in enumerate(run_ranks(_rank_draws, 3, 24)):
        for name, (whole, state) in plain.items():
            own = whole if name == "what no batch is in" else own_rows(whole, rank, 3)
            assert torch.equal(drawn[name][0], own), name
            assert torch.equal(drawn[name][1], state), name
        torch.manual_seed(1)
        assert torch.equal(between_batches, torch.randn(8))


# Whole trainings, in float64: what is left is rounding.


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
    """Adds noise from all global generators to samples, or to those that `draws` names."""

    def __init__(self, draws: Callable[[int], bool] = lambda index: True) -> None:
        self._clean, self._draws = _clean(), draws

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y, number = self._clean[index]
        if self._draws(index):
            x = x + 0.1 * (random.random() + np.random.rand() + float(torch.randn(())))
        return x, y, number


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


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


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
    "shuffled": lambda: {"batch_size": BATCH, "shuffle": True},
    "in order": lambda: {"batch_size": BATCH},
    "the last batch is short": lambda: {
        "batch_size": 40,
        "sampler": SubsetRandomSampler(range(94)),
        "drop_last": False,
    },
    "a generator": lambda: {"batch_size": BATCH, "shuffle": True, "generator": _generator()},
    "with replacement": lambda: {"batch_size": BATCH, "sampler": RandomSampler(range(NUM_SAMPLES), True, 96)},
    "weighted": lambda: {"batch_size": BATCH, "sampler": WeightedRandomSampler(list(range(1, NUM_SAMPLES + 1)), 96)},
    "subset": lambda: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(5, 100))},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(NUM_SAMPLES)), BATCH, True)},
    "of the user": lambda: {"batch_size": BATCH, "sampler": _OneByOne()},
    "drawn at once": lambda: {"batch_sampler": _AtOnce()},
    "drawn at once, for workers that stay": lambda: {"batch_sampler": _AtOnce(), **FORKED, "persistent_workers": True},
    "workers that stay": lambda: {"batch_size": BATCH, "shuffle": True, **FORKED, "persistent_workers": True},
    "augmented": lambda: {"batch_size": BATCH, "shuffle": True},
    "augmented by workers": lambda: {"batch_size": 12, "shuffle": True, **FORKED},
    "drawn when collated": lambda: {"batch_size": BATCH, "shuffle": True, "collate_fn": _mixed},
    "combined": lambda: {"batch_size": 16, "shuffle": True},
    "combined, in a subset": lambda: {"batch_size": 15, "shuffle": True},
    "combined by workers": lambda: {"batch_size": 16, "shuffle": True, **FORKED},
}


def _train(
    make: Callable[..., Any], wrap: Callable[[nn.Module], Any], kind: str, between: Callable[[], Any] = lambda: None
) -> Any:
    """The weights, the samples of each step, the state of the generator and the losses after three epochs."""
    net = wrap(_Net())
    data = DATA.get(kind, _clean)()
    loader = make(data, **{"drop_last": "batch_sampler" not in KINDS[kind](), **KINDS[kind]()})
    optimizer, samples, losses = torch.optim.Adam(net.parameters(), 1e-3), [], []
    for _ in range(3):
        for x, y, index in loader:
            samples.append(index.tolist())
            losses.append(_step(net, optimizer, x, y))
        between()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), samples, torch.get_rng_state(), losses


def _step(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    timesteps = torch.randint(0, 100, (len(x),))
    noised = x + 0.1 * torch.randn(x.shape)
    kept = torch.multinomial(torch.rand(len(x), 5).add(0.1), 1)[:, 0]
    loss = ((net(noised) - y) ** 2).mean(1).mul(1 + timesteps / 100).mul(1 + 0.1 * kept).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@functools.cache
def _plain(kind: str) -> Any:
    return _in_one_process(_train, kind)


def _in_one_process(train: Callable[..., Any], *arguments: Any) -> Any:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        seed_everything(SEED)
        return train(DataLoader, lambda net: net, *arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def _rank_trains(kinds: list[str], draws_between: bool = False) -> list[Any]:
    found = []
    for kind in kinds:
        here = _join()
        torch.set_default_dtype(torch.float64)
        between = (lambda: torch.randn(5)) if draws_between and here.is_main else (lambda: None)
        found.append(_train(ddpshim.make_loader, ddpshim.wrap_parallel, kind, between))
    return found


def _check_equal(plain: Any, ranks: Sequence[Any], kind: str) -> None:
    weights, samples, state, losses = plain
    for rank, (own_weights, own_samples, own_state, _) in enumerate(ranks):
        assert own_samples == [own_rows(batch, rank, len(ranks)) for batch in samples], kind
        assert torch.equal(own_state, state), kind
        assert torch.allclose(own_weights, weights, rtol=0, atol=1e-11), kind
        assert torch.equal(own_weights, ranks[0][0]), kind
    means = [sum(of_step) / len(of_step) for of_step in zip(*(own[3] for own in ranks))]
    assert means == pytest.approx(losses, abs=1e-11), kind


def _train_on_two(make: Callable[..., Any], wrap: Callable[[nn.Module], Any]) -> Any:
    """As `_train`, with samples of two loaders in each step, of which one has twice the other's."""
    net = wrap(_Net())
    loaders = [make(_clean(), batch_size=size, shuffle=True, drop_last=True) for size in (BATCH, BATCH // 2)]
    optimizer, samples, losses = torch.optim.Adam(net.parameters(), 1e-3), [], []
    for _ in range(2):
        for (x, y, index), (other, _, its) in zip(*loaders):
            noised = [part + 0.1 * torch.randn(len(part), 6) for part in (x, other)]
            samples += [index.tolist(), its.tolist()]
            loss = (net(noised[0]) - y).square().mean() + net(noised[1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return torch.cat([p.detach().flatten() for p in net.parameters()]), samples, torch.get_rng_state(), losses


def _rank_trains_on_two() -> Any:
    _join()
    torch.set_default_dtype(torch.float64)
    return _train_on_two(ddpshim.make_loader, ddpshim.wrap_parallel)


def test_a_step_on_the_samples_of_two_loaders() -> None:
    _check_equal(_in_one_process(_train_on_two), run_ranks(_rank_trains_on_two, 2), "two loaders")


ON_THREE = ["shuffled", "combined, in a subset", "augmented by workers"]
ON_TWO = [kind for kind in KINDS if kind not in ("combined, in a subset", "of the user")]
OF_ONE = [kind for kind in ON_TWO if not ("worker" in kind or kind in DATA or kind == "drawn when collated")]


@pytest.mark.parametrize(("size", "kinds"), [(1, OF_ONE), (2, ON_TWO), (3, ON_THREE)])
def test_ranks_train_what_a_plain_process_trains(size: int, kinds: list[str]) -> None:
    for kind, *ranks in zip(kinds, *run_ranks(_rank_trains, size, kinds, timeout_s=120)):
        _check_equal(_plain(kind), ranks, kind)


def test_a_sampler_of_the_user_draws_alike_on_the_ranks() -> None:
    kind = "of the user"
    ((one,),), ranks = (run_ranks(_rank_trains, size, [kind]) for size in (1, 2))
    _check_equal(one, [own for (own,) in ranks], kind)
    steps = [[i for share in shares for i in share] for shares in zip(*(own[1] for (own,) in ranks))]
    assert steps[0] == _plain(kind)[1][0]
    assert {len(step) for step in steps} == {BATCH}


def test_what_the_main_rank_alone_drew_counts_from_the_next_pass_on() -> None:
    _, samples, _, _ = _in_one_process(_train, "shuffled", lambda: torch.randn(5))
    for rank, ((_, own, _, _),) in enumerate(run_ranks(_rank_trains, 2, ["shuffled"], True)):
        assert own == [own_rows(batch, rank, 2) for batch in samples]


# Going on after an interruption.


def _rank_goes_on(folder: Path, until: Optional[int], kind: str) -> Any:
    """Train three epochs, or leave as `until` steps were made; what is in `folder` is gone on with."""
    here = _join(checkpoint_every_s=None, background_save=False)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    net = ddpshim.wrap_parallel(_Net())
    optimizer, samples, num_made = torch.optim.Adam(net.parameters(), 1e-3), [], 0
    loader = ddpshim.make_loader(DATA.get(kind, _clean)(), **KINDS[kind]())
    training = ddpshim.Resumable(folder, {"net": net, "optimizer": optimizer})
    training.restore()
    for epoch in range(training.epoch, 3):
        for x, y, index in training.steps(loader, epoch):
            samples.append(index.tolist())
            _step(net, optimizer, x, y)
            num_made += 1
            if num_made == until and num_made % len(loader):
                training.step += 1
                break
        if num_made == until:
            training.save()
            here.barrier()
            return samples
    return torch.cat([p.detach().flatten() for p in net.parameters()]), samples, torch.get_rng_state()


@pytest.mark.parametrize(
    ("kind", "until"), [("shuffled", 2), ("shuffled", 4), ("a generator", 7), ("augmented by workers", 10)]
)
def test_left_in_an_epoch_it_goes_on_with_the_order_and_the_noise_on_other_ranks(
    kind: str, until: int, tmp_path: Path
) -> None:
    weights, samples, state, _ = _plain(kind)
    before = run_ranks(_rank_goes_on, 2, tmp_path, until, kind)
    after = run_ranks(_rank_goes_on, 3, tmp_path, None, kind)
    assert before == [[own_rows(batch, rank, 2) for batch in samples[:until]] for rank in range(2)]
    for rank, (own_weights, own, own_state) in enumerate(after):
        assert own == [own_rows(batch, rank, 3) for batch in samples[until:]]
        assert torch.allclose(own_weights, weights, rtol=0, atol=1e-11)
        assert torch.equal(own_state, state)


# What goes wrong is said.


def _draw_from_another_state() -> None:
    here, generator = _join(), _generator()
    torch.rand(here.rank, generator=generator)
    ddpshim.make_loader(_clean(), BATCH, shuffle=True, generator=generator)


def _rank_steps_later() -> Any:
    here = _join()
    net = ddpshim.wrap_parallel(nn.Linear(6, 1))
    loader = ddpshim.make_loader(_clean(), BATCH, shuffle=True)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        (x, _, _), *_ = list(loader)  # all batches first, then the steps
        before = torch.randn(4)
        for _ in range(2):
            net(x.float()).sum().backward()
    return before, torch.randn(4), here.gather(torch.initial_seed()), said.getvalue()


def test_ranks_that_train_on_batches_of_their_own_draw_their_own_noise_and_say_so() -> None:
    (before, after, seeds, said), (other_before, other_after, _, nothing) = run_ranks(_rank_steps_later, 2)
    assert torch.equal(before, other_before)
    assert not torch.equal(after, other_after)
    assert seeds[0] == SEED != seeds[1]
    assert said.count("Linear is trained on batches that are not the current batch of make_loader") == 1
    assert "if every rank reads the whole data set, the global batch is 2 times as large" in said
    assert nothing == ""


def _rank_reads_everything(own: bool, **how: Any) -> None:
    here = _join()
    net = ddpshim.wrap_parallel(nn.Linear(6, 1))
    data = TensorDataset(torch.randn(12, 6) + (here.rank if own else 0))
    for (x,) in DataLoader(data, 4, **how):
        net(x).sum().backward()


def test_ranks_that_all_train_on_the_same_batches_are_refused() -> None:
    ways: list[dict[str, Any]] = [{"shuffle": True}, {}, {"shuffle": True, **FORKED}]
    cases = [functools.partial(_rank_reads_everything, own, **how) for own in (False, True) for how in ways]
    for said in run_ranks(errors_of, 3, cases):
        assert said[3:] == ["", "", ""], "ranks with data of their own"
        for refused in said[:3]:
            assert re.search(r"all ranks train Linear on the same batch \(loss .*make_loader", refused)


def _draw_late(**how: Any) -> None:
    _join()
    for _ in ddpshim.make_loader(_Augmented(lambda index: index == 57), BATCH, **how):
        pass


def test_generators_in_other_states_and_a_first_draw_in_the_middle_of_a_pass_are_refused() -> None:
    cases = [_draw_from_another_state, _draw_late, functools.partial(_draw_late, **FORKED)]
    (of_state, *late), (same, *nothing) = run_ranks(errors_of, 2, cases)
    assert "state of the generator" in of_state == same
    assert nothing == ["", ""]  # sample 57 is rank 0's
    for said in late:
        assert re.search(r"a sample of _Augmented draws random numbers, .* Draw for each sample", said)


OWN_NOISE = ["already_sharded", "per_rank"]


def _rank_draws_its_own() -> list[Any]:
    found = []
    for how in OWN_NOISE:
        _join(noise="per_rank" if how == "per_rank" else "one_process")
        loader: Any = ()
        if how == "already_sharded":
            ddpshim.make_loader(_clean(), 4, already_sharded=True)
        else:
            loader = ddpshim.make_loader(_clean(), BATCH, shuffle=True)
        built = torch.rand(())
        ddpshim.wrap_parallel(nn.Linear(2, 1))
        own = torch.rand(())
        with ddpshim.shared_random_streams(1):
            shared = torch.rand(())
            ddpshim.wrap_parallel(nn.Linear(2, 1))
        read = {i for _, _, index in loader for i in index.tolist()}
        found.append(([built, shared, *torch.rand(2)], own, read))
    return found


def test_ranks_with_shares_or_noise_of_their_own_draw_it_once_networks_are_built() -> None:
    for how, *ranks in zip(OWN_NOISE, *run_ranks(_rank_draws_its_own, 4)):
        drawn, own, read = zip(*ranks)
        assert [len({number.item() for number in numbers}) for numbers in (*zip(*drawn), own)] == [1, 1, 4, 4, 4], how
        assert sum(map(len, read)) == len(set().union(*read)) == (96 if how == "per_rank" else 0)


def _rank_names_lines() -> Any:
    _join()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        drawn = _names_lines()
    return *drawn, said.getvalue()


def _names_lines() -> list[float]:
    noise.share()
    noise.begin_batch(4)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3)] * 4)
    nn.LSTM(3, 4, 2, dropout=0.5)(packed)
    drawn = torch.poisson(torch.full((4,), 1e5))
    torch.distributions.Gamma(torch.ones(4), 1.0).sample()
    torch.randperm(4)
    F.rrelu(torch.ones(4), training=True)
    F.rrelu(torch.ones(4))
    large = [torch.randn(30, 31).sum() for _ in range(2)]
    return [*drawn.long().tolist(), *torch.stack(large).tolist(), int(torch.randint(10**9, ()))]


def test_what_cannot_be_drawn_as_in_one_process_is_named() -> None:
    (*first, state, said), (*second, other_state, nothing) = run_ranks(_rank_names_lines, 2)
    assert len({*first, *second}) == 12
    assert state == other_state
    assert nothing == ""
    for text in (
        "between RNN layers",
        "by torch.poisson",
        "by Gamma.rsample",
        "by functional.rrelu",
        "permutes the batch",
        "draws 30 x 31 numbers, but no dimension is the batch (4);",
    ):
        assert said.count(text) == 1


def _rank_augments() -> list[str]:
    """What is said in a pass over some datasets."""
    found = []
    for data in (_Augmented(), _Augmented(lambda index: index % 10 == 3), Subset(_Augmented(), range(NUM_SAMPLES))):
        _join()
        loader = ddpshim.make_loader(data, 20, shuffle=True)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            list(loader)
        found.append(said.getvalue())
    return found


def test_that_each_rank_loads_whole_batches_is_said() -> None:
    for found, num in zip(run_ranks(_rank_augments, 2), (1, 0)):
        for said in found:
            assert said.count("_Augmented draws random numbers for a sample: to draw what one process draws") == num


# Logged numbers.


def _rank_logs(steps: list[list[float]]) -> dict[str, float]:
    here, metrics = _join(), _Metrics({})
    for numbers in steps:
        own = torch.tensor(numbers, dtype=torch.float64)[here.rank :: here.world_size]
        of_step = {"adv/mean": own.mean(), "adv/max": own.max(), "adv/min": own.min(), "adv/std": own.std()}
        metrics.take({**of_step, "std": own.std(), "loss": own.mean()})
    whole = metrics.of_whole_batches(len(steps[0]) // here.world_size)
    logged = {key: sum(values) / len(values) for key, values in whole.items()}
    of_steps = metrics.joined(len(steps[0]) // here.world_size)["loss"]
    return {**logged, "loss": sum(of_steps) / len(of_steps)}


def test_extremes_and_deviations_are_those_of_the_whole_batch() -> None:
    steps = torch.randn(3, 12, dtype=torch.float64)
    of_steps = {"adv/max": steps.amax(1), "adv/min": steps.amin(1), "adv/std": steps.std(1), "loss": steps.mean(1)}
    expected = {key: pytest.approx(float(values.mean()), abs=1e-15) for key, values in of_steps.items()}
    for logged in run_ranks(_rank_logs, 3, steps.tolist()):
        assert logged == expected, "a deviation without its mean is averaged, as all else is"
