"""Copies the main rank's weights and buffers to all ranks, in few messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn

_BUCKET_BYTES = 250 * 1024 * 1024


class Buffers:
    """A module's buffers, and the message per device that copies the main rank's to all ranks."""

    def __init__(self, module: nn.Module) -> None:
        # Their places and not the tensors, because a module may replace a tensor.
        self.homes = [(child, name) for child in module.modules() for name in child._buffers]
        self._places = [home._buffers for home, _ in self.homes]
        self._names = [name for _, name in self.homes]
        self._is_main = dist.get_rank() == 0
        self._laid_out: list[Optional[torch.Tensor]] = []
        self._messages: list[tuple[torch.Tensor, list[torch.Tensor], list[int]]] = []
        self._sent: list[Any] = []

    def start(self) -> None:
        """Send the buffers, or prepare to receive them (collective, does not wait)."""
        now = list(map(dict.get, self._places, self._names))
        if list(map(id, now)) != list(map(id, self._laid_out)):
            self._lay_out(now)
        for message, views, numbers in self._messages:
            buffers: list[Any] = [now[i] for i in numbers]
            if self._is_main:
                copy_all(views, buffers)
            work = dist.broadcast(message, 0, async_op=True)
            self._sent.append((work, views, buffers))

    def finish(self) -> None:
        """Wait for the messages of `start`, and write the received values into the buffers."""
        for work, views, buffers in self._sent:
            work.wait()
            if not self._is_main:
                # .data: otherwise a second backward pass over the same forward would refuse it as an in-place change.
                copy_all([b.data for b in buffers], views)
        self._sent.clear()

    def _lay_out(self, now: list[Optional[torch.Tensor]]) -> None:
        """Allocate one message per device, with a view of the dtype and shape of each buffer."""
        numbers: dict[torch.device, list[int]] = {}
        for i, buffer in enumerate(now):
            if type(buffer) is torch.Tensor:  # no row tensor: it is each rank's own
                numbers.setdefault(buffer.device, []).append(i)
        self._messages.clear()
        for device, those in numbers.items():
            buffers: list[Any] = [now[i] for i in those]
            ends = list(itertools.accumulate(-(-b.numel() * b.element_size() // 16) * 16 for b in buffers))
            message = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
            views = [
                message[start : start + b.numel() * b.element_size()].view(b.dtype).view(b.shape)
                for start, b in zip([0, *ends], buffers)
            ]
            self._messages.append((message, views, those))
        self._laid_out = now


def copy_all(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each of `values` into its target, in one call if this torch has it. Local."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(targets), list(values))
    else:
        for target, value in zip(targets, values):
            target.copy_(value)


def broadcast_state(module: nn.Module) -> None:
    """Copy the main rank's parameters and buffers to all ranks, frozen ones included (collective)."""
    broadcast([tensor.detach() for tensor in (*module.parameters(), *module.buffers())])


def broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Copy the main rank's `tensors` to all ranks, in few messages (collective)."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for left in by_kind.values():
        while left:
            ends = itertools.accumulate(tensor.numel() * tensor.element_size() for tensor in left)
            num = max(1, sum(end <= _BUCKET_BYTES for end in ends))
            same, left = left[:num], left[num:]
            message = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.broadcast(message.view(torch.uint8), 0)  # bytes, because gloo does not support bool
            for tensor, values in zip(same, message.split([tensor.numel() for tensor in same])):
                if not torch.equal(tensor, values.view(tensor.shape)):  # else a graph that holds it stays valid
                    tensor.copy_(values.view(tensor.shape))
