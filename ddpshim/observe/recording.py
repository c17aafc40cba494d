"""Records the training of a rank, and the three times of its steps, for `python -m ddpshim report`."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, Optional

import torch

from ddpshim.job.group import world
from ddpshim.job.world import World
from ddpshim.observe import records
from ddpshim.observe.step_times import StepTimes
from ddpshim.process import machine
from ddpshim.process.job import current
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
