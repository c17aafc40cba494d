"""Losses that are no means over samples, against one process: masked means, and samples that are compared."""

from __future__ import annotations

import contextlib
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpshim
from ddpshim.job import shares
from ddpshim.model import weighing
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
BATCH, NUM_STEPS = 12, 4


def _data() -> TensorDataset:
    x = (torch.arange(BATCH * NUM_STEPS * 3 * 4, dtype=torch.float64) * 0.3).sin().view(-1, 3, 4)
    num_valid = torch.arange(BATCH * NUM_STEPS) % 7 % 4  # of three steps; some samples have none
    return TensorDataset(x, (torch.arange(3) < num_valid[:, None]).double())


def _masked(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ((out - 1).square().mean(-1) * mask).sum() / mask.sum()


def _coupled(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = F.normalize(out.flatten(1), dim=1)
    noise = torch.randn(len(rows), 2, dtype=rows.dtype).mean()  # of the loss itself, for the batch as it is
    return F.cross_entropy(rows @ rows.roll(1, 0).T / 0.2, torch.arange(len(rows))) * (1 + noise / 10)


def _flattened(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _masked(out.flatten(0, 1), mask.flatten()) + 0.1 * out.flatten(0, 1)[::5].std()


def _by_count(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ddpshim.world().mean_over(((out - 1).square().mean(-1) * mask).sum(), mask.sum())


def _by_gather(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    world = ddpshim.world()
    return _masked(world.all_gather(out), world.all_gather(mask))


# What one process computes, and what does so on ranks.
LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mean_over": (_masked, _by_count),
    "all_gather": (_masked, _by_gather),
    "a masked mean over the whole batch": (_masked, ddpshim.whole_batch(_masked)),
    "samples that are compared": (_coupled, ddpshim.whole_batch(_coupled)),
    "several rows for a sample": (
        lambda out, mask: _flattened(out, mask),
        lambda out, mask: ddpshim.whole_batch(lambda *of_all: _rows(*of_all))(out.flatten(0, 1), mask.flatten()),
    ),
}


def _rows(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _masked(out, mask) + 0.1 * out[::5].std()


# Batches that three ranks do not divide: twice 23 samples, and at last 2, of which a rank has none. They divide 12.
UNEVEN = 23


def _mean_over_samples(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ((out - 1).square().mean(-1) * (1 + mask)).mean()


def _with_parameters_of_that_size(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Also takes tensors that are no batch, and of which some rank may think so."""
    return ddpshim.whole_batch(lambda out, mask, a, b: _masked(out, mask) * (a.sum() + b.sum()))(
        out, mask, torch.ones(8, dtype=out.dtype), torch.ones(5, dtype=out.dtype)
    )


OF_BATCHES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **LOSSES,
    "a mean": (_mean_over_samples, _mean_over_samples),
    "no batch": (lambda out, mask: 13 * _masked(out, mask), _with_parameters_of_that_size),
}


def _train(make: Callable[..., Any], wrap: Callable[[nn.Module], Any], batch_size: int, is_whole: bool) -> Any:
    """For each loss, on BatchNorm and with gradients of two batches a step: weights, buffers, and weighed losses."""
    out: dict[str, Any] = {}
    for name, losses in OF_BATCHES.items():
        if name == "no batch" and batch_size == BATCH:
            continue  # each rank has four rows there
        torch.manual_seed(3)
        first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2))
        made = nn.Sequential(first, nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (-1, 3)), nn.Linear(8, 4))
        net = wrap(made.double())
        optimizer, logged = torch.optim.SGD(net.parameters(), 0.1), []
        drops = name == "no batch"  # where each rank has one row, any number is a multiple of it
        for number, (x, mask) in enumerate(make(_data(), batch_size=batch_size, shuffle=True, drop_last=drops)):
            is_last = number > 0
            with contextlib.nullcontext() if is_last or not is_whole else net.no_sync():
                value = losses[is_whole](net(x), mask + 0.1)
                value.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            at_hand = shares.at_hand()
            logged.append(value.item() * (1.0 if at_hand is None else at_hand.weight))
        numbers = [*made.parameters(), *(each.double() for each in made.buffers())]
        out[name] = torch.cat([each.detach().flatten() for each in numbers]), logged, torch.get_rng_state()
    return out


@pytest.mark.parametrize("batch_size", [BATCH, UNEVEN])
def test_losses_over_the_whole_batch_and_means_train_as_in_one_process(batch_size: int) -> None:
    plain = _train(DataLoader, lambda net: net, batch_size, False)
    ranks = run_ranks(_train, 3, ddpshim.make_loader, ddpshim.wrap_parallel, batch_size, True)
    for name, (numbers, losses, state) in plain.items():
        for own, own_losses, own_state in (rank[name] for rank in ranks):
            assert (own - numbers).abs().max() < 1e-13, name
            assert torch.equal(own_state, state)
            if name in LOSSES and batch_size == BATCH:
                assert own_losses == pytest.approx(losses, abs=1e-13), name
        means = [sum(of_ranks) / 3 for of_ranks in zip(*(rank[name][1] for rank in ranks))]
        assert means == pytest.approx(losses, abs=1e-13), name


def _searches_unevenly(make: Callable[..., Any], wrap: Callable[[nn.Module], Any]) -> torch.Tensor:
    torch.manual_seed(3)
    made = nn.Linear(4, 4).double()
    net = wrap(made)
    optimizer = torch.optim.LBFGS(net.parameters(), 9.0, max_iter=6, line_search_fn="strong_wolfe")
    for x, mask in make(_data(), batch_size=UNEVEN, drop_last=False):

        def closure(x: torch.Tensor = x, mask: torch.Tensor = mask) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _mean_over_samples(net(x), mask)
            loss.backward()
            return loss

        optimizer.step(closure)
    return torch.cat([p.detach().flatten() for p in made.parameters()])


def test_a_line_search_over_a_batch_that_ranks_do_not_divide_sees_the_mean_of_all_samples() -> None:
    plain = _searches_unevenly(DataLoader, lambda net: net)
    ranks = run_ranks(_searches_unevenly, 3, ddpshim.make_loader, ddpshim.wrap_parallel)
    assert all((own - plain).abs().max() < 1e-10 for own in ranks)


def _rank_counts_a_pass() -> Any:
    here = ddpshim.world()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        loader = ddpshim.make_loader(TensorDataset(torch.arange(5.0)), batch_size=4, drop_last=False)
    return [(len(x), here.all_gather(x).tolist()) for (x,) in loader], said.getvalue()


def test_a_pass_is_counted_without_the_rows_that_are_repeated() -> None:
    (first, said), (second, _) = run_ranks(_rank_counts_a_pass, 2)
    assert first == second == [(2, [0.0, 1.0, 2.0, 3.0]), (1, [4.0])]
    assert "has 1 sample in its last batch, for 2 ranks: the others repeat one" in said
    assert "take it from world.all_gather(values)" in said


def _logs(make: Callable[..., Any]) -> list[list[float]]:
    """Of each batch: its mean, as a number and as a tensor, and how many entries are valid, as a fraction."""
    world, rows = ddpshim.world(), []
    for x, mask in make(_data(), batch_size=UNEVEN, drop_last=False):
        loss = x.square().mean()
        as_number = world.mean_over(loss.item() * len(x), len(x))
        assert type(as_number) is float
        as_tensor = world.mean_over(loss * len(x), len(x))
        rows.append([as_number, as_tensor.item(), world.mean_over(mask.bool().sum(), mask.numel()).item()])
    return rows


def _rank_logs() -> Any:
    with contextlib.redirect_stderr(io.StringIO()) as nothing:
        for x, _ in ddpshim.make_loader(_data(), batch_size=BATCH):
            ddpshim.world().mean(x.sum().item())
    assert "world.mean" not in nothing.getvalue(), "shares are equal"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        rows = _logs(ddpshim.make_loader)
        means = [ddpshim.world().mean(1.0) for _ in range(2)]
        for _ in ddpshim.make_loader(_data(), batch_size=BATCH):
            means.append(ddpshim.world().mean(1.0))
    return rows, said.getvalue()


def test_means_of_batches_that_ranks_do_not_divide_are_those_of_one_process() -> None:
    """The last batch has two rows, and the third rank repeats one."""
    rows = _logs(DataLoader)
    assert len(rows) == 3
    (first, said), *others = run_ranks(_rank_logs, 3)
    for row, expected in zip(first, rows):
        assert row == pytest.approx(expected, abs=1e-7)
        assert row[:2] == pytest.approx(expected[:2], abs=1e-14)
    for own, own_said in others:
        assert own == first
        assert "world.mean" not in own_said
    assert said.count("world.mean weighs all ranks equally, but they have different numbers of samples") == 1


def _refusals() -> list[str]:
    """What is said where it is unknown how much the rows of a rank count for."""
    net, said = ddpshim.wrap_parallel(nn.Linear(1, 1)), []
    data = TensorDataset(torch.ones(11, 1))

    def refused(train: Callable[[], Any]) -> None:
        with pytest.raises(ddpshim.errors.DataError) as raised:
            train()
        said.append(str(raised.value))

    def loader(batch_size: int = 4) -> Any:
        return ddpshim.make_loader(data, batch_size, shuffle=True, drop_last=False)

    def of_two() -> None:
        for (x,), (y,) in zip(loader(), loader(2)):
            (net(x).mean() + net(y).mean()).backward()

    def ahead() -> None:
        batches = iter(loader())
        (now,) = next(batches)
        while now is not None:
            (following,) = next(batches, (None,))
            net(now).mean().backward()
            now = following

    def two_at_once() -> None:
        batches = iter(loader(3))
        sum(net(next(batches)[0]).mean() for _ in range(2)).backward()

    refused(ahead)
    refused(lambda: sum(net(x).mean() for (x,) in loader()).backward())
    refused(of_two)
    refused(two_at_once)
    with ThreadPoolExecutor(1) as pool:
        refused(lambda: pool.submit(list, loader()).result())
    return said


def test_where_the_weight_of_a_ranks_rows_is_unknown_it_is_refused() -> None:
    for ahead, several, two, at_once, thread in run_ranks(_refusals, 2):
        assert "the loader was asked for the next batch before this one was trained on" in ahead
        assert "before this one was trained on" in several
        assert "batches of 2 and 3 samples from several loaders are in use" in two
        assert "2 batches were taken since the backward pass before" in at_once
        assert "a thread takes a batch" in thread


def test_of_a_loss_that_is_no_number_torch_says_so() -> None:
    number, several = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
    assert weighing._scaled(number, None, 0.5).tolist() == [0.5]
    assert weighing._scaled(several, torch.ones(2), 0.5).tolist() == [0.5, 0.5]
    assert [weighing._scaled(loss, None, 0.5) for loss in (several, number.detach())] == [None, None]


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
    assert ddpshim.whole_batch(lambda given, by: given is x and by == 2)(x, by=2)
