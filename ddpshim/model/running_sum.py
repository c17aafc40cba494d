"""Adds up the gradients of virtual ranks during their backward passes, in a job of one process.

It works like gradient accumulation, in the memory of one gradient: torch adds each virtual rank's gradient to the sum
of the previous ones, which is the order in which several processes add them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ddpshim.errors import SyncError

_NUM_COMPARED = 64  # numbers of a gradient


class RunningSum:
    """The sums for parameters whose gradient was None before the backward pass; other parameters are not covered.

    Afterwards the first virtual rank has the mean in its own memory, and the others share one copy of it. A step that
    changes its gradients (clips them) would change that copy once for each of them, so it is restored between turns.

    Args:
        copies: for each virtual rank, its parameters; the list grows and shrinks with the virtual ranks.
    """

    def __init__(self, copies: Sequence[Sequence[nn.Parameter]]) -> None:
        self._copies = copies
        self._totals: dict[int, torch.Tensor] = {}
        self._begins: list[tuple[int, set[int]]] = []  # passes in progress: virtual rank, sums that it may begin
        self._means: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first virtual rank's, the others'
        self._versions: dict[int, int] = {}  # of the first virtual rank's mean, when its turn began
        self._before: dict[int, torch.Tensor] = {}  # the others' means when their first turn began
        self._is_fresh = False  # the first one had at most one turn since the means were made

    def before_backward(self, number: int) -> None:
        """Let virtual rank `number` add to existing sums, and begin a sum for other parameters. Local."""
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
                parameter.grad = parameter.grad.clone()  # so that its own gradient is added to a copy
        if number == 0:
            for index in begins & self._means.keys():
                del self._means[index]
        self._begins.append((number, begins))
        if len(self._begins) > 1:
            # Passes overlap: nested ones (checkpointing), or ones that exchange values midway (BatchNorm). Their
            # gradients would not be added one after another.
            for _, of_pass in self._begins:
                of_pass.clear()

    def after_backward(self, number: int, touched: set[int]) -> None:
        """Record the sums that virtual rank `number` began. Local."""
        latest = max(i for i, (of, _) in enumerate(self._begins) if of == number)
        for index in self._begins.pop(latest)[1] & touched:
            gradient = self._copies[number][index].grad
            assert gradient is not None
            self._totals[index] = gradient

    def take_mean(self, index: int, num: int, touched: Sequence[set[int]]) -> bool:
        """Set all gradients of parameter `index` to its sum / `num`; return False if there is no sum. Local."""
        total = self._totals.pop(index, None)
        if total is None or total.layout != torch.strided:
            return False
        if not all(index in own for own in touched):
            total.add_(0.0)  # several processes add 0 for a rank without a gradient: -0 becomes 0
        total.div_(num)
        mean = total.clone() if len(self._copies) > 1 else total
        for parameters in self._copies[1:]:
            parameters[index].grad = mean
        self._copies[0][index].grad = total
        self._means[index], self._versions[index] = (total, mean), total._version
        self._is_fresh = True
        return True

    def begin_turn(self, number: int) -> None:
        """Restore the shared means that the virtual rank before `number` has changed. Local."""
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
        """Drop all sums and means, when virtual ranks end. Local."""
        self._begins.clear()
        for kept in (self._totals, self._means, self._before, self._versions):
            kept.clear()

    def _is_changed(self, index: int) -> bool:
        first, other = self._means[index]
        if self._copies[0][index].grad is not first:
            return False
        if self._is_fresh and first._version == self._versions.get(index):  # .data changes no version
            every = first.numel() // _NUM_COMPARED + 1
            return not torch.equal(first.reshape(-1)[::every], other.reshape(-1)[::every])
        return first._version != self._versions.get(index)
