"""Records the training of a rank, for `python -m ddpshim report`.

Recording adds only a few sums to a step: no collective, no wait for a GPU. Lines are written at the end of an epoch,
and every 30 s inside a long one.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, Optional, Union

import torch

from ddpshim.checkpoint import files as checkpoint
from ddpshim.failures import failure
from ddpshim.job.group import on_cleanup, world
from ddpshim.job.meter import Meter
from ddpshim.job.world import World
from ddpshim.observe import environment, exporting, records
from ddpshim.process import machine
from ddpshim.process.say import say

_PROGRESS_EVERY_S = 30.0
_GPU_LOOK_EVERY_S = 5.0
_MOST_POINTS = 32  # points of a loss curve inside an epoch; a power of 2


@contextlib.contextmanager
def record(folder: checkpoint.PathLike, *, log_with: Union[str, Iterable[str]] = ()) -> Iterator[Recorder]:
    """Record the training in this block in `folder`, for `python -m ddpshim report folder`.

    Collective at the start; `Recorder.epoch` is local, or collective with `log_with`. Each rank appends to its own
    file, and a later start of the run appends to the same files. Losses, gradients and random streams do not change.
    If the disk is full, recording ends and training continues. Launched robomimic trainers are recorded without this
    call. Nothing is written with the option `record` off (DDPSHIM_RECORD=no).

    Args:
        folder: the folder of the run.
        log_with: "tensorboard", "wandb" or both: the main rank also writes curves of the mean and of each rank, by
            epoch, as TensorBoard events to `folder`/tensorboard, and as a W&B run to `folder`/wandb, or to the
            program's current run. A new W&B run is offline unless WANDB_MODE is set.

    Raises:
        ReportError: `log_with` is unknown, or its package is not installed.
    """
    recorder = Recorder(folder, log_with)
    try:
        with recorder.measured():
            yield recorder
    except BaseException as error:
        _note_failure(error)
        raise
    finally:
        records.end("finished")  # without effect after a failure: the first end counts
        recorder.close_curves()


@contextlib.contextmanager
def profile() -> Iterator[list[records.Record]]:
    """Print how this block's time was spent, one row per rank; write nothing.

    Collective at the end, unless the block raises. Use it around a training loop with any of torch's data loaders and
    optimizers, and networks of `wrap_parallel`; `Meter` defines the parts. Outside the block nothing is measured, at
    no cost.

    Yields a list that is empty inside the block. After it, on every rank, it holds one mapping per rank, in rank order:
    `steps` (batches), `seconds` by part (their sum is the time of the block), and `memory` in bytes.
    """
    here, ranks = world(), list[records.Record]()
    meter = Meter(uses_events=here.backend == "nccl")
    meter.start()
    try:
        yield ranks
    finally:
        meter.stop()
    ranks += here.gather({**_counted_by(meter), "memory": _memory(here.device)})
    if here.is_main:
        from ddpshim.observe.report.tables import table_of_times

        say(f"where the time of each rank went\n{table_of_times(ranks)}")


class Recorder:
    """Writes the records of this rank's training to `folder`/ddpshim/rank_N.jsonl."""

    def __init__(self, folder: checkpoint.PathLike, log_with: Union[str, Iterable[str]] = ()) -> None:
        """Start the records, or append to those of an earlier start (collective)."""
        here = world()
        self.is_on = here.options.record
        self._folder = folder
        self._log_with = here.run_on_main(exporting.check, log_with) if self.is_on and log_with else ()
        self._curves: Optional[exporting.Curves] = None  # on the main rank, from its first epoch on
        self._writes_curves = here.is_main
        self.first_step = 0  # of this epoch; above 0 if an earlier start was interrupted in it
        self._device = here.device
        self._uses_events = here.backend == "nccl"
        self._meter: Optional[Meter] = None
        self._counted: dict[str, Any] = {}
        self._curve = _Curve()
        self._next_progress = time.monotonic() + _PROGRESS_EVERY_S
        self._next_look = 0.0
        self._gpu_use: list[int] = []
        if self.is_on:
            number = here.run_on_main(_number, folder)
            self.is_on = records.begin(folder, here.rank, start=number, **_facts(here))
            # The last chance to record how the run ended: with the exception that is propagating, if any.
            on_cleanup(lambda: _note_failure(sys.exc_info()[1]))

    def step(self, loss: float) -> None:
        """Record this rank's loss of one step, a number. Local. Reading it from a GPU's tensor waits for the GPU."""
        if not self.is_on:
            return
        self._curve.add(float(loss))
        now = time.monotonic()
        if now > self._next_look and self._device.type == "cuda":
            self._look_at_gpu(now)
        if now > self._next_progress:
            means = self._curve.means
            records.note("progress", steps=self._curve.num_steps, loss=means[-1] if means else None)
            self._next_progress = now + _PROGRESS_EVERY_S

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
        """Record an epoch that has ended, and how the time since the last call was spent.

        Local; collective with `log_with`.

        Args:
            epoch: its number. The report shows the last start's record of an epoch.
            loss: this rank's mean training loss. The report shows the losses of all ranks, and their mean.
            valid: this rank's validation loss.
            num_samples: how many samples this rank saw.
            metrics: any other numbers.
        """
        if not self.is_on and not self._log_with:
            return
        self.stop_counting()
        own = {**({} if loss is None else {"Loss": loss}), **metrics}
        self.write_epoch(epoch, "training", own, num_samples=num_samples)
        if valid is not None:
            self.write_epoch(epoch, "validation", {"Loss": valid})
        self.start_counting()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure how this block's time is spent, for the next `write_epoch`. Local."""
        self.start_counting()
        try:
            yield
        finally:
            self.stop_counting()

    def start_counting(self) -> None:
        """Start measuring time. Local."""
        self.stop_counting()  # in case the last epoch raised
        if self.is_on:
            self._meter = Meter(self._uses_events)
            self._meter.start()

    def stop_counting(self) -> None:
        """Stop measuring, and keep the times for the next `write_epoch`. Local."""
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.stop()
            self._counted = _counted_by(meter)

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
        if not self.is_on and not self._log_with:
            return
        curve, self._curve = self._curve, _Curve()
        counted, self._counted = self._counted, {}
        first_step, self.first_step = self.first_step, 0
        memory = _memory(self._device)
        if self._gpu_use:
            memory["gpu_use"] = sum(self._gpu_use) / len(self._gpu_use)
            self._gpu_use.clear()
        if batch_size is not None and "steps" in counted:
            num_samples = batch_size * counted["steps"]
        pass_ = {
            "epoch": epoch,
            "phase": phase,
            "own": numbers(own),
            "mean": None if mean is None else numbers(mean),
            "samples": num_samples,
            "first_step": first_step,
            "curve": [float(f"{mean:.6g}") for mean in curve.means] if phase == "training" else [],
            "memory": memory,
            **counted,
        }
        records.note("epoch", **pass_)
        if self._log_with:
            self._export(pass_)
        self._next_progress = time.monotonic() + _PROGRESS_EVERY_S

    def close_curves(self) -> None:
        """Close the writers of `log_with`. Local."""
        if self._curves is not None:
            with self._exporting():
                self._curves.close()

    def _export(self, pass_: records.Record) -> None:
        by_rank = dict(enumerate(world().gather(pass_)))
        if self._writes_curves:
            with self._exporting():
                self._curves = self._curves or exporting.Curves(self._folder, self._log_with)
                self._curves.add(by_rank)

    @contextlib.contextmanager
    def _exporting(self) -> Iterator[None]:
        """Print an error of this block, and stop writing the curves of `log_with`; training continues."""
        try:
            yield
        except Exception as error:
            self._curves, self._writes_curves = None, False
            say(
                f"{' and '.join(self._log_with)} cannot be written ({type(error).__name__}: {error}); training and its "
                "records continue without. Correct what the error names."
            )

    def _look_at_gpu(self, now: float) -> None:
        self._next_look = now + _GPU_LOOK_EVERY_S
        try:
            self._gpu_use.append(torch.cuda.utilization(self._device))
        except Exception:  # no pynvml, or it fails: it would fail again
            self._next_look = float("inf")


class _Curve:
    """Reduces the losses of any number of steps to at most `_MOST_POINTS` means over equally many steps."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.num_steps = 0
        self._width, self._sum, self._num = 1, 0.0, 0

    def add(self, loss: float) -> None:
        self.num_steps += 1
        self._sum, self._num = self._sum + loss, self._num + 1
        if self._num < self._width:
            return
        self.means.append(self._sum / self._num)
        self._sum, self._num = 0.0, 0
        if len(self.means) == _MOST_POINTS:
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2])]
            self._width *= 2


def _counted_by(meter: Meter) -> dict[str, Any]:
    return {"steps": meter.num_batches, "seconds": {part: round(s, 6) for part, s in meter.seconds.items()}}


def _memory(device: torch.device) -> dict[str, Any]:
    """Return the bytes that the process and its GPU use, currently and at the peak."""
    now, most = machine.resident_bytes()
    memory: dict[str, Any] = {"rss": now, "peak_rss": most}
    if device.type == "cuda":
        memory["gpu_allocated"] = torch.cuda.max_memory_allocated(device)
        memory["gpu_reserved"] = torch.cuda.max_memory_reserved(device)
        memory["gpu_total"] = torch.cuda.get_device_properties(device).total_memory
    return memory


def _number(folder: checkpoint.PathLike) -> int:
    try:
        return records.num_starts(folder) + 1
    except OSError:  # `records.begin` gets the same error, and reports it
        return 1


def _facts(here: World) -> dict[str, Any]:
    names = ("world_size", "local_world_size", "node_rank", "backend", "device", "launcher", "num_restarts", "seed")
    facts = {name: getattr(here, name) for name in names}
    facts.update(device=str(here.device), cores=machine.num_cores(), options=here.options.changed())
    if here.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(here.device)
    return {**facts, "environment": environment.describe()} if here.is_main else facts


def _note_failure(error: Optional[BaseException]) -> None:
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        failure.note(error)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return those of `metrics` that are numbers, or tensors with one, as floats."""
    found = ((n, v) for n, v in metrics.items() if isinstance(v, Real) or (torch.is_tensor(v) and v.numel() == 1))
    return {name: float(value) for name, value in found}
