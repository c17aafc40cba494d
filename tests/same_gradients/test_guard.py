"""The guards: what makes ranks differ is an error that names it, and what users rightly do is none."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import re
from datetime import timedelta
from functools import partial
from typing import Any, Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpshim
from ddpshim.errors import SyncError
from ddpshim.job.process_group import ENDS_THREADS
from ddpshim.model import backward, equality, guard
from ddpshim.process import job_store
from ddpshim.process.job import begin_next, current
from tests.preloaded_commands import patience
from tests.ranks import errors_of, free_port, run_ranks

B, D_IN, D_OUT = 8, 5, 3


def _net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(D_IN, 7), nn.Tanh(), nn.Linear(7, D_OUT))


def _batch(seed: int = 0) -> torch.Tensor:
    here = ddpshim.world()
    x = torch.randn(B, D_IN, generator=torch.Generator().manual_seed(seed))
    return x[here.rank :: here.world_size]


def _loss(net: nn.Module, seed: int = 0) -> torch.Tensor:
    return net(_batch(seed)).pow(2).mean()


def _steps(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        _loss(net, step).backward()
        optimizer.step()


def _sum(tensor: torch.Tensor) -> str:
    return equality.fact_of(tensor).partition(" (")[2]


@pytest.mark.unit
def test_the_checksum_sees_every_bit_but_not_which_nan() -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int32, torch.bool]
    seen = set()
    for dtype in kinds:
        zeros = torch.zeros(4, 6, dtype=dtype)
        other = zeros.clone()
        other[3, 5] = 1
        seen |= {_sum(zeros), _sum(other), _sum(zeros.flatten())}
        assert _sum(zeros) == _sum(zeros.clone())
    assert len(seen) == 3 * len(kinds)
    x = 1 + torch.rand(4, 6)
    assert _sum(x.t()) == _sum(x.t().contiguous())
    assert _sum(torch.nextafter(x, x + 1)) != _sum(x)
    odd = torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)  # as cuDNN puts weights
    assert torch.equal(odd, x)
    assert _sum(odd) == _sum(x)
    # As many bits up as down leave the sum of the bits as it was, but not that of the numbers.
    balanced = torch.tensor([1.0, -1.0])
    up = torch.nextafter(balanced, balanced + 1)
    assert _sum(up) == _sum(balanced)
    assert equality.fact_of(up) != equality.fact_of(balanced)
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert bool(nans.isnan().all())
    assert len({_sum(nan) for nan in nans}) == 1
    assert _sum(torch.tensor([torch.nan, 1])) != _sum(torch.tensor([torch.nan, 2]))
    _sum(torch.zeros(3, device="meta"))
    _sum(torch.zeros(0))


# What makes ranks differ, and what is alike or rightly differs.


def _become_different(how: str) -> None:
    here = ddpshim.world()
    net = _net()
    net.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    target = _net().requires_grad_(False)
    wrapped = ddpshim.wrap_parallel(net)
    ddpshim.wrap_parallel(target)
    average = ddpshim.watch(copy.deepcopy(net))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1 * here.rank if how == "decay" else 0.0)
    _steps(wrapped, optimizer, 5)
    if here.is_main:
        if how == "loaded":
            wrapped.load_state_dict({key: value + 1 for key, value in net.state_dict().items()})
        elif how == "last bit":
            with torch.no_grad():
                net[2].bias.view(torch.int32)[1] += 1
        elif how == "frozen":
            net.frozen.data[1] = 3
        elif how == "nan":
            net.frozen.data[1] = torch.nan
        elif how == "dtype":
            net.frozen.data = net.frozen.data.double()
        elif how == "removed":
            del net.frozen
        elif how == "added":
            net[1].adapter = nn.Linear(2, 2)
        elif how == "target":
            target[0].weight.data.zero_()
        elif how == "step":
            optimizer.step()
    _steps(wrapped, optimizer, 6)
    if here.is_main:  # weights are compared no more, until the end
        if how == "last weights":
            net[0].weight.data.add_(1)
        elif how == "rate":
            optimizer.param_groups[0]["lr"] = 1.0
        elif how == "moments":
            optimizer.state[net[0].weight]["exp_avg_sq"].add_(1)
        elif how == "average":
            average[0].weight.data.add_(1)
    _steps(wrapped, optimizer, 1)


def _cross_collectives() -> None:
    here = ddpshim.world()
    here.barrier() if here.is_main else here.broadcast(1)  # type: ignore[func-returns-value]


def _train_twice() -> None:
    for training in range(2):
        net, target = _net(), _net().requires_grad_(False)
        wrapped = ddpshim.wrap_parallel(net)
        ddpshim.watch(target)
        if training and ddpshim.world().is_main:
            target[0].weight.data.zero_()
        _steps(wrapped, torch.optim.SGD(net.parameters(), lr=0.1), 4)


def _update_without_an_optimizer() -> None:
    here = ddpshim.world()
    net = ddpshim.wrap_parallel(_net())
    for step in range(12):
        _loss(net, step).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * (1 + here.rank) * p.grad


def _be_legitimate() -> None:
    """What differs between ranks rightly, or looks odd and is equal."""
    here = ddpshim.world()
    net = nn.Sequential(_net(), nn.BatchNorm1d(D_OUT), nn.Dropout(0.3))
    net.register_parameter("nan", nn.Parameter(torch.full((2,), torch.nan), requires_grad=False))
    net.register_parameter("scalar", nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False))
    net.register_parameter("brain", nn.Parameter(torch.ones(2, 2).half(), requires_grad=False))
    net.register_parameter("byte_", nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False))
    wrapped = ddpshim.wrap_parallel(net)
    private = ddpshim.wrap_parallel(nn.Sequential(_net(), nn.BatchNorm1d(D_OUT)), broadcast_buffers=False)
    for module in (wrapped, private):
        if here.is_main:
            net.nan.data[0] = -torch.nan
            with torch.no_grad():
                module(_batch(9))  # an evaluation on one rank, which moves the BatchNorm's statistics
        _steps(module, torch.optim.Adam(module.parameters(), lr=1e-3), 12)
    added = net.add_module("added", nn.Linear(2, 2))  # on every rank, alike
    del added
    net.added.weight.data.fill_(1)
    net.added.bias.data.fill_(1)
    optimizer = torch.optim.Adam(wrapped[0].parameters())
    for step in range(100):
        optimizer.zero_grad()
        wrapped[0](_batch(step)).sum().backward()
        optimizer.step()
    assert [wrapped.num_reductions, private.num_reductions] == [112, 12]


def _by_hand(net: nn.Module) -> None:
    parameters = list(net.parameters())
    for p, g in zip(parameters, torch.autograd.grad(_loss(net), parameters)):
        p.grad = g


def _set_gradients_later(view: bool) -> None:
    net = ddpshim.wrap_parallel(_net(), gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _steps(net, optimizer, 3)
    optimizer.zero_grad()
    _by_hand(net)
    optimizer.step()


def _turn_off() -> None:
    here = ddpshim.world()
    current().world = dataclasses.replace(here, options=dataclasses.replace(here.options, guard=False))
    net = ddpshim.wrap_parallel(_net())
    torch.manual_seed(7)
    if here.is_main:
        net[0].weight.data.zero_()
    _steps(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    net.zero_grad()
    _by_hand(net)
    torch.optim.SGD(net.parameters(), lr=0.1).step()


DIFFERENT = "of Sequential ranks hold different weights or settings"
AT_THE_END = "^SyncError: at the end of the job ranks hold different weights or settings"
REPLACED = r"SGD\.step\(\): gradients of Sequential never went through a backward pass \(after 3 of them;"
# What `_become_different` does, and the error.
DIFFERENCES = {
    "loaded": rf"after 10 backward passes {DIFFERENT}: parameter 'frozen' "
    r"sums to 4.0 \(torch.float32 \(2,\), #\w+\) on rank 0, sums to 2.0 \(.*\) on rank 1 \(4 more differ\)",
    "last bit": "parameter '2.bias' sums to",
    "frozen": r"parameter 'frozen' sums to 4.0 \(.*\) on rank 0, sums to 2.0",
    "nan": "parameter 'frozen' sums to 1.0 .* on rank 0, sums to 2.0",
    "dtype": r"parameter 'frozen' sums to 2.0 \(torch.float\d+ .* on rank 0, sums to 2.0 \(torch.float\d+ ",
    "removed": "parameter 'frozen' missing on rank 0, sums to 2.0",
    "added": r"parameter '1.adapter.weight' sums to .* on rank 0, missing on rank 1",
    "target": r"network 0 of those that are not trained \(Sequential\)",
    "step": f"after 10 backward passes {DIFFERENT}: parameter '0.weight' sums to",
    "decay": "^SyncError: after .* weight_decay of group 0 of AdamW 0 is 0.0 on rank 0, is 0.1 on rank 1",
    "last weights": f"{AT_THE_END}: parameter '0.weight' of network 0",
    "rate": f"{AT_THE_END}: parameter '0.weight' of network 0 .* more differ",
    "moments": rf"{AT_THE_END}: parameter '0.weight' of network 0 \(Sequential\) sums to",
    "average": rf"{AT_THE_END}: parameter '0.weight' of network 1 of those that are not trained \(Sequential\) sums",
}
CASES: list[tuple[Callable[[], None], str]] = [
    *((partial(_become_different, how), text) for how, text in DIFFERENCES.items()),
    (
        _cross_collectives,
        "different collectives: rank 0 is in barrier at .*:[0-9]+; rank 1 is in broadcast from rank 0 at .*:[0-9]+",
    ),
    (_train_twice, f"after 1 backward passes {DIFFERENT}: parameter '0.weight' of network 1 of those that are not"),
    (_update_without_an_optimizer, f"after 2 backward passes {DIFFERENT}"),
    (partial(_set_gradients_later, True), REPLACED),
    (partial(_set_gradients_later, False), REPLACED),
    (_be_legitimate, "^$"),
    (_turn_off, "^$"),
]


def test_what_makes_ranks_differ_is_named_and_nothing_else() -> None:
    for said in run_ranks(errors_of, 2, [act for act, _ in CASES], timeout_s=120):
        for (act, text), told in zip(CASES, said):
            assert re.search(text, told), (act, told)


# What users rightly do with gradients


def _twice_after_one_backward(set_to_none, net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        _loss(net, step).backward()
        optimizer.step()
        optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()


def _several_optimizers(net):
    first, second = torch.optim.Adam(net[0].parameters()), torch.optim.SGD(net[2].parameters(), lr=0.1)
    both = torch.optim.AdamW(net.parameters(), foreach=True)
    for step in range(3):
        net.zero_grad()
        _loss(net, step).backward()
        for optimizer in (first, second, both):
            optimizer.step()
    both.step()


def _merged_by_hand(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        _loss(net, step).backward()
        kept = [p.grad.clone() for p in net.parameters()]
        optimizer.zero_grad()
        _loss(net, step + 1).backward()
        for p, g in zip(net.parameters(), kept):
            p.grad = torch.maximum(p.grad, g)
        optimizer.step()


def _sharpness_aware(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        _loss(net, step).backward()
        before = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p in net.parameters():
                p.add_(p.grad, alpha=0.01)
        optimizer.zero_grad()
        _loss(net, step).backward()
        with torch.no_grad():
            for p, old in zip(net.parameters(), before):
                p.copy_(old)
        optimizer.step()


def _put_back(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _loss(net).backward()
    kept = [p.grad for p in net.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    for p, g in zip(net.parameters(), kept):
        p.grad = g
    optimizer.step()


def _other_networks_gradients(net):
    bare = _net()  # not wrapped, and trained alike on all ranks: on one rank's data it would be an error
    with torch.no_grad():
        bare(_batch())
    _steps(net, torch.optim.SGD([*net.parameters(), *bare.parameters()], lr=0.1), 2)


RIGHTLY = [
    *(partial(_twice_after_one_backward, set_to_none) for set_to_none in (True, False)),
    *(_several_optimizers, _merged_by_hand, _sharpness_aware, _put_back),
    _other_networks_gradients,
]


def _rank_does_what_is_right() -> list[list[float]]:
    out = []
    for view in (True, False):
        for way in RIGHTLY:
            net = ddpshim.wrap_parallel(_net(), gradient_as_bucket_view=view)
            way(net)
            out.append([p.detach().sum().item() for p in net.parameters()])
    return out


def test_what_users_rightly_do_with_gradients_is_no_error() -> None:
    first, second = run_ranks(_rank_does_what_is_right, 2)
    assert first == second


# Equal steps


class _Patient:
    """The job's store, in which a deadline ends the wait for one rank alone: the others come when they are ready."""

    def __init__(self, store: Any, impatient_for: int) -> None:
        self._store, self._end_of_key = store, f"/{impatient_for}"

    def check(self, keys: list[str]) -> bool:
        if not keys[0].endswith(self._end_of_key) and not keys[0].startswith("watch/"):
            self._store.wait(keys, timedelta(seconds=patience(50)))
        return job_store.is_there(self._store, keys[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _rank_ends_epochs(num_steps: list[list[int]], stays_away: int) -> list[str]:
    """For each epoch what check_equal_steps said, where each rank makes the passes that are its own."""
    here, said = ddpshim.world(), []
    current().store = _Patient(current().store, stays_away)
    nets = [ddpshim.wrap_parallel(_net()) for _ in num_steps[0]]
    for rank, passes in enumerate(num_steps):
        for net, number in zip(nets, passes):
            net.__dict__["num_reductions"] = number if rank == here.rank else net.num_reductions
    for epoch in (1, 2):
        if here.rank == stays_away and epoch == 2:
            break
        try:
            guard.DEADLINE_S = {1: patience(50), 2: 0.2}[epoch]
            ddpshim.check_equal_steps(f"epoch {epoch}")
            said.append("")
        except SyncError as error:
            said.append(str(error))
    here.barrier()
    return said


def test_other_numbers_of_steps_are_an_error_on_every_rank() -> None:
    assert run_ranks(_rank_ends_epochs, 3, [[7, 2], [7, 2], [7, 2]], 3) == [["", ""]] * 3
    text = "different numbers of backward passes by the end of epoch 1: 7 on rank 0, 7 on rank 1, 8 on rank 2;"
    for first, _ in run_ranks(_rank_ends_epochs, 3, [[5, 2], [4, 3], [5, 3]], 3):
        assert text in first


@pytest.mark.parametrize("away", [0, 1])
def test_a_rank_that_does_not_come_is_named_by_the_others(away: int) -> None:
    said = run_ranks(_rank_ends_epochs, 3, [[5], [5], [5]], away)
    assert said.pop(away) == [""]
    for here, (first, second) in zip([rank for rank in range(3) if rank != away], said):
        assert first == ""
        assert f"ranks [{away}] did not reach the end of epoch 2 within 0.2 s of rank {here}; they wait" in second
        assert "so far: 5 on rank " in second


def _rank_has_jobs(port: int, is_alone: bool) -> list[str]:
    """What check_equal_steps said in each of three jobs of one process; in the first, rank 1 makes one pass more."""
    rank, said = dist.get_rank(), []
    ddpshim.cleanup()
    dist.destroy_process_group()
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    for job in range(3):
        ddpshim.setup(device="cpu", timeout_s=patience(50))
        if not ENDS_THREADS:  # it would end the rank that waits for one that has left
            current().watched.watch.end()  # type: ignore[union-attr]
        net = ddpshim.wrap_parallel(_net())
        _steps(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
        try:
            if job == 0 and rank == 1:
                if is_alone:
                    _loss(net).backward()
                net.__dict__["num_reductions"] += 1
            # In the first job alone nobody comes, however long the other rank waits.
            guard.DEADLINE_S = 0.2 if job == 0 and is_alone else patience(50)
            ddpshim.check_equal_steps(f"job {job}")
            said.append("")
        except (SyncError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        ddpshim.cleanup()
    return said


def test_a_job_is_not_blamed_for_the_steps_of_one_before_it() -> None:
    """Both ranks met the error, and went on with another job."""
    for first, *later in run_ranks(_rank_has_jobs, 2, free_port(), False):
        assert "by the end of job 0: 2 on rank 0, 3 on rank 1; gradients of different steps" in first
        assert later == ["", ""]


def test_ranks_meet_again_in_the_job_after_one_where_a_rank_stayed_away() -> None:
    """Rank 1 waited for gradients that nobody sent, and never came to the meeting at which rank 0 raised."""
    (first, *later), (lost, *later_too) = run_ranks(_rank_has_jobs, 2, free_port(), True)
    assert first.startswith("SyncError: ranks [1] did not reach the end of job 0 within 0.2 s of rank 0; they wait")
    assert lost.startswith("RuntimeError: ")
    assert ("by peer" if ENDS_THREADS else "Timed out") in lost  # groups that cannot be ended stay connected
    assert later == later_too == ["", ""]


def _rank_cleans_up() -> int:
    net = ddpshim.wrap_parallel(_net())
    target = ddpshim.wrap_parallel(_net().requires_grad_(False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _steps(net, optimizer, 1)
    assert current().part(guard.GuardState).companions == [target.module]
    ddpshim.cleanup()
    _by_hand(net)
    optimizer.step()
    return len(vars(current())["_parts"])


def test_cleanup_takes_the_guards_away() -> None:
    assert run_ranks(_rank_cleans_up, 2) == [0, 0]


def _nan_on_rank_1() -> list[str]:
    said: list[str] = []
    net = ddpshim.wrap_parallel(_net())
    with mock.patch.object(backward, "say", said.append):
        for step in range(4):
            loss = _loss(net) * (math.nan if step == 2 and ddpshim.world().rank == 1 else 1)
            loss.backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad  # type: ignore[operator]
                    p.grad = None
    return said


@pytest.mark.ranks
def test_the_first_rank_with_a_loss_that_is_nan_is_named_once() -> None:
    of_main, of_other = run_ranks(_nan_on_rank_1, 2)
    (said,) = of_main
    assert re.fullmatch(
        r"on rank 1, the loss is NaN in backward pass 3 \(\S+test_guard.py:\d+\)\. The training goes on, as in one "
        "process",
        said,
    )
    assert of_other == []


@pytest.mark.unit
def test_a_parameter_that_was_replaced_is_kept_so_no_new_one_is_taken_for_it() -> None:
    class Wrapper(guard.Reduced):
        pass

    try:
        guard.own(Wrapper(), [nn.Parameter(torch.ones(2)) for _ in range(50)])
        assert not any(guard.is_owned(nn.Parameter(torch.ones(2))) for _ in range(200))
    finally:
        begin_next()
