"""Policies that sleep where a GPU would compute; their gradients and the communication are real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_LEAST_SLEEP_S = 2e-4  # shorter sleeps take longer than requested


class _Sleep(torch.autograd.Function):
    """The identity, after a sleep in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class RealOrder(nn.Module):
    """Has a real policy's parameters (sizes and order); their gradients arrive in that policy's order.

    A pass takes `compute_s`, two thirds of it in backward; each parameter's share is proportional to its size.
    """

    def __init__(self, sizes: Sequence[int], arrival: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self.arrival, self.compute_s = list(arrival), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1,), for x: (1,)."""
        third = self.compute_s / 3 / sum(part.numel() for part in self.parts)
        waiting = 0.0
        for number in reversed(self.arrival):
            part = self.parts[number]
            x = x + part.mean()
            waiting += third * part.numel()
            if waiting > _LEAST_SLEEP_S:
                x, waiting = _Sleep.apply(x, waiting, 2 * waiting), 0.0  # type: ignore[no-untyped-call]
        return x


class SleepingPolicy(nn.Module):
    """`num_layers` layers of equal size; a pass takes `compute_s`, two thirds of it in backward, plus `more_*_s`.

    A layer's gradient is complete after its share of the backward sleep, the last layer's first.
    """

    def __init__(
        self,
        num_parameters: int,
        num_layers: int,
        compute_s: float,
        *,
        more_forward_s: float = 0.0,
        more_backward_s: float = 0.0,
    ) -> None:
        super().__init__()
        size = num_parameters // num_layers
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(num_layers)])
        self.compute_s, self.more_forward_s, self.more_backward_s = compute_s, more_forward_s, more_backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1,), for x: (1,)."""
        forward_s = (self.compute_s / 3 + self.more_forward_s) / len(self.layers)
        backward_s = (2 * self.compute_s / 3 + self.more_backward_s) / len(self.layers)
        for layer in self.layers:
            x = _Sleep.apply(x + layer.mean(), forward_s, backward_s)  # type: ignore[no-untyped-call]
        return x
