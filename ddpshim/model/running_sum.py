"""Adds up the gradients of the virtual ranks of a job's only process while their backward passes are made.

As gradient accumulation does, in one set of memory: the gradient of each virtual rank is added to the sum of those
before it by torch itself, which is the order in which several processes add them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ddpshim.errors import SyncError

_NUM_COMPARED = 64  # numbers of a gradient


class RunningSum:
    """The sums of the parameters whose gradient was None before their backward passes; others are left alone.

    Afterwards the first virtual rank has the mean in memory of its own, and the others share a copy of it. A step that
    changes its gradients (it clips them) changes that copy once for each of them, so it is put back between them.

    Args:
        copies: of each virtual rank, its parameters; the list changes with the virtual ranks.
    """

    def __init__(self, copies: Sequence[Sequence[nn.Parameter]]) -> None:
        self._copies = copies
        self._totals: dict[int, torch.Tensor] = {}
        self._begins: list[tuple[int, set[int]]] = []  # of the passes that go on: whose, which sums it may begin
        self._means: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first one's, and that of the others
        self._versions: dict[int, int] = {}  # of the first one's, at the start of its turn
        self._before: dict[int, torch.Tensor] = {}  # what the others' were at the start of this round of turns
        self._is_fresh = False  # since the means were made the first one has had one turn at most

    def before_backward(self, number: int) -> None:
        """Let virtual rank `number` add to the sums, and begin those of parameters that have none. Local."""
        if number == 0:
            self._totals.clear()
        begins: set[int] = set()
        for index, parameter in enumerate(self._copies[number]):
            if parameter.grad is None:
                parameter.grad = self._totals.get(index)
                if parameter.grad is None:
                    begins.add(index)
                continue
            if index in self._totals:
                raise SyncError(
                    f"before a backward pass, virtual rank {number} of this process has a gradient of shape "
                    f"{tuple(parameter.shape)} left, and those before it have none: the step clears gradients only "
                    "for some samples. Clear them always, or never."
                )
            if number and index in self._means and parameter.grad is self._means[index][1]:
                parameter.grad = parameter.grad.clone()  # to which it adds its own
        if number == 0:
            for index in begins & self._means.keys():
                del self._means[index]
        self._begins.append((number, begins))
        if len(self._begins) > 1:
            # Passes inside of one another (checkpointing), or that exchange something on the way (BatchNorm): they are
            # not one after another.
            for _, of_pass in self._begins:
                of_pass.clear()

    def after_backward(self, number: int, touched: set[int]) -> None:
        """Take note of the sums that virtual rank `number` began. Local."""
        latest = max(i for i, (of, _) in enumerate(self._begins) if of == number)
        for index in self._begins.pop(latest)[1] & touched:
            gradient = self._copies[number][index].grad
            assert gradient is not None
            self._totals[index] = gradient

    def take_mean(self, index: int, num: int, touched: Sequence[set[int]]) -> bool:
        """Give all the mean over `num` of the sum of parameter `index`; False if there is no such sum. Local."""
        total = self._totals.pop(index, None)
        if total is None or total.layout != torch.strided:
            return False
        if not all(index in own for own in touched):
            total.add_(0.0)  # as processes do for a rank without a gradient: 0 and -0 are 0
        total.div_(num)
        mean = total.clone() if len(self._copies) > 1 else total
        for parameters in self._copies[1:]:
            parameters[index].grad = mean
        self._copies[0][index].grad = total
        self._means[index], self._versions[index] = (total, mean), total._version
        self._is_fresh = True
        return True

    def begin_turn(self, number: int) -> None:
        """Put back what the virtual rank before `number` has changed of the mean that both have. Local."""
        if number == 1 and len(self._copies) > 2:
            self._before = {index: self._means[index][1].clone() for index in self._means if self._is_changed(index)}
            self._is_fresh = False
        elif number > 1:
            for index, before in self._before.items():
                self._means[index][1].copy_(before)
        elif number == 0:
            self._before.clear()
            self._versions = {index: first._version for index, (first, _) in self._means.items()}

    def clear(self) -> None:
        """Forget what there is, when virtual ranks end. Local."""
        self._begins.clear()
        for kept in (self._totals, self._means, self._before, self._versions):
            kept.clear()

    def _is_changed(self, index: int) -> bool:
        first, other = self._means[index]
        if self._copies[0][index].grad is not first:
            return False
        if self._is_fresh and first._version == self._versions.get(index):  # what goes through .data counts no version
            every = first.numel() // _NUM_COMPARED + 1
            return not torch.equal(first.reshape(-1)[::every], other.reshape(-1)[::every])
        return first._version != self._versions.get(index)
