"""Computes short fingerprints of tensors, samples and random streams, for comparison between ranks.

Imports torch at the first call; draws nothing and changes nothing.
"""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

_MAX_PARTS = 1024  # approximate limit on the entries of a sample that are hashed


def checksums(tensors: Sequence[Any]) -> list[Any]:
    """Return [hash of the bits, sum] for each tensor, and None for None. Local; one transfer from each device.

    A DTensor always gets [0, 0.0]: its parts differ between ranks, and summing it would be a collective.
    """
    import torch

    from ddpshim.model import checksums

    out: list[Any] = [None] * len(tensors)
    by_device: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if hasattr(tensor, "placements"):
            out[i] = [0, 0.0]
        elif tensor is not None:
            by_device.setdefault(tensor.device, []).append(i)
    for device, places in by_device.items():
        rows = torch.stack([torch.stack(checksums.checksum(tensors[i], device)) for i in places]).cpu()
        totals = rows[:, 1].contiguous().view(torch.float64).tolist()
        for i, bits, total in zip(places, rows[:, 0].tolist(), totals):
            out[i] = [bits, total]
    return out


def samples_of(batch: Any) -> tuple[int, Optional[list[str]]]:
    """Return the number of samples in a batch and a hash of each; (0, None) if the batch holds no tensors.

    A sample is one row of every tensor whose first dimension equals that of the batch's first tensor.
    """
    import torch

    with torch.no_grad():
        strided = (t for t in _tensors(batch) if t.dim() and t.layout == torch.strided)
        tensors = [t.detach() for t in strided if not (t.is_nested or t.is_quantized or t.is_meta)]
        if not tensors or not len(tensors[0]):
            return 0, None
        size = len(tensors[0])
        names = torch.zeros(size, dtype=torch.int64, device="cpu")  # even if the program sets a default device
        for i, t in enumerate(t for t in tensors if len(t) == size):
            rows = t.flatten(1) if t.dim() > 1 else t[:, None]
            rows = rows[:, :: max(1, rows.shape[1] // _MAX_PARTS)]
            if rows.is_complex():
                rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
            if rows.is_floating_point():
                rows = rows.double().view(torch.int64)
            bits = rows.to("cpu", torch.int64)
            # Scrambled odd weights, one per position: the same entries at other positions get another hash.
            weights = torch.arange(i + 1, i + 1 + bits.shape[1], device="cpu") * 0x5851F42D4C957F2D + (2 * i + 1)
            names += ((bits ^ (bits >> 31)) * (weights | 1)).sum(1)
        return size, [f"{name & 0xFFFFFFFFFFFF:x}" for name in names.tolist()]


def _tensors(batch: Any) -> Iterator[Any]:
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def streams() -> dict[str, int]:
    """Return a hash of each random stream's state in this process; {} if ddpshim gives ranks rows of shared draws."""
    shares: Any = sys.modules.get("ddpshim.job.shares")
    if shares is not None and shares.is_shared():
        return {}
    import torch

    out = {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "random": zlib.crc32(repr(random.getstate()).encode()),
    }
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        out["numpy.random"] = zlib.crc32(pickle.dumps(numpy_random.get_state(legacy=False)))
    if torch.cuda.is_initialized():
        out["torch.cuda"] = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes())
    return out
