"""Accumulates gradients: backward passes of a batch's parts add up to the gradient of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddpshim.errors import DataError
from ddpshim.job.group import world


def accumulate(batch: Any, *networks: Any, steps: int) -> Iterator[Any]:
    """Yield the equal parts of `batch`; gradients are reduced in the backward pass of the last part.

    Local. With one part it yields the batch itself. Call `backward()` on the mean loss of each part, divided by k, and
    step after the loop: `for part in accumulate(batch, policy, steps=k): (loss(part) / k).backward()`.

    Args:
        batch: tensors in nested mappings, lists and tuples, split along their first dimension; other values are
            in every part.
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
    for number in range(steps):
        with contextlib.ExitStack() as unreduced:
            for network in networks:
                unreduced.enter_context(network.accumulate(is_last=number == steps - 1))
            yield _part(batch, number, steps)


def _part(value: Any, number: int, k: int) -> Any:
    if isinstance(value, torch.Tensor):
        size, left_over = divmod(len(value), k)
        if left_over or not size:
            raise DataError(
                f"a batch of {len(value)} does not split into {k} equal parts (steps); samples would "
                f"be weighted unequally. Use a batch per rank that {k} divides."
            )
        return value[number * size : (number + 1) * size]
    if isinstance(value, Mapping):
        return {key: _part(inner, number, k) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        inner = [_part(item, number, k) for item in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    return value
