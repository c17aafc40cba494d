"""Sends the gradients of networks that share a process group in one order on all ranks.

A group adds up the messages of ranks in the order in which each rank sends them. Where two networks share a backward
pass, and one rank leaves a branch out, their gradients are complete in another order there. So the networks of a pass
have an order, the same on all ranks: one sends as soon as those before it have sent all but their last buckets, or when
the pass ends; the last buckets leave then, in the same order.

Which networks a pass has is expected from the passes before, which all ranks have made alike. Their order is that in
which the main rank met them the first time.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpshim.job.job import current
from ddpshim.model import backward
from ddpshim.model.equality import Equality

_NUM_REMEMBERED = 3  # passes from which the next one is expected: a step of an actor and its critics has as many kinds

Numbers = tuple[int, ...]


class Network(Protocol):
    """What is asked of a wrapper: its part in a pass, and how it ends."""

    _equality: Equality
    _device: torch.device

    @property
    def has_sent(self) -> bool: ...

    def check_equality(self) -> None: ...

    def _finish(self) -> None: ...

    def _send_last(self) -> None: ...


class Orders:
    """Of a job: the order of each process group."""

    def __init__(self) -> None:
        self._of_groups: dict[Any, Order] = {}

    def of(self, group: Any) -> Order:
        return self._of_groups.setdefault(group, Order(group))


class Order:
    """The backward passes of the networks that share a group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._networks: list[Any] = []  # in the order in which they were wrapped; None for one that was detached
        self._met: list[int] = []  # the networks of the pass that goes on, as this rank met them
        self._passes: tuple[Numbers, ...] = ()  # who took part in the last ones
        self._after: dict[tuple[Numbers, ...], Numbers] = {}  # the order of the pass that came after these
        self._of_all: dict[Numbers, Numbers] = {}  # for those who took part, their order on all ranks

    def add(self, network: Network) -> int:
        """Take `network` up; its number. Every rank does so in the same order. Local."""
        self._networks.append(network)
        return len(self._networks) - 1

    def remove(self, number: int) -> None:
        """Forget the network of this number. Local."""
        self._networks[number] = None

    def join(self, number: int) -> bool:
        """Whether network `number`, which takes part in the pass that goes on, sends its gradients at once.

        The first one that joins has all networks' comparisons read before a message of this pass is sent.
        """
        if backward.at_outer_end(self._end):
            self._met.clear()
            for network in self._networks:
                if network is not None and network._equality.sent is not None:
                    network.check_equality()
        self._met.append(number)
        expected = self._expected()
        if number not in expected:
            return False
        return all(self._networks[before].has_sent for before in expected[: expected.index(number)])

    def _expected(self) -> Numbers:
        return (0,) if len(self._networks) == 1 else self._after.get(self._passes, ())

    def _end(self) -> None:
        """The pass has computed all gradients: what was not sent leaves, and what comes next is learnt."""
        expected, took_part = self._expected(), tuple(sorted(self._met))
        numbers = [number for number in expected if number in took_part]
        numbers += [number for number in took_part if number not in expected]
        for number in numbers:
            self._networks[number]._finish()
        for number in numbers:
            self._networks[number]._send_last()
        before, self._passes = self._passes, (*self._passes, took_part)[-_NUM_REMEMBERED:]
        if took_part in self._of_all or len(took_part) == 1:
            self._after[before] = self._of_all.get(took_part, took_part)
        else:
            backward.at_end(lambda: self._learn(before, took_part))

    def _learn(self, before: tuple[Numbers, ...], took_part: Numbers) -> None:
        """Take the main rank's order for these networks, which share a pass for the first time (collective)."""
        met = torch.tensor(self._met, device=self._networks[took_part[0]]._device)
        dist.broadcast(met, dist.get_process_group_ranks(self._group)[0], group=self._group)
        self._of_all[took_part] = self._after[before] = tuple(met.tolist())


def of(group: Any) -> Order:
    """The order of the networks that share `group`. Local."""
    return current().part(Orders).of(group)
