"""What a training does with its batches: copies them to a GPU, or splits them into parts whose gradients add up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import DataError
from ddpshim.job.group import world
from ddpshim.process.devices import mapped, moved


def accumulate(batch: Any, *networks: Any, steps: int) -> Iterator[Any]:
    """Yield the equal parts of `batch`; gradients are reduced in the backward pass of the last part.

    Local. With one part it yields the batch itself. Call `backward()` on the mean loss of each part, divided by k, and
    step after the loop: `for part in accumulate(batch, policy, steps=k): (loss(part) / k).backward()`.

    Args:
        batch: tensors in nested dicts, lists and tuples, split along their first dimension; other values are in
            every part.
        networks: all networks that the loss trains, as `wrap_parallel` returned them.
        steps: the number of parts k.

    Raises:
        DataError: the batch does not split into `steps` parts of one size, or virtual ranks (exact) accumulate.
    """
    if steps > 1 and world().options.exact is not None:
        raise DataError(
            f"accumulate with steps={steps} and exact={world().options.exact}: results would depend on the number of "
            "ranks. Leave accumulation out, or leave the option out."
        )

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        size, left_over = divmod(len(value), steps)
        if left_over or not size:
            raise DataError(
                f"a batch of {len(value)} does not split into {steps} equal parts (steps); samples would "
                f"be weighted unequally. Use a batch per rank that {steps} divides."
            )
        return value[number * size : (number + 1) * size]

    for number in range(steps):
        with contextlib.ExitStack() as unreduced:
            for network in networks:
                unreduced.enter_context(network.accumulate(is_last=number == steps - 1))
            yield mapped(part, batch)


def on_device(batches: Iterable[Any], device: Optional[torch.device] = None) -> Iterable[Any]:
    """Return `batches` with their tensors on this rank's device; dictionaries, lists and tuples are kept. Local.

    For a loader, or `Resumable.steps`: `for batch in ddpshim.on_device(loader): ...`. Pinned tensors
    (`pin_memory=True`) are copied on a separate stream, while the GPU computes the previous step; for others the host
    waits. Dtypes stay: uint8 images are copied as bytes.

    >>> [batch["x"].device.type for batch in on_device([{"x": torch.ones(1)}], torch.device("cpu"))]
    ['cpu']
    """
    device = world().device if device is None else device
    if device.type == "cpu":
        return batches
    stream: Any = torch.cuda.Stream(device)

    def sent(batch: Any) -> Any:
        with torch.cuda.stream(stream):
            copied = moved(batch, device)
        computes = torch.cuda.current_stream(device)
        computes.wait_stream(stream)

        def used(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.is_cuda:
                x.record_stream(computes)  # its memory is reused only after that stream has used it
            return x

        return mapped(used, copied)

    return Batches(batches, lambda: map(sent, batches))


class Batches:
    """Other batches with the length and the attributes of a loader."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._begin = loader, begin

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return self._begin()
