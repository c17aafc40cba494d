"""Counts where the time of this process goes, while somebody asks: each moment belongs to one part."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Optional

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from ddpshim.job import events
from ddpshim.job.replaced import replaced
from ddpshim.job.say import say_once

PARTS = ("data_wait", "compute", "communication", "optimizer", "other")


class Meter:
    """Seconds by part, and the number of batches, between `start` and `stop`; both may be called again. Local.

    A part begins at a call that torch or ddpshim makes:
    - data_wait: for a batch. From a batch's arrival to the next request everything is
    - compute, but for
    - communication: what the reducer, or a collective of `World`, makes this rank wait for, and
    - optimizer: the steps of optimizers.
    - other: before the first batch, and after the end of a pass over a loader.

    On a GPU under nccl the host does not wait for the reducer, but the GPU's stream does: that is timed by events,
    and taken out of compute, which waits for the GPU somewhere.
    """

    def __init__(self, uses_events: bool = False) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.num_batches = 0
        self._uses_events = uses_events
        self._part = "other"
        self._since = 0.0
        self._outer: list[str] = []  # the parts that the current one interrupts
        self._events: list[tuple[Any, Any]] = []
        self._around: Optional[events.Clock] = None
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Begin to count. A meter that runs already goes on, and is to be stopped after this one."""
        self._around = events.measure_by(self)
        self._part, self._since = "other", time.perf_counter()
        self._outer.clear()
        self._undo.callback(register_optimizer_step_pre_hook(lambda *_: self.begin("optimizer")).remove)
        self._undo.callback(register_optimizer_step_post_hook(lambda *_: self.end()).remove)
        # The one place that all of torch's loaders, with workers or without, go through.
        batches_of_any = getattr(dataloader, "_BaseDataLoaderIter", None)
        if batches_of_any is None:
            say_once("this torch hides the iterator of its loaders; the time that they are waited for is in `other`")
            return
        original = batches_of_any.__next__

        def timed_next(batches: Any) -> Any:
            self._become("data_wait")
            arrived = "other"
            try:
                batch = original(batches)
                self.num_batches, arrived = self.num_batches + 1, "compute"
            finally:
                self._become(arrived)
            return batch

        self._undo.enter_context(replaced(batches_of_any, "__next__", timed_next))

    def stop(self) -> None:
        """Count no more, and leave torch as it was."""
        events.measure_by(self._around)
        self._become("other")
        self._undo.close()
        if self._events:
            torch.cuda.synchronize()
        self._read_events()

    def begin(self, part: str) -> None:
        """From here to `end()` time counts to `part`; may be nested."""
        if part == "communication" and self._around is not None:  # of the others it hears by itself
            self._around.begin(part)
        if part == "communication" and self._uses_events and "communication" not in (self._part, *self._outer):
            self._events.append((_event(), None))
        self._outer.append(self._part)
        self._become(part)

    def end(self) -> None:
        """What `begin` interrupted goes on. Nothing where the meter was started in between."""
        if not self._outer:
            return
        ended, before = self._part, self._outer.pop()
        if ended == "communication" and self._around is not None:
            self._around.end()
        self._become(before)
        if self._events and ended == "communication" and "communication" not in (before, *self._outer):
            self._events[-1] = self._events[-1][0], _event()
            self._read_events()

    def _become(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def _read_events(self) -> None:
        """Move what the GPU has waited, as far as it has come, from compute to communication."""
        while self._events and self._events[0][1] is not None and self._events[0][1].query():
            first, last = self._events.pop(0)
            waited = first.elapsed_time(last) / 1000
            self.seconds["communication"] += waited
            self.seconds["compute"] -= waited


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
