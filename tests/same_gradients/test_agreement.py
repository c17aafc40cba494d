"""What ranks must share is compared when it matters: what differs is an error or a line, at once."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim
from ddpshim.model import guard
from ddpshim.process.job import current
from tests.ranks import errors_of, run_ranks

NUM_STEPS = 24  # of three epochs
Act = Callable[["_Run"], None]


class _Run:
    """A training of three epochs; on rank 1 something happens before steps or after them."""

    def __init__(
        self,
        before: Optional[dict[int, Act]] = None,
        after: Optional[dict[int, Act]] = None,
        **rates: Any,
    ) -> None:
        with ddpshim.shared_random_streams(3):
            self.net = ddpshim.wrap_parallel(nn.Linear(5, 3))
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


def _cross_collectives() -> None:
    here = ddpshim.world()
    here.barrier() if here.is_main else here.broadcast(1)  # type: ignore[func-returns-value]


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
    (partial(_Run, {4: _skip_step}), f"after 10 backward passes {WEIGHTS}"),
    (partial(_Run, {4: _write_in_place}), "after 10 backward passes of Linear ranks hold different weights"),
    (partial(_Run, {12: _set_rate}), rf"{AT_THE_END}: parameter 'weight' of network 0 .* more differ"),
    (partial(_Run, after={20: _lose_state}), rf"{AT_THE_END}: parameter 'weight' of network 0 \(Linear\) sums to"),
    (partial(_Run, after={4: _add_to_weights}), f"after 10 backward passes {WEIGHTS}"),
    (partial(_Run, after={NUM_STEPS - 1: _add_to_weights}), f"{AT_THE_END}: parameter 'weight' of network 0"),
    (
        partial(_Run, after={NUM_STEPS - 1: _move_average}),
        r"at the end of the job .*: parameter 'weight' of network 0 of those that are not trained \(Linear\) sums",
    ),
    (_decay_otherwise, "^SyncError: after .* weight_decay of group 0 of AdamW 0 is 0.0 on rank 0, 0.1 on rank 1"),
    (
        _cross_collectives,
        "different collectives: rank 0 in barrier at .*:[0-9]+; rank 1 in broadcast from rank 0 at .*:[0-9]+",
    ),
    (_Run, "^$"),
    (_do_what_is_alike, "^$"),
]


@pytest.mark.ranks
def test_what_differs_is_told_when_it_matters() -> None:
    for said in run_ranks(errors_of, 2, [act for act, _ in CASES]):
        for (act, text), told in zip(CASES, said):
            assert re.search(text, told), (act, told)
