"""Sets of parameters and modules, whose order in Python is that of addresses, on three ranks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpshim
from tests.launch.test_unedited import compared
from tests.ranks import run_ranks

GROUPS = """
import copy, gc
gc.disable()
rank = int(os.environ.get("DDPSHIM_RANK", 0))
junk = [[] for _ in range(1000 * rank)]
def made():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(9)]).double()
def main():
    body, head = made(), nn.Linear(4, 1).double()
    target = copy.deepcopy(body)
    gc.collect(rank % 2)  # so all modules are found in another order
    other = copy.deepcopy(body)
    frozen = made().requires_grad_(False)
    every = {p for net in (body, head, frozen) for p in net.parameters()}
    rest = every - set(frozen.parameters()) - set(head.parameters())
    decay = {p for p in every if p.dim() > 1}
    groups = [{"params": [*part]} for part in (rest & decay, rest - decay, set(head.parameters()))]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(3):
        for index, x, y in DataLoader(Items(), batch_size=14, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(head(body(x) + frozen(x)), y.double()).backward()
            nn.utils.clip_grad_norm_(every - set(frozen.parameters()), 0.5)
            optimizer.step()
            say("trained on", index.tolist())
    numbers = {id(p): number for number, p in enumerate([*body.parameters(), *head.parameters()])}
    say("steps", [numbers[id(p)] for group in optimizer.param_groups for p in group["params"]])
    later = [*target.modules(), *other.parameters(), *target.parameters(), *body.modules()]
    numbers = {id(thing): number for number, thing in enumerate(later)}
    say("set", [numbers[id(thing)] for thing in {*later}])
    torch.save({**body.state_dict(), **head.state_dict()}, "weights.pth")
main()
"""


@pytest.mark.launch
def test_sets_have_one_order_on_all_ranks(tmp_path: Path) -> None:
    _, ranks = compared(tmp_path, GROUPS, 3, equal=("trained on",), close=(), weights=1e-12)
    for what, num in (("steps", 38), ("set", 146)):
        orders = [ranks.said(rank, what) for rank in range(3)]
        assert orders == [orders[0]] * 3
        assert sorted(orders[0][0]) == [*range(num)]


class _Named(nn.Linear):
    def __hash__(self) -> int:
        return 5


def _hashes() -> Any:
    ddpshim.cleanup()
    before = nn.Linear(2, 2)
    known = {before: 1, before.weight: 2}
    hashes = {thing: hash(thing) for thing in known}
    ddpshim.setup(batch="global", seed=1, device="cpu")
    assert known[before] + known[before.weight] == 3
    assert {thing: hash(thing) for thing in known} == hashes
    net = nn.Linear(2, 2)
    numbers = [hash(thing) for thing in (net, net.weight, net.bias)]
    numbers += [hash(thing) for thing in copy.deepcopy([net, net.weight])]
    numbers += [hash(thing) for thing in pickle.loads(pickle.dumps({net.weight, net.bias}))]
    for _ in range(9):  # each at the address of the one before
        numbers.append(hash(torch.zeros(2)))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ddpshim.cleanup()
    assert [hash(thing) for thing in (net, net.weight, net.bias)] == numbers[:3]
    assert [optimizer.state[p]["step"].item() for p in net.parameters()] == [1, 1]
    assert hash(_Named(2, 2)) == 5
    later = nn.Linear(2, 2)
    assert {later, later.weight} == {later.weight, later}
    return numbers


@pytest.mark.ranks
def test_a_hash_is_a_number_that_lasts() -> None:
    one, other = run_ranks(_hashes, 2)
    assert one == other
    assert len({*one}) == len(one) == 16


def _swaps() -> list[bool]:
    ddpshim.cleanup()
    ddpshim.setup(batch="global", seed=1, device="cpu")
    net = nn.Linear(3, 2)
    before = [(hash(p), id(p)) for p in net.parameters()]
    torch.__future__.set_swap_module_params_on_conversion(True)
    net.double()
    return [before == [(hash(p), id(p)) for p in net.parameters()], net.weight.dtype == torch.float64]


@pytest.mark.ranks
@pytest.mark.skipif(not hasattr(torch.utils, "swap_tensors"), reason="torch has it from 2.3 on")
def test_parameters_whose_memory_is_swapped_keep_their_place_in_sets() -> None:
    assert run_ranks(_swaps, 2) == [[True, True]] * 2
