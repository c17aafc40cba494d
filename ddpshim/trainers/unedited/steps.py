"""Checks the backward passes of a program for one process, and says at its end what was computed on rows."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from ddpshim.errors import SyncError
from ddpshim.job.group import world
from ddpshim.model.backward import Passes
from ddpshim.model.equality import is_milestone
from ddpshim.model.wrapper import is_compiling
from ddpshim.process.job import current
from ddpshim.process.say import say, size
from ddpshim.process.users_line import users_line
from ddpshim.rows.gradients import plain
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited.networks import Networks

_ROUNDING = 1e-3
_DEADLINE_S = 600.0
_NUM_PLACES = 3
_LEAST_GATHERS = 100  # a short program's are not worth a line


class Steps:
    """State of one program that its replaced functions share.

    Attributes:
        networks: the networks that it trains.
        num_passes: outermost backward passes since an optimizer was made; at its first step, 1.
    """

    def __init__(self) -> None:
        self.networks = Networks()
        self.num_passes = 0
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before the first step of an optimizer: its training may have begun with the last pass. Local."""
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self.num_passes = 1

    def begin_pass(self, tensors: Any) -> None:
        """Before a backward pass, wrap new networks and compare the loss (collective)."""
        if not is_compiling() and current().part(Passes).depth <= 1:  # not in a pass of a checkpoint, inside another
            self.networks.wrap()
            self.num_passes += 1
            if is_milestone(self.num_passes):
                self._check_alike([tensors] if isinstance(tensors, torch.Tensor) else tensors)

    def _check_alike(self, given: Any) -> None:
        """Raise SyncError if ranks computed different losses (collective)."""
        own = [float(plain(loss).detach().double().sum()) for loss in given]
        found = world().gather_with_deadline("losses", own, _DEADLINE_S)
        expected = next(iter(found.values()))
        for rank, theirs in found.items():
            if not all(_is_close(x, y) for x, y in zip(expected, theirs)) or len(expected) != len(theirs):
                raise SyncError(
                    f"{users_line()}: rank 0 computed the loss {expected} and rank {rank} {theirs}; every "
                    "rank runs the whole program, so it should be the same on all, and the step would be wrong. Draw "
                    "batches from torch's, numpy's or Python's global generator, or with a fixed seed "
                    "(np.random.default_rng(0)), or take them from a DataLoader."
                )
        if len(found) < world().world_size:
            raise SyncError(
                f"{users_line()}: of {world().world_size} ranks only {[*found]} reached this backward pass "
                f"within {_DEADLINE_S:g} s; the others do something else. The decision must be the same on all ranks: "
                "it must not depend on a clock or on entropy."
            )


def say_what_was_divided() -> None:
    """Print which share of the operations was computed on rows, and what gathered most, on the main rank."""
    counts = current().part(Counts)
    num = counts.gathered.total() if hasattr(counts.gathered, "total") else sum(counts.gathered.values())
    if not world().is_main or counts.on_rows + num < _LEAST_GATHERS:
        return
    most = [
        f"{os.path.basename(line)} ({name or 'read'}, {times} times, {size(counts.num_bytes[line, name])})"
        for (line, name), times in counts.gathered.most_common(_NUM_PLACES)
    ]
    percent = 100 * counts.on_rows / (counts.on_rows + num)
    whole = f" Whole batches were needed at {', '.join(most)}" if most else ""
    say(f"{percent:.0f}% of the operations on batches were divided among the ranks.{whole}")


def _is_close(one: float, two: float) -> bool:
    return one == two or abs(one - two) <= _ROUNDING * max(abs(one), abs(two)) or (one != one and two != two)
