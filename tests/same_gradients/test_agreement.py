"""What ranks must share is compared when it matters: what differs is an error or a line, at once."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import re
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import ddpshim
from ddpshim.errors import DataError, SyncError
from ddpshim.model import guard, reducer
from ddpshim.process import devices
from ddpshim.process.job import current
from tests.ranks import errors_of, run_ranks

NUM_STEPS = 24  # of three epochs
Act = Callable[["_Run"], None]


class _Normalised(nn.Module):
    """Keeps a running mean of what it sees, which on a rank is its share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.noise = np.random.default_rng(0)
        self.net = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + 0.1 * x.mean(0)
        return self.net(x - self.mean + self.noise.random())


class _Run:
    """A training of three epochs; on rank 1 something happens before steps or after them."""

    def __init__(
        self,
        before: Optional[dict[int, Act]] = None,
        after: Optional[dict[int, Act]] = None,
        make: Callable[[], nn.Module] = partial(nn.Linear, 5, 3),
        **rates: Any,
    ) -> None:
        with ddpshim.shared_random_streams(3):
            self.net = ddpshim.wrap_parallel(make())
        self.average = ddpshim.watch(copy.deepcopy(self.net.module))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **{"lr": 0.1, **rates})
        data = TensorDataset(torch.randn(64, 5, generator=torch.Generator().manual_seed(0)))
        self.loader = ddpshim.make_loader(data, 8, shuffle=True)
        self.number, self.skips_step = 0, False
        is_odd = ddpshim.world().rank == 1
        for _ in range(3):
            self.batches = iter(self.loader)
            for (x,) in self.batches:
                self.optimizer.zero_grad()
                self.net(x).pow(2).mean().backward()
                if is_odd and before and self.number in before:
                    before[self.number](self)
                if not self.skips_step:
                    self.optimizer.step()
                self.skips_step = False
                if is_odd and after and self.number in after:
                    after[self.number](self)
                with torch.no_grad():
                    for mean, p in zip(self.average.parameters(), self.net.parameters()):
                        mean.lerp_(p, 0.1)
                self.number += 1


def _add_to_weights(run: _Run) -> None:
    run.net.weight.data.add_(1)


def _skip_batch(run: _Run) -> None:
    next(run.batches)


def _skip_step(run: _Run) -> None:
    run.skips_step = True


def _write_in_place(run: _Run) -> None:
    run.net.weight.grad.mul_(2)


def _set_rate(run: _Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 1.0


def _lose_state(run: _Run) -> None:
    run.optimizer.state[run.net.weight]["exp_avg_sq"].add_(1)


def _move_average(run: _Run) -> None:
    next(run.average.parameters()).data.add_(1)


def _decay_otherwise() -> None:
    _Run(weight_decay=0.1 * ddpshim.world().rank)


def _look_at_a_batch() -> None:
    data = TensorDataset(torch.randn(16, 5))
    loader, wrapped = ddpshim.make_loader(data, 4, shuffle=True), ddpshim.wrap_parallel(nn.Linear(5, 3))
    if ddpshim.world().is_main:
        next(iter(loader))
    wrapped(next(iter(loader))[0]).sum().backward()


def _cross_collectives() -> None:
    here = ddpshim.world()
    here.barrier() if here.is_main else here.broadcast(1)  # type: ignore[func-returns-value]


def _cross_networks() -> None:
    nets = [ddpshim.wrap_parallel(nn.Linear(2, 1)) for _ in range(2)]
    sum(net(torch.ones(1, 2)).sum() for net in nets).backward()
    for net in nets if ddpshim.world().is_main else reversed(nets):
        net(torch.ones(1, 2)).sum().backward()


def _do_what_is_alike() -> None:
    """Loops that look odd, and are alike on all ranks or no training."""
    here = ddpshim.world()
    data = TensorDataset(torch.randn(16, 5))
    net = ddpshim.wrap_parallel(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    train, other = (ddpshim.make_loader(data, 4, shuffle=True) for _ in range(2))
    for (x,), (y,) in zip(train, other):
        with torch.no_grad():
            for number, _ in enumerate(other):  # ranks may look at different parts of a validation set
                if number == here.rank:
                    break
        (net(x).sum() + net(y).sum()).backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1 + here.rank)  # after the step, for a log
    for _ in range(2):
        net(x).sum().backward()  # no batch of a loader: ranks are on their own
    optimizer.step()
    assert not current().part(guard.GuardState).companions


WEIGHTS = "of Linear ranks hold different weights or settings: parameter 'weight'"
AT_THE_END = "at the end of the job ranks hold different weights or settings"
# What happens, and what is said of it.
CASES: list[tuple[Callable[[], Any], str]] = [
    (
        partial(_Run, after={10: _skip_batch}),
        "rank 0: step 3 of epoch 1 of the loader of .*:[0-9]+ over 64 samples, after 11 .*rank 1: step 4 of epoch",
    ),
    (partial(_Run, {4: _skip_step}), "after 5 optimizer steps .* after 4 optimizer steps"),
    (partial(_Run, {4: _write_in_place}), "after 10 backward passes of Linear ranks hold different weights"),
    (partial(_Run, {12: _set_rate}), r"learning rate 0.1\), network 0; .*rank 1: .* learning rate 1.0"),
    (partial(_Run, after={20: _lose_state}), rf"{AT_THE_END}: parameter 'weight' of network 0 \(Linear\) sums to"),
    (partial(_Run, after={4: _add_to_weights}), f"after 10 backward passes {WEIGHTS}"),
    (partial(_Run, after={NUM_STEPS - 1: _add_to_weights}), f"{AT_THE_END}: parameter 'weight' of network 0"),
    (
        partial(_Run, after={NUM_STEPS - 1: _move_average}),
        r"at the end of the job .*: parameter 'weight' of network 0 of those that are not trained \(Linear\) sums",
    ),
    (_decay_otherwise, "^SyncError: after .* weight_decay of group 0 of AdamW 0 is 0.0 on rank 0, 0.1 on rank 1"),
    (_look_at_a_batch, "rank 0: step 0 of epoch 1 .*rank 1: step 0 of epoch 0 of the loader"),
    (
        _cross_collectives,
        "different collectives: rank 0 in barrier at .*:[0-9]+; rank 1 in broadcast from rank 0 at .*:[0-9]+",
    ),
    (_cross_networks, "steps or networks in.*rank 0: .*, network 0; rank 1: .*, network 1"),
    (_Run, "^$"),
    (_do_what_is_alike, "^$"),
]


@pytest.mark.ranks
def test_what_differs_is_told_when_it_matters() -> None:
    for said in run_ranks(errors_of, 2, [act for act, _ in CASES]):
        for (act, text), told in zip(CASES, said):
            assert re.search(text, told), (act, told)


def _draw(run: _Run) -> None:
    torch.rand(1), np.random.rand(1), random.random()


def _rank_draws_alone() -> tuple[list[float], str]:
    """Rank 1 draws once from each generator; what both draw in the end, and what was said."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        _Run(after={0: _draw}, make=_Normalised)
    return [float(torch.rand(1)), float(np.random.rand()), random.random()], said.getvalue()


@pytest.mark.ranks
def test_what_one_rank_draws_alone_is_taken_back() -> None:
    (first, said), (second, _) = run_ranks(_rank_draws_alone, 2)
    assert first == second
    assert said.count("after 2 backward passes ranks had drawn different random numbers") == 1
    assert said.count("the generator 'noise' of a _Normalised draws the same numbers on all ranks") == 1
    assert said.count("buffer 'mean' of a _Normalised is updated from each rank's own samples") == 1


# Data


class _Files:
    """A dataset of as many items as files, with random streams of its own."""

    def __init__(self, files: list[str]) -> None:
        self.files, self._random = files, np.random.default_rng(ddpshim.world().rank)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("nobody reads items yet")


class _Buffer:
    """A replay buffer, of which `make_loader` takes what it holds when a pass begins."""

    def __init__(self) -> None:
        self.num = 8

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5,), float(index))


def _rank_has_data() -> dict[str, Any]:
    here = ddpshim.world()
    names = [f"/data{here.rank}/demo_{number}.hdf5" for number in range(8)]
    shuffled = names[::-1] if here.rank else names
    numbers = torch.arange(8.0)
    cases: dict[str, Any] = {
        "a split": Subset(TensorDataset(numbers), [3, 1, 2, 5] if here.rank else [3, 1, 2, 4]),
        "files": _Files(shuffled),
        "values": TensorDataset(numbers + here.rank),
        "other folders": _Files(names),
    }
    said: dict[str, Any] = {}
    for name, data in cases.items():
        torch.manual_seed(0)
        try:
            ddpshim.make_loader(data, 4, shuffle=True)
            said[name] = ""
        except DataError as error:
            said[name] = str(error)
        assert float(torch.rand(())) == pytest.approx(0.4962566)  # what the seed gives first
    said["no guard"] = len(ddpshim.make_loader(cases["values"], 4, world=_unguarded()))
    return said


def _unguarded() -> Any:
    return replace(ddpshim.world(), options=ddpshim.Options(guard=False))


def _rank_has_a_buffer() -> list[Any]:
    here = ddpshim.world()
    net, buffer = ddpshim.wrap_parallel(nn.Linear(5, 3)), _Buffer()
    loader = ddpshim.make_loader(buffer, 4, shuffle=True)
    seen = []
    for _ in range(3):
        batches = list(loader)
        seen.append([len(loader), sorted(int(x[0]) for batch in here.gather(batches) for b in batch for x in b)])
        buffer.num += 4
    buffer.num += here.rank
    batch = next(iter(loader))
    try:
        net(batch).sum().backward()
    except SyncError as error:
        seen.append(str(error))
    return seen


@pytest.mark.ranks
def test_data_that_differ_are_an_error_before_training() -> None:
    for said in run_ranks(_rank_has_data, 2):
        assert said.pop("no guard") == 2
        named = {
            "a split": "order of the split dataset.indices",
            "files": "dataset.files",
            "values": "dataset.tensors",
        }
        assert all(f"Ranks 0 and 1 hold different data ({what})" in said.pop(name) for name, what in named.items())
        assert said == {"other folders": ""}


@pytest.mark.ranks
def test_a_buffer_that_grows_is_read_anew_in_each_pass() -> None:
    for *passes, text in run_ranks(_rank_has_a_buffer, 2):
        assert passes == [[n // 4, list(range(n))] for n in (8, 12, 16)]
        assert re.search("rank 0: .* over 20 samples.*rank 1: .* over 21 samples", text)


class _Unread:
    """Gradients on a GPU, which nobody may read."""


@pytest.mark.unit
def test_nothing_is_read_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert devices.is_capturing(torch.device("cuda", 0))
    assert not devices.is_capturing(torch.device("cpu"))
    monkeypatch.setattr(reducer, "new_group", lambda backend: None)
    of_network = reducer.Unused(2, torch.device("cuda", 0))
    of_network.tell(torch.empty(2), [])
    assert of_network.of_all(_Unread()) == []
