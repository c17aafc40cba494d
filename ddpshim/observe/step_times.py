"""Counts a rank's steps, and what their time is spent for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Optional

import torch

from ddpshim.process.job import current
from ddpshim.process.observed import PARTS, Progress, StepClock, observe

_WARM_UP = 50  # steps of optimizers: calls of networks are traced in some, and data workers start


class StepTimes:
    """Counts this process's steps from its creation to the end of the job: `current().part(StepTimes)`. Local.

    A step waits for data and for other ranks' messages, is in the optimizer, or in the rest ("compute"). A GPU works on
    while the host continues, so its time is counted where the host waits for it. torch's own DDP waits in "compute".

    A batch of any of torch's loaders begins a step; without loaders each step of an optimizer ends one. A loop under
    torch.no_grad(), saves, episodes, and what follows a loader's last batch, count to no step.
    """

    def __init__(self) -> None:
        job = current()
        self._clock, self._thread = job.part(StepClock), threading.get_ident()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_batches = self._num_optimizer_steps = 0
        self._part: Optional[str] = None  # None: no step
        self._since = self._clock.now()
        self.after_warm_up: Optional[dict[str, Any]] = None  # what had been counted then
        if job.door.computes_alike:
            job.part(Progress).waiting = lambda: self._waiting("message_wait", self._part == "compute")

        def for_batch(_: Any) -> contextlib.AbstractContextManager[None]:  # not where one loader reads another
            return self._waiting("data_wait", self._part != "data_wait" and torch.is_grad_enabled())

        of_steps = {"before_step": self._begin_optimizer, "after_step": self._end_optimizer}
        observe(job.at_end, around_batch=for_batch, **of_steps)

    def read(self, since: Optional[dict[str, Any]] = None, leaves_step: bool = False) -> dict[str, Any]:
        """Return `steps`, and `seconds` by part, counted up to now, or between an earlier answer and now.

        Each moment of a step belongs to one part. With `leaves_step`, the time until the next batch counts to no step.
        """
        self._become(None if leaves_step else self._part)
        before = since or {"steps": 0, "seconds": dict.fromkeys(PARTS, 0.0)}
        seconds = {part: round(s - before["seconds"][part], 6) for part, s in self._seconds.items()}
        return {"steps": (self._num_batches or self._num_optimizer_steps) - before["steps"], "seconds": seconds}

    @contextlib.contextmanager
    def _waiting(self, part: str, counts: bool) -> Iterator[None]:
        if not counts or threading.get_ident() != self._thread:  # a thread may fetch ahead
            yield
            return
        arrived = None
        self._become(part)
        try:
            yield
            arrived = "compute"
            self._num_batches += part == "data_wait"
        finally:
            self._become(arrived)

    def _begin_optimizer(self, *_: Any) -> None:
        # Not inside of another optimizer's step, or that of its base class, nor after the last batch.
        if self._part == "compute" or not self._num_batches:
            self._become("optimizer")

    def _end_optimizer(self, *_: Any) -> None:
        if self._part == "optimizer":
            self._num_optimizer_steps += 1
            self._become("compute")
            if self._num_optimizer_steps == _WARM_UP:
                self.after_warm_up = self.read()

    def _become(self, part: Optional[str]) -> None:
        now = self._clock.now()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        self._part, self._since = part, now
