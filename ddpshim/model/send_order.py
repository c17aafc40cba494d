"""Sends the gradients of several networks in one order on all ranks.

The process group matches the messages of ranks by the order in which each rank sends them. If two networks share a
backward pass and one rank leaves a branch out, their gradients are complete in another order there. So the networks of
a pass have an order, the same on all ranks: a network sends as soon as those before it have sent all but their last
buckets, or when the pass ends. The last buckets are sent at the end of the pass, in the same order.

The networks of a pass are predicted from previous passes, which were the same on all ranks. Their order is the one in
which the main rank reached them the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpshim.model import backward

if TYPE_CHECKING:
    from ddpshim.model.reducer import DistributedModule

_NUM_REMEMBERED = 3  # passes that predict the next one: a step of an actor and its critics has so many kinds

Numbers = tuple[int, ...]


class Order:
    """The order of a job's networks in each backward pass: `job.current().part(Order)`."""

    def __init__(self) -> None:
        self._networks: list[Any] = []  # in the order of wrapping; None for a detached one
        self._met: list[int] = []  # the networks of this pass, in the order in which this rank reached them
        self._passes: tuple[Numbers, ...] = ()  # the networks of the last passes
        self._after: dict[tuple[Numbers, ...], Numbers] = {}  # the order of the pass after these passes
        self._of_all: dict[Numbers, Numbers] = {}  # for the networks of a pass, their order

    def add(self, network: DistributedModule) -> int:
        """Add `network` and return its number. Local; every rank must add networks in the same order."""
        self._networks.append(network)
        return len(self._networks) - 1

    def remove(self, number: int) -> None:
        """Forget the network of this number. Local."""
        self._networks[number] = None

    def join(self, number: int) -> bool:
        """Add network `number` to this pass; return whether it may send its gradients at once.

        The first network of a pass first makes all networks read their comparisons, before this pass sends a message.
        """
        if backward.at_outer_end(self._end):
            self._met.clear()
            for network in self._networks:
                if network is not None and network._equality is not None and network._equality.sent is not None:
                    network._equality.finish()
        self._met.append(number)
        expected = self._expected()
        if number not in expected:
            return False
        return all(self._networks[before].has_sent for before in expected[: expected.index(number)])

    def _expected(self) -> Numbers:
        return (0,) if len(self._networks) == 1 else self._after.get(self._passes, ())

    def _end(self) -> None:
        """At the end of a pass, send all gradients that were not sent, and learn to predict this pass."""
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
            backward.at_end_of_pass(lambda: self._learn(before, took_part))

    def _learn(self, before: tuple[Numbers, ...], took_part: Numbers) -> None:
        """Use the main rank's order for these networks, which share a pass for the first time (collective)."""
        met = torch.tensor(self._met, device=self._networks[took_part[0]]._device)
        dist.broadcast(met, 0)
        self._of_all[took_part] = self._after[before] = tuple(met.tolist())
