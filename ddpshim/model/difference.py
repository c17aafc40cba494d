"""Names what differs between ranks after a comparison, and gives all the main rank's random streams."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any, Optional

import torch

from ddpshim.errors import SyncError
from ddpshim.job.group import world
from ddpshim.process import observed
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.say import say

_DEADLINE_S = 120.0  # after a common step ranks are only seconds apart

SAME_STATE = (
    "Build, load and change networks and optimizers equally on every rank, step schedulers with numbers of all ranks, "
    "and let every gradient come from loss.backward()"
)
OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
Tensors = dict[str, torch.Tensor]  # by what messages call them
Facts = dict[str, Any]  # settings, and the numbers of tensors, by name


def refuse(when: str, settings: Mapping[str, str], tensors: Tensors) -> None:
    """Raise SyncError on all ranks, which names the first difference between them (collective).

    Not if only the bits of NaNs differ.
    """
    own: Facts = {**settings, **{name: numbers_of(tensor) for name, tensor in tensors.items()}}
    found = described(world().gather_with_deadline("facts", own, _DEADLINE_S))
    if found is not None:
        raise SyncError(
            f"{when} ranks hold different weights or settings: {found}. They train different models, and only the "
            f"main rank's is saved. {SAME_STATE} ({OPT_OUT})."
        )


def described(of_ranks: Mapping[int, Facts]) -> Optional[str]:
    """Describe the first fact that differs, with all ranks' values; None if all are equal (NaNs are). Local."""
    by_name = {name: [of.get(name) for of in of_ranks.values()] for facts in of_ranks.values() for name in facts}
    found = [(name, values) for name, values in by_name.items() if any(value != values[0] for value in values)]
    if not found:
        return None
    name, values = found[0]
    is_setting = any(isinstance(value, str) for value in values)
    on_ranks = (f"{_shown(value)} on rank {rank}" for rank, value in zip(of_ranks, values))
    more = f" ({len(found) - 1} more differ)" if len(found) > 1 else ""
    return f"{name} {'is ' if is_setting else ''}{', '.join(on_ranks)}{more}"


def _shown(fact: Any) -> str:
    """Return text for a fact: a tensor's sum, with its checksum since sums may be equal; else the value itself."""
    if fact is None:
        return "missing"
    if isinstance(fact, str):
        return fact
    checksum, total, _ = fact
    return f"sums to {struct.unpack('d', struct.pack('q', total))[0]!r} (#{checksum % 65521:04x})"


def numbers_of(tensor: torch.Tensor) -> list[int]:
    """Return three ints: a checksum of bits and kind, the bits of the float64 sum that messages show, the kind. Local.

    Unlike in `bits_of_rows` all NaNs are equal.
    """
    t, kind = tensor.detach(), kind_of(tensor)
    if t.layout != torch.strided or t.is_meta or t.is_quantized:
        return [kind, 0, kind]
    if t.is_complex():
        t = torch.view_as_real(t)
    if t.is_floating_point() and t.element_size() > 1:
        t = torch.nan_to_num(t)
    bits = t.view(INTEGERS[t.element_size()]).sum(dtype=torch.int64)
    total = (t.to(torch.float64) if t.element_size() == 1 else t).sum(dtype=torch.float64)
    return [int(bits) + kind, int(total.view(torch.int64)), kind]


def kind_of(tensor: Optional[torch.Tensor]) -> int:
    """Return a number that depends on dtype and shape; 0 for None."""
    if tensor is None:
        return 0
    return (zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()) + 1) << 24


def take_streams(number: int) -> None:
    """Set the random streams of all ranks to the main rank's (collective)."""
    here = world()
    restore_rank_states(here.broadcast(rank_states(here.device)), here.device)
    observed.note("mended", what="random streams", reductions=number)
    if here.is_main:
        say(
            f"after {number} backward passes ranks had drawn different random numbers: something draws on one "
            "rank only (a log, a rollout). All ranks continue with the main rank's streams"
        )
