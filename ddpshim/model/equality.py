"""Compares across ranks what must be equal (weights, buffers, optimizers, untrained networks, random streams).

Checksums are sent while training continues and read at the next step. Where a checksum does not tell what differs (the
settings of an optimizer), ranks exchange the values through the job's store.

A few numbers in each reduction of gradients (`Agreement`) show requests of ranks, and whether all are at one step. They
are zeros and ones, because a sum of zeros is zero in any dtype and with any rounding. A rank sends each bit and its
opposite; if the sums of both are above zero, ranks disagree. They need no message of their own.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import mul
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job import shares
from ddpshim.job.group import world
from ddpshim.job.noise import draws_alike
from ddpshim.model.checksums import Named, bits_of_rows, sent
from ddpshim.process import events
from ddpshim.process.devices import computes_on
from ddpshim.process.job import current
from ddpshim.process.random_streams import digest
from ddpshim.process.say import count, say

OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"
_SYNCED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # their statistics are of all ranks

Optimizers = Sequence[torch.optim.Optimizer]
Row = tuple[str, Union[int, Named]]  # a name, and the number or the tensors to compare
Companions = Mapping[str, Named]
_NUM_BITS = 16
_BITS = [[float(byte >> i & 1) for i in range(8)] for byte in range(256)]
NUM_SENT = 2 + 2 * _NUM_BITS
_DELAY = 4  # passes, on GPUs: the numbers are read this much later, so that the host does not wait for them
_MEETING_DEADLINE_S = 20.0


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
        self.module, self._group, self.device = module, group, device
        self.optimizers, self.companions = optimizers, companions
        self.buffers = [(home, name) for home, name in buffer_homes if home._buffers.get(name) is not None]
        # Buffers that only the main rank's broadcast makes equal.
        self._unsynced = [(home, name) for home, name in self.buffers if not isinstance(home, _SYNCED)]
        self._names = [name for name, _ in module.named_parameters()]
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.sent: Any = None
        self._before_broadcast: Optional[torch.Tensor] = None
        self._has_named_buffer = False
        self._private = PrivateGenerators()
        self.num_mended = 0
        # All ranks must agree: if one skipped a later collective, the others would hang.
        device_kind = zlib.crc32(repr(computes_on(world().device)).encode())
        vote = torch.tensor([int(is_on), device_kind, -device_kind], device=device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
        agreed, lowest, highest = vote.tolist()
        self.is_on = bool(agreed) and len(self.ranks) > 1
        self._rounds_alike = lowest == -highest
        self.covers_all = len(self.ranks) == world().world_size

    def look_at_own_buffers(self) -> None:
        """Record checksums of this rank's own buffers, before the main rank's replace them. Local."""
        own = (home._buffers.get(name) for home, name in self._unsynced)
        self._before_broadcast = bits_of_rows([[("", buffer)] for buffer in own], self.device)

    def start(self, num_reductions: int) -> None:
        """Send this rank's checksums (collective, does not wait)."""
        differing, equal = list(self._differing_rows()), list(self.equal_rows())
        before, self._before_broadcast = self._before_broadcast, None
        if before is None:
            before = sent([0] * len(self._unsynced), self.device)
        drawn = sent([self._private.states_if_used(self.module)], self.device)
        mine = torch.cat([bits_of_rows([row for _, row in (*differing, *equal)], self.device), before, drawn])
        everyones = [torch.empty_like(mine) for _ in self.ranks]
        work = dist.all_gather(everyones, mine, group=self._group, async_op=True)
        names = [[name for name, _ in rows] for rows in (differing, equal)]
        self.sent = (work, *names, [mine, *everyones], num_reductions)

    def finish(self) -> None:
        """Wait for the checksums that `start` sent; raise SyncError on all ranks if they show an error."""
        if self.sent is None:
            return
        (work, differing, equal, (_, *everyones), num_reductions), self.sent = self.sent, None
        work.wait()
        kind = type(self.module).__name__
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
            self._private.name_if_alike([rows[-1] for rows in table], self.ranks[0] == dist.get_rank())
            return
        from ddpshim.model import difference

        if STREAMS in [names[i] for i in odd]:
            difference.take_streams(number)
        facts = difference.look_closer(self, names, [i for i in odd if names[i] != STREAMS])
        if facts and (self._rounds_alike or not difference.mend(self, number)):
            raise SyncError(difference.said_of(self, facts, number))

    def _refuse_equal(self, names: Sequence[str], table: list[list[int]]) -> None:
        for i, name in enumerate(names):
            by_seed: dict[int, list[int]] = {}
            for rank, rows in zip(self.ranks, table):
                by_seed.setdefault(rows[i], []).append(rank)
            for seed, ranks in by_seed.items():
                if len(ranks) > 1:
                    raise SyncError(
                        f"ranks {ranks} draw from the same random stream ({name} is {seed}); they use the same "
                        "noise and dropout, as if there were fewer samples. Seed before wrap_parallel, with "
                        "ddpshim.setup(seed=), or afterwards with a different seed on each rank. If equal noise is "
                        f"intended, draw it inside ddpshim.shared_random_streams(seed) ({OPT_OUT})."
                    )

    def _name_shares(self, table: list[list[int]], start: int) -> None:
        """Print once if each rank updated a buffer from its own share of the samples."""
        for i, (home, name) in enumerate(self._unsynced, start):
            seen = {rows[i] for rows in table}
            if len(seen) > 1 and 0 not in seen and not self._has_named_buffer and self.ranks[0] == dist.get_rank():
                self._has_named_buffer = True
                from ddpshim.process.remedies import remedy

                say(f"buffer '{name}' of a {type(home).__name__} {remedy('buffer')}")

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the module and of its optimizers' state, which must be equal. Local."""
        yield from self._rows_of_module()
        yield from ((title, [("", tensor)]) for title, tensor in state_of(self.optimizers(), self.module))

    def settings(self) -> dict[str, str]:
        """Return the settings of the optimizers' parameter groups, by name. Local."""
        return settings_of(self.optimizers())

    def _differing_rows(self) -> Iterator[Row]:
        """Yield the rows that must differ, if each rank has its own random streams."""
        if draws_alike():
            return
        seeds = {"torch.initial_seed()": torch.initial_seed()}
        if self.device.type == "cuda":
            seeds["torch.cuda.initial_seed()"] = torch.cuda.initial_seed()
        seeds["the state of random"], seeds["the state of numpy.random"] = states_of_others()
        for name, seed in seeds.items():
            yield name, (seed + 2**63) % 2**64 - 2**63  # as an int64

    def equal_rows(self) -> Iterator[Row]:
        """Yield the rows that must be equal."""
        yield from self._rows_of_module()
        yield from self.companions().items()
        if draws_alike() and self.covers_all:
            yield STREAMS, int(digest(), 16) % 2**62
        yield SETTINGS, zlib.crc32(repr(settings_of(self.optimizers())).encode())
        yield STATE, state_of(self.optimizers(), self.module)

    def _rows_of_module(self) -> Iterator[Row]:
        now = dict(self.module.named_parameters())
        for name in self._names:
            yield f"parameter '{name}'", [("", now.pop(name, None))]
        for number, (home, name) in enumerate(self.buffers):
            yield f"buffer '{name}' of a {type(home).__name__} (number {number})", [("", home._buffers.get(name))]
        # One row for all of these, because their number may differ between ranks.
        first = next(iter(now), None)
        added = "the parameters added after wrap_parallel" + ("" if first is None else f" (here first: '{first}')")
        yield added, list(now.items())


STREAMS = "the random streams"
SETTINGS = "the settings of the optimizers"
STATE = "the state of the optimizers"


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


def states_of_others() -> list[int]:
    """Return hashes of Python's and numpy's global generators; without numpy this rank's number. Local."""
    numpy, of_numpy = sys.modules.get("numpy"), dist.get_rank()
    if numpy is not None:
        _, key, *others = numpy.random.get_state()
        of_numpy = zlib.crc32(key.tobytes() + repr(others).encode())
    return [zlib.crc32(repr(random.getstate()).encode()), of_numpy]


class PrivateGenerators:
    """The generators in a network's or the main file's attributes that were used since the last look.

    If one draws equally on all ranks, different samples get the same noise, because ddpshim divides only the draws of
    torch's functions and numpy's global ones. This may be intended (an equal decision), so it is only reported.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._used: list[str] = []
        self._is_named = False

    def states_if_used(self, module: nn.Module) -> int:
        """Return a hash of the states that have changed since the last call; 0 if none has. Local."""
        now = {name: zlib.crc32(repr(_state(generator)).encode()) for name, generator in _found(module)}
        self._used = [name for name, state in now.items() if self._before.get(name, state) != state]
        self._before = now
        return zlib.crc32(repr([(name, now[name]) for name in self._used]).encode()) if self._used else 0

    def name_if_alike(self, of_ranks: list[int], is_main: bool) -> None:
        """Print once, on the main rank, if two ranks have the same states. Local."""
        is_alike = len(set(of_ranks)) < len(of_ranks) and of_ranks[0] != 0
        # Where every rank runs the whole program, they should.
        if is_alike and not self._is_named and is_main and not current().holds_whole_batches:
            self._is_named = True
            say(
                f"{', '.join(self._used)} draws the same numbers on all ranks, so different samples get the same "
                "noise, unlike in one process. Draw with torch's functions or numpy.random's, or seed it with "
                "ddpshim.world().rank. If it is meant to decide something equally on all ranks, ignore this line"
            )


def _found(module: nn.Module) -> Iterator[tuple[str, Any]]:
    numpy = sys.modules.get("numpy")
    kinds: tuple[Any, ...] = (random.Random, *(() if draws_alike() else (torch.Generator,)))
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    holders = [(f"a {type(child).__name__}", vars(child)) for child in module.modules()]
    for holder, held in (*holders, ("the program", vars(sys.modules["__main__"]))):
        for name, value in list(held.items()):
            if isinstance(value, kinds):
                yield f"the generator '{name}' of {holder}", value


def _state(generator: Any) -> Any:
    """Return the state that determines its next draws, in a form that `repr` shows in full."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if hasattr(generator, "bit_generator"):
        state = generator.bit_generator.state
        return [[key, value.tolist() if hasattr(value, "tolist") else value] for key, value in _flat(state)]
    _, key, *others = generator.get_state()
    return [key.tolist(), others]


def _flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


class _Sent(NamedTuple):
    """A rank's position in a pass. It becomes text only for an error, because that costs time in every pass."""

    where: list[tuple[shares.Position, str]]
    num_steps: Optional[int]
    rates: Sequence[float]

    def __str__(self) -> str:
        batches = (f"step {at.step} of epoch {at.epoch} of {called}{_of_samples(at)}" for at, called in self.where)
        from ddpshim.process.remedies import remedy

        said = ", ".join(batches) or remedy("a batch")
        if self.num_steps is not None:
            said += f", after {count(self.num_steps, 'optimizer step')}"
        return said + (f" (the last at learning rate {', '.join(map(str, self.rates))})" if self.rates else "")


class Agreement:
    """The numbers that one wrapper adds to its reductions.

    Attributes:
        leave_out: whether a rank left a parameter out in the last pass that was read.
    """

    def __init__(self, network: str, device: torch.device, number: int = 0) -> None:
        """`number` identifies the network in its process group, so that crossed messages of two networks are found."""
        self._network, self._number, self._is_on_cpu = network, number, device.type == "cpu"
        self._sent_for = _Sent([], None, ())
        self._pending: deque[tuple[Any, torch.Tensor, _Sent]] = deque()
        self.leave_out = False

    def fill(
        self,
        entries: torch.Tensor,
        asks: bool = False,
        num_steps: Optional[int] = None,
        rates: Sequence[float] = (),
        leaves_out: bool = False,
    ) -> None:
        """Write this rank's numbers into the last `NUM_SENT` of `entries`, which are on the CPU. Local."""
        where = shares.positions()
        self._sent_for = _Sent(where, num_steps, rates)
        number = zlib.crc32(repr((self._number, [position for position, _ in where], num_steps, [*rates])).encode())
        low, high = number & 255, number >> 8 & 255
        bits = [float(asks), float(leaves_out), *_BITS[low], *_BITS[high], *_BITS[255 - low], *_BITS[255 - high]]
        entries[-NUM_SENT:].copy_(torch.tensor(bits, device="cpu"))

    def read(self, entries: torch.Tensor) -> bool:
        """Return whether a rank has asked, from the reduced `entries`. On a GPU the answer is of an earlier pass.

        Raises SyncError on all ranks if they are not at the same step.
        """
        if self._is_on_cpu:
            return self._judge(entries[-NUM_SENT:].tolist(), self._sent_for)
        copied = torch.empty(NUM_SENT, dtype=entries.dtype, pin_memory=entries.is_cuda, device="cpu")
        copied.copy_(entries[-NUM_SENT:], non_blocking=True)
        arrived: Optional[Any] = torch.cuda.Event() if entries.is_cuda else None
        if arrived is not None:
            arrived.record()
        self._pending.append((arrived, copied, self._sent_for))
        if len(self._pending) <= _DELAY:
            return False
        arrived, copied, sent_for = self._pending.popleft()
        if arrived is not None and not arrived.query():  # the host is `_DELAY` passes ahead
            arrived.synchronize()
        return self._judge(copied.tolist(), sent_for)

    def _judge(self, numbers: list[float], sent_for: _Sent) -> bool:
        asks, leave_out, bits, opposites = numbers[0], numbers[1], numbers[2 : 2 + _NUM_BITS], numbers[2 + _NUM_BITS :]
        self.leave_out = leave_out > 0
        if any(map(mul, bits, opposites)):
            here = world()
            of_ranks = here.gather_with_deadline(
                "positions", f"{sent_for}, network {self._number}", _MEETING_DEADLINE_S
            )
            where = "; ".join(f"rank {rank}: {said}" for rank, said in of_ranks.items())
            from ddpshim.process.remedies import remedy

            raise SyncError(
                f"ranks reduced gradients of different steps or networks in a backward pass of {self._network}. "
                f"{where}. {remedy('same steps')} ({OPT_OUT})."
            )
        return asks > 0


def _of_samples(at: shares.Position) -> str:
    return "" if at.num_samples is None else f" over {at.num_samples} samples"
