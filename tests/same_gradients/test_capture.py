"""Captured calls of networks: what is refused, what is proven, and that ranks need not agree on it.

tests/one_process/changing.py has programs that change something between two calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Callable, NamedTuple, Optional
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

import ddpshim
from ddpshim.process.job import current
from ddpshim.rows import calls, capture, tape
from ddpshim.rows.tensor import Counts, divided
from tests.one_process.parts import below
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Join(nn.Module):
    def forward(self, pair: Any) -> Any:
        return torch.cat(pair, 1)


class Net(nn.Module):
    def __init__(self, inside: Optional[Callable[[Net, Tensor], Any]] = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.inside, self.kept = inside, None
        self.total = torch.zeros(8)
        self.queries, self.attend = nn.Parameter(torch.randn(1, 3, 8)), nn.MultiheadAttention(8, 2, 0.1)
        self.join = Join()

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.norm(self.first(x))) * 2 + 1
        return self.last(y if self.inside is None else self.inside(self, y))


def _gathers(net: Net, y: Tensor) -> Tensor:
    return y - y.mean(0)


def _reads(net: Net, y: Tensor) -> Tensor:
    return y if float(y.detach().sum()) > 0 else -y


def _keeps(net: Net, y: Tensor) -> Tensor:
    before, net.kept = net.kept, y.detach()
    return y if before is None else y + before


def _without_rule(net: Net, y: Tensor) -> Tensor:
    return y + torch.trapezoid(y.detach())[:, None]


def _by_generator(net: Net, y: Tensor) -> Tensor:
    return y + torch.rand(8, generator=torch.Generator().manual_seed(1))


def _counts(net: Net, y: Tensor) -> Tensor:
    net.kept = (net.kept or 0) + 1
    return y * net.kept


def _notes_usage(net: Net, y: Tensor) -> Tensor:
    torch._C._log_api_usage_once("ddpshim.tests")
    return y


def _asserts(net: Net, y: Tensor) -> Tensor:
    below(net.total, 1)
    return y


def _asserts_rows(net: Net, y: Tensor) -> Tensor:
    return below(y, 1e9)


def _decodes(net: Net, y: Tensor) -> Tensor:
    queries = net.queries.expand(len(y), -1, -1).transpose(0, 1)  # a tensor of its own, which has as many rows
    seen, _ = net.attend(queries, y[None], value=y[None])
    return y + seen.mean(0) + net.attend(queries, queries, queries)[0].sum(0)


def _joins(net: Net, y: Tensor) -> Any:
    return net.join([torch.ones(7, 2), y])[:, 2:]


@functools.cache
def _features(width: int) -> Tensor:
    return torch.randn(width)


def _draws_once(net: Net, y: Tensor) -> Tensor:
    return y + _features(8)


def _environment(net: Net, y: Tensor) -> Tensor:
    return y * float(os.environ.get("A_GAIN", "1"))


def _makes_what_is_missing(net: Net, y: Tensor) -> Tensor:
    try:
        before: Any = net.made
    except AttributeError:
        before = torch.zeros(8)
    return y + before


class _Gain:
    value = 2.0

    def scaled(self, y: Tensor) -> Tensor:
        return y * self.value


_HIDDEN = [[_Gain()]]


def _by_a_hidden_object(net: Net, y: Tensor) -> Tensor:
    return _HIDDEN[0][0].scaled(y)


def test_captures_are_supported_from_torch_2_8_on() -> None:
    assert capture.is_supported() == (Version(torch.__version__).release >= (2, 8))


CAPTURED = (None, _notes_usage, _asserts, _decodes)
REFUSED: dict[Any, str] = {
    **dict.fromkeys(CAPTURED, ""),
    _asserts_rows: "it gathers a tensor",
    _joins: "a module inside shards a tensor of its own",
    _gathers: "it gathers a tensor",
    _reads: "",  # in Dynamo's words
    _keeps: "",
    _without_rule: "it gathers a tensor",
    _by_generator: "",
    _counts: "its Python differs from call to call",
    _draws_once: "a function caches its results",
    _environment: "_environment reads environ, of which nobody sees a change",
    _makes_what_is_missing: "_makes_what_is_missing handles exceptions",
}


@contextlib.contextmanager
def _capturing(is_on: bool = True) -> Any:
    with calls.installed():
        found = current().part(calls.Calls)
        found.least_operations, found.least_work = (0 if is_on else 1 << 60), 0
        yield found


def _trained(net: Net, num_steps: int = 8) -> list[Any]:
    torch.manual_seed(1)
    out: list[Any] = []
    for _ in range(num_steps):
        x = divided(torch.randn(7, 6))
        loss = net(x).square().mean()
        net.zero_grad()
        loss.backward()
        out += [loss.item(), *(p.grad.tolist() for p in net.parameters() if p.grad is not None)]
    return [out, [x.tolist() for x in net.state_dict().values()], torch.rand(2).tolist()]


def _of_one(inside: Any, is_on: bool) -> tuple[list[Any], str, int]:
    torch.manual_seed(0)
    _features.cache_clear()
    net, counts = Net(inside), current().part(Counts)
    before = counts.replayed
    with _capturing(is_on) as found:
        out = _trained(net)
    return out, found.known(net).refused, counts.replayed - before


def _until_it_fails() -> bool:
    net, counts = Net(_asserts), current().part(Counts)
    with _capturing():
        before = counts.replayed
        _trained(net)
        net.total[3] = 2
        with pytest.raises(AssertionError, match="too large"):
            net(divided(torch.randn(7, 6)))
        return counts.replayed > before


def _until_it_is_audited() -> str:
    """What a class's method computes changes, and no module holds an object of the class."""
    net, original = Net(_by_a_hidden_object), _Gain.scaled
    with _capturing():
        _trained(net, 5)
        _Gain.scaled = lambda self, y: y * 3  # type: ignore[method-assign]
        try:
            _trained(net, 9)
        except ddpshim.errors.SyncError as error:
            return str(error)
        finally:
            _Gain.scaled = original  # type: ignore[method-assign]
        return next(iter(current().part(calls.Calls).known(net).regions.values())).refused


class _Loses(nn.Module):
    """Returns views of one tensor, and changes one of them after."""

    def forward(self, x: Tensor) -> Any:
        y = F.relu(x * 2 + 1).exp()
        return y[:, :2], {"rest": y[:, 2:], "same": x}


def _shared() -> tuple[list[Any], int]:
    out, before = [], current().part(Counts).replayed
    for is_on in (False, True):
        with _capturing(is_on):
            net, x = _Loses(), divided(torch.arange(42.0).reshape(7, 6) / 42)
            for _ in range(4):
                first, others = net(x)
            first.mul_(3)
            assert others["same"] is x
            out.append([first.tolist(), others["rest"].tolist(), first.memory is others["rest"].memory])
    return out, current().part(Counts).replayed - before


class Found(NamedTuple):
    """What a rank saw: of each network its training by rules, or that when captured, why not, and replayed calls."""

    by_rules: list[Any]
    without_dynamo: Any
    captured: Any = None  # as what follows, where this torch's calls are not captured
    with_a_difference: Any = None
    on_one_rank: Any = None
    shared: Any = None
    has_failed: bool = False
    audited: str = ""


def _rank_captures() -> Found:
    by_rules = [_of_one(inside, False)[0] for inside in REFUSED]
    with mock.patch.object(capture, "is_supported", return_value=False):
        without_dynamo = _of_one(None, True)
    if not capture.is_supported():
        return Found(by_rules, without_dynamo)
    with mock.patch.object(tape, "are_equal", return_value=False):
        with_a_difference = _of_one(None, True)
    captured = [_of_one(inside, True) for inside in REFUSED]
    on_one_rank = _of_one(None, ddpshim.world().rank == 0)
    return Found(
        by_rules,
        without_dynamo,
        captured,
        with_a_difference,
        on_one_rank,
        _shared(),
        _until_it_fails(),
        _until_it_is_audited(),
    )


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return run_ranks(_rank_captures, 3)


@pytest.fixture
def found(ranks: list[Found]) -> list[Found]:
    if ranks[0].captured is None:
        pytest.skip("this torch's calls are not captured")
    return ranks


def test_what_is_not_certain_is_computed_by_the_rules(found: list[Found]) -> None:
    for of_rank in found:
        for (inside, refused), by_rules, (captured, why, num_replayed) in zip(
            REFUSED.items(), of_rank.by_rules, of_rank.captured
        ):
            assert captured == by_rules, inside
            assert why.startswith(refused), inside
            assert bool(why) == (inside not in CAPTURED), inside
            assert (num_replayed > 0) == (inside in CAPTURED), inside


def test_an_assertion_of_a_replay_fails_as_the_programs(found: list[Found]) -> None:
    assert [of_rank.has_failed for of_rank in found] == [True] * 3


def test_where_torch_has_not_what_captures_need_the_rules_compute(ranks: list[Found]) -> None:
    for of_rank in ranks:
        assert of_rank.without_dynamo == (of_rank.by_rules[0], "", 0)


def test_a_replay_that_differs_is_given_up(found: list[Found]) -> None:
    why = "a message of the replay differs from that of the rules"
    for of_rank in found:
        assert of_rank.with_a_difference == (of_rank.by_rules[0], why, 0)


def test_a_change_that_no_guard_sees_ends_the_job_at_the_next_comparison(found: list[Found]) -> None:
    for of_rank in found:
        assert "the replay of Net was compared with the program's Python after 10 replays" in of_rank.audited
        assert "the last comparison, after 1 replay, may be wrong, and checkpoints saved since" in of_rank.audited


def test_ranks_need_not_agree(found: list[Found]) -> None:
    for rank, of_rank in enumerate(found):
        captured, _, num_replayed = of_rank.on_one_rank
        assert captured == of_rank.by_rules[0]
        assert (num_replayed > 0) == (rank == 0)


def test_results_that_share_memory_share_it(found: list[Found]) -> None:
    for of_rank in found:
        (by_rules, captured), num_replayed = of_rank.shared
        assert captured == by_rules
        assert captured[-1]
        assert num_replayed > 0
