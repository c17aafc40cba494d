"""Computes checksums of tensors, so that ranks are compared by a few numbers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_ALL_BITS = 2**64
_SMALL = 1024  # numbers

Named = Sequence[tuple[str, Optional[torch.Tensor]]]


def _sent(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `numbers` as int64 on `device`; the host does not wait for the copy. Local."""
    signed = [(number + _ALL_BITS // 2) % _ALL_BITS - _ALL_BITS // 2 for number in numbers]
    return _to(torch.tensor(signed, dtype=torch.int64, device="cpu"), device)


def _to(here: torch.Tensor, device: torch.device) -> torch.Tensor:
    is_pinned = device.type == "cuda" and here.device.type == "cpu"
    return (here.pin_memory() if is_pinned else here).to(device, non_blocking=is_pinned)


@torch.no_grad()
def bits_of_rows(rows: Sequence[Union[int, Named]], device: torch.device) -> torch.Tensor:
    """Return an int64 on `device` for each row: rows with equal numbers are taken as equal. Local.

    Different numbers may still mean equal rows, if only the bits of NaNs differ. Small tensors are joined, so that a
    policy's hundreds take a few operations; a larger one takes one or two.
    """
    constants, parts = [], dict[Any, list[tuple[torch.Tensor, int, int]]]()
    for number, row in enumerate(rows):
        total, weight = row if isinstance(row, int) else 0, 1
        for name, tensor in () if isinstance(row, int) else row:
            total += weight * (zlib.crc32(name.encode()) + _kind_of(tensor))
            for integers in _integers_of(tensor):
                kind = integers.device, integers.dtype, integers.numel() <= _SMALL
                parts.setdefault(kind, []).append((integers, weight, number))
            weight = weight * 31 % _ALL_BITS
        constants.append(total)
    bits = _sent(constants, device)
    for (*_, is_small), part in parts.items():
        vectors, weights, numbers = zip(*part)
        sums = _sums_of(vectors) if is_small else torch.stack([vector.sum(dtype=torch.int64) for vector in vectors])
        bits.index_add_(0, _sent(numbers, device), _to(sums, device) * _sent(weights, device))
    return bits


def _integers_of(tensor: Optional[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bits as vectors of integers: those of a large tensor as 8-byte integers (fastest), and the rest."""
    if tensor is None or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return []
    t = tensor.detach()
    t = (torch.view_as_real(t) if t.is_complex() else t).contiguous().view(-1)
    size, num = t.element_size(), t.numel()
    if num <= _SMALL or size == 8:
        return [t.view(_INTEGERS[size])]
    if t.storage_offset() * size % 8:  # cuDNN puts the weights of a network one after the other in memory
        t = t.clone()
    even = num - num % (8 // size)
    return [t[:even].view(torch.int64), *([t[even:].view(_INTEGERS[size])] if num > even else [])]


def _sums_of(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the int64 sum of each vector; all are of one type, on one device."""
    ends = torch.tensor([vector.numel() for vector in vectors], device="cpu").cumsum(0) - 1
    until = torch.cat([*vectors]).cumsum(0, dtype=torch.int64)[_to(ends, vectors[0].device)]
    return until.diff(prepend=until.new_zeros(1))


def _kind_of(tensor: Optional[torch.Tensor]) -> int:
    """Return a number that depends on dtype and shape; 0 for None."""
    if tensor is None:
        return 0
    return (zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()) + 1) << 24


def numbers_of(tensor: torch.Tensor) -> list[int]:
    """Return three ints: a checksum of bits and kind, the bits of the float64 sum that messages show, the kind. Local.

    Unlike in `bits_of_rows` all NaNs are equal.
    """
    t, kind = tensor.detach(), _kind_of(tensor)
    if t.layout != torch.strided or t.is_meta or t.is_quantized:
        return [kind, 0, kind]
    if t.is_complex():
        t = torch.view_as_real(t)
    if t.is_floating_point() and t.element_size() > 1:
        t = torch.nan_to_num(t)
    bits = t.view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64)
    total = (t.to(torch.float64) if t.element_size() == 1 else t).sum(dtype=torch.float64)
    return [int(bits) + kind, int(total.view(torch.int64)), kind]
