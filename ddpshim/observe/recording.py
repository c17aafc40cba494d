"""Records the training of a rank, for `python -m ddpshim report`.

Recording adds a few sums to a step: no collective, no wait for a GPU. Lines are written at the end of an epoch, and
every 30 s inside a long one.
"""

from __future__ import annotations

import array
import contextlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, Optional, Union

import torch

from ddpshim.failures import failure
from ddpshim.job.group import on_cleanup, world
from ddpshim.job.world import World
from ddpshim.observe import records
from ddpshim.observe.step_times import Counted, StepTimes, hint
from ddpshim.process import machine
from ddpshim.process.job import current
from ddpshim.process.say import say
from ddpshim.version import __version__

_PROGRESS_EVERY_S = 30.0
_MOST_POINTS = 32  # of a loss curve inside an epoch

PathLike = Union[str, os.PathLike[str]]


@contextlib.contextmanager
def record(folder: PathLike) -> Iterator[Recorder]:
    """Record the training in this block in `folder`, for `python -m ddpshim report folder`.

    Collective at the start. Each rank appends to its own file, and a later start of the run appends to the same files.
    Losses, gradients and random streams do not change. If the disk is full, recording ends and training continues.
    Launched robomimic trainers are recorded without this call. Nothing is written with the option `record` off
    (DDPSHIM_RECORD=no).
    """
    recorder = Recorder(folder)
    recorder.start_counting()
    try:
        yield recorder
    except BaseException as error:
        _note_failure(error)
        raise
    finally:
        recorder.stop_counting()
        records.end("finished")  # without effect after a failure: the first end counts


@contextlib.contextmanager
def profile() -> Iterator[list[records.Record]]:
    """Print how the time of this block's steps was spent, one row per rank; write nothing.

    Collective at the end, unless the block raises. Use it around a training loop with any of torch's data loaders and
    optimizers. The three times are those of `StepTimes`: waiting for data, the optimizer, and the rest.

    Yields a list that is empty inside the block. After it, on every rank, it holds one mapping per rank, in rank order:
    `steps` (batches), `seconds` by part, and `memory` in bytes.
    """
    here, ranks, times = world(), list[records.Record](), current().part(StepTimes)
    before = times.read(leaves_step=True)
    yield ranks
    ranks += here.gather({**_rounded(times.read().since(before)), "memory": _memory(here.device)})
    if here.is_main:
        from ddpshim.observe.page import as_markdown, table_of_times

        table = as_markdown(table_of_times(dict(enumerate(ranks))))
        say("\n".join(["where the time of each rank's steps went", *table]))


class Recorder:
    """Writes the records of this rank's training to `folder`/ddpshim/rank_N.jsonl."""

    def __init__(self, folder: PathLike) -> None:
        """Start the records, or append to those of an earlier start (collective)."""
        here = world()
        self.first_step = 0  # of this epoch; above 0 if an earlier start was interrupted in it
        self._device = here.device
        self._begun: Optional[Counted] = None  # what had been counted when this epoch began
        self._counted: dict[str, Any] = {}
        self._losses = array.array("d")  # of the epoch's steps
        self._next_progress = time.monotonic() + _PROGRESS_EVERY_S
        self.is_on = here.options.record
        if self.is_on:
            number = here.run_on_main(records.num_starts, folder) + 1
            self.is_on = records.begin(folder, here.rank, start=number, **_facts(here))
            self._times = current().part(StepTimes)
            # The last chance to record how the run ended: with the exception that is propagating, if any.
            on_cleanup(lambda: _note_failure(sys.exc_info()[1]))
            if here.is_main:
                on_cleanup(lambda: _say_hint(self._times, here))

    def step(self, loss: float) -> None:
        """Record this rank's loss of one step, a number. Local. Reading it from a GPU's tensor waits for the GPU."""
        if self.is_on:
            self._losses.append(float(loss))
            if time.monotonic() > self._next_progress:
                records.note("progress", steps=len(self._losses), loss=self._losses[-1])
                self._next_progress = time.monotonic() + _PROGRESS_EVERY_S

    def step_of(self, metrics: Mapping[str, Any]) -> None:
        """Call `step` with the loss in `metrics`, if there is one. Local."""
        name = records.main_loss(metrics)
        if name is not None:
            self.step(metrics[name])

    def epoch(
        self,
        epoch: int,
        *,
        loss: Optional[float] = None,
        valid: Optional[float] = None,
        num_samples: Optional[int] = None,
        **metrics: float,
    ) -> None:
        """Record an epoch that has ended, and how the time since the last call was spent. Local.

        Args:
            epoch: its number. The report shows the last start's record of an epoch.
            loss: this rank's mean training loss. The report shows the losses of all ranks, and their mean.
            valid: this rank's validation loss.
            num_samples: how many samples this rank saw.
            metrics: any other numbers.
        """
        self.stop_counting()
        own = {**({} if loss is None else {"Loss": loss}), **metrics}
        self.write_epoch(epoch, "training", own, num_samples=num_samples)
        if valid is not None:
            self.write_epoch(epoch, "validation", {"Loss": valid})
        self.start_counting()

    def start_counting(self) -> None:
        """Start measuring time. Local."""
        self._begun = self._times.read(leaves_step=True) if self.is_on else None

    def stop_counting(self) -> None:
        """Stop measuring, and keep the times for the next `write_epoch`. Local."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._counted = _rounded(self._times.read(leaves_step=True).since(begun))

    def write_epoch(
        self,
        epoch: int,
        phase: str,
        own: Mapping[str, Any],
        mean: Optional[Mapping[str, Any]] = None,
        *,
        batch_size: Optional[int] = None,
        num_samples: Optional[int] = None,
    ) -> None:
        """Record a pass over data: this rank's metrics and, if the trainer computed it, their mean over ranks."""
        if not self.is_on:
            return
        counted, self._counted = self._counted, {}
        first_step, self.first_step = self.first_step, 0
        losses, self._losses = self._losses, array.array("d")
        width = -(-len(losses) // _MOST_POINTS) or 1
        curve = [float(f"{statistics.fmean(losses[i : i + width]):.6g}") for i in range(0, len(losses), width)]
        if batch_size is not None and "steps" in counted:
            num_samples = batch_size * counted["steps"]
        about = {"epoch": epoch, "phase": phase, "own": numbers(own), "samples": num_samples, "first_step": first_step}
        about.update(mean=None if mean is None else numbers(mean), curve=curve, memory=_memory(self._device))
        records.note("epoch", **about, **counted)
        self._next_progress = time.monotonic() + _PROGRESS_EVERY_S


def _rounded(counted: Counted) -> dict[str, Any]:
    return {"steps": counted.steps, "seconds": {part: round(s, 6) for part, s in counted.seconds.items()}}


def _say_hint(times: StepTimes, here: World) -> None:
    text = "" if sys.exc_info()[1] is not None else hint(times, here)
    if text:
        say(text)


def _memory(device: torch.device) -> dict[str, Any]:
    """Return the bytes that the process and its GPU use, currently and at the peak."""
    now, most = machine.resident_bytes()
    memory: dict[str, Any] = {"rss": now, "peak_rss": most}
    if device.type == "cuda":
        memory["gpu_allocated"] = torch.cuda.max_memory_allocated(device)
        memory["gpu_reserved"] = torch.cuda.max_memory_reserved(device)
    return memory


def _facts(here: World) -> dict[str, Any]:
    names = ("world_size", "local_world_size", "node_rank", "backend", "launcher", "num_restarts", "seed")
    facts = {name: getattr(here, name) for name in names}
    facts.update(device=str(here.device), cores=machine.num_cores(), options=here.options.changed())
    if here.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(here.device)
    return {**facts, "ddpshim": __version__, "torch": str(torch.__version__), "Python": platform.python_version()}


def _note_failure(error: Optional[BaseException]) -> None:
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        failure.note(error)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return those of `metrics` that are numbers, or tensors with one, as floats."""
    found = ((n, v) for n, v in metrics.items() if isinstance(v, Real) or (torch.is_tensor(v) and v.numel() == 1))
    return {name: float(value) for name, value in found}
