"""Has the gradients of networks that share a process group leave in one order on all ranks.

A group adds up the messages of ranks in the order in which each rank sends them. Where two networks share a backward
pass, and one rank leaves a branch out, their gradients are complete in another order there. So in each pass at most one
network sends while the pass goes on, and the others when it ends, in the order in which they were wrapped. Which one it
is follows from the passes before, which all ranks have made alike: where each network has passes of its own, each
overlaps its communication with backward.
"""

from __future__ import annotations

from typing import Any, Optional, Protocol

from ddpshim.job.job import current
from ddpshim.model import backward
from ddpshim.model.equality import Equality

_NUM_REMEMBERED = 3  # passes from which the next one is expected: a step of an actor and its critics has as many kinds


class Network(Protocol):
    """What is asked of a wrapper: its part in a pass, in bytes, and how it ends."""

    num_bytes: int
    _equality: Equality

    def check_equality(self) -> None: ...

    def _finish(self) -> None: ...


class Orders:
    """Of a job: the order of each process group."""

    def __init__(self) -> None:
        self._of_groups: dict[Any, Order] = {}

    def of(self, group: Any) -> Order:
        return self._of_groups.setdefault(group, Order())


class Order:
    """The backward passes of the networks that share a group."""

    def __init__(self) -> None:
        self._networks: list[Any] = []  # in the order in which they were wrapped; None for one that was detached
        self._taking_part: list[int] = []  # in the pass that goes on
        self._passes: tuple[tuple[int, ...], ...] = ()  # who took part in the last ones
        self._first_after: dict[
            tuple[tuple[int, ...], ...], int
        ] = {}  # who was to send at once in the pass after these

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
            self._taking_part.clear()
            for network in self._networks:
                if network is not None and network._equality.sent is not None:
                    network.check_equality()
        self._taking_part.append(number)
        return number == self._expected()

    def _expected(self) -> Optional[int]:
        return 0 if len(self._networks) == 1 else self._first_after.get(self._passes)

    def _end(self) -> None:
        """The pass has computed all gradients: what was not sent leaves, and what comes next is learnt."""
        expected, numbers = self._expected(), sorted(self._taking_part)
        numbers.sort(key=lambda number: number != expected)
        for number in numbers:
            self._networks[number]._finish()
        # Of several the largest, which has most to hide. Whoever it is, all ranks choose the same one.
        self._first_after[self._passes] = max(numbers, key=lambda number: (self._networks[number].num_bytes, -number))
        self._passes = (*self._passes, tuple(sorted(numbers)))[-_NUM_REMEMBERED:]


def of(group: Any) -> Order:
    """The order of the networks that share `group`. Local."""
    return current().part(Orders).of(group)
