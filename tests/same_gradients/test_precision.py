"""What a process has to obey or to say: precision."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import ddpshim
from ddpshim import Options
from ddpshim.errors import OptionsError
from ddpshim.job import precision
from ddpshim.process.job import Job


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 1, 8).view(4, 2)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _train(net: Any, scaler: Any) -> list[torch.Tensor]:
    """The weights after three steps."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale((net(X) - Y).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in net.parameters()]


class _ByHand(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = _net(), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.net(x)  # type: ignore[no-any-return]


needs_scaler = pytest.mark.skipif(
    not hasattr(torch.amp, "GradScaler"), reason="torch before 2.3 scales losses only on GPUs"
)


@needs_scaler
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_forward_of_what_is_wrapped_computes_in_the_precision(name: str) -> None:
    is_scaled = name == "fp16"
    expected = _train(_ByHand(DTYPES[name]), torch.amp.GradScaler("cpu", enabled=is_scaled))
    plain = _train(_net(), torch.amp.GradScaler("cpu", enabled=False))
    here = ddpshim.setup(options=Options(precision=name), device="cpu")
    try:
        net, scaler = ddpshim.wrap_parallel(_net()), here.grad_scaler()
        assert scaler.is_enabled() == is_scaled
        found = _train(net, scaler)
        assert net.eval()(X).dtype == torch.float32, "an evaluation"
    finally:
        ddpshim.cleanup()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(found, plain))


@needs_scaler
def test_the_scale_of_ranks_is_a_part_of_one_process_and_its_file_is_not() -> None:
    options, cpu = Options(precision="fp16"), torch.device("cpu")
    one, four = (precision.grad_scaler(options, cpu, Job(), num_ranks) for num_ranks in (1, 4))
    assert one.get_scale() == torch.amp.GradScaler("cpu").get_scale() == 4 * four.get_scale()
    assert one.state_dict() == four.state_dict()
    one.load_state_dict({**one.state_dict(), "scale": 2.0**10})
    four.load_state_dict(one.state_dict())
    four.scale(torch.ones(()))
    assert four.get_scale() == 2.0**8
    off = precision.grad_scaler(Options(), cpu, Job(), 4)
    off.load_state_dict(off.state_dict())
    assert off.scale(torch.ones(())) == 1.0


@pytest.mark.parametrize("name", ["float32", "bf16", "fp16"])
def test_a_precision_that_nobody_computes_in_is_refused(name: str) -> None:
    def step(way: Any) -> torch.dtype:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with way():
            out = net(X)
        out.float().sum().backward()
        optimizer.step()
        return out.dtype

    here = ddpshim.setup(options=Options(precision=name), device="cpu")
    try:
        if name != "float32":
            with torch.no_grad(), here.autocast():
                _net()(X)  # an evaluation is no training
            with pytest.raises(OptionsError, match=f"precision={name}, but this step was computed without it"):
                step(contextlib.nullcontext)
            if name == "fp16":
                with pytest.raises(OptionsError, match="precision=fp16, but no loss was scaled"):
                    step(here.autocast)
                here.grad_scaler()
            assert step(here.autocast) == DTYPES[name]
        assert step(contextlib.nullcontext) == torch.float32
    finally:
        ddpshim.cleanup()
    assert step(contextlib.nullcontext) == torch.float32, "of a job that is over"
