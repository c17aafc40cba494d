"""wrap_parallel(shard=True): ranks that hold a part each train what one process does, and save the same files."""

from __future__ import annotations

import io
import pickle
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Union

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim
from ddpshim.errors import SyncError
from ddpshim.model import sharding
from tests.ranks import errors_of, run_ranks

Shard = Union[bool, list[str]]
NUM, GLOBAL_BATCH = 11, 4  # the last batch of 3 is not divided by two ranks

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(getattr(torch.distributed.fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms"),
    reason="torch before 2.8: pip install torch>=2.8",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(7, 7), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.layer(x)))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7)
        self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(7, 3)
        self.other = nn.Linear(7, 3)  # used where it is asked for

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor, head: str = "last") -> torch.Tensor:
        return getattr(self, head)(self._hidden(x))

    def compute_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Reaches into layers, as `forward` does."""
        return (self.last(self._hidden(x)) - y).square().mean()


def _make(shard: Shard) -> tuple[Any, torch.optim.Optimizer, Any]:
    policy = ddpshim.wrap_parallel(Policy(), shard=shard)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(NUM, 6, generator=generator), torch.randn(NUM, 3, generator=generator))
    loader = ddpshim.make_loader(data, batch_size=GLOBAL_BATCH, shuffle=True)
    return policy, torch.optim.AdamW(policy.parameters(), lr=0.01), loader


def _train(shard: Shard, folder: Path) -> dict[str, Any]:
    policy, optimizer, loader = _make(shard)
    training = ddpshim.Resumable(folder, {"policy": policy, "optimizer": optimizer})
    norms = []
    for epoch in range(2):
        for x, y in training.steps(loader, epoch):
            optimizer.zero_grad()
            (policy(x) - y).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
    training.save()
    result = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "norms": norms}
    result["unwrapped"] = ddpshim.unwrap(policy).state_dict()
    result["held"] = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in policy.parameters())
    return result


def _load(shard: Shard, folder: Path) -> dict[str, Any]:
    policy, optimizer, _ = _make(shard)
    assert ddpshim.Resumable(folder, {"policy": policy, "optimizer": optimizer}).restore()
    return {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}


def _close(one: Any, other: Any, tolerance: float) -> None:
    torch.testing.assert_close(one["policy"], other["policy"], rtol=0, atol=tolerance)
    torch.testing.assert_close(one["optimizer"]["state"], other["optimizer"]["state"], rtol=0, atol=tolerance)
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    assert type(other["policy"]["first.weight"]) is torch.Tensor


@pytest.mark.ranks
@needs_fsdp2
def test_ranks_that_hold_a_part_train_what_one_process_does(tmp_path: Path) -> None:
    (one,) = run_ranks(_train, 1, True, tmp_path / "one")  # nothing to divide
    ranks = run_ranks(_train, 2, True, tmp_path / "two")
    for result in ranks:
        _close(one, result, 2e-6)
        torch.testing.assert_close(result["unwrapped"], result["policy"], rtol=0, atol=0)
        assert result["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert sum(result["held"] for result in ranks) == one["held"]
    assert max(result["held"] for result in ranks) < 0.6 * one["held"]
    # A file of two ranks in one process, and one of one process on two ranks.
    _close(ranks[0], run_ranks(_load, 1, False, tmp_path / "two")[0], 0.0)
    for result in run_ranks(_load, 2, True, tmp_path / "one"):
        _close(one, result, 0.0)


def _accumulate(shard: Shard) -> Any:
    policy, optimizer, loader = _make(shard)
    policy.eval()
    for x, y in loader:
        optimizer.zero_grad()
        parts = [*zip(x.split(1), y.split(1))]
        for i, (xs, ys) in enumerate(parts):
            with policy.accumulate(is_last=i == len(parts) - 1):
                (policy.compute_loss(xs, ys) / len(parts)).backward()
        optimizer.step()
    return policy.state_dict()


@pytest.mark.ranks
@needs_fsdp2
def test_parts_of_a_batch_by_a_method_of_the_networks_own() -> None:
    (one,), ranks = run_ranks(_accumulate, 1, False), run_ranks(_accumulate, 2, ["compute_loss"])
    torch.testing.assert_close(ranks[0], one, rtol=0, atol=2e-6)


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(self.layer(x), 1.0)


def _made_before(x: torch.Tensor) -> None:
    net = Policy()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddpshim.wrap_parallel(net, shard=True)(x).sum().backward()
    optimizer.step()


def _not_reduced(x: torch.Tensor) -> None:
    policy, optimizer, _ = _make(True)
    with policy.no_sync():
        policy(x).sum().backward()
    optimizer.step()


def _distribution(x: torch.Tensor) -> None:
    policy = ddpshim.wrap_parallel(Gaussian(), shard=True)
    policy(x).log_prob(torch.zeros(3)).sum().backward()


def _used_differently(x: torch.Tensor) -> None:
    policy, _, _ = _make(True)
    policy(x, ["last", "other"][ddpshim.world().rank]).sum().backward()


def _saved_by_one(x: torch.Tensor) -> None:
    policy, _, _ = _make(True)
    if ddpshim.world().is_main:
        policy.state_dict()
    raise SyncError("did not call state_dict()")  # what the main rank says


def _pickled(x: torch.Tensor) -> None:
    pickle.dump(_make(True)[0], io.BytesIO())


def _with_a_hook(x: torch.Tensor) -> None:
    ddpshim.wrap_parallel(Policy(), shard=True, comm_hook=print)


REFUSED: dict[Callable[[torch.Tensor], None], str] = {
    _made_before: "SGD.step(): it was made before wrap_parallel(..., shard=True) and holds 'first.weight'",
    _not_reduced: "AdamW.step() after a backward pass of Policy under no_sync()",
    _distribution: "the gradient of 'layer.weight' of Gaussian was not reduced over the ranks",
    _used_differently: "A sharded network mixes gradients of different parameters: use all of them in every pass",
    _saved_by_one: "did not call state_dict()",
    _pickled: "a Policy that is sharded (shard=True) was pickled",
    _with_a_hook: "wrap_parallel(shard=...) with comm_hook",
}


def _refused() -> list[str]:
    sharding._DEADLINE_S = 0.5
    return errors_of(partial(attempt, torch.ones(2, 6)) for attempt in REFUSED)


@pytest.mark.ranks
@needs_fsdp2
def test_what_would_go_wrong_is_refused() -> None:
    for said in run_ranks(_refused, 2):
        for text, expected in zip(said, REFUSED.values()):
            assert expected in text


def test_an_older_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed.fsdp", ModuleType("fsdp"))
    monkeypatch.setattr(torch.distributed, "fsdp", ModuleType("fsdp"))
    with pytest.raises(SyncError, match=r"which has no torch\.distributed\.fsdp\.fully_shard"):
        ddpshim.wrap_parallel(Policy(), shard=True)
