"""Names what differs between ranks after a comparison, and mends what only rounding or a stray draw has changed."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Optional

import torch
import torch.distributed as dist

from ddpshim.errors import SyncError
from ddpshim.job.group import world
from ddpshim.model.broadcasting import broadcast
from ddpshim.model.checksums import numbers_of
from ddpshim.model.equality import OPT_OUT, Equality, Tensors
from ddpshim.process import events
from ddpshim.process.devices import computes_on
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.remedies import remedy
from ddpshim.process.say import say

_DEADLINE_S = 120.0  # after a common step ranks are only seconds apart
# Relative to a tensor's norm: the difference that rounding on different devices causes in a thousand steps.
_ROUNDING = 1e-3

Facts = dict[str, Any]  # settings, and the numbers of tensors, by name


def facts_of_ranks(settings: Mapping[str, str], tensors: Tensors) -> dict[int, Facts]:
    """Return what each rank has, by rank (collective)."""
    own: Facts = {**settings, **{name: numbers_of(tensor) for name, tensor in tensors.items()}}
    return world().gather_with_deadline("facts", own, _DEADLINE_S)


def described(of_ranks: Mapping[int, Facts]) -> Optional[str]:
    """Describe the first fact that differs, with all ranks' values; None if all are equal (NaNs are). Local."""
    found = []
    for name in dict.fromkeys(name for facts in of_ranks.values() for name in facts):
        values = [facts.get(name) for facts in of_ranks.values()]
        if any(value != values[0] for value in values):
            found.append((name, values))
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


def mend_or_refuse(equality: Equality, number: int) -> None:
    """Mend what only rounding has changed; raise SyncError on all ranks for another difference (collective)."""
    settings, tensors = equality.settings(), {**equality.tensors(), **equality.companions()}
    of_ranks = facts_of_ranks(settings, tensors)
    found, everyones = described(of_ranks), [*of_ranks.values()]
    if found is None:  # only NaNs with different bits
        return
    devices = world().gather_with_deadline("devices", computes_on(world().device), _DEADLINE_S)
    # The main rank's values may take the place of tensors of the same kind, under the same settings.
    kinds = [{name: fact if isinstance(fact, str) else fact[2] for name, fact in of.items()} for of in everyones]
    may_round = len({repr(device) for device in devices.values()}) > 1 and all(kind == kinds[0] for kind in kinds)
    apart = _take_mains([*tensors.values()]) if may_round else None
    if apart is None:
        raise SyncError(
            f"after {number} backward passes of {type(equality.module).__name__} ranks hold different weights or "
            f"settings: {found}. They now train different models. {remedy('same state')} ({OPT_OUT})."
        )
    equality.num_mended += 1
    events.note("mended", what="rounding", reductions=number, relative=apart, times=equality.num_mended)
    if world().is_main:
        say(
            f"after {number} backward passes weights differed between ranks by {apart:.1e} of their norm: "
            "ranks compute on different devices, which round differently. All ranks now have the main rank's "
            f"weights (time {equality.num_mended})"
        )


def _take_mains(tensors: list[torch.Tensor]) -> Optional[float]:
    """Copy the main rank's values to all ranks if no tensor is further from them than rounding (collective).

    Returns the largest distance, relative to a tensor's norm; None if it is larger, and nothing was copied.
    """
    device = world().device
    mains = [tensor.detach().to(device, copy=True) for tensor in tensors]
    broadcast(mains)
    distances = [_distance(tensor.detach().to(device), main) for tensor, main in zip(tensors, mains)]
    largest = torch.tensor(distances, dtype=torch.float64, device=device).max().nan_to_num(torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if float(largest) > _ROUNDING:
        return None
    for tensor, main in zip(tensors, mains):
        tensor.data.copy_(main)
    return float(largest)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of two tensors, relative to the norm of the second."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    distance = (one.to(wide) - other.to(wide)).norm()
    return float(distance / other.to(wide).norm().clamp_min(1e-12)) if float(distance) else 0.0


def take_streams(number: int) -> None:
    """Set the random streams of all ranks to the main rank's (collective)."""
    here = world()
    restore_rank_states(here.broadcast(rank_states(here.device)), here.device)
    events.note("mended", what="random streams", reductions=number)
    if here.is_main:
        say(
            f"after {number} backward passes ranks had drawn different random numbers: something draws on one "
            "rank only (a log, a rollout). All ranks continue with the main rank's streams"
        )
