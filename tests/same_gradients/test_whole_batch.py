"""Losses of shares that are no means over samples, against one process: masked means, samples that are compared."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpshim
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
BATCH, NUM_STEPS = 12, 4


def _data() -> TensorDataset:
    x = (torch.arange(BATCH * NUM_STEPS * 3 * 4, dtype=torch.float64) * 0.3).sin().view(-1, 3, 4)
    num_valid = torch.arange(BATCH * NUM_STEPS) % 7 % 4  # of three steps; some samples have none
    return TensorDataset(x, (torch.arange(3) < num_valid[:, None]).double())


def _masked(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ((out - 1).square().mean(-1) * mask).sum() / mask.sum()


def _by_count(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ddpshim.world().mean_over(((out - 1).square().mean(-1) * mask).sum(), mask.sum())


def _compared(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = F.normalize(out.flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.roll(1, 0).T / 0.2, torch.arange(len(rows)))


def _by_gather(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    of_ranks = ddpshim.world().all_gather(out).unflatten(0, (ddpshim.world().world_size, -1))
    return _compared(of_ranks.transpose(0, 1).flatten(0, 1), mask)  # rank r of W has `batch[r::W]`


# What one process computes, and what does so on ranks.
LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mean_over": (_masked, _by_count),
    "all_gather": (_compared, _by_gather),
}


def _train(make: Callable[..., Any], wrap: Callable[[nn.Module], Any], on_ranks: bool) -> Any:
    """For each loss, on BatchNorm and with gradients of two batches a step: weights, buffers, losses."""
    out: dict[str, Any] = {}
    for name, losses in LOSSES.items():
        torch.manual_seed(3)
        made = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (-1, 3)), nn.Linear(8, 4)
        )
        net = wrap(made.double())
        optimizer, logged = torch.optim.SGD(net.parameters(), 0.1), []
        for number, (x, mask) in enumerate(make(_data(), batch_size=BATCH)):
            is_last = number > 0
            with contextlib.nullcontext() if is_last or not on_ranks else net.no_sync():
                value = losses[on_ranks](net(x), mask + 0.1)
                value.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            logged.append(value.item())
        numbers = [*made.parameters(), *(each.double() for each in made.buffers())]
        out[name] = torch.cat([each.detach().flatten() for each in numbers]), logged
    return out


def test_losses_over_the_whole_batch_train_as_in_one_process() -> None:
    plain = _train(DataLoader, lambda net: net, False)
    ranks = run_ranks(_train, 3, ddpshim.make_loader, ddpshim.wrap_parallel, True)
    for name, (numbers, losses) in plain.items():
        for own, own_losses in (rank[name] for rank in ranks):
            assert (own - numbers).abs().max() < 1e-13, name
            assert own_losses == pytest.approx(losses, abs=1e-13), name


def _searches(make: Callable[..., Any], wrap: Callable[[nn.Module], Any]) -> torch.Tensor:
    torch.manual_seed(3)
    made = nn.Linear(4, 4).double()
    net = wrap(made)
    optimizer = torch.optim.LBFGS(net.parameters(), 9.0, max_iter=6, line_search_fn="strong_wolfe")
    for x, mask in make(_data(), batch_size=BATCH):

        def closure(x: torch.Tensor = x, mask: torch.Tensor = mask) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((net(x) - 1).square().mean(-1) * (1 + mask)).mean()
            loss.backward()
            return ddpshim.world().mean_over(loss.detach(), 1)  # in one process the loss

        optimizer.step(closure)
    return torch.cat([p.detach().flatten() for p in made.parameters()])


def test_a_line_search_sees_the_mean_of_all_samples() -> None:
    plain = _searches(DataLoader, lambda net: net)
    ranks = run_ranks(_searches, 3, ddpshim.make_loader, ddpshim.wrap_parallel)
    assert all((own - plain).abs().max() < 1e-10 for own in ranks)


def _logs(make: Callable[..., Any]) -> list[list[float]]:
    """Of each batch: its mean, as a number and as a tensor, and how many entries are valid, as a fraction."""
    world, rows = ddpshim.world(), []
    for x, mask in make(_data(), batch_size=BATCH):
        loss = x.square().mean()
        as_number = world.mean_over(loss.item() * len(x), len(x))
        assert type(as_number) is float
        as_tensor = world.mean_over(loss * len(x), len(x))
        rows.append([as_number, as_tensor.item(), world.mean_over(mask.bool().sum(), mask.numel()).item()])
    return rows


def test_means_of_batches_are_those_of_one_process() -> None:
    rows = _logs(DataLoader)
    first, *others = run_ranks(_logs, 3, ddpshim.make_loader)
    for row, expected in zip(first, rows):
        assert row == pytest.approx(expected, abs=1e-7)
        assert row[:2] == pytest.approx(expected[:2], abs=1e-14)
    assert len(first) == len(rows) == NUM_STEPS
    assert all(own == first for own in others)


SAMPLES = ((3, 1), (4, 0), (0, 5))  # of each rank, in each iteration


def _train_on_unequal_numbers(alone: bool) -> torch.Tensor:
    torch.manual_seed(3)
    here, made = ddpshim.world(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    net = made if alone else ddpshim.wrap_parallel(made)
    optimizer = torch.optim.SGD(net.parameters(), 0.3)
    for number, counts in enumerate(SAMPLES):
        x = (torch.arange(4 * sum(counts), dtype=torch.float64) + number).sin().view(-1, 4)
        x = x if alone else x.split(counts)[here.rank]
        optimizer.zero_grad()
        here.mean_over((net(x) - 1).square().sum(), len(x)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in made.parameters()])


def test_ranks_with_unequal_numbers_of_samples_or_none_train_as_one_process() -> None:
    weights = _train_on_unequal_numbers(alone=True)
    for own in run_ranks(_train_on_unequal_numbers, 2, False):
        assert (own - weights).abs().max() < 1e-14


def _gather_unequal() -> str:
    with pytest.raises(ddpshim.errors.DataError) as raised:
        ddpshim.world().all_gather(torch.ones(3 * (1 - ddpshim.world().rank), 2))
    return str(raised.value)


def test_batches_of_different_sizes_are_not_put_together() -> None:
    for said in run_ranks(_gather_unequal, 2):
        assert "different numbers of rows (3 on rank 0, 0 on rank 1)" in said


@pytest.mark.unit
def test_with_one_process_nothing_is_gathered() -> None:
    x = torch.ones(3)
    assert ddpshim.world().all_gather(x) is x
    assert ddpshim.world().mean_over(x.sum(), 2) == ddpshim.world().mean_over(3, 2) == 1.5
