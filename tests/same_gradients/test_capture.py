"""Captured calls of networks: what is refused, what is proven, and that ranks need not agree on it.

tests/one_process/changing.py has programs that change something between two calls.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Optional
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpshim
from ddpshim.process.job import current
from ddpshim.rows import calls, capture, tape
from ddpshim.rows.tensor import Counts, divided
from tests.one_process.parts import below
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
needs_dynamo = pytest.mark.usefixtures("dynamo")


@pytest.fixture(scope="module")
def dynamo() -> None:
    if not run_ranks(capture.is_supported, 1)[0]:  # not in pytest's process, which need not import Dynamo
        pytest.skip("this torch's calls are not captured")


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


def _writes(net: Net, y: Tensor) -> Tensor:
    net.total.add_(net.first.bias.detach())
    net.first.bias.data.mul_(1.5)
    return y


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


CAPTURED = (None, _notes_usage, _asserts, _decodes)
REFUSED: dict[Any, str] = {
    **dict.fromkeys(CAPTURED, ""),
    _asserts_rows: "it gathers wholes",
    _joins: "a network inside divides a tensor of its own",
    _gathers: "it gathers wholes",
    _reads: "",  # in Dynamo's words
    _keeps: "",
    _without_rule: "it gathers wholes",
    _by_generator: "",
    _counts: "its Python differs from call to call",
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
    net, counts = Net(inside), current().part(Counts)
    before = counts.replayed
    with _capturing(is_on) as found:
        out = _trained(net)
        known = found.captures.get(net)
    return out, known.refused if known is not None else "", counts.replayed - before


def _all() -> list[Any]:
    return [(_of_one(inside, False)[0], *_of_one(inside, True)) for inside in REFUSED]


@needs_dynamo
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_not_certain_is_computed_by_the_rules(num_ranks: int) -> None:
    for of_rank in run_ranks(_all, num_ranks):
        for (inside, refused), (by_rules, captured, why, num_replayed) in zip(REFUSED.items(), of_rank):
            assert captured == by_rules, inside
            assert why.startswith(refused), inside
            assert bool(why) == (inside not in CAPTURED), inside
            assert (num_replayed > 0) == (inside in CAPTURED), inside


def _until_it_fails() -> Any:
    net, counts = Net(_asserts), current().part(Counts)
    with _capturing():
        _trained(net)
        before = counts.replayed
        net.total[3] = 2
        with pytest.raises(AssertionError, match="too large"):
            net(divided(torch.randn(7, 6)))
        return counts.replayed > before


@needs_dynamo
def test_an_assertion_of_a_replay_fails_as_the_programs() -> None:
    assert run_ranks(_until_it_fails, 2) == [True] * 2


def _without_dynamo() -> Any:
    with mock.patch.object(capture, "is_supported", return_value=False):
        return _of_one(None, False)[0], *_of_one(None, True)


def test_where_torch_has_not_what_captures_need_the_rules_compute() -> None:
    for by_rules, captured, why, num_replayed in run_ranks(_without_dynamo, 2):
        assert captured == by_rules
        assert (why, num_replayed) == ("this torch's Dynamo is another", 0)


def _that_differs() -> Any:
    def wrong(one: Tensor, other: Tensor) -> bool:
        return False

    with mock.patch.object(tape, "are_equal", wrong):
        return _of_one(None, False)[0], *_of_one(None, True)


@needs_dynamo
def test_a_replay_that_differs_is_given_up() -> None:
    for by_rules, captured, why, num_replayed in run_ranks(_that_differs, 2):
        assert captured == by_rules
        assert (why, num_replayed) == ("a message of the replay differs from that of the rules", 0)


def _on_one_rank() -> Any:
    rank = ddpshim.world().rank
    return _of_one(None, False)[0], *_of_one(None, rank == 0)


@needs_dynamo
def test_ranks_need_not_agree() -> None:
    found = run_ranks(_on_one_rank, 3)
    assert [captured == by_rules for by_rules, captured, *_ in found] == [True] * 3
    assert [num_replayed > 0 for *_, num_replayed in found] == [True, False, False]


class _Loses(nn.Module):
    """Returns views of one tensor, and changes one of them after."""

    def forward(self, x: Tensor) -> Any:
        y = F.relu(x * 2 + 1).exp()
        return y[:, :2], {"rest": y[:, 2:], "same": x}


def _shared() -> Any:
    out = []
    for is_on in (False, True):
        with _capturing(is_on):
            net, x = _Loses(), divided(torch.arange(42.0).reshape(7, 6) / 42)
            for _ in range(4):
                first, others = net(x)
            first.mul_(3)
            assert others["same"] is x
            out.append([first.tolist(), others["rest"].tolist(), first.memory is others["rest"].memory])
    return out, current().part(Counts).replayed


@needs_dynamo
def test_results_that_share_memory_share_it() -> None:
    for (by_rules, captured), num_replayed in run_ranks(_shared, 2):
        assert captured == by_rules
        assert captured[-1]
        assert num_replayed > 0
