"""wrap_parallel: gradients are those of the whole batch, whatever method trained; what cannot be reduced is refused."""

from __future__ import annotations

import collections
import contextlib
import copy
import cProfile
import pickle
import pstats
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import ddpshim
from ddpshim.errors import SyncError
from ddpshim.job.process_group import ENDS_THREADS
from ddpshim.model import backward, guard
from ddpshim.model.wrapper import BareModule, new_keys
from ddpshim.model.wrapping import best_bucket_cap_mb
from ddpshim.process import job
from ddpshim.process.devices import moved
from tests.preloaded import START_DEADLINE_S, environment, start_afresh
from tests.ranks import errors_of, run_ranks

B, D_IN, D_OUT = 24, 6, 3  # global batch, observation and action dimensions


class Policy(nn.Module):
    """A network in robomimic's manner: it trains through `forward_train`, and does not always use all of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(D_IN, 16), nn.Tanh())
        self.head = nn.Linear(16, D_OUT)
        self.other_head = nn.Linear(16, D_OUT)
        self.never = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.dim = 17

    def forward(self, x: torch.Tensor, head: str = "head") -> torch.Tensor:
        self.calls += 1
        return getattr(self, head)(self.trunk(x))

    def forward_train(self, x: torch.Tensor, head: str = "head") -> torch.distributions.Distribution:
        return torch.distributions.Normal(self(x, head), 0.7)

    def compute_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.forward(x) - y) ** 2).mean()

    def gather(self) -> str:
        return "the module's own"


def _distribution(net, x, y):
    (-net.forward_train(x).log_prob(y).mean()).backward()


def _plain_forward(net, x, y):
    ((net(x) - y) ** 2).mean().backward()


def _two_forwards(net, x, y):
    (((net(x) - y) ** 2).mean() + net(x * 2, "other_head").pow(2).mean()).backward()


def _two_backwards_over_one_forward(net, x, y):
    out = net(x)
    out.pow(2).mean().backward(retain_graph=True)
    net.zero_grad()
    ((out - y) ** 2).mean().backward()


def _accumulated(net, x, y):
    ((net(x) - y) ** 2).mean().backward()
    net(x, "other_head").abs().mean().backward()


def _reentrant_checkpoint(net, x, y):
    from torch.utils.checkpoint import checkpoint

    before = getattr(net, "num_reductions", 0)
    hidden = checkpoint(net.trunk, x.requires_grad_(), use_reentrant=True)
    ((checkpoint(net.head, hidden, use_reentrant=True) - y) ** 2).mean().backward()
    assert getattr(net, "num_reductions", 1) == before + 1


def _method_in_evaluation_mode(net, x, y):
    net.eval()
    net.compute_loss(x, y).backward()


def _two_methods_and_the_module(net, x, y):
    inner = net.module if hasattr(net, "module") else net
    with torch.no_grad():
        target = net.forward_train(x).mean
    (net.compute_loss(x, y) + inner(x, "other_head").sub(target).pow(2).mean()).backward()


def _checkpoint(net, x, y):
    from torch.utils.checkpoint import checkpoint

    ((checkpoint(net, x, use_reentrant=False) - y) ** 2).mean().backward()


STEPS = [
    *(_method_in_evaluation_mode, _two_methods_and_the_module, _checkpoint, _distribution, _plain_forward),
    *(_two_forwards, _two_backwards_over_one_forward, _accumulated, _reentrant_checkpoint),
]


def _batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [(draw(B, D_IN), draw(B, D_OUT)) for _ in range(steps)]


def _train(net: nn.Module, way, rank: int, size: int, steps: int = 4) -> nn.Module:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in _batches(steps):
        optimizer.zero_grad()
        way(net, x[rank::size].clone(), y[rank::size])
        optimizer.step()
    return net


def _new_policy() -> Policy:
    with torch.random.fork_rng():  # alike on all ranks, and each goes on with its own noise
        torch.manual_seed(3)
        return Policy().double()


# Ways to train, with or without a wrapper, on a rank's part of each batch; they return the trained network.


def _by_steps(step, wrap, rank, size):
    return _train(wrap(_new_policy()), step, rank, size)


def _with_options_of_ddp(wrap, rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if wrap is not BareModule:
        wrap = partial(wrap, comm_hook=allreduce_hook, gradient_as_bucket_view=False, broadcast_buffers=False)
    return _by_steps(_distribution, wrap, rank, size)


def _frozen_and_thawed(wrap, rank, size):
    net = _train(wrap(_new_policy()), _plain_forward, rank, size, 2)
    net.trunk.requires_grad_(False)
    _train(net, _plain_forward, rank, size, 2)
    net.trunk.requires_grad_(True)
    return _train(net, _two_forwards, rank, size, 2)


def _unfrozen_and_wrapped_again(wrap, rank, size):
    net = _new_policy().requires_grad_(False)
    wrapped = wrap(net)
    net.requires_grad_(True)
    if wrap is not BareModule:
        with pytest.raises(SyncError, match="again if it was unfrozen"):
            _train(wrapped, _plain_forward, rank, size, 1)
        net.zero_grad()
    return _train(wrap(wrapped), _plain_forward, rank, size)


class Shared(nn.Module):
    """An actor or a critic over an encoder that both hold."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(D_IN, D_IN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.encoder(x)))


def _nets(dtype: torch.dtype = torch.float64) -> tuple[Shared, Shared]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        encoder = nn.Linear(D_IN, D_IN)
        return Shared(encoder).to(dtype), Shared(encoder).to(dtype)


def _whole(part: torch.Tensor) -> torch.Tensor:
    return part.pow(2).mean()


def _parts(rank: int, size: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [x[rank::size].to(dtype) for x, _ in _batches(4)]


def _alone_with_sgd(wrap, dtype: torch.dtype = torch.float64):
    net = wrap(_nets(dtype)[0])
    return net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)


def _accumulate(wrap, rank, size):
    net, optimizer = _alone_with_sgd(wrap)
    for x in _parts(rank, size):
        optimizer.zero_grad()
        for i in range(4):  # as many samples in each part
            with net.accumulate(is_last=i == 3):
                (_whole(net(x[i::4])) / 4).backward()
        optimizer.step()
    assert getattr(net, "num_reductions", 4) == 4
    return net


def _actor_and_critic(wrap, rank, size):
    actor, critic = (wrap(net) for net in _nets())
    of_actor = torch.optim.Adam(actor.head.parameters(), lr=1e-2)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for x in _parts(rank, size):
        of_critic.zero_grad()
        (critic(x) - x).pow(2).mean().backward()
        of_critic.step()
        of_actor.zero_grad()
        (-critic(actor(x)).mean() + actor(x).pow(2).mean()).backward()  # leaves gradients in the critic
        of_actor.step()
    return nn.ModuleList([actor, critic])


def _penalty(wrap, rank, size):
    """A penalty on the gradient with respect to the input: torch.autograd.grad inside the loss."""
    net, optimizer = _alone_with_sgd(wrap)
    for x in _parts(rank, size):
        optimizer.zero_grad()
        x.requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        _whole(slope).backward()
        optimizer.step()
    return net


def _scaled(wrap, rank, size):
    """In the second step one sample overflows: every rank must skip that step, and halve the scale."""
    net, optimizer = _alone_with_sgd(wrap, torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step, x in enumerate(_parts(rank, size, torch.float32)):
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        if step == 1 and rank == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024, 512, 512, 1024]
    return net


def _with_batchnorm(wrap, rank, size):
    """BatchNorm of both shapes, one of them without weights, and a loss that no scale hides."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        of_rows = nn.Linear(D_IN, 12), nn.BatchNorm1d(12, affine=False), nn.Unflatten(1, (3, 2, 2))
        of_pictures = nn.BatchNorm2d(3, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)
        net = wrap(nn.Sequential(*of_rows, *of_pictures).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in _parts(rank, size):
        optimizer.zero_grad()
        (net(x).exp() * x[:, :1]).mean().backward()
        optimizer.step()
    with torch.no_grad():  # no share of a batch: no collective
        alone = nn.functional.batch_norm(torch.tensor([[1.0], [3.0 + rank]]), None, None, training=True)
    assert alone.mean().abs() < 1e-6
    return net


def _compiled(order, wrap, rank, size):
    net = module = _nets()[0]
    is_alone = wrap is BareModule
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo's own
        if order == "before" and not is_alone:
            net = torch.compile(net, backend="aot_eager")
        net = wrap(net) if is_alone else wrap(net, bucket_cap_mb=1.0)  # torch splits graphs where buckets end
        if order == "after" and not is_alone:
            net = torch.compile(net, backend="aot_eager")
        elif order == "in place" and not is_alone:
            net.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
        for x in _parts(rank, size):
            optimizer.zero_grad()
            _whole(net(x)).backward()
            optimizer.step()
    return module


HAS_SCALER = hasattr(torch.amp, "GradScaler")  # before torch 2.3 it needs a GPU
WAYS = [
    *(partial(_by_steps, step) for step in STEPS),
    *(_with_options_of_ddp, _frozen_and_thawed, _unfrozen_and_wrapped_again, _accumulate),
    *(_actor_and_critic, _penalty, _with_batchnorm),
    *([_scaled] if HAS_SCALER else []),
]
COMPILED = [partial(_compiled, order) for order in ("before", "after", "in place")]


def _outcome(way, wrap, rank: int, size: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of what was trained, and the names of parameters without a gradient."""
    net = way(wrap, rank, size)
    tensors = {key: value.clone() for key, value in net.state_dict().items() if key != "calls"}
    return tensors, [name for name, p in net.named_parameters() if p.grad is None]


def _rank_trains(ways: list[Any]) -> list[Any]:
    here, wrap = ddpshim.world(), partial(ddpshim.wrap_parallel, bucket_cap_mb=0.0002)
    batch_norm = nn.functional.batch_norm
    trained = [_outcome(way, wrap, here.rank, here.world_size) for way in ways]
    ddpshim.cleanup()
    assert nn.functional.batch_norm is batch_norm
    return trained


@pytest.mark.parametrize(
    ("ways", "size"),
    [
        (WAYS, 3),
        pytest.param(
            *(COMPILED, 2),
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 12) and not HAS_SCALER, reason="dynamo of torch 2.1 needs Python 3.11"
            ),
        ),
    ],
    ids=["on 3", "compiled"],
)
def test_every_way_to_train_equals_one_process(ways: list[Any], size: int) -> None:
    for way, *ranks in zip(ways, *run_ranks(_rank_trains, size, ways, timeout_s=120)):
        alone, has_no_gradient = _outcome(way, BareModule, 0, 1)
        for tensors, of_rank in ranks:
            assert of_rank == has_no_gradient, way
            for key, value in alone.items():
                assert torch.equal(tensors[key], ranks[0][0][key]), (way, key)
                rounding = 1e-12 if value.dtype is torch.float64 else 1e-6
                assert (tensors[key] - value).abs().max() < rounding, (way, key)


def _rank_rolls_out_alone() -> tuple[int, list[float]]:
    here = ddpshim.world()
    net = ddpshim.wrap_parallel(_new_policy())
    _train(net, _plain_forward, here.rank, here.world_size, 1)
    before = net.calls.item()
    if here.is_main:
        net.eval()
        with torch.no_grad():
            for _ in range(5):
                net(torch.zeros(1, D_IN, dtype=torch.float64))
        net(torch.zeros(1, D_IN, dtype=torch.float64)).sum()  # gradients enabled, and still nobody is waited for
        assert type(pickle.loads(pickle.dumps(net))) is Policy
        copied = copy.deepcopy(net)
        assert type(copied) is Policy
        copied(torch.zeros(1, D_IN, dtype=torch.float64)).sum().backward()
        net.train()
    here.barrier()
    _train(net, _plain_forward, here.rank, here.world_size, 1)
    num_calls = int(net.calls.item() - before)
    ddpshim.cleanup()  # the module is bare again
    _train(net.module, _plain_forward, here.rank, here.world_size, 1)
    return num_calls, net.head.weight.grad.flatten().tolist()


def test_one_rank_alone_may_run_the_wrapped_network() -> None:
    (num_calls, gradient), (num_others, other_gradient) = run_ranks(_rank_rolls_out_alone, 2)
    assert num_calls == num_others == 7  # buffers are the main rank's again after training
    assert gradient != other_gradient


def _rank_wraps_twice() -> list[torch.Tensor]:
    here = ddpshim.world()
    net = _new_policy()
    once = ddpshim.wrap_parallel(net)
    assert isinstance(once._ddp, DistributedDataParallel)
    assert [name for name, _ in once.named_parameters()] == [name for name, _ in net.named_parameters()]  # for an EMA
    assert isinstance(ddpshim.wrap_parallel(_new_policy().requires_grad_(False)), BareModule)
    assert ddpshim.wrap_parallel(once) is once
    assert isinstance(ddpshim.wrap_parallel(net), BareModule)  # nothing is left to reduce
    parent = nn.ModuleDict({"child": once, "extra": nn.Linear(D_IN, D_OUT).double()})
    nn.init.ones_(parent["extra"].weight)
    nn.init.zeros_(parent["extra"].bias)
    whole = ddpshim.wrap_parallel(parent)
    assert [len(once._reduced), len(whole._reduced)] == [8, 2]
    x, y = _batches(1)[0]
    out = whole["child"](x[here.rank :: 2]) + whole["extra"](x[here.rank :: 2])
    ((out - y[here.rank :: 2]) ** 2).mean().backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    assert list(parent.state_dict()) == [*(f"child.{k}" for k in net.state_dict()), "extra.weight", "extra.bias"]
    return [p.detach().clone() for p in parent.parameters()]


def test_wrapping_twice_and_child_then_parent_reduces_once() -> None:
    ranks = run_ranks(_rank_wraps_twice, 2)
    for a, b in zip(*ranks):
        assert torch.equal(a, b)


def _rank_sends_buckets() -> list[Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    came: list[int] = []
    sent: list[tuple[int, list[int]]] = []  # how many gradients were there, and whose a bucket had

    def hook(state: Any, bucket: Any) -> Any:
        sent.append((len(came), [places[p.data_ptr()] for p in bucket.parameters()]))
        return allreduce_hook(None, bucket)

    hook.__annotations__ = allreduce_hook.__annotations__  # torch looks at them

    with ddpshim.shared_random_streams(0):
        net = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    places = {p.data_ptr(): i for i, p in enumerate(net.parameters())}
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 64 * 64 * 4  # torch 2.1: whatever bucket_cap_mb is
    wrapped = ddpshim.wrap_parallel(net, bucket_cap_mb=64 * 64 * 4 / 2**20, comm_hook=hook)
    for i, p in enumerate(net.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, i=i: came.append(i))
    got = []
    for _ in range(3):
        came.clear()
        sent.clear()
        x = torch.full((2, 64), 0.1 * (ddpshim.world().rank + 1))
        for layer in (3, 5, 0, 4, 2, 1):  # not in the order in which the network has them, as in a U-Net
            x = wrapped[layer](x).tanh()
        x.sum().backward()
        got.append((list(came), list(sent)))
    return got


def test_buckets_leave_in_the_order_in_which_gradients_come() -> None:
    for (order, _), *later in run_ranks(_rank_sends_buckets, 2):
        assert (order[0] // 2, order[-1] // 2) == (1, 3)
        for came, sent in later:
            assert came == order
            assert [i for _, bucket in sent for i in bucket] == order
            # Each leaves when its own gradients are there; the hook that counts may run after the one that sends.
            ends = [sum(len(bucket) for _, bucket in sent[: k + 1]) for k in range(len(sent))]
            assert len(ends) >= 5
            assert all(end - there in (0, 1) for (there, _), end in zip(sent, ends))


def _rank_builds_different() -> list[float]:
    here = ddpshim.world()
    torch.manual_seed(here.rank)
    net = nn.Linear(3, 3)
    said = pytest.warns(UserWarning, match="weights differed between ranks before training")
    with said if here.is_main else contextlib.nullcontext():
        ddpshim.wrap_parallel(net)
    return net.weight.flatten().tolist()


def test_different_weights_warn_and_become_equal() -> None:
    first, second = run_ranks(_rank_builds_different, 2)
    torch.manual_seed(0)
    assert first == second == nn.Linear(3, 3).weight.flatten().tolist()


_LEAVES = """
import atexit
import contextlib
import os
import pathlib
import torch
import ddpshim

def threads():
    names = []
    for file in pathlib.Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, _, rest = file.read_text().partition("(")[2].rpartition(")")
            # One that was waited for is listed until the kernel has taken it away, and marked as exiting.
            names += [] if int(rest.split()[6]) & 4 else [name]
    return names

def train():
    make_net = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    nets = [ddpshim.wrap_parallel(make_net()) for _ in range(2)]
    sum(net(torch.rand(3, 4)).sum() for net in nets).backward()
    assert len(threads()) > len(before) + 2  # gloo's, which have no names of their own before torch 2.9
    return nets

before = threads()
atexit.register(lambda: None if threads() == before else os._exit(3))  # it runs after what setup() registers
world = ddpshim.setup()
nets = train()
ddpshim.cleanup()
assert threads() == before
try:
    world.gather(0)
except ddpshim.WorldError as error:
    print(error)
ddpshim.setup()
nets = train()  # without cleanup()
"""


@pytest.mark.launch
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads in /proc")
@pytest.mark.skipif(not ENDS_THREADS, reason="before torch 2.8 they live as long as the process")
def test_cleanup_or_the_end_of_the_program_ends_the_threads_of_gloo(tmp_path: Path) -> None:
    """One that is alive when Python ends may abort a finished job; in an interpreter of its own, as imports matter."""
    (tmp_path / "leaves.py").write_text(_LEAVES)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    code, output = start_afresh([*torchrun, "leaves.py"], environment(), tmp_path, START_DEADLINE_S, True)
    assert code == 0, output
    assert "rank 1 of 2 has left its job by cleanup()" in output


class _Critic(nn.Module):
    """The gradients of one head come first, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.other_head, self.trunk, self.head = nn.Linear(D_IN, 1), nn.Linear(D_IN, D_IN), nn.Linear(D_IN, 1)

    def forward(self, x: torch.Tensor, has_head: bool) -> torch.Tensor:
        x = self.trunk(x).tanh()
        found = self.other_head(x).pow(2).mean()
        return found + self.head(x).pow(2).mean() if has_head else found


def _actor_and_critics(wrap: Callable[[nn.Module], Any], ranks: list[int]) -> list[torch.Tensor]:
    """Critics alone, then an actor through one of them, of which rank 1 leaves out a head."""
    torch.manual_seed(3)
    actor, critics = nn.Linear(D_IN, D_IN).double(), [_Critic().double() for _ in range(2)]
    for net in (actor, *critics):
        wrap(net)  # the bare modules are trained
    optimizer = torch.optim.SGD([p for net in (actor, *critics) for p in net.parameters()], lr=0.1)
    for whole, _ in _batches(5):
        for critic, inputs in ((critics[0], lambda x: x), (critics[1], lambda x: x), (critics[0], actor)):
            optimizer.zero_grad()
            for rank in ranks:
                has_head = not rank or inputs is not actor
                (critic(inputs(whole[rank::2]), has_head) / len(ranks)).backward()
            optimizer.step()
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]


def _rank_trains_actor_and_critics() -> list[torch.Tensor]:
    return _actor_and_critics(partial(ddpshim.wrap_parallel, bucket_cap_mb=0.0001), [ddpshim.world().rank])


def test_a_rank_may_leave_out_a_part_of_one_of_several_networks() -> None:
    """Then its buckets leave later, after those of another network."""
    weights, others = run_ranks(_rank_trains_actor_and_critics, 2)
    for alone, a, b in zip(_actor_and_critics(BareModule, [0, 1]), weights, others):
        assert torch.equal(a, b)
        assert (alone - a).abs().max() < 1e-12


class Awkward(nn.Module):
    """Names that torch's wrapper has, too; a parameter at the root, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D_OUT, D_IN, dtype=torch.float64))
        self.join = nn.Linear(D_IN, D_OUT, bias=False).double()
        self.join.weight = self.weight
        self.device, self.reducer, self.logger, self.detach = "mine", "mine", "mine", "mine"


def _rank_with_awkward_names() -> list[str]:
    here = ddpshim.world()
    net = Awkward()
    wrapped = ddpshim.wrap_parallel(net)
    wrapped.device = "set"
    wrapped.join(_batches(1)[0][0][here.rank :: 2]).mean().backward()
    with ddpshim.shared_random_streams(1):
        parent = ddpshim.wrap_parallel(nn.ModuleDict({"net": net, "more": nn.Linear(1, 1)}))
    assert len(parent._reduced) == 2
    ddpshim.cleanup()
    return [net.device, wrapped.reducer, wrapped.logger, wrapped.detach, str(net.weight.grad.sum().item())]


def test_names_that_torch_uses_are_the_modules() -> None:
    first, second = run_ranks(_rank_with_awkward_names, 2)
    assert first[:4] == ["set", "mine", "mine", "mine"]
    assert first == second


# The step


def _normed(num_layers: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [[nn.Linear(D_IN, D_IN), nn.BatchNorm1d(D_IN), nn.ReLU()] for _ in range(num_layers)]
        return nn.Sequential(*(layer for three in layers for layer in three))


def _num_python_calls(act: Callable[[], Any]) -> int:
    profile = cProfile.Profile(builtins=False)
    profile.runcall(act)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]


def _rank_steps() -> tuple[list[int], list[int]]:
    here = ddpshim.world()
    calls = []
    ddpshim.wrap_parallel(nn.Linear(1, 1))  # the further ones have groups of their own
    options: dict[str, Any] = {"bucket_cap_mb": 0.0005, "sync_batchnorm": False}
    for net in [ddpshim.wrap_parallel(_normed(num_layers), **options) for num_layers in (2, 20)]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, _ in _batches(6):  # weights are compared after the first ones
            loss = net(x[here.rank :: 2].float()).pow(2).mean()
            act = [loss.backward, lambda optimizer=optimizer: guard._check_step(optimizer, (), {})]
            calls.append([_num_python_calls(a) for a in act])
    return calls[5], calls[-1]


def test_a_step_runs_no_python_for_each_parameter() -> None:
    for few_layers, many_layers in run_ranks(_rank_steps, 2):
        assert few_layers == many_layers


class _Odd(nn.Module):
    """Parameters that some ranks use, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dead, self.never = (nn.Parameter(torch.ones(2)) for _ in range(3))
        for name, value in {"scalar": 1, "flag": True, "mask": [[1.5, 2.5]], "none": []}.items():
            self.register_buffer(name, torch.tensor(value))
        self.register_buffer("later", None)


def _rank_uses_a_part() -> dict[str, object]:
    here = ddpshim.world()
    net = ddpshim.wrap_parallel(_Odd())
    out = []
    for step in range(3):
        net.zero_grad(set_to_none=step != 2)
        if step == 1:  # a buffer that came later, and one in the place of another
            net.later = torch.full((3,), here.rank, dtype=torch.float64)
            net.mask = torch.full((1, 1), here.rank + 5)
        net.scalar += here.rank
        net.flag &= here.is_main
        loss = net.used.sum() * (here.rank + 1)
        if here.rank == 1:
            loss = loss + net.dead.sum() * 0.0  # used, and its gradient is zero
        loss.backward()
        gradients = [None if p.grad is None else p.grad.tolist() for p in (net.used, net.dead, net.never)]
        buffers = [None if b is None else b.tolist() for b in net._buffers.values()]
        out.append((gradients, buffers))
    return out


def test_what_no_rank_used_has_no_gradient_and_any_buffer_is_the_main_ranks() -> None:
    first, *others = run_ranks(_rank_uses_a_part, 3)
    assert first == [
        ([[2, 2], [0, 0], None], [1, True, [[1.5, 2.5]], [], None]),
        ([[2, 2], [0, 0], None], [1, True, [[5]], [], [0, 0, 0]]),
        ([[2, 2], [0, 0], None], [1, True, [[5]], [], [0, 0, 0]]),
    ]
    assert others == [first, first]


@pytest.mark.unit
def test_the_size_of_a_bucket() -> None:
    sizes = [1, 4 * 2**20, 32 * 2**20, 10**10]  # of parameters
    nets = [nn.ParameterList([nn.Parameter(torch.empty(size, device="meta"))]) for size in sizes]
    assert [best_bucket_cap_mb(net, "gloo") for net in nets] == [1, 1, 8, 25]
    assert best_bucket_cap_mb(nets[2], "nccl") == 25
    assert best_bucket_cap_mb(nets[2].requires_grad_(False), "gloo") == 1


def _rank_has_one_sample(sync_batchnorm: bool) -> str:
    net = ddpshim.wrap_parallel(nn.BatchNorm1d(2), sync_batchnorm=sync_batchnorm)
    try:
        net.module(torch.full((1, 2), float(ddpshim.world().rank)))
    except ValueError as error:
        return str(error)
    return ""


def test_batchnorm_over_one_sample_of_each_rank() -> None:
    assert run_ranks(_rank_has_one_sample, 2, True) == ["", ""]
    assert all("Expected more than 1 value per channel" in said for said in run_ranks(_rank_has_one_sample, 2, False))


# One process


@pytest.fixture
def one() -> BareModule:
    return ddpshim.wrap_parallel(_new_policy())


@pytest.mark.unit
def test_one_process_passes_everything_through(one: BareModule) -> None:
    net = one.module
    assert type(net) is Policy
    assert ddpshim.unwrap(one) is net
    assert ddpshim.unwrap(DataParallel(one)) is net
    assert one.dim == 17
    assert one.gather() == "the module's own"
    assert list(one.state_dict()) == list(net.state_dict())
    assert [n for n, _ in one.named_parameters()] == [n for n, _ in net.named_parameters()]
    one.eval()
    assert not net.training
    assert not one.training
    one.train()
    assert net.trunk.training
    one.note = 4
    assert net.note == 4
    one.extra = nn.Linear(2, 2)
    assert "extra.weight" in net.state_dict()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        one.nonsense  # noqa: B018
    with pytest.raises(TypeError):
        len(one)
    assert bool(one)
    one.apply(lambda m: setattr(m, "visited", True))
    assert net.visited
    with one.no_sync():
        one(torch.zeros(1, D_IN, dtype=torch.float64)).sum().backward()
    assert net.head.weight.grad is not None
    assert one.double() is one
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nonsense"):
        one.load_state_dict({**one.state_dict(), "nonsense": torch.zeros(1)})
    before = nn.functional.batch_norm
    ddpshim.wrap_parallel(nn.BatchNorm1d(2))
    assert nn.functional.batch_norm is before


@pytest.mark.unit
def test_one_process_that_sees_several_gpus_is_spread_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpus(nn.Linear):
        dim = "mine"  # a name of DataParallel's

        def parameters(self, recurse: bool = True) -> Any:
            return [SimpleNamespace(is_cuda=True)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    seen = []
    monkeypatch.setattr(nn.DataParallel, "forward", lambda self, x: (seen.append(self.device_ids), x)[1])
    monkeypatch.setattr(nn.DataParallel, "__init__", lambda self, module: vars(self).update(device_ids=[0, 1]))
    monkeypatch.setattr(nn.DataParallel, "__call__", nn.DataParallel.forward)
    spread = ddpshim.wrap_parallel(OnGpus(2, 2))
    assert spread(torch.ones(1)).item() == 1
    assert (seen, spread.dim, list(spread.state_dict())) == ([[0, 1]], "mine", ["weight", "bias"])
    assert type(ddpshim.wrap_parallel(nn.Linear(2, 2))) is BareModule  # it is not on a GPU


@pytest.mark.unit
def test_inputs_follow_to_the_device_and_what_is_there_is_left_alone() -> None:
    there, scalar = torch.device("meta"), torch.tensor(2.0)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    point = collections.namedtuple("point", "x y")(scalar, "text")
    by_name = collections.defaultdict(list, a=[scalar, (1, None)])
    found = moved((scalar, packed, point, by_name, 3), there)
    assert [found[0].device, found[1].data.device, found[2].x.device, found[3]["a"][0].device] == [there] * 4
    assert (type(found[2]), found[2].y, found[3]["a"][1], found[4]) == (type(point), "text", (1, None), 3)
    assert (type(found[3]), found[3]["new"]) == (collections.defaultdict, [])
    assert by_name == {"a": [scalar, (1, None)]}  # the caller's own
    assert moved(found, there) is found
    assert (moved((), there), moved({}, there)) == ((), {})
    leaf = torch.ones(2, requires_grad=True)
    moved(leaf, torch.device("cpu")).add(1).sum().backward()
    assert moved(leaf, torch.device("cpu")) is leaf
    assert leaf.grad is not None


@pytest.mark.unit
def test_indexing_reaches_containers() -> None:
    nets = ddpshim.wrap_parallel(nn.ModuleDict({"policy": nn.Linear(2, 2)}))
    assert isinstance(nets["policy"], nn.Linear)
    assert "policy" in nets
    assert list(nets) == ["policy"]
    assert len(ddpshim.wrap_parallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == 2


@pytest.mark.unit
def test_copies_and_pickles_are_bare(one: BareModule) -> None:
    assert type(copy.deepcopy(one)) is Policy
    assert type(copy.deepcopy(nn.ModuleDict({"a": one}))["a"]) is Policy
    assert type(pickle.loads(pickle.dumps(one))) is Policy
    assert b"ddpshim" not in pickle.dumps(ddpshim.wrap_parallel(nn.Linear(2, 2))), "who loads it needs no ddpshim"


class WithChildCalledModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.zeros(2))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("net", "keys"),
    [
        (nn.Linear(2, 2), ["weight", "bias"]),
        (nn.Linear(2, 2), ["module.weight", "module.bias"]),
        (nn.Linear(2, 2), ["_orig_mod.weight", "_orig_mod.bias"]),
        (nn.Linear(2, 2), ["module._orig_mod.weight", "module._orig_mod.bias"]),
        (WithChildCalledModule(), ["weight", "module.weight", "module.bias"]),
        (WithChildCalledModule(), ["module.weight", "module.module.weight", "module.module.bias"]),
        (nn.ModuleDict({"submodule": nn.Linear(2, 2)}), ["submodule.module.weight", "submodule.module.bias"]),
        (nn.ModuleDict({"prior_module": nn.Linear(2, 2)}), ["module.prior_module.weight", "module.prior_module.bias"]),
    ],
)
def test_keys_with_and_without_prefixes_load(net: nn.Module, keys: list[str]) -> None:
    state = net.state_dict()
    assert list(new_keys(keys, net).values()) == list(state)
    values = {key: torch.full_like(value, i) for i, (key, value) in enumerate(zip(keys, state.values()))}
    ddpshim.wrap_parallel(net).load_state_dict(values)
    assert [v.flatten()[0].item() for v in net.state_dict().values()] == list(range(len(keys)))
    parent = nn.ModuleDict({"net": ddpshim.wrap_parallel(net)})
    parent.load_state_dict({f"net.{key}": value + 10 for key, value in values.items()})
    assert [v.flatten()[0].item() for v in net.state_dict().values()] == list(range(10, 10 + len(keys)))


@pytest.mark.unit
def test_hooks_of_a_wrapped_child_run_when_its_parent_loads() -> None:
    child, seen = nn.Linear(2, 2), []
    wrapped = ddpshim.wrap_parallel(child)
    child.register_load_state_dict_post_hook(lambda module, keys: seen.append("child"))
    wrapped.register_load_state_dict_post_hook(lambda module, keys: seen.append("wrapper"))
    parent = nn.ModuleDict({"net": wrapped})
    parent.load_state_dict(parent.state_dict())
    assert seen == ["child", "wrapper"]
    wrapped.load_state_dict(child.state_dict())
    assert seen == ["child", "wrapper"] * 2


@pytest.mark.unit
def test_another_wrapper_is_refused() -> None:
    class Pretend(DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(SyncError, match="Pretend is distributed already, by torch's DistributedDataParallel"):
        ddpshim.wrap_parallel(Pretend())
    with pytest.raises(TypeError, match="did you mean bucket_cap_mb"):
        ddpshim.wrap_parallel(nn.Linear(2, 2), bucket_cap=3)
    with pytest.raises(SyncError, match="wrap_parallel got a dict, which is not an nn"):
        ddpshim.wrap_parallel({"policy": nn.Linear(2, 2)})
    inner = nn.Linear(2, 2)
    assert ddpshim.wrap_parallel(DataParallel(inner)).module is inner


# What ranks cannot train together: each is refused at once, with what to do.


def _replicated() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(nn.Linear(2, 2))  # type: ignore[no-any-return]


def _fully_sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(2, 2))
    fully_shard(net[0], mesh=init_device_mesh("cpu", (2,)))
    return net


def _split_into_dtensors() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    return distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (2,)))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.jit.script(nn.Linear(2, 2)), "RecursiveScriptModule is scripted or traced.*Wrap the orig"),
    (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "TopLevelTracedModule is scripted or traced"),
    (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "'0' of Sequential is scripted or traced"),
    (lambda: nn.Sequential(DistributedDataParallel(nn.Linear(2, 2))), "'0' of Sequential is distributed already"),
    (lambda: DistributedDataParallel(nn.Linear(2, 2)), "is distributed already, by torch's DistributedDataParallel"),
    (_replicated, "Linear is distributed already, by torch's (DDP|replicate).*bare module"),
    (_fully_sharded, "'0' of Sequential is distributed already, by torch's (FSDPModule|FSDP)"),
    (_split_into_dtensors, "'weight' of Linear is a DTensor"),
    (lambda: [nn.Linear(2, 2)], "wrap_parallel got a list"),
]


def _rank_is_refused() -> list[str]:
    said = []
    warnings.simplefilter("ignore")  # torch's: jit, fully_shard
    for make, _ in REFUSED:
        try:
            net = make()
        except (ImportError, AttributeError):
            said.append("torch lacks it")
            continue
        try:
            ddpshim.wrap_parallel(net)
        except SyncError as error:
            said.append(str(error))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = nn.Linear(2, 2)
    wrapped = ddpshim.wrap_parallel(net)
    for module in (net, wrapped, nn.Sequential(net)):
        with pytest.raises(SyncError, match="weight' wrap_parallel reduces already: two reducers"):
            DistributedDataParallel(module)
    DistributedDataParallel(copy.deepcopy(wrapped))
    torch.jit.script(wrapped)(torch.ones(3, 2) * ddpshim.world().rank).sum().backward()
    assert net.weight.grad.tolist() == [[1.5, 1.5], [1.5, 1.5]]
    return said


def test_what_ranks_cannot_share_is_refused_with_its_cure() -> None:
    for said in run_ranks(_rank_is_refused, 2):
        assert len(said) == len(REFUSED)
        for (_, text), told in zip(REFUSED, said):
            assert told == "torch lacks it" or re.search(text, told), told


class _Checkpointed(nn.Module):
    """One layer in two reentrant checkpoints, or in one and outside of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.shared, self.head, self.how = nn.Linear(4, 4), nn.Linear(4, 1), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.shared, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(self.shared, x, use_reentrant=True) if self.how == "two" else self.shared(x)
        return self.head(x)


def _checkpoint_twice(how: str) -> None:
    net = ddpshim.wrap_parallel(_Checkpointed(how))
    net(torch.ones(3, 4)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def _layers() -> nn.Module:
    return ddpshim.wrap_parallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))


def _retry(_: str) -> None:
    def hook(gradient: torch.Tensor) -> None:
        assert gradient.sum() > 1e6

    net, x = _layers(), torch.ones(3, 4)
    net[0].weight.register_hook(hook)
    with contextlib.suppress(AssertionError):
        net(x).sum().backward()
    net(x)


def _step_in_hooks(_: str) -> None:
    net = _layers()
    for p in net.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    net(torch.ones(3, 4)).sum().backward()


def _without_graph(_: str) -> None:
    with torch.no_grad():
        out = _layers()(torch.ones(3, 4))
    out.sum().backward()


def _compiled_autograd(_: str) -> None:
    from torch._dynamo import compiled_autograd

    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    with enable(torch.compile(backend="eager")):
        _layers()(torch.ones(3, 4)).sum().backward()


def _step_on_unreduced(how: str) -> None:
    here = ddpshim.world()
    net = _new_policy()
    net.never.requires_grad_(False)
    wrapped = ddpshim.wrap_parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = _batches(1)[0]
    x, y = x[here.rank :: 2], y[here.rank :: 2]
    if how == "no_sync":
        with wrapped.no_sync():
            _plain_forward(wrapped, x, y)
    elif how == "caught":
        try:
            loss = ((net(x) - y) ** 2).mean()
            net.trunk[0].weight.register_hook(lambda _: 1 / 0)
            loss.backward()
        except ZeroDivisionError:
            pass
    elif how == "autograd.grad":
        loss = ((net(x) - y) ** 2).mean()
        for p, g in zip(net.head.parameters(), torch.autograd.grad(loss, list(net.head.parameters()))):
            p.grad = g
    elif how == "not used":
        wrapped = ddpshim.wrap_parallel(_new_policy(), find_unused_parameters=False)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        _plain_forward(wrapped, x, y)
    elif how == "static":
        wrapped = ddpshim.wrap_parallel(_new_policy(), static_graph=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        _distribution(wrapped, x, y)
    elif how == "unfrozen":
        net.never.requires_grad_(True)
        (net(x).sum() + net.never(x[:, :2]).sum()).backward()
    elif how == "added":
        net.adapter = nn.Linear(D_OUT, D_OUT).double()
        optimizer.add_param_group({"params": net.adapter.parameters()})
        net.adapter(net(x)).sum().backward()
    optimizer.step()


def _convert(how: str) -> None:
    here = ddpshim.world()
    net = ddpshim.wrap_parallel(_new_policy())
    net = net.float() if how == "float" else net.float().double()
    x, y = _batches(1)[0]
    dtype = net.head.weight.dtype
    _plain_forward(net, x[here.rank :: 2].to(dtype), y[here.rank :: 2].to(dtype))
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def _build_different(how: str) -> None:
    is_main = ddpshim.world().is_main
    net = nn.Linear(3, 3 if is_main or how != "shape" else 4)
    if how == "buffer" and is_main:
        net.register_buffer("extra", torch.zeros(2))
    ddpshim.wrap_parallel(net)


def _keep_the_graph(_: str) -> None:
    net = _layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of a cycle of references
        _whole(net(torch.ones(3, 4))).backward(create_graph=True)
    torch.optim.SGD(net.parameters(), lr=0.1).step()


NOT_REDUCED: list[tuple[Callable[[str], None], str, str]] = [
    (_step_on_unreduced, "no_sync", r"SGD\.step\(\) after a backward pass of Policy under no_sync\(\)"),
    (_step_on_unreduced, "caught", r"a backward pass of Policy never finished"),
    (_step_on_unreduced, "autograd.grad", "gradients of Policy never went through a backward pass"),
    (_step_on_unreduced, "not used", r"'other_head.weight' of Policy \(4 in all\) got no gradient .*find_unused"),
    (_step_on_unreduced, "static", "gradients of Policy with static_graph=True were not reduced.*Train through for"),
    (_step_on_unreduced, "unfrozen", "'never.weight' of Policy"),
    (_step_on_unreduced, "added", "'adapter.weight' of Policy"),
    (_convert, "float", "of Policy changed its dtype or device after it was wrapped"),
    (_convert, "float and back", "of Policy changed its dtype or device after it was wrapped"),
    (
        _build_different,
        "shape",
        r"parameter 'weight' is \(3, 3\).* on rank 0, is \(4, 3\).* on rank 1 \(1 more differ\)",
    ),
    (_build_different, "buffer", r"buffer 'extra' is \(2,\), torch\.float32 on rank 0, missing on rank 1"),
    (_keep_the_graph, "", r'setup\(batch="global"\)'),
    (_checkpoint_twice, "one", "got a second gradient in one backward pass.*use_reentrant=False"),
    (_checkpoint_twice, "two", "got a second gradient in one backward pass.*use_reentrant=False"),
    (_without_graph, "", r"loss that depends on no parameter.*torch.no_grad\(\).* inference_mode is for evaluation"),
    (_retry, "", r"that of \w+ ended with AssertionError \(.*test_parallel.py, line \d+, in hook: assert"),
    (_step_in_hooks, "", r"SGD.step\(\) inside a backward pass .*Step after loss.backward"),
    (_compiled_autograd, "", "a backward pass under compiled autograd.*compiled_autograd off"),
]


def test_what_cannot_be_reduced_says_what_to_do() -> None:
    for said in run_ranks(errors_of, 2, [partial(act, how) for act, how, _ in NOT_REDUCED]):
        for (act, how, text), told in zip(NOT_REDUCED, said):
            assert re.search(text, told), (act, how, told)


@pytest.mark.unit
def test_a_program_that_catches_the_refusal_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(backward, "abort", ended.append)
    monkeypatch.setattr(job, "_current", job.Job())
    passes = backward.Passes()
    job.leave(job.current())
    passes.left = "that of Net ended with MemoryError"
    for _ in range(2):
        with pytest.raises(SyncError, match="never finished: that of Net ended with MemoryError"):
            backward.check(passes)
    assert [type(error) for error in ended] == [SyncError]
