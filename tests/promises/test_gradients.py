"""Same gradients: with whole batches those of one process but for rounding; on shares the bits of torch's DDP.

However the optimizer is used: clipped, accumulated, with several networks.
"""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpshim
from evidence.compare import largest_difference
from tests.promises.running import result, weights_of
from tests.ranks import run_ranks

ACCUMULATED = ("--how", "accumulated,by_momentum,with_critic", "--batch", "7")
CLIPPED = ("--how", "clipped,by_momentum,with_critic", "--drop-last")


@pytest.mark.launch
@pytest.mark.parametrize(("options", "door", "ranks"), [(ACCUMULATED, "", 3), (CLIPPED, "", 2), (CLIPPED, "global", 3)])
def test_weights_are_those_of_one_process(options: tuple[str, ...], door: str, ranks: int) -> None:
    one, many = weights_of(result(*options)), weights_of(result(*options, door=door, ranks=ranks))
    assert largest_difference(one, many) < 1e-13


@pytest.mark.launch
def test_without_a_launcher_the_calls_change_nothing() -> None:
    one = weights_of(result("--batch", "7"))
    for door in ("global", "shares"):
        assert largest_difference(one, weights_of(result("--batch", "7", door=door))) == 0


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += x.sum()
        return self.layers(x)


def _losses(net: Any, x: torch.Tensor, y: torch.Tensor, how: str) -> None:
    """Compute gradients as users of DDP do."""
    if how == "nanoGPT":
        for is_last in (False, True):
            net.require_backward_grad_sync = is_last
            (net(x).sub(y).pow(2).mean() / 2).backward()
    elif how == "no_sync":
        with net.no_sync():
            net(x).sub(y).pow(2).mean().backward()
        net(x * 2).sub(y).pow(2).mean().backward()
    elif how == "join":
        with net.join():
            for _ in range(1 + ddpshim.world().rank):
                net(x).sub(y).pow(2).mean().backward()
    else:
        net(x).sub(y).pow(2).mean().backward()


def _train(wrap: Callable[..., Any], how: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the gradients of each step, the weights and the buffers."""
    here, found = ddpshim.world(), list[torch.Tensor]()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = wrap(_Noisy(), gradient_as_bucket_view=True, bucket_cap_mb=1.0, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(5):
        x, y = torch.randn(24, 9, generator=torch.Generator().manual_seed(step)).split([6, 3], 1)
        torch.manual_seed(7 * step + here.rank)
        optimizer.zero_grad()
        _losses(net, x[here.rank :: here.world_size], y[here.rank :: here.world_size], how)
        found += [p.grad.clone() for p in net.parameters()]
        optimizer.step()
    return [*found, *(p.detach().clone() for p in net.parameters())]


IDIOMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {},
    "nanoGPT": {},
    "join": {},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def _rank_trains() -> dict[str, list[bool]]:
    found = {}
    for how, options in IDIOMS.items():
        mine = _train(ddpshim.wrap_parallel, how, options)
        ddpshim.cleanup()
        theirs = _train(DistributedDataParallel, how, options)
        found[how] = [torch.equal(a, b) for a, b in zip(mine, theirs)]
        ddpshim.setup(seed=0, device="cpu")
    return found


@pytest.mark.ranks
def test_gradients_and_weights_on_shares_have_the_bits_of_ddp_by_hand() -> None:
    for found in run_ranks(_rank_trains, 3, timeout_s=120):
        assert {how: (len(equal), all(equal)) for how, equal in found.items()} == dict.fromkeys(IDIOMS, (24, True))
