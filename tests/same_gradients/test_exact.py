"""The option `exact`: one hash of all bits on any number of ranks that divides it, and what is refused with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import random
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ddpshim
from ddpshim.errors import DataError, OptionsError, RankError
from ddpshim.model import exact as summing
from ddpshim.model.exact import Networks
from ddpshim.options import Options
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from evidence import exact
from tests.ranks import errors_of, run_ranks

BATCH, NUM_EPOCHS = 24, 3


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.spare = nn.Linear(32, 2), nn.Linear(32, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()  # every virtual rank's own: the first one's counts
        out = self.body(x)
        return self.head(out) + (self.spare(out) if len(x) and x[0, 0] > 0 else 0)  # not used by all


def _data() -> TensorDataset:
    made = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(4 * BATCH, 6, generator=made), torch.randn(4 * BATCH, 2, generator=made))


def _step(net: Any, critic: Any, averaged: Any, optimizers: Any, schedule: Any, x: Any, y: Any) -> dict[str, Any]:
    """Two networks, two optimizers, a mean over valid entries, samples that are compared, an average of weights."""
    world = ddpshim.world()
    noisy = x + 0.1 * torch.randn_like(x) + 0.01 * float(np.random.rand()) + 0.01 * random.random()
    valid = (y > -0.5).float()
    masked = world.mean_over(((net(noisy) - y).square() * valid).sum(), valid.sum())
    everyone = world.all_gather(net(x))
    loss = masked + 0.1 * everyone.std()
    optimizers[0].zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.3)
    optimizers[0].step()
    optimizers[1].zero_grad()
    (critic(torch.cat([x, net(x).detach()], 1)) - y.sum(1, keepdim=True)).square().mean().backward()
    optimizers[1].step()
    schedule.step()
    with torch.no_grad():
        for mine, its in zip(averaged.parameters(), net.parameters()):
            mine.lerp_(its, 0.1)
    return {
        "loss": loss.detach(),
        "norm": norm,
        "lr": schedule.get_last_lr()[0],
        "all": world.mean(float(masked.detach())),
    }


def _build() -> tuple[Any, ...]:
    torch.manual_seed(1)
    net, critic = _Policy(), nn.Linear(8, 1)
    averaged = copy.deepcopy(net)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2), torch.optim.SGD(critic.parameters(), 1e-2, momentum=0.9)]
    return net, critic, averaged, optimizers, torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 40)


def _tensors(parts: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    net, critic, averaged, optimizers, _ = parts
    out = {
        f"{i}.{key}": value for i, of in enumerate((net, critic, averaged)) for key, value in of.state_dict().items()
    }
    for i, optimizer in enumerate(optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            out.update((f"optimizer {i}.{number}.{key}", v) for key, v in state.items() if isinstance(v, torch.Tensor))
    return out


def _train(num_parts: int = 0) -> tuple[str, dict[str, torch.Tensor], list[dict[str, float]]]:
    parts = _build()
    net, critic = (ddpshim.wrap_parallel(part) for part in parts[:2])
    loader = ddpshim.make_loader(_data(), batch_size=BATCH, shuffle=True)
    step = ddpshim.virtual_step(_step, net, critic, *parts[2:])
    logs = []
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        for x, y in loader:
            logs.append({key: float(value) for key, value in step(x, y).items()})
        net.load_state_dict(net.state_dict())  # the copies are to be made anew
    tensors = _tensors((net, critic, *parts[2:]))
    made = hashlib.sha256(repr(logs).encode() + torch.get_rng_state().numpy().tobytes())
    made.update(repr((np.random.get_state()[2:], random.random())).encode())
    for key, value in tensors.items():
        made.update(key.encode() + value.numpy().tobytes())
    return made.hexdigest(), tensors, logs


def _clip(net: Any) -> Any:
    return nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def _scale_through_data(net: Any) -> Any:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(0.3)
    return sum(float(p.grad.sum()) for p in net.parameters() if p.grad is not None)


def _clip_twice(net: Any) -> Any:
    first = float(_clip(net))
    return ddpshim.world().mean(first) + float(nn.utils.clip_grad_norm_(net.parameters(), 0.05))


CHANGES = {"nothing": lambda net: 0.0, "clip": _clip, "data": _scale_through_data, "twice": _clip_twice}
PASSES = ("one", "two", "kept", "zeroed", "checkpointed")


def _gradient_step(net: Any, optimizer: Any, x: Any, y: Any, change: str, passes: str) -> Any:
    """A step whose gradients are cleared, accumulated and changed in one of the ways that trainers have."""
    if passes != "kept":
        optimizer.zero_grad(set_to_none=passes != "zeroed")
    if passes == "two":
        net(x[: len(x) // 2]).square().mean().backward()
    out = checkpoint(net, x.requires_grad_(), use_reentrant=True) if passes == "checkpointed" else net(x)
    (out - y).square().mean().backward()
    changed = CHANGES[change](net)
    optimizer.step()
    return {
        "changed": float(changed),
        "norm": sum(float(p.grad.norm()) for p in net.parameters() if p.grad is not None),
    }


class _Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(6, 32), nn.Linear(32, 2), nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x).relu()
        return self.head(out) + (self.spare(out) if x.detach()[0, 0] > 0 else 0)  # type: ignore[no-any-return]


def _accumulate() -> tuple[dict[str, str], list[str]]:
    """A hash of each way, and those in which gradients were added up on the way."""
    found, running = {}, []
    for change, passes in itertools.product(CHANGES, PASSES):
        torch.manual_seed(2)
        net = ddpshim.wrap_parallel(_Branched())
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        step = ddpshim.virtual_step(functools.partial(_gradient_step, change=change, passes=passes), net, optimizer)
        logs = [step(x, y) for x, y in ddpshim.make_loader(_data(), BATCH, shuffle=True)]
        if current().part(Networks).running_sum._means:
            running.append(passes)
        made = hashlib.sha256(repr(logs).encode())
        for value in [*net.state_dict().values(), *(state["momentum_buffer"] for state in optimizer.state.values())]:
            made.update(value.numpy().tobytes())
        found[f"{change}, {passes}"] = made.hexdigest()[:8]
        ddpshim.cleanup()
        ddpshim.setup()
    return found, running


@pytest.mark.ranks
def test_sums_on_the_way_have_the_hash_of_sums_of_processes() -> None:
    """One process adds gradients up while its backward passes go, several put them together afterwards."""
    ((alone, running),), ((on_two, none), _) = (
        run_ranks(_accumulate, size, environ={"DDPSHIM_EXACT": "4"}) for size in (1, 2)
    )
    assert alone == on_two
    assert len(set(alone.values())) == len(CHANGES) * 3  # cleared to zeros or checkpointed, the same is trained
    assert (running, none) == ([*PASSES[:-1]] * len(CHANGES), [])


@pytest.mark.ranks
@pytest.mark.parametrize(("virtual", "sizes"), [(4, (1, 2, 4)), (6, (1, 2, 3))])
def test_one_hash(virtual: int, sizes: tuple[int, ...]) -> None:
    """Two networks, BatchNorm, dropout, noise of three generators, masks, gathers, a branch that not all take."""
    found = [run_ranks(_train, size, environ={"DDPSHIM_EXACT": str(virtual)}) for size in sizes]
    assert len({digest for run in found for digest, _, _ in run}) == 1, [
        [digest[:8] for digest, *_ in r] for r in found
    ]
    assert found[0][0][2][0]["loss"] != found[0][0][2][1]["loss"]


def _train_by_messages() -> tuple[str, dict[str, torch.Tensor], list[dict[str, float]]]:
    with replaced(summing, "_shared_memory", lambda *_: None):
        return _train()


@pytest.mark.ranks
def test_messages_have_the_hash_of_shared_memory() -> None:
    """As between machines, and on GPUs."""
    by_memory, by_messages = (
        run_ranks(train, 2, environ={"DDPSHIM_EXACT": "4"})[0][0] for train in (_train, _train_by_messages)
    )
    assert by_memory == by_messages


def _simple() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16, False), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 2))


def _simple_step(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (net(x + 0.1 * torch.randn_like(x)) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.ranks
def test_without_marked_step() -> None:
    """With as many ranks as virtual ones nothing has to be marked; the hash is that of the marked step."""
    found = [run_ranks(_unmarked, 4, is_marked, environ={"DDPSHIM_EXACT": "4"})[0] for is_marked in (True, False)]
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def _unmarked(is_marked: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = ddpshim.wrap_parallel(_simple())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    step = ddpshim.virtual_step(_simple_step, net, optimizer)
    for x, y in ddpshim.make_loader(_data(), batch_size=BATCH, shuffle=True):
        step(x, y) if is_marked else _simple_step(net, optimizer, x, y)
    out: dict[str, torch.Tensor] = net.state_dict()
    return out


def _go_wrong(kind: str) -> None:
    net = ddpshim.wrap_parallel(nn.Linear(6, 2))
    other = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = _data()
    number = [0]

    def step(net: Any, optimizer: Any, x: Any, y: Any) -> None:
        world, i = ddpshim.world(), number[0]
        number[0] += 1
        if kind == "broadcast":
            world.broadcast(1)
        if kind == "other draws" and i == 2:
            torch.rand(())
        if kind == "raises" and i == 2:
            raise DataError("of the step itself")
        net(x).mean().backward()
        if kind == "another backward" and i == 3:
            net(x).mean().backward()
        if kind == "no backward":
            return
        optimizer.step((lambda: None) if kind == "closure" else None)

    def early(net: Any, optimizer: Any, x: Any, y: Any) -> None:
        number[0] += 1
        if number[0] != 2:
            net(x).mean().backward()

    of_another = torch.optim.SGD(other.parameters(), lr=0.1)
    objects: dict[str, tuple[Any, ...]] = {
        "network missing": (nn.Identity(), optimizer),
        "network not wrapped": (other, of_another),
    }

    if kind == "batch":
        ddpshim.make_loader(data, batch_size=6)
    elif kind == "last batch":
        ddpshim.make_loader(data, batch_size=BATCH, drop_last=False)
    elif kind == "no loader":
        ddpshim.virtual_step(step, net, optimizer)(torch.zeros(4, 6), None)
    elif kind == "accumulation":
        next(ddpshim.accumulate(torch.zeros(4), net, steps=2))
    elif kind == "own statistics":
        ddpshim.wrap_parallel(nn.BatchNorm1d(6), sync_batchnorm=False)
    for x, y in ddpshim.make_loader(data, batch_size=BATCH):
        if kind == "outside":
            net(x).mean().backward()
        around: Any = torch.autocast("cpu") if kind == "autocast" else contextlib.nullcontext()
        chosen: Callable[..., Any] = early if kind == "one backward less" else step
        if kind == "uses the global":
            chosen = lambda *given: step(net, optimizer, *given[2:])  # noqa: E731
        given = (object(),) if kind == "no rows" else (x, y)
        made = objects.get(kind, (net, optimizer))
        marked = (lambda *_: None) if kind == "no rows" else chosen
        with around:
            ddpshim.virtual_step(marked, *made)(*given)


REFUSED = {
    "batch": "DataError: a global batch of 6 samples with exact=4, which must divide it",
    "last batch": "DataError: drop_last=False with exact=4",
    "accumulation": "DataError: accumulate with steps=2 and exact=4",
    "own statistics": "sync_batchnorm=False, and exact=4",
    "no loader": "without a current batch of make_loader",
    "no rows": "DataError: no argument of the step has the batch",
    "outside": "SyncError: a backward pass outside of a step of virtual ranks, with exact=4 on 1 ranks",
    "autocast": "SyncError: autocast around a step of virtual ranks",
    "broadcast": "WorldError: broadcast in a step of 4 virtual ranks",
    "closure": "SyncError: SGD.step with a closure",
    "network missing": "a Linear was given to wrap_parallel but is not among the objects of the step",
    "network not wrapped": "trains a parameter of shape (2, 6) that is in no wrapped network",
    "uses the global": "virtual rank 1 of this process trained virtual rank 0's 'weight'",
    "other draws": "virtual ranks 0 and 2 of this process drew different amounts",
    "another backward": "reached a step of an optimizer, virtual rank 3 the end of a backward pass",
    "one backward less": "reached the end of a backward pass, virtual rank 1 the end of its step",
    "raises": "DataError: of the step itself",
}


@pytest.mark.ranks
def test_refuses() -> None:
    """What would differ in silence on another number of ranks."""
    cases = [functools.partial(_go_wrong, kind) for kind in REFUSED]
    [said] = run_ranks(errors_of, 1, cases, environ={"DDPSHIM_EXACT": "4"})
    for text, told in zip(REFUSED.values(), said):
        assert text in told


@pytest.mark.unit
@pytest.mark.parametrize("more", [{"noise": "per_rank"}, {"per_rank_batch": True}])
def test_refuses_options(more: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match="with exact=4: results would depend on the number of ranks"):
        Options(exact=4, **more)


@pytest.mark.unit
def test_refuses_sizes() -> None:
    ddpshim.cleanup()  # of a test before this one
    with pytest.raises(OptionsError, match=r"exact=4 in a process without a launcher.*with N one of 1, 2, 4"):
        ddpshim.setup(options=Options(exact=4))
    assert ddpshim.world().world_size == 1  # nothing was set up


@pytest.mark.ranks
def test_refuses_ranks() -> None:
    with pytest.raises(RankError, match="exact=4 in 3 ranks: 4 virtual ranks cannot be divided evenly"):
        run_ranks(_build, 3, environ={"DDPSHIM_EXACT": "4"})


def _forget_one() -> None:
    ddpshim.wrap_parallel(nn.Linear(6, 2))
    other = nn.Linear(6, 2)
    other(torch.ones(4, 6)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()


def _step_inside_a_pass(by_optimizer: bool) -> None:
    net = ddpshim.wrap_parallel(nn.Linear(6, 2))
    for p in net.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def act(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step() if by_optimizer else p.detach().sub_(p.grad)  # type: ignore[arg-type]

        p.register_post_accumulate_grad_hook(act)
    for x, _ in ddpshim.make_loader(_data(), batch_size=BATCH):
        net(x).sum().backward()


@pytest.mark.ranks
def test_refuses_steps_on_one_ranks_gradients() -> None:
    ways = _forget_one, functools.partial(_step_inside_a_pass, False), functools.partial(_step_inside_a_pass, True)
    for forgotten, by_hand, by_optimizer in run_ranks(errors_of, 2, ways, environ={"DDPSHIM_EXACT": "2"}):
        assert "SGD.step(): a parameter of shape (2, 6) is in no wrapped network" in forgotten
        assert "' was changed inside a backward pass (a hook that steps?)" in by_hand
        assert "SGD.step() inside a backward pass (an optimizer in backward" in by_optimizer


@pytest.mark.unit
def test_without_the_option() -> None:
    net = nn.Linear(6, 2)
    optimizer: Optional[Any] = torch.optim.SGD(net.parameters(), lr=0.1)
    step = ddpshim.virtual_step(_simple_step, net, optimizer)
    assert step(torch.zeros(4, 6), torch.zeros(4, 2)).shape == ()


@pytest.mark.launch
def test_robomimic(tmp_path: Path) -> None:
    """The installed release, patched: a policy with noise in its loss, of two sizes of world; logs and validation."""
    found = exact.train("0.3.0", "bc_vae", 4, (1, 2), tmp_path, steps=5, epochs=2)
    assert (len(set(found)), len(found[0])) == (1, 12), found
