"""A policy that sleeps where a GPU would compute: its gradients are real, and so is their communication."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


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


class SleepingPolicy(nn.Module):
    """`num_layers` layers of equal size; a pass takes `compute_s`, two thirds of it backwards.

    A layer's gradient is there after its share of the backward sleep, the last layer's first.
    """

    def __init__(self, num_parameters: int, num_layers: int, compute_s: float) -> None:
        super().__init__()
        size = num_parameters // num_layers
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(num_layers)])
        self._forward_s = compute_s / 3 / num_layers
        self._backward_s = 2 * compute_s / 3 / num_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A scalar, for x: (1,)."""
        for layer in self.layers:
            x = _Sleep.apply(x + layer.mean(), self._forward_s, self._backward_s)  # type: ignore[no-untyped-call]
        return x.sum()
