"""Data of which each rank reads its own part: a batch is the rows of all ranks, and trains as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import ddpshim
from ddpshim.rows.joined_loader import JoinedLoader
from ddpshim.rows.tensor import Rows
from tests.ranks import errors_of, run_ranks

pytestmark = pytest.mark.ranks
BATCH, NUM_STEPS = 10, 4


class Trajectories(IterableDataset[Any]):
    """A rank's own part of a stream: it draws noise and the order, as a shuffle buffer does; texts are of one rank."""

    def __init__(self, rank: int, num: int) -> None:
        self._rank, self._num = rank, num

    def __iter__(self) -> Iterator[Any]:
        for i in range(self._num):
            x = torch.full((3,), float(i)) + 100 * self._rank + torch.rand(3)
            yield {"x": x, "text": f"{self._rank}.{i}"}


class Known(Trajectories):
    def __len__(self) -> int:
        return self._num


def _begin() -> Any:
    ddpshim.cleanup()
    return ddpshim.setup(batch="global", seed=1, device="cpu")


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)).double()


def _train(loader: Any) -> list[dict[str, Any]]:
    net = _net()
    optimizer, steps = torch.optim.SGD(net.parameters(), 1e-2), []
    for batch in loader:
        x = batch["x"].double() / 100
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grads = torch.cat([p.grad.flatten() for p in net.parameters()])
        steps.append({"x": batch["x"].clone() + 0, "text": batch["text"], "loss": loss.item(), "grads": grads})
        steps[-1]["is rows"] = isinstance(batch["x"], Rows)
    return steps


def _of_ranks(num_workers: int, has_length: bool) -> tuple[list[dict[str, Any]], Any]:
    here = _begin()
    how: Any = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    num = BATCH * NUM_STEPS // here.world_size + (here.rank if has_length else 0)
    loader = JoinedLoader((Known if has_length else Trajectories)(here.rank, num), BATCH, **how)
    steps = _train(loader)
    whole = [{**step, "x": torch.as_tensor(step["x"].tolist())} for step in steps]
    return whole, (torch.get_rng_state(), loader.batch_size, len(loader) if has_length else None)


@pytest.mark.parametrize(("num_ranks", "num_workers", "has_length"), [(2, 0, False), (3, 0, True), (3, 1, True)])
def test_the_ranks_parts_are_one_batch(num_ranks: int, num_workers: int, has_length: bool) -> None:
    ranks = run_ranks(_of_ranks, num_ranks, num_workers, has_length)
    first, (state, batch_size, length) = ranks[0]
    assert batch_size == BATCH
    alone = _train([{"x": step["x"], "text": step["text"]} for step in first])
    cuts = [BATCH * rank // num_ranks for rank in range(num_ranks + 1)]
    assert len(first) == len(alone) >= 3
    if has_length:
        assert length == len(first)
    for number, (there, here) in enumerate(zip(first, alone)):
        assert there["is rows"]
        assert not here["is rows"]
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-12)
        assert (there["grads"] - here["grads"]).abs().max() < 1e-12 * here["grads"].abs().max()
        for rank in range(num_ranks):
            own = range(cuts[rank], cuts[rank + 1])
            numbers = [number * len(own) + i for i in range(len(own))]
            assert [there["text"][row] for row in own] == [f"{rank}.{i}" for i in numbers]
            noise = there["x"][own.start : own.stop] - 100 * rank - torch.tensor(numbers).float()[:, None]
            assert ((noise >= 0) & (noise <= 1)).all()
    # Each rank has noise of its own, and the training's streams are those of one process.
    noise = first[0]["x"] % 1
    assert len({*noise.flatten().tolist()}) == noise.numel()
    for steps, (own_state, _, _) in ranks:
        assert torch.equal(own_state, torch.get_rng_state())
        assert [step["loss"] for step in steps] == [step["loss"] for step in first]
    assert torch.equal(state, torch.get_rng_state())


def _shuffled() -> list[Any]:
    here = _begin()
    own = TensorDataset(torch.arange(8 + here.rank) + 100 * here.rank)
    loader = ddpshim.make_loader(own, 8, shuffle=True, already_sharded=True)
    assert isinstance(loader, JoinedLoader)
    return [[[int(i) for i in batch.tolist()] for (batch,) in loader] for _ in range(2)]


def test_datasets_are_shuffled_by_each_rank() -> None:
    passes, others = run_ranks(_shuffled, 2)
    assert passes == others
    for batches in passes:
        assert len(batches) == 2
        seen = [i for batch in batches for i in batch]
        assert sorted(seen[:4] + seen[8:12]) == [*range(8)]
        assert len({*seen[4:8], *seen[12:]} & {*range(100, 109)}) == 8
    assert passes[0] != passes[1]


def _unequal() -> Any:
    here = _begin()
    _train(JoinedLoader(Trajectories(here.rank, 5 * 20 + 5 * here.rank), BATCH))


def _too_small() -> Any:
    _begin()
    JoinedLoader(TensorDataset(torch.zeros(9)), 3)


def _not_by_sample() -> Any:
    _begin()
    loader = JoinedLoader(TensorDataset(torch.zeros(9)), 8, collate_fn=lambda samples: torch.zeros(3, 2))
    next(iter(loader))


def _refused() -> list[str]:
    return errors_of([_unequal, _too_small, _not_by_sample])


def test_parts_that_make_no_batch_are_refused() -> None:
    for unequal, too_small, not_by_sample in run_ranks(_refused, 2):
        assert "WorldError: ranks are at different lines: rank 0 has read all of its data at " in unequal
        assert "; rank 1 takes a batch of the DataLoader of " in unequal
        assert "Global batch 3 on 2 ranks leaves a rank fewer than 2 samples" in too_small
        assert "Use at least 4." in too_small
        assert "a tensor of shape (3, 2) in a batch with 4 samples of this rank" in not_by_sample
