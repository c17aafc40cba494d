"""Records the training of a rank, and the three times of its steps, for `python -m ddpshim report`."""

from __future__ import annotations

import contextlib
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, Optional

import torch

from ddpshim.job.group import world
from ddpshim.job.world import World
from ddpshim.observe import records
from ddpshim.process import machine
from ddpshim.process.job import current
from ddpshim.process.observed import StepClock, observe
from ddpshim.process.say import say
from ddpshim.version import __version__


@contextlib.contextmanager
def record(folder: records.PathLike) -> Iterator[Recorder]:
    """Record the training in this block in `folder`, for `python -m ddpshim report folder`.

    Collective at the start. Each rank appends to its own file, and a later start of the run appends to the same files.
    Losses, gradients and random streams do not change. If the disk is full, recording ends and training continues.
    Launched robomimic trainers are recorded without this call. Nothing is written with the option `record` off
    (DDPSHIM_RECORD=no).
    """
    recorder = Recorder(folder)
    try:
        yield recorder
    except BaseException as error:
        _note_failure(error)
        raise
    finally:
        records.note("end", how="finished")  # without effect after a failure: the first end counts


@contextlib.contextmanager
def profile() -> Iterator[list[records.Record]]:
    """Print how the time of this block's steps was spent, one row per rank; write nothing.

    Collective at the end, unless the block raises. Use it around a training loop with any of torch's data loaders and
    optimizers. The three times are waiting for data, the optimizer, and the rest.

    Yields a list that is empty inside the block. After it, on every rank, it holds one mapping per rank, in rank order:
    `steps` (batches), `seconds` by part, and `memory` in bytes.
    """
    here, ranks, times = world(), list[records.Record](), current().part(StepTimes)
    before = times.read(leaves_step=True)
    yield ranks
    ranks += here.gather({**times.read(since=before), "memory": _memory(here.device)})
    if here.is_main:
        from ddpshim.observe.report import as_markdown, table_of_times

        table = as_markdown(table_of_times(dict(enumerate(ranks)))).rstrip()
        say(f"where the time of each rank's steps went\n{table}")


class Recorder:
    """Writes the records of this rank's training to `folder`/ddpshim/rank_N.jsonl."""

    def __init__(self, folder: records.PathLike) -> None:
        """Start the records, or append to those of an earlier start (collective)."""
        here = world()
        self._device, self._times = here.device, current().part(StepTimes)
        start = here.run_on_main(time.time)
        if here.options.record and records.begin(folder, here.rank, start=start, **_facts(here)):
            # The last chance to record how the run ended: with the exception that is propagating, if any.
            current().at_end.callback(lambda: _note_failure(sys.exc_info()[1]))
        self._begun = self._times.read(leaves_step=True)  # what had been counted when this epoch began

    def epoch(
        self, epoch: int, *, loss: Optional[float] = None, valid: Optional[float] = None, **metrics: float
    ) -> None:
        """Record an epoch that has ended, and how the time since the last call was spent. Local.

        Args:
            epoch: its number. The report shows the last start's record of an epoch.
            loss: this rank's mean training loss. The report shows the losses of all ranks, and their mean.
            valid: this rank's validation loss.
            metrics: any other numbers.
        """
        own = {**({} if loss is None else {"Loss": loss}), **metrics}
        self.write_epoch(epoch, "training", own, self.counted())
        if valid is not None:
            self.write_epoch(epoch, "validation", {"Loss": valid}, {})

    def counted(self) -> records.Record:
        """Return what was counted since the last call; what follows counts to no step until the next batch. Local."""
        before, self._begun = self._begun, self._times.read(leaves_step=True)
        return self._times.read(since=before, leaves_step=True)

    def write_epoch(self, epoch: int, phase: str, own: Mapping[str, Any], counted: records.Record) -> None:
        """Record a pass over data, with this rank's metrics and what was counted in it. Local."""
        records.note("epoch", epoch=epoch, phase=phase, own=numbers(own), memory=_memory(self._device), **counted)


class StepTimes:
    """Counts this process's steps from its creation to the end of the job: `current().part(StepTimes)`. Local.

    A step has three times: waiting for data, the optimizer, and the rest ("compute"), communication included. A GPU
    works on while the host continues, so its time is counted where the host waits for it.

    A batch of any of torch's loaders begins a step; without loaders each step of an optimizer ends one. A loop under
    torch.no_grad(), saves, episodes, and what follows a loader's last batch, count to no step.
    """

    def __init__(self) -> None:
        job = current()
        self._clock, self._thread = job.part(StepClock), threading.get_ident()
        self._seconds = dict.fromkeys(records.PARTS, 0.0)
        self._num_batches = self._num_optimizer_steps = 0
        self._part: Optional[str] = None  # None: no step
        self._since = self._clock.now()
        of_steps = {"before_step": self._begin_optimizer, "after_step": self._end_optimizer}
        observe(job.at_end, around_batch=self._waiting, **of_steps)

    def read(self, since: Optional[records.Record] = None, leaves_step: bool = False) -> records.Record:
        """Return `steps`, and `seconds` by part, counted up to now, or between an earlier answer and now.

        Each moment of a step belongs to one part. With `leaves_step`, the time until the next batch counts to no step.
        """
        self._become(None if leaves_step else self._part)
        before = since or {"steps": 0, "seconds": dict.fromkeys(records.PARTS, 0.0)}
        seconds = {part: round(s - before["seconds"][part], 6) for part, s in self._seconds.items()}
        return {"steps": (self._num_batches or self._num_optimizer_steps) - before["steps"], "seconds": seconds}

    @contextlib.contextmanager
    def _waiting(self, _: Any) -> Iterator[None]:
        # Not where one loader reads another, or a thread fetches ahead.
        if self._part == "data_wait" or threading.get_ident() != self._thread or not torch.is_grad_enabled():
            yield
            return
        arrived = None
        self._become("data_wait")
        try:
            yield
            arrived = "compute"
            self._num_batches += 1
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

    def _become(self, part: Optional[str]) -> None:
        now = self._clock.now()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        self._part, self._since = part, now


def _memory(device: torch.device) -> dict[str, int]:
    """Return the bytes that the process and its GPU use, currently and at the peak, as far as the system says."""
    now, most = machine.resident_bytes()
    memory = {"rss": now, "peak_rss": most}
    if device.type == "cuda":
        memory["gpu_allocated"] = torch.cuda.max_memory_allocated(device)
        memory["gpu_reserved"] = torch.cuda.max_memory_reserved(device)
    return {name: value for name, value in memory.items() if value is not None}


def _facts(here: World) -> dict[str, Any]:
    names = ("world_size", "local_world_size", "node_rank", "backend", "launcher", "num_restarts", "seed")
    facts = {name: getattr(here, name) for name in names}
    facts.update(device=str(here.device), cores=machine.num_cores(), options=here.options.changed())
    if here.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(here.device)
    return {**facts, "ddpshim": __version__, "torch": str(torch.__version__), "Python": platform.python_version()}


def _note_failure(error: Optional[BaseException]) -> None:
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        from ddpshim.failures import failure_notes

        failure_notes.note(error)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return those of `metrics` that are numbers, or tensors with one, as floats."""
    found = ((n, v) for n, v in metrics.items() if isinstance(v, Real) or (torch.is_tensor(v) and v.numel() == 1))
    return {name: float(value) for name, value in found}
