"""Adds a few numbers to each reduction of gradients, which show requests of ranks and whether all are at one step.

They are zeros and ones, because a sum of zeros is zero in any dtype and with any rounding. A rank sends each bit and
its opposite; if the sums of both are above zero, ranks disagree. They need no message of their own.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple, Optional

import torch

from ddpshim.errors import SyncError
from ddpshim.job import shares
from ddpshim.job.group import world
from ddpshim.model.equality import OPT_OUT
from ddpshim.process.say import count

_NUM_BITS = 16
NUM = 2 + 2 * _NUM_BITS
_DELAY = 4  # passes, on GPUs: the numbers are read this much later, so that the host does not wait for them
_MEETING_DEADLINE_S = 20.0


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
        """Write this rank's numbers into the last `NUM` of `entries`, which are on the CPU. Local."""
        where = shares.positions()
        self._sent_for = _Sent(where, num_steps, rates)
        number = zlib.crc32(repr((self._number, [position for position, _ in where], num_steps, [*rates])).encode())
        bits = [float(number >> i & 1) for i in range(_NUM_BITS)]
        said = [float(asks), float(leaves_out), *bits, *(1 - bit for bit in bits)]
        entries[-NUM:].copy_(torch.tensor(said, device="cpu"))

    def read(self, entries: torch.Tensor) -> bool:
        """Return whether a rank has asked, from the reduced `entries`. On a GPU the answer is of an earlier pass.

        Raises SyncError on all ranks if they are not at the same step.
        """
        if self._is_on_cpu:
            return self._judge(entries[-NUM:].tolist(), self._sent_for)
        copied = torch.empty(NUM, dtype=entries.dtype, pin_memory=entries.is_cuda, device="cpu")
        copied.copy_(entries[-NUM:], non_blocking=True)
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
