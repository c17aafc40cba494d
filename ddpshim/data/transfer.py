"""Copies batches to a GPU on a separate stream, so that neither the host nor the previous step waits for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Optional

import torch

from ddpshim.job.group import world


def on_device(batches: Iterable[Any], device: Optional[torch.device] = None) -> Iterable[Any]:
    """Return `batches` with their tensors on this rank's device; dictionaries, lists and tuples are kept. Local.

    For a loader, or `Resumable.steps`: `for batch in ddpshim.on_device(loader): ...`. Pinned tensors
    (`pin_memory=True`) are copied on a separate stream, while the GPU computes the previous step; for others the host
    waits.

    >>> [batch["x"].device.type for batch in on_device([{"x": torch.ones(1)}], torch.device("cpu"))]
    ['cpu']
    """
    device = world().device if device is None else device
    return batches if device.type == "cpu" else OnDevice(batches, device, copies_all=True)


class OnDevice:
    """Replaces `loader` in a trainer: the pinned tensors of its batches are on the GPU.

    Dtypes do not change, so uint8 images are copied as bytes. `device`: a GPU. `but`: keys that stay on the CPU.
    `copies_all`: copy tensors that are not pinned too; the host waits for these.
    """

    def __init__(self, loader: Any, device: torch.device, but: Collection[str] = (), copies_all: bool = False) -> None:
        self._loader, self._device, self._but, self._copies_all = loader, device, but, copies_all
        self._stream: Any = torch.cuda.Stream(device)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            sent: list[torch.Tensor] = []
            with torch.cuda.stream(self._stream):
                moved = self._moved(batch, sent)
            computes = torch.cuda.current_stream(self._device)
            computes.wait_stream(self._stream)
            for tensor in sent:
                tensor.record_stream(computes)  # its memory is reused only after that stream has used it
            yield moved

    def _moved(self, value: Any, sent: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.is_pinned():  # the host would wait for its copy, so the trainer may choose when
                return value.to(self._device) if self._copies_all else value
            sent.append(value.to(self._device, non_blocking=True))
            return sent[-1]
        if type(value) in (dict, OrderedDict):
            return type(value)((k, part if k in self._but else self._moved(part, sent)) for k, part in value.items())
        if type(value) is list or (self._copies_all and type(value) is tuple):
            return type(value)(self._moved(part, sent) for part in value)
        return value
