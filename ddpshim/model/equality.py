"""Compares across ranks what must be equal (weights, buffers, optimizers, untrained networks, random streams).

Checksums are sent while training continues and read at the next step. Only if they differ do ranks exchange, through
the job's store, what tells the difference (`ddpshim.model.difference`).

In each backward pass a message of two numbers shows whether all ranks are at one step (`agree_on_pass`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job.collectives import pairs, peers
from ddpshim.job.group import world
from ddpshim.model import difference
from ddpshim.model.difference import INTEGERS, OPT_OUT, Tensors, kind_of
from ddpshim.process import observed
from ddpshim.process.devices import is_capturing
from ddpshim.process.job import current
from ddpshim.process.random_streams import digest
from ddpshim.process.say import count, say
from ddpshim.process.users_line import users_line
from ddpshim.shares.streams import draws_alike

_SYNCED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # their statistics are of all ranks

Optimizers = Sequence[torch.optim.Optimizer]
Named = Sequence[tuple[str, Optional[torch.Tensor]]]
_ALL_BITS = 2**64
_SMALL = 1024  # numbers
_MEETING_DEADLINE_S = 20.0
_IN_A_PASS = zlib.crc32(b"backward pass")


def is_milestone(number: int) -> bool:
    """Whether to compare in this backward pass: 1, 2, 10, 100 and every 1000. Pass 2 sees the effects of step 1."""
    return number in (1, 2, 10, 100) or (number > 0 and number % 1000 == 0)


def agree_on_pass(network: str, gradients: Sequence[int], num_steps: int, rates: Sequence[float]) -> int:
    """Return a number for the gradients of this backward pass (collective).

    Raises SyncError on all ranks if they are not in one pass with the same gradients.

    The message is as those of World: a rank that is in another collective sees it, and does not hang.

    Args:
        network: the name of the network, or the names.
        gradients: numbers of the parameters that got a gradient, in order: those of other ranks meet them.
        num_steps, rates: steps of optimizers so far, and the learning rates of the last one.
    """
    here, num_passes = world(), current().part(observed.Progress).num_passes + 1
    kind = zlib.crc32(repr(gradients).encode())
    own = zlib.crc32(repr((num_passes, num_steps, rates)).encode(), kind), _IN_A_PASS
    if len({*pairs(own, here.world_size, peers(here))}) == 1:
        return kind
    from ddpshim.failures.failure_notes import SAME_WAY

    told = f"backward pass {num_passes}, of {network}, with {count(len(gradients), 'gradient')}, "
    told += f"after {count(num_steps, 'optimizer step')}"
    told += f" (the last at learning rate {', '.join(map(str, rates))})" if rates else ""
    of_ranks = here.gather_with_deadline("positions", f"{told}; at {users_line()}", _MEETING_DEADLINE_S)
    where = [f"rank {rank}: {of_ranks.get(rank, 'in no backward pass')}" for rank in range(here.world_size)]
    raise SyncError(
        f"ranks are at different steps, or computed gradients of different parameters; they would be mixed up, and "
        f"ranks would train different models. {'; '.join(where)}. {SAME_WAY} ({OPT_OUT})."
    )


class Equality:
    """The comparison of one wrapped network, with its optimizers and the untrained networks.

    `start` sends checksums while training continues, and `finish` reads those of all ranks. So no rank waits, and ranks
    that reach several wrappers in different orders do not block each other.

    Attributes:
        sent: the comparison in progress: (work, this rank's numbers and those of each rank, num_reductions).
    """

    def __init__(
        self,
        module: nn.Module,
        with_buffers: bool,
        device: torch.device,
        optimizers: Callable[[], Optimizers],
        companions: Callable[[], Tensors],
    ) -> None:
        """Prepare to compare `module`, with its buffers if ranks share them. Local.

        Args:
            device: from which checksums are sent.
            optimizers: returns the optimizers that step the module.
            companions: returns the tensors of networks that are not reduced but must be equal.
        """
        self.module, self._with_buffers, self._device = module, with_buffers, device
        self._optimizers, self.companions = optimizers, companions
        modules = module.modules() if with_buffers else ()
        # Buffers that only the main rank's broadcast makes equal.
        self._unsynced = [(m, name) for m in modules if not isinstance(m, _SYNCED) for name in m._buffers]
        self._own_buffers: Optional[torch.Tensor] = None
        self.sent: Any = None

    def tensors(self) -> Tensors:
        """Return the tensors that must be equal: of the module, and of its optimizers' state. Local."""
        found: Tensors = {f"parameter '{name}'": p for name, p in self.module.named_parameters()}
        if self._with_buffers:
            # No row tensor: it is each rank's own.
            buffers = [pair for pair in self.module.named_buffers() if type(pair[1]) is torch.Tensor]
            found.update((f"buffer '{name}'", buffer) for name, buffer in buffers)
        return {**found, **_state_of(self._optimizers(), self.module)}

    def settings(self) -> dict[str, str]:
        """Return learning rates, weight decays and all other settings of parameter groups, by name. Local."""
        return {
            f"{key} of group {number} of {type(optimizer).__name__} {i}": repr(_plain(value))
            for i, optimizer in enumerate(self._optimizers())
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }

    def look_at_own_buffers(self) -> None:
        """Record checksums of this rank's own buffers, before the main rank's replace them. Local."""
        buffers = [home._buffers.get(name) for home, name in self._unsynced]
        rows = [[("", buffer if type(buffer) is torch.Tensor else None)] for buffer in buffers]
        self._own_buffers = bits_of_rows(rows, self._device)

    def start(self, num_reductions: int) -> None:
        """Send this rank's checksums (collective, does not wait)."""
        mine = bits_of_rows(
            [
                [*self.tensors().items(), *self.companions().items()],
                zlib.crc32(repr(self.settings()).encode()),
                int(digest(), 16) if draws_alike() else 0,
            ],
            self._device,
        )
        if self._own_buffers is not None:  # in the first comparison, on every rank
            mine, self._own_buffers = torch.cat([mine, self._own_buffers]), None
        everyones = [torch.empty_like(mine) for _ in range(world().world_size)]
        work = dist.all_gather(everyones, mine, async_op=True)
        self.sent = (work, [mine, *everyones], num_reductions)  # a GPU may still read `mine`

    def finish(self) -> None:
        """Wait for the checksums that `start` sent; raise SyncError on all ranks if they show an error."""
        if self.sent is None or is_capturing(self._device):
            return
        (work, (_, *everyones), num_reductions), self.sent = self.sent, None
        work.wait()
        facts = {"check": "weights", "network": type(self.module).__name__, "reductions": num_reductions}
        try:
            self._compare(torch.stack(everyones).t().tolist(), num_reductions)
        except SyncError as error:
            observed.note("guard", passed=False, said=str(error), **facts)
            raise
        observed.note("guard", passed=True, **facts)

    def _compare(self, numbers: list[list[int]], num_reductions: int) -> None:
        """Raise SyncError if `numbers`, of which each has a value for each rank, differ where they must not."""
        (tensors, settings, streams), others = numbers[:3], numbers[3:]
        if len({*streams}) > 1:
            difference.take_streams(num_reductions)
        if len({*tensors}) > 1 or len({*settings}) > 1:
            when = f"after {num_reductions} backward passes of {type(self.module).__name__}"
            difference.refuse(when, self.settings(), {**self.tensors(), **self.companions()})
            return
        if world().is_main:
            self._name_own_buffers(others)

    def _name_own_buffers(self, numbers: list[list[int]]) -> None:
        """Print a line if each rank updated a buffer from its own share of the samples."""
        pairs = (place for place, of_ranks in zip(self._unsynced, numbers) if len({*of_ranks}) > 1)
        for home, name in itertools.islice(pairs, 1):
            say(
                f"buffer '{name}' of a {type(home).__name__} differed between ranks, and all get the main rank's. If "
                "it is updated from each rank's own samples, update it from those of all ranks (ddpshim.world().mean, "
                ".all_gather); if it is drawn, seed its generator"
            )


def _state_of(optimizers: Optimizers, module: nn.Module) -> Tensors:
    names = {id(p): name for name, p in module.named_parameters()}
    found: Tensors = {}
    for i, optimizer in enumerate(optimizers):
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            title = f"of '{names[id(p)]}'" if id(p) in names else f"of parameter {number}"
            found.update(_tensors_in(optimizer.state.get(p, {}), f"{title} in {type(optimizer).__name__} {i}"))
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


def _plain(value: Any) -> Any:
    """Return a setting without its device, and without addresses of objects, which differ between ranks."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


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
            total += weight * (zlib.crc32(name.encode()) + kind_of(tensor))
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
        return [t.view(INTEGERS[size])]
    if t.storage_offset() * size % 8:  # cuDNN puts the weights of a network one after the other in memory
        t = t.clone()
    even = num - num % (8 // size)
    return [t[:even].view(torch.int64), *([t[even:].view(INTEGERS[size])] if num > even else [])]


def _sums_of(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the int64 sum of each vector; all are of one type, on one device."""
    ends = torch.tensor([vector.numel() for vector in vectors], device="cpu").cumsum(0) - 1
    until = torch.cat([*vectors]).cumsum(0, dtype=torch.int64)[_to(ends, vectors[0].device)]
    return until.diff(prepend=until.new_zeros(1))
