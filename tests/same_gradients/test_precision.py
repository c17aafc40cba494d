"""What a process has to obey or to say: precision."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpshim
from ddpshim import Options
from ddpshim.errors import OptionsError
from tests.ranks import run_ranks


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 1, 8).view(4, 2)


def _train(net: Any) -> list[torch.Tensor]:
    """The weights after three steps."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (net(X) - Y).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_the_forward_of_what_is_wrapped_computes_in_the_precision() -> None:
    by_hand = _net()
    by_hand.forward = torch.autocast("cpu", torch.bfloat16)(by_hand.forward)  # type: ignore[method-assign]
    expected, plain = _train(by_hand), _train(_net())
    ddpshim.setup(options=Options(precision="bf16"), device="cpu")
    try:
        net = ddpshim.wrap_parallel(_net())
        found = _train(net)
        assert net.eval()(X).dtype == torch.float32, "an evaluation"
    finally:
        ddpshim.cleanup()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(found, plain))


def _train_on_whole_batches(name: str, num_workers: int) -> dict[str, Any]:
    ddpshim.cleanup()
    here = ddpshim.setup(batch="global", seed=0, device="cpu", options=Options(precision=name))
    net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 2))
    x = torch.randn(50, 3)
    wrapped, optimizer = ddpshim.wrap_parallel(net), torch.optim.SGD(net.parameters(), 0.1)
    how: Any = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    losses = []
    for _ in range(3):
        for (rows,) in DataLoader(TensorDataset(x), 16, shuffle=True, **how):
            with here.autocast():
                out = wrapped(rows)
                loss = (out - rows[:, :2].sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    found = {"dtype": out.dtype, "losses": losses, "weights": weights}
    ddpshim.cleanup()
    return found


@pytest.mark.ranks
def test_row_tensors_are_computed_in_the_precision() -> None:
    plain, one = _train_on_whole_batches("float32", 0), _train_on_whole_batches("bf16", 0)
    ranks = run_ranks(_train_on_whole_batches, 3, "bf16", 2)
    for found in ranks:
        assert found["dtype"] == one["dtype"] == torch.bfloat16
        assert found["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
        assert torch.equal(found["weights"], ranks[0]["weights"])
    # A gradient's sum is rounded to half precision once on each rank: no further from one process than that is from
    # float32.
    rounding = (one["weights"] - plain["weights"]).abs().max()
    assert 0 < (ranks[0]["weights"] - one["weights"]).abs().max() < 2 * rounding


def test_a_precision_that_nobody_computes_in_is_refused() -> None:
    def step(way: Any) -> torch.dtype:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with way():
            out = net(X)
        out.float().sum().backward()
        optimizer.step()
        return out.dtype

    here = ddpshim.setup(options=Options(precision="bf16"), device="cpu")
    try:
        with torch.no_grad(), here.autocast():
            _net()(X)  # an evaluation is no training
        with pytest.raises(OptionsError, match="precision=bf16, but this step was computed without it"):
            step(contextlib.nullcontext)
        assert step(here.autocast) == torch.bfloat16
        assert step(contextlib.nullcontext) == torch.float32
    finally:
        ddpshim.cleanup()
    assert step(contextlib.nullcontext) == torch.float32, "of a job that is over"
