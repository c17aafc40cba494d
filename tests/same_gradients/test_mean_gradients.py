"""Mean gradients on hooks (model/mean_gradients.py): each rank gives other ones, and all get the mean, in any program.

Ranks compute with numbers of their own on purpose. The value of each loss is zero, since ranks compare losses.
"""

from __future__ import annotations

import random
import re
import warnings
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpshim
from ddpshim.model import guard
from ddpshim.model.mean_gradients import Means
from ddpshim.process.job import current
from ddpshim.process.observed import Progress
from ddpshim.process.replaced import replaced
from tests.ranks import errors_of, run_ranks

pytestmark = pytest.mark.ranks
NUM_RANKS = 3


def _wrap(net: nn.Module, bucket_cap_mb: float = 1.0) -> Any:
    return ddpshim.wrap_parallel(net, bucket_cap_mb=bucket_cap_mb)


def _x(rank: int) -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


class _Net(nn.Module):
    """A convolution in channels_last, a layer that is used twice, and parameters of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        self.twice = nn.Linear(3, 3).double()
        self.of_others = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in _DTYPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(self.twice(self.convolution(x)).tanh())
        return hidden.square().sum() + sum((p * x[0, 0, 0, 0].to(p.dtype)).abs().sum().double() for p in self.of_others)


_DTYPES = (torch.float32, torch.bfloat16, torch.complex64)


def _loss(net: nn.Module, rank: int) -> torch.Tensor:
    value = net(_x(rank))
    return value - value.detach()


def _numbers(tensors: Any) -> torch.Tensor:
    tensors = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    return torch.cat([one.detach().double().flatten() for one in tensors])


def _gradients(net: nn.Module) -> torch.Tensor:
    return _numbers([p.grad for p in net.parameters()])


def _is_mean(net: nn.Module, expected: torch.Tensor, times: int = 1) -> None:
    num_exact = sum(p.numel() for p in net.parameters() if p.dtype == torch.float64)
    found = _gradients(net)
    assert (found - times * expected)[:num_exact].abs().max() < 1e-12
    assert torch.allclose(found, times * expected, atol=0.05)  # bfloat16
    everyones = ddpshim.world().gather(found.tolist())
    assert all(theirs == everyones[0] for theirs in everyones)


def _expected(net: nn.Module) -> torch.Tensor:
    """The mean of all ranks' gradients, computed on one."""
    params = [*net.parameters()]
    of_ranks = [_numbers(torch.autograd.grad(_loss(net, rank), params)) for rank in range(NUM_RANKS)]
    return torch.stack(of_ranks).mean(0)


def _rank_accumulates(bucket_cap_mb: float) -> int:
    """Everything that a program may do with gradients between passes and in them."""
    plain = _Net()
    net, rank = _wrap(_Net(), bucket_cap_mb), ddpshim.world().rank
    plain.load_state_dict(net.state_dict())
    expected, params = _expected(plain), [*net.parameters()]

    _loss(net, rank).backward()
    _is_mean(net, expected)
    assert net.convolution.weight.grad.stride() == net.convolution.weight.stride() != (27, 9, 3, 1)
    memory = [p.grad.data_ptr() for p in params]
    loss = _loss(net, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    _is_mean(net, expected, 3)
    assert [p.grad.data_ptr() for p in params] == memory, "sums are reduced where they lie"
    for p in params:
        p.grad.detach_()  # refused for views of torch's buckets
    net.zero_grad(set_to_none=False)
    _loss(net, rank).backward()
    _is_mean(net, expected)

    mine = [torch.zeros_like(p) for p in params]
    for p, gradient in zip(params, mine):
        p.grad = gradient
    _loss(net, rank).backward()
    assert all(p.grad is gradient for p, gradient in zip(params, mine)), "the program's own gradients are written"
    _is_mean(net, expected)

    net.zero_grad()
    with net.accumulate(is_last=False):
        _loss(net, rank).backward()
    assert net.has_unreduced_gradients
    value = net.twice.bias.sum() * (rank + 1)  # leaves out the other parameters
    (value - value.detach()).backward()
    assert not net.has_unreduced_gradients
    with torch.no_grad():
        net.twice.bias.grad.sub_(2)  # the mean of 1, 2 and 3
    _is_mean(net, expected)

    net.zero_grad()
    called: list[torch.Tensor] = []
    handle = net.twice.bias.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.clone()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        _loss(net, rank).backward(create_graph=True)
    handle.remove()
    _is_mean(net, expected)
    assert torch.equal(called[0], net.twice.bias.grad), "hooks of the program see the mean"
    penalty = net.twice.weight.grad.square().sum()
    net.zero_grad()
    penalty.backward()
    everyones = ddpshim.world().gather(net.convolution.weight.grad.tolist())
    assert all(theirs == everyones[0] for theirs in everyones)
    return current().part(Progress).num_passes


@pytest.mark.parametrize("bucket_cap_mb", [1e-5, 1.0])
def test_sums_hooks_and_memory_are_those_of_one_process(bucket_cap_mb: float) -> None:
    assert run_ranks(_rank_accumulates, NUM_RANKS, bucket_cap_mb, batch="global") == [8] * NUM_RANKS


def _rank_has_sparse_gradients() -> torch.Tensor:
    net, rank = _wrap(nn.Embedding(8, 2, sparse=True)), ddpshim.world().rank
    for _ in range(2):
        value = net(torch.tensor([rank, rank + 1, 5])).sum()
        (value - value.detach()).backward()
    gradient = net.weight.grad
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[0, 1, 2, 3, 5]]
    return gradient.to_dense()[:, 0] * NUM_RANKS / 2


def test_sparse_gradients_are_averaged_where_any_rank_has_some() -> None:
    for found in run_ranks(_rank_has_sparse_gradients, NUM_RANKS, batch="global"):
        assert found.tolist() == pytest.approx([1, 2, 2, 1, 0, 3, 0, 0])


def _rank_trains_several() -> list[Any]:
    rank, nets = ddpshim.world().rank, [_wrap(nn.Linear(2, 2), 1e-6) for _ in range(5)]
    num_sent = []
    for kinds in [(0, 1, 2, 3, 4), (0,), (1, 2)] * 3:
        hidden = torch.full((1, 2), rank + 1.0)
        for kind in kinds:
            hidden = nets[kind](hidden)
        nets[kinds[0]].weight.register_hook(lambda _: num_sent.append(len(current().part(Means)._sent)))
        (hidden.sum() - hidden.sum().detach()).backward()
    gradients = [p.grad.tolist() for net in nets for p in net.parameters()]
    assert all(theirs == gradients for theirs in ddpshim.world().gather(gradients))
    assert (guard.num_reductions(), current().part(Progress).num_passes) == (3 * 8, 9)
    return [num_sent[0], num_sent[-1]]


def test_several_networks_share_passes_and_send_early_in_those_that_repeat() -> None:
    """A pass sends nothing before its end until ranks agreed on one after the same passes before."""
    for at_first, later in run_ranks(_rank_trains_several, NUM_RANKS, batch="global"):
        assert at_first == 0 < later


def _rank_leaves_out_layers_at_random() -> list[bool]:
    """Return for each of the last passes whether it sent all gradients before it waited for another rank."""
    net, events, is_early = _wrap(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), 1e-6), list[str](), []
    reduce, wait = dist.all_reduce, dist.Work.wait
    used = [random.Random(i).sample(range(4), 1 + i % 4) for i in range(30)] + [[1, 3, 0]] * 12
    x = torch.full((1, 2), ddpshim.world().rank + 1.0)
    sending = replaced(dist, "all_reduce", lambda *a, **k: (events.append("sends"), reduce(*a, **k))[1])
    waiting = replaced(dist.Work, "wait", lambda *a, **k: (events.append("waits"), wait(*a, **k))[1])
    with sending, waiting:
        for kinds in used:
            events.clear()
            net.zero_grad()
            _value(sum(net[kind](x) for kind in kinds)).backward()
            is_early.append("sends" not in events[events.index("waits") :])
            for kind, layer in enumerate(net):
                found = [None if p.grad is None else p.grad.unique().tolist() for p in layer.parameters()]
                assert found == ([[2.0], [1.0]] if kind in kinds else [None, None])  # x is 1, 2 and 3
    return is_early[-5:]


def test_passes_that_come_otherwise_than_expected_are_averaged_and_others_wait_for_no_rank_before_they_send() -> None:
    assert run_ranks(_rank_leaves_out_layers_at_random, NUM_RANKS, batch="global") == [[True] * 5] * NUM_RANKS


def _trained() -> Any:
    ddpshim.cleanup()
    ddpshim.setup(batch="global", seed=0, device="cpu")
    net = _wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 1e-6)
    for _ in range(4):
        _value(net(torch.ones(1, 3))).backward()
    return net


def _value(output: torch.Tensor) -> torch.Tensor:
    return output.sum() - output.sum().detach()


def _is_odd() -> bool:
    return ddpshim.world().rank == 1


def _take_another_branch() -> None:
    net = _trained()
    _value((net[0] if _is_odd() else net)(torch.ones(1, 3))).backward()


def _make_another_pass() -> None:
    net, other = _trained(), _wrap(nn.Linear(3, 3))
    for one in [net, other] if _is_odd() else [other]:
        _value(one(torch.ones(1, 3))).backward()


def _skip_a_pass() -> None:
    net = _trained()
    if not _is_odd():
        _value(net(torch.ones(1, 3))).backward()
    ddpshim.world().barrier()


def _skip_a_step() -> None:
    net = _trained()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if not _is_odd():
        optimizer.step()
    _value(net(torch.ones(1, 3))).backward()


def _take_another_rate() -> None:
    net = _trained()
    torch.optim.SGD(net.parameters(), 0.1 * (1 + ddpshim.world().rank)).step()
    _value(net(torch.ones(1, 3))).backward()


def _differentiate_inside() -> None:
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            with torch.enable_grad():
                torch.autograd.backward(_value(net[1](torch.ones(1, 3))))
            return gradient

    net = _trained()
    _value(net[1](Inside.apply(net[0](torch.ones(1, 3))))).backward()


def _catch_an_error() -> None:
    net = _trained()

    def fails(gradient: torch.Tensor) -> None:
        raise MemoryError

    try:
        hidden = net[0](torch.ones(1, 3))
        hidden.register_hook(fails)
        _value(net[1](hidden)).backward()
    except MemoryError:
        pass
    _value(net(torch.ones(1, 3))).backward()


_IN = "is in backward pass 5, of"
APART: dict[Callable[[], Any], str] = {
    _take_another_branch: f"rank 0 {_IN} Sequential, with 4 gradients.*rank 1 {_IN} .*with 2 gradients, after",
    _make_another_pass: f"rank 0 {_IN} Linear.*rank 1 {_IN} Sequential.*rank 2 {_IN} Linear",
    _skip_a_pass: "rank 1 is in no backward pass|rank 1 is in barrier",
    _skip_a_step: "rank 0 is .* after 1 optimizer step .*rank 1 is .* after 0 optimizer steps",
    _take_another_rate: r"rank 0 is .* rate 0.1\).*rank 1 is .* rate 0.2\)",
    _differentiate_inside: "parameter '1.(bias|weight)' of Sequential got a second gradient in one backward pass",
    _catch_an_error: "a backward pass after one that never finished: that of Sequential ended with MemoryError",
}


@pytest.mark.parametrize("act", APART)
def test_ranks_that_are_apart_are_named_in_the_same_pass(act: Callable[[], Any]) -> None:
    for (said,) in run_ranks(errors_of, NUM_RANKS, [act]):
        assert re.search(APART[act], said), said
