"""Copies the main rank's weights and buffers to all ranks, in few messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_MESSAGE_BYTES = 250 * 1024 * 1024


class Buffers:
    """A module's buffers, of which all ranks get the main rank's, if it is asked for."""

    def __init__(self, module: nn.Module, is_asked: bool) -> None:
        # Their places and not the tensors, because a module may replace a tensor.
        modules = module.modules() if is_asked else ()
        self._places = [(child._buffers, name) for child in modules for name in child._buffers]
        self._sent: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []

    def start(self) -> None:
        """Send the buffers, or prepare to receive them (collective, does not wait)."""
        now = [home.get(name) for home, name in self._places]
        # No row tensor: it is each rank's own. .data: otherwise a second backward pass over the same forward would
        # refuse what `finish` writes as an in-place change.
        self._sent = [*_sent([buffer.data for buffer in now if type(buffer) is torch.Tensor])]

    def finish(self) -> None:
        """Wait for the messages of `start`, and write the received values into the buffers."""
        for work, message, buffers in self._sent:
            work.wait()
            if dist.get_rank():
                for buffer, values in zip(buffers, message.split([buffer.numel() for buffer in buffers])):
                    buffer.copy_(values.view(buffer.shape))
        self._sent.clear()


def broadcast_state(module: nn.Module) -> None:
    """Copy the main rank's parameters and buffers to all ranks, frozen ones included (collective)."""
    for work, message, tensors in _sent([tensor.detach() for tensor in (*module.parameters(), *module.buffers())]):
        work.wait()
        for tensor, values in zip(tensors, message.split([tensor.numel() for tensor in tensors])):
            if not torch.equal(tensor, values.view(tensor.shape)):  # else a graph that holds it stays valid
                tensor.copy_(values.view(tensor.shape))


def _sent(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor, list[torch.Tensor]]]:
    """Broadcast `tensors`; yield (work, message, the tensors in it) of each message, without waiting (collective)."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for left in by_kind.values():
        while left:
            ends = itertools.accumulate([tensor.numel() * tensor.element_size() for tensor in left])
            num = max(1, len([end for end in ends if end <= _MESSAGE_BYTES]))
            same, left = left[:num], left[num:]
            message = torch.cat([tensor.reshape(-1) for tensor in same])
            # Bytes, because gloo does not support bool.
            yield dist.broadcast(message.view(torch.uint8), 0, async_op=True), message, same
