"""Describes what differs between ranks after a comparison, and mends what only rounding or a stray draw has changed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist

from ddpshim.job.group import world
from ddpshim.model.checksums import numbers_of
from ddpshim.model.equality import OPT_OUT, SETTINGS, STATE, Equality, settings_of, state_of
from ddpshim.process import events
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.remedies import remedy
from ddpshim.process.say import say

_MEETING_DEADLINE_S = 20.0
# Relative to a tensor's norm: the difference that rounding on different devices causes in a thousand steps.
_ROUNDING = 1e-3


def look_closer(equality: Equality, names: Sequence[str], odd: list[int]) -> dict[str, list[list[int]]]:
    """Return the rows of `odd` that really differ (NaNs count as equal), with all ranks' numbers (collective)."""
    if not odd:
        return {}
    rows = dict(equality.equal_rows())
    wanted = [rows.get(names[i], ()) for i in odd]
    mine = torch.tensor([numbers_of(row) for row in wanted], device=equality.device)
    everyones = [torch.empty_like(mine) for _ in equality.ranks]
    dist.all_gather(everyones, mine, group=equality._group)
    table = [everyone.tolist() for everyone in everyones]
    found = {names[odd[k]]: [rows[k] for rows in table] for k in range(len(odd))}
    return {name: facts for name, facts in found.items() if any(fact[0] != facts[0][0] for fact in facts)}


def said_of(equality: Equality, odd: Mapping[str, list[list[int]]], number: int) -> str:
    kind = type(equality.module).__name__
    name = SETTINGS if SETTINGS in odd else next(iter(odd))  # different settings make the state differ
    more = f" ({len(odd) - 1} more tensors differ)" if len(odd) > 1 else ""
    if name in (SETTINGS, STATE):
        of_state = state_of(equality.optimizers(), equality.module)
        settings = settings_of(equality.optimizers())
        found = _exchanged(
            equality, settings if name == SETTINGS else {title: numbers_of([("", x)]) for title, x in of_state}
        )
        return (
            f"after {number} backward passes of {kind} ranks have different optimizers: {found}{more}. They now "
            f"train different models. {remedy('same state')} ({OPT_OUT})."
        )
    values = ", ".join(f"{shown(fact)} on rank {rank}" for rank, fact in zip(equality.ranks, odd[name]))
    return (
        f"after {number} backward passes of {kind} ranks hold different weights: {name} {values}{more}. They "
        f"now train different models. {remedy('same state')} ({OPT_OUT})."
    )


def _exchanged(equality: Equality, facts: Mapping[str, Any]) -> str:
    """Describe the first of `facts` that differs between ranks, after an exchange in the store (collective)."""
    of_ranks = world().gather_with_deadline("different facts", dict(facts), _MEETING_DEADLINE_S)
    return first_difference(of_ranks) or "it is not known which of their numbers differs"


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


def mend(equality: Equality, number: int) -> bool:
    """Copy the main rank's values to all ranks if only rounding differs; return whether it did (collective)."""
    tensors = [(name, tensor) for name, tensor in _tensors(equality) if tensor.is_floating_point()]
    kinds = repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors])
    kind = torch.tensor(zlib.crc32(kinds.encode()), device=equality.device)
    everyones = [torch.empty_like(kind) for _ in equality.ranks]
    dist.all_gather(everyones, kind, group=equality._group)
    if len({int(other) for other in everyones}) > 1:
        return False
    mains = [tensor.detach().clone() for _, tensor in tensors]
    for tensor in mains:
        dist.broadcast(tensor, equality.ranks[0], group=equality._group)
    apart = [_apart(tensor, main) for (_, tensor), main in zip(tensors, mains)]
    worst = torch.tensor([max(apart, default=0.0)], dtype=torch.float64, device=equality.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=equality._group)
    largest = float(worst)
    if not largest <= _ROUNDING:
        return False
    for (_, tensor), main in zip(tensors, mains):
        tensor.data.copy_(main)
    equality.num_mended += 1
    events.note("mended", what="rounding", reductions=number, relative=largest, times=equality.num_mended)
    if equality.ranks[0] == dist.get_rank():
        say(
            f"after {number} backward passes weights differed between ranks by {largest:.1e} of their norm: "
            "ranks compute on different devices, which round differently. All ranks now have the main rank's "
            f"weights (time {equality.num_mended})"
        )
    return True


def _tensors(equality: Equality) -> Iterator[tuple[str, torch.Tensor]]:
    yield from equality.module.named_parameters()
    yield from ((name, buffer) for home, name in equality.buffers if (buffer := home._buffers.get(name)) is not None)
    for title, tensors in equality.companions().items():
        yield from ((f"{title} {name}", tensor) for name, tensor in tensors if tensor is not None)
    yield from state_of(equality.optimizers(), equality.module)


def first_difference(of_ranks: Mapping[int, Mapping[str, Any]]) -> Optional[str]:
    """Describe the first fact that differs between ranks, with all ranks' values; None if all are equal. Local."""
    for name in dict.fromkeys(name for facts in of_ranks.values() for name in facts):
        values = [facts.get(name) for facts in of_ranks.values()]
        if any(value != values[0] for value in values):
            on_ranks = (f"{shown(value)} on rank {rank}" for rank, value in zip(of_ranks, values))
            return f"{name} {'' if isinstance(values[0], list) else 'is '}{', '.join(on_ranks)}"
    return None


def shown(fact: Any) -> str:
    """Return text for a fact: a tensor's sum, with its checksum since sums may be equal; else the value itself."""
    if fact is None or (isinstance(fact, list) and fact[0] == 0):
        return "missing"
    if not isinstance(fact, list):
        return str(fact)
    total = struct.unpack("d", struct.pack("q", fact[1]))[0]
    return f"sums to {total!r} (#{fact[0] % 65521:04x})"


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of two tensors, relative to the norm of the second."""
    difference = (one.detach().double() - other.double()).norm()
    return float(difference / other.double().norm().clamp_min(1e-12)) if float(difference) else 0.0
