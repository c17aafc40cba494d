"""Measures the three times of a step: waiting for data, the optimizer, and the rest ("compute").

Compute is all else between two batches, communication included. A GPU works on while the host continues, so its time is
counted where the host waits for it. torch.profiler and nsys say more; these numbers cost a few microseconds a step.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch.utils.data import IterableDataset

from ddpshim.job.world import World
from ddpshim.process import machine
from ddpshim.process.job import current
from ddpshim.process.observed import StepClock, observe

PARTS = ("data_wait", "compute", "optimizer")
_MUCH_DATA_WAIT = 0.15
_LEAST_S, _LEAST_STEPS = 60.0, 100  # shorter trainings need no advice


class Counted(NamedTuple):
    """Steps, and seconds by part, of which each moment of a step belongs to one."""

    steps: int
    seconds: dict[str, float]

    def since(self, before: Counted) -> Counted:
        """Return what was counted after `before`."""
        return Counted(self.steps - before.steps, {part: s - before.seconds[part] for part, s in self.seconds.items()})


class StepTimes:
    """Counts this process's steps from its creation to the end of the job: `current().part(StepTimes)`. Local.

    A batch of any of torch's loaders begins a step; without loaders each step of an optimizer ends one. A loop under
    torch.no_grad(), saves, episodes, and what follows a loader's last batch, count to no step.
    """

    def __init__(self) -> None:
        job = current()
        self._clock, self._thread = job.part(StepClock), threading.get_ident()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_batches = self._num_optimizer_steps = 0
        self._part: Optional[str] = None  # None: no step
        self._before_optimizer: Optional[str] = None
        self._is_waiting = False
        self._since = self._clock.now()
        self.num_workers, self.is_stream = 0, False  # of the loader of the last batch; whether its dataset is iterable
        hooks = {"before_step": self._begin_optimizer, "after_step": self._end_optimizer}
        observe(job.at_end, around_batch=self._waiting, **hooks)

    def read(self, leaves_step: bool = False) -> Counted:
        """Return what was counted so far; with `leaves_step`, the time until the next batch counts to no step."""
        self._become(None if leaves_step else self._part)
        return Counted(self._num_batches or self._num_optimizer_steps, dict(self._seconds))

    @contextlib.contextmanager
    def _waiting(self, batches: Any) -> Iterator[None]:
        # Not where one loader reads another, or a thread fetches ahead.
        if self._is_waiting or threading.get_ident() != self._thread or not torch.is_grad_enabled():
            yield
            return
        self._is_waiting, arrived = True, None
        self._become("data_wait")
        try:
            yield
            arrived = "compute"
            self._num_batches += 1
            self.num_workers = getattr(batches, "_num_workers", 0)
            self.is_stream = isinstance(getattr(batches, "_dataset", None), IterableDataset)
        finally:
            self._is_waiting = False
            self._become(arrived)

    def _begin_optimizer(self, *_: Any) -> None:
        if self._part != "optimizer":  # else one optimizer steps another, or the step of its base class
            self._before_optimizer = self._part
            self._become("optimizer")

    def _end_optimizer(self, *_: Any) -> None:
        if self._part == "optimizer":
            self._num_optimizer_steps += 1
            self._become("compute" if not self._num_batches else self._before_optimizer)

    def _become(self, part: Optional[str]) -> None:
        now = self._clock.now()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        self._part, self._since = part, now


def hint(times: StepTimes, here: World) -> str:
    """Return a line about waiting for data, if this took much of a training that lasted; else "". Local."""
    steps, seconds = times.read()
    total = sum(seconds.values())
    if steps < _LEAST_STEPS or total < _LEAST_S or seconds["data_wait"] <= _MUCH_DATA_WAIT * total:
        return ""
    step_ms, wait_ms = 1000 * total / steps, 1000 * seconds["data_wait"] / steps
    do = "Store samples decoded and small, or keep them in memory"
    if not times.is_stream and _has_room(times.num_workers, here):
        do = f"Raise num_workers (now {times.num_workers}; robomimic: train.num_data_workers), as there are cores left"
    return f"of a step of {step_ms:.4g} ms, rank {here.rank} waited {wait_ms:.3g} ms for data. {do}."


def _has_room(num_workers: int, here: World) -> bool:
    """Return whether this node has cores for one more data worker of each rank. Local."""
    num_ranks, num_cores = here.local_world_size, machine.num_cores()
    if num_ranks * len(machine.cores()) <= (os.cpu_count() or 1):  # the launcher may have given each rank its own
        num_ranks = 1
    return num_ranks * (num_workers + 2) <= num_cores
