"""The option `rows_at_once`: networks are computed on some rows at once, and numbers are those of the plain program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ddpshim
from ddpshim import Options
from ddpshim.failures import memory
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from ddpshim.rows import blocks, calls, capture, layers
from ddpshim.rows.tensor import Rows
from tests.one_process import in_pieces
from tests.one_process.compare import compare
from tests.same_gradients.test_one_process import _results, _unequal

pytestmark = pytest.mark.skipif(not capture.is_supported(), reason="torch before 2.8 does not capture")
NAMES = [
    *(f"in_pieces.{name}" for name in in_pieces.PROGRAMS),
    *("hostile.checkpoint_outside_a_network", "hostile.initialised_by_the_first_batch", "changing.no_grad_inside"),
]


FEW = ("dropouts", "couples_rows", "unfrozen_before_backward", "hook_of_an_unused_head", "gradient_penalty")


def _check(names: list[str], ranks: int, num_rows: int, tmp_path: Path) -> None:
    plain = _results(tmp_path / "plain", names)
    found = _results(tmp_path / "ranks", names, ranks=ranks, DDPSHIM_ROWS_AT_ONCE=str(num_rows))
    assert _unequal(plain, found, tmp_path) == {}, compare(plain, found)


@pytest.mark.launch
def test_numbers_are_those_of_the_plain_program(tmp_path: Path) -> None:
    """What draws, couples rows, differentiates twice, changes before backward(); no batch divides."""
    _check([f"in_pieces.{name}" for name in FEW], 3, 1, tmp_path)


@pytest.mark.launch
@pytest.mark.daily
@pytest.mark.parametrize(("ranks", "num_rows"), [(1, 4), (2, 3), (3, 1)])
def test_numbers_of_all_programs_are_those_of_the_plain_one(ranks: int, num_rows: int, tmp_path: Path) -> None:
    _check(NAMES, ranks, num_rows, tmp_path)


class _Sizes(TorchDispatchMode):
    """The most rows on which a product was computed."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.most = max(self.most, *(x.shape[0] for x in args if isinstance(x, torch.Tensor) and x.dim() == 2))
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def _at_once(num_rows: int) -> Iterator[None]:
    of_job, state = current().part(calls.Calls), current().part(blocks.State)
    if of_job.original is None:
        current().at_end.enter_context(calls.installed())
    with contextlib.ExitStack() as undo:
        for one in ((state, "rows_at_once", num_rows), (of_job, "least_operations", -1), (of_job, "least_work", 0)):
            undo.enter_context(replaced(*one))
        yield


class _Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), *layers, nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_no_product_has_more_rows() -> None:
    net, x = _Net(), torch.randn(30, 6)
    F.mse_loss(net(x), x[:, :3]).backward()
    expected = [p.grad for p in net.parameters()]
    with _at_once(4):
        for _ in range(2):  # the first call is traced, and its first piece compared with Python
            net.zero_grad()
            out = net(x)
            assert type(out) is Rows
            assert out.shape == (30, 3)
            assert type(out.block.grad_fn).__name__ == "_ComputedBackward"
            with _Sizes() as sizes:
                F.mse_loss(out, x[:, :3]).backward()
            assert sizes.most == 8  # of weights; 30 rows are 8 pieces of 3 or 4
            for p, gradient in zip(net.parameters(), expected):
                torch.testing.assert_close(p.grad, gradient, rtol=1e-6, atol=1e-7)
        with torch.no_grad():
            assert net(x).grad_fn is None
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            assert type(net(x).grad_fn).__name__ == "AddmmBackward0"  # of a checkpoint


def test_a_graph_is_freed_as_in_torch() -> None:
    net, x = _Net(), torch.randn(30, 6)
    with _at_once(4):
        loss = net(x).square().mean()
        loss.backward(retain_graph=True)
        expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(net.parameters(), expected))  # type: ignore[arg-type]


_WRITES = [
    lambda p: p.data.mul_(2),
    lambda p: p.data.copy_(p.data.flip(0)),
    lambda p: setattr(p, "data", p.data.flip(1)),
]


@pytest.mark.parametrize("write", _WRITES)
def test_a_weight_that_changes_before_backward_is_an_error(write: Any) -> None:
    net, x = _Net(), torch.randn(30, 6)
    with _at_once(4):
        loss = net(x).square().mean()
        write(net.layers[0].weight)
        with pytest.raises(ddpshim.errors.SyncError, match="a weight, or what a network got, was written into after"):
            loss.backward()


def test_what_needs_all_rows_is_said_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "group", lambda: None)  # which this process has not joined
    net, other, x = _Net(nn.BatchNorm1d(8)), _Net(nn.BatchNorm1d(8)), torch.randn(30, 6)
    with _at_once(4):
        for _ in range(3):
            net(x).square().mean().backward()
    for _ in range(3):
        other(x).square().mean().backward()
    said = capsys.readouterr().err
    text = "_Net is computed for all rows at once, or part by part: BatchNorm needs all rows"
    assert said.count(text) == 1, said
    for one, two in zip(net.state_dict().values(), other.state_dict().values()):
        torch.testing.assert_close(one, two)
    for p, q in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("other", [{"exact": 4}, {"capture": "off"}, {"graphs": "on"}])
def test_options_that_contradict_it_are_refused(other: Any) -> None:
    options = Options.read({"DDPSHIM_ROWS_AT_ONCE": "16"})
    assert options.rows_at_once == 16
    capture.check_options(options)
    with pytest.raises(
        ddpshim.errors.OptionsError, match=r"^rows_at_once=16 with .*: rows_at_once and graphs compute what"
    ):
        capture.check_options(Options(rows_at_once=16, **other))


def test_an_error_of_memory_names_the_call_and_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return batch["x"][:, None].expand(-1, 1 << 50).clone()

    for present, advised in ("", 32), ("8", 4):
        monkeypatch.setenv("DDPSHIM_ROWS_AT_ONCE", present)
        with pytest.raises(RuntimeError) as caught:
            nn.Sequential(Net())({"x": torch.ones(64)})
        memory.explain(caught.value)
        memory.explain(caught.value)
        said = str(caught.value)
        assert "memory ran out in the call of Sequential on 64 rows, 64 on this rank" in said
        assert said.count(f"DDPSHIM_ROWS_AT_ONCE={advised} computes a network on so many rows at once") == 1
