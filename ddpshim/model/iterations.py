"""Finds ranks that average gradients of different batches: each reduction also carries the number of the batch.

A rank that skips a backward pass, or makes one more, is a batch away from the others from there on. Nobody waits for
it: its next gradients go into the sum of theirs, until one of them waits for a pass that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from ddpshim.errors import SyncError
from ddpshim.job import hangs
from ddpshim.job.group import world
from ddpshim.job.job import current

NUM_MARKS = 16  # numbers of batches are told apart modulo this
_TELL_S = 5.0
_EPOCH = 7  # the last batch of an epoch and the first of the next one seldom have one mark


class Marks:
    """The end of a gradient that has one number for each parameter: a one in the place that stands for this batch.

    After the reduction there is something in one place where all ranks are at one batch, and in several where they are
    not, however a communication hook rounds. A rank that does not know its batch leaves all places empty.

    Args:
        num_parameters: of the gradient.
        like: a tensor of its type and device.
        is_on: whether to compare; ranks send their marks in any case.
    """

    def __init__(self, num_parameters: int, like: torch.Tensor, is_on: bool) -> None:
        all_used = like.new_ones(1, num_parameters).expand(NUM_MARKS + 1, -1)
        self._rows = torch.cat([all_used, torch.eye(NUM_MARKS + 1, NUM_MARKS).to(all_used)], 1).unbind()
        self._num, self._is_on = num_parameters, is_on
        self._mark: Optional[int] = None
        self._on_gpu: Any = None  # what the last comparison waits for: (an event, numbers, this rank's mark)

    def row(self) -> torch.Tensor:
        """The gradient of a rank that is at its batch and used all parameters. Local."""
        self._mark = mark_of(current().progress.begin_pass())
        return self._rows[NUM_MARKS if self._mark is None else self._mark]

    def check(self, gradient: torch.Tensor) -> None:
        """Raise SyncError where ranks were at different batches; `gradient` is the sum of theirs, or their mean.

        Local, and on all ranks alike. On a GPU nothing waits for it: it is found in one of the passes that follow.
        """
        if not self._is_on or self._mark is None:
            return
        if not gradient.is_cuda:
            refuse_apart(gradient[self._num :].tolist(), self._mark)
            return
        if self._on_gpu is None:
            event, numbers = torch.cuda.Event(), torch.empty(NUM_MARKS, dtype=gradient.dtype, pin_memory=True)
        else:
            event, numbers, mark = self._on_gpu
            if not event.query():
                return
            refuse_apart(numbers.tolist(), mark)
        numbers.copy_(gradient[self._num :], non_blocking=True)
        event.record()
        self._on_gpu = (event, numbers, self._mark)


def mark_of(batch: Optional[tuple[int, int]]) -> Optional[int]:
    """Where a one stands for this epoch and step. Local."""
    return None if batch is None else (batch[1] + _EPOCH * batch[0]) % NUM_MARKS


def refuse_apart(numbers: Sequence[float], mark: int) -> None:
    """Raise SyncError where `numbers`, put together of all ranks' marks, have something beside this rank's `mark`.

    Local, but where it raises ranks tell each other which batch they are at.
    """
    if numbers.count(0) == NUM_MARKS - 1 and numbers[mark]:
        return
    here, progress = world(), current().progress
    came = here.meet("batches", (progress.batch, progress.num_passes), _TELL_S)
    at = ", ".join(f"batch {b[1]} of epoch {b[0]} on rank {rank}" for rank, (b, _) in came.items() if b is not None)
    raise SyncError(
        f"in backward pass {progress.num_passes + 1} gradients of different batches were averaged ({at}): a rank has "
        "skipped a backward pass, or made one more, and from there on ranks train on sums that belong to no batch. Let "
        f"every rank make a backward pass for each of its batches, if with a loss of 0 * loss ({hangs.OPT_OUT})."
    )
