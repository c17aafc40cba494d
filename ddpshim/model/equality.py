"""Compares across ranks what must be equal: weights, buffers, optimizers, untrained networks, random streams.

Checksums are sent while training continues and read at the next step. Where a checksum does not tell what differs (the
settings of an optimizer), ranks exchange the values through the job's store.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job import events
from ddpshim.job.alike import computes_on
from ddpshim.job.group import world
from ddpshim.job.own_streams import draws_alike
from ddpshim.job.random_streams import digest, rank_states, restore_rank_states
from ddpshim.job.say import say
from ddpshim.model.checksums import Named, bits_of_rows, numbers_of, sent
from ddpshim.model.generators import PrivateGenerators, states_of_others

OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"
_MEETING_DEADLINE_S = 20.0
# Relative to a tensor's norm: the difference that rounding on different devices causes in a thousand steps.
_ROUNDING = 1e-3

_SYNCED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # their statistics are of all ranks

Optimizers = Sequence[torch.optim.Optimizer]
Row = tuple[str, Union[int, Named]]  # a name, and the number or the tensors to compare
Companions = Mapping[str, Named]


def is_milestone(number: int) -> bool:
    """Whether to compare at this step: 1, 2, 10, 100 and every 1000. Step 2 sees the effects of step 1."""
    return number in (1, 2, 10, 100) or (number > 0 and number % 1000 == 0)


class Equality:
    """The comparison across the ranks of one wrapper's group.

    `start` sends checksums while training continues, and `finish` reads those of all ranks. So no rank waits, and ranks
    that reach several wrappers in different orders do not block each other.

    Attributes:
        is_on: whether all ranks have this comparison on.
        covers_all: whether the group has all ranks of the job.
        num_mended: how often weights that differed by rounding were replaced by the main rank's.
        sent: the comparison in progress: (work, names of rows that must differ, names of rows that must be equal, own
            checksums and those of each rank, num_reductions).
    """

    def __init__(
        self,
        module: nn.Module,
        buffer_homes: list[tuple[nn.Module, str]],
        group: Any,
        device: torch.device,
        is_on: bool,
        optimizers: Callable[[], Optimizers],
        companions: Callable[[], Companions],
    ) -> None:
        """Prepare to compare `module` and its buffers at `buffer_homes` (collective).

        Checksums are sent from `device`. All ranks must have equally many tensors; torch's DDP has checked that.

        Args:
            optimizers: returns the optimizers that step the module.
            companions: returns the tensors of networks that are not reduced but must be equal.
        """
        self._module, self._group, self._device = module, group, device
        self._optimizers, self._companions = optimizers, companions
        self._buffers = [(home, name) for home, name in buffer_homes if home._buffers.get(name) is not None]
        # Buffers that only the main rank's broadcast makes equal.
        self._unsynced = [(home, name) for home, name in self._buffers if not isinstance(home, _SYNCED)]
        self._names = [name for name, _ in module.named_parameters()]
        self._ranks: list[int] = dist.get_process_group_ranks(group)
        self.sent: Any = None
        self._before_broadcast: Optional[torch.Tensor] = None
        self._has_named_buffer = False
        self._private = PrivateGenerators()
        self.num_mended = 0
        # All ranks must agree: if one skipped a later collective, the others would hang.
        device_kind = zlib.crc32(repr(computes_on(world())).encode())
        vote = torch.tensor([int(is_on), device_kind, -device_kind], device=device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
        agreed, lowest, highest = vote.tolist()
        self.is_on = bool(agreed) and len(self._ranks) > 1
        self._rounds_alike = lowest == -highest
        self.covers_all = len(self._ranks) == world().world_size

    def look_at_own_buffers(self) -> None:
        """Record checksums of this rank's own buffers, before the main rank's replace them. Local."""
        own = (home._buffers.get(name) for home, name in self._unsynced)
        self._before_broadcast = bits_of_rows([[("", buffer)] for buffer in own], self._device)

    def start(self, num_reductions: int) -> None:
        """Send this rank's checksums (collective, does not wait)."""
        differing, equal = list(self._differing_rows()), list(self._equal_rows())
        before, self._before_broadcast = self._before_broadcast, None
        if before is None:
            before = sent([0] * len(self._unsynced), self._device)
        drawn = sent([self._private.states_if_used(self._module)], self._device)
        mine = torch.cat([bits_of_rows([row for _, row in (*differing, *equal)], self._device), before, drawn])
        everyones = [torch.empty_like(mine) for _ in self._ranks]
        work = dist.all_gather(everyones, mine, group=self._group, async_op=True)
        names = [[name for name, _ in rows] for rows in (differing, equal)]
        self.sent = (work, *names, [mine, *everyones], num_reductions)

    def finish(self) -> None:
        """Wait for the checksums that `start` sent; raise SyncError on all ranks if they show an error."""
        if self.sent is None:
            return
        (work, differing, equal, (_, *everyones), num_reductions), self.sent = self.sent, None
        work.wait()
        kind = type(self._module).__name__
        compared = {
            "check": "weights",
            "network": kind,
            "reductions": num_reductions,
            "tensors": len(differing) + len(equal),
        }
        try:
            self._compare(differing, equal, torch.stack(everyones).tolist(), num_reductions)
        except SyncError as error:
            events.note("guard", passed=False, said=str(error), **compared)
            raise
        events.note("guard", passed=True, **compared)

    def _compare(self, differing: list[str], equal: list[str], table: list[list[int]], number: int) -> None:
        """Raise SyncError if rows differ that must be equal, or the reverse. `table` has one list per rank."""
        names = differing + equal
        self._refuse_equal(differing, table)
        odd = [i for i in range(len(differing), len(names)) if len({rows[i] for rows in table}) > 1]
        if not odd:
            self._name_shares(table, len(names))
            self._private.name_if_alike([rows[-1] for rows in table], self._ranks[0] == dist.get_rank())
            return
        if _STREAMS in [names[i] for i in odd]:
            self._take_streams(number)
        facts = self._look_closer(names, [i for i in odd if names[i] != _STREAMS])
        if facts and (self._rounds_alike or not self._mend(number)):
            raise SyncError(self._said_of(facts, number))

    def _look_closer(self, names: Sequence[str], odd: list[int]) -> dict[str, list[list[int]]]:
        """Return the rows of `odd` that really differ (NaNs count as equal), with all ranks' numbers (collective)."""
        if not odd:
            return {}
        rows = dict(self._equal_rows())
        wanted = [rows.get(names[i], ()) for i in odd]
        mine = torch.tensor([numbers_of(row) for row in wanted], device=self._device)
        everyones = [torch.empty_like(mine) for _ in self._ranks]
        dist.all_gather(everyones, mine, group=self._group)
        table = [everyone.tolist() for everyone in everyones]
        found = {names[odd[k]]: [rows[k] for rows in table] for k in range(len(odd))}
        return {name: facts for name, facts in found.items() if any(fact[0] != facts[0][0] for fact in facts)}

    def _refuse_equal(self, names: Sequence[str], table: list[list[int]]) -> None:
        for i, name in enumerate(names):
            by_seed: dict[int, list[int]] = {}
            for rank, rows in zip(self._ranks, table):
                by_seed.setdefault(rows[i], []).append(rank)
            for seed, ranks in by_seed.items():
                if len(ranks) > 1:
                    raise SyncError(
                        f"ranks {ranks} draw from the same random stream ({name} is {seed}); they use the same "
                        "noise and dropout, as if there were fewer samples. Seed before wrap_parallel, with "
                        "ddpshim.setup(seed=), or afterwards with a different seed on each rank. If equal noise is "
                        f"intended, draw it inside ddpshim.shared_random_streams(seed) ({OPT_OUT})."
                    )

    def _said_of(self, odd: Mapping[str, list[list[int]]], number: int) -> str:
        kind = type(self._module).__name__
        name = _SETTINGS if _SETTINGS in odd else next(iter(odd))  # different settings make the state differ
        more = f" ({len(odd) - 1} more tensors differ)" if len(odd) > 1 else ""
        if name in (_SETTINGS, _STATE):
            of_state = state_of(self._optimizers(), self._module)
            settings = settings_of(self._optimizers())
            found = self._first_difference(
                settings if name == _SETTINGS else {title: numbers_of([("", x)]) for title, x in of_state}
            )
            return (
                f"after {number} backward passes of {kind} ranks have different optimizers: {found}{more}. They now "
                "train different models. Set rates and load states equally on every rank; step schedulers with "
                f"numbers of all ranks ({OPT_OUT})."
            )
        values = ", ".join(f"{shown(fact)} on rank {rank}" for rank, fact in zip(self._ranks, odd[name]))
        return (
            f"after {number} backward passes of {kind} ranks hold different weights: {name} {values}{more}. They "
            "now train different models. Load checkpoints, and change, convert or add layers, equally on every "
            f"rank, and let every gradient come from loss.backward() ({OPT_OUT})."
        )

    def _first_difference(self, facts: Mapping[str, Any]) -> str:
        """Describe the first of `facts` that differs between ranks, after an exchange in the store (collective)."""
        of_ranks = world().meet("different facts", dict(facts), _MEETING_DEADLINE_S)
        return first_difference(of_ranks) or "it is not known which of their numbers differs"

    def _name_shares(self, table: list[list[int]], start: int) -> None:
        """Print once if each rank updated a buffer from its own share of the samples."""
        for i, (home, name) in enumerate(self._unsynced, start):
            seen = {rows[i] for rows in table}
            if len(seen) > 1 and 0 not in seen and not self._has_named_buffer and self._ranks[0] == dist.get_rank():
                self._has_named_buffer = True
                say(
                    f"buffer '{name}' of a {type(home).__name__} is updated from each rank's own samples, but only "
                    "the main rank's is kept, which saw one share of the batch. Update it from all ranks' samples "
                    "(ddpshim.world().mean, .all_gather)"
                )

    def _take_streams(self, number: int) -> None:
        """Set the random streams of all ranks to the main rank's (collective)."""
        here = world()
        restore_rank_states(here.broadcast(rank_states(here.device)), here.device)
        events.note("mended", what="random streams", reductions=number)
        if here.is_main:
            say(
                f"after {number} backward passes ranks had drawn different random numbers: something draws on one "
                "rank only (a log, a rollout). All ranks continue with the main rank's streams"
            )

    def _mend(self, number: int) -> bool:
        """Copy the main rank's values to all ranks if only rounding differs; return whether it did (collective)."""
        tensors = [(name, tensor) for name, tensor in self._tensors() if tensor.is_floating_point()]
        kinds = repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors])
        kind = torch.tensor(zlib.crc32(kinds.encode()), device=self._device)
        everyones = [torch.empty_like(kind) for _ in self._ranks]
        dist.all_gather(everyones, kind, group=self._group)
        if len({int(other) for other in everyones}) > 1:
            return False
        mains = [tensor.detach().clone() for _, tensor in tensors]
        for tensor in mains:
            dist.broadcast(tensor, self._ranks[0], group=self._group)
        apart = [_apart(tensor, main) for (_, tensor), main in zip(tensors, mains)]
        worst = torch.tensor([max(apart, default=0.0)], dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group)
        largest = float(worst)
        if not largest <= _ROUNDING:
            return False
        for (_, tensor), main in zip(tensors, mains):
            tensor.data.copy_(main)
        self.num_mended += 1
        events.note("mended", what="rounding", reductions=number, relative=largest, times=self.num_mended)
        if self._ranks[0] == dist.get_rank():
            say(
                f"after {number} backward passes weights differed between ranks by {largest:.1e} of their norm: "
                "ranks compute on different devices, which round differently. All ranks now have the main rank's "
                f"weights (time {self.num_mended})"
            )
        return True

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the module and of its optimizers' state, which must be equal. Local."""
        yield from self._rows_of_module()
        yield from ((title, [("", tensor)]) for title, tensor in state_of(self._optimizers(), self._module))

    def settings(self) -> dict[str, str]:
        """Return the settings of the optimizers' parameter groups, by name. Local."""
        return settings_of(self._optimizers())

    def _differing_rows(self) -> Iterator[Row]:
        """Yield the rows that must differ, if each rank has its own random streams."""
        if draws_alike():
            return
        seeds = {"torch.initial_seed()": torch.initial_seed()}
        if self._device.type == "cuda":
            seeds["torch.cuda.initial_seed()"] = torch.cuda.initial_seed()
        seeds["the state of random"], seeds["the state of numpy.random"] = states_of_others()
        for name, seed in seeds.items():
            yield name, (seed + 2**63) % 2**64 - 2**63  # as an int64

    def _equal_rows(self) -> Iterator[Row]:
        """Yield the rows that must be equal."""
        yield from self._rows_of_module()
        yield from self._companions().items()
        if draws_alike() and self.covers_all:
            yield _STREAMS, int(digest(), 16) % 2**62
        yield _SETTINGS, zlib.crc32(repr(settings_of(self._optimizers())).encode())
        yield _STATE, state_of(self._optimizers(), self._module)

    def _rows_of_module(self) -> Iterator[Row]:
        now = dict(self._module.named_parameters())
        for name in self._names:
            yield f"parameter '{name}'", [("", now.pop(name, None))]
        for number, (home, name) in enumerate(self._buffers):
            yield f"buffer '{name}' of a {type(home).__name__} (number {number})", [("", home._buffers.get(name))]
        # One row for all of these, because their number may differ between ranks.
        first = next(iter(now), None)
        added = "the parameters added after wrap_parallel" + ("" if first is None else f" (here first: '{first}')")
        yield added, list(now.items())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._module.named_parameters()
        yield from ((name, buffer) for home, name in self._buffers if (buffer := home._buffers.get(name)) is not None)
        for title, tensors in self._companions().items():
            yield from ((f"{title} {name}", tensor) for name, tensor in tensors if tensor is not None)
        yield from state_of(self._optimizers(), self._module)


_STREAMS = "the random streams"
_SETTINGS = "the settings of the optimizers"
_STATE = "the state of the optimizers"


def settings_of(optimizers: Optimizers) -> dict[str, str]:
    """Return learning rates, weight decays and all other settings of parameter groups, by name. Local."""
    return {
        f"{key} of group {number} of {_called(optimizer, i)}": repr(_plain(value))
        for i, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def state_of(optimizers: Optimizers, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of the optimizers' state, by name. Local."""
    names = {id(p): name for name, p in module.named_parameters()}
    found: list[tuple[str, torch.Tensor]] = []
    for i, optimizer in enumerate(optimizers):
        called = _called(optimizer, i)
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            title = f"of '{names[id(p)]}'" if id(p) in names else f"of parameter {number}"
            found += _tensors_in(optimizer.state.get(p, {}), f"{title} in {called}")
    return found


def _tensors_in(value: Any, title: str) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield title, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(inner, f"{key} {title}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors_in(inner, f"entry {number} {title}")
    elif isinstance(value, (int, float)):
        yield title, torch.tensor(float(value), dtype=torch.float64, device="cpu")


def _called(optimizer: torch.optim.Optimizer, number: int) -> str:
    return f"{type(optimizer).__name__} {number}"


def _plain(value: Any) -> Any:
    """Return a setting without its device, and without addresses of objects, which differ between ranks."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


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
