"""Does the work that every trainer needs on several ranks; an adapter or a patch set calls it.

Checks that ranks have the same config and make equally many steps, seeds each epoch's noise, averages metrics,
writes records, and saves progress from which a later start resumes.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, TypeVar

import torch

from ddpshim import variables
from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint.progress_folder import (
    find_progress,
    leave_if_finished,
    plain_content,
    read_plain,
    restore_streams,
)
from ddpshim.checkpoint.resume import Resumable, Stateful
from ddpshim.job.group import on_cleanup, world
from ddpshim.model import guard
from ddpshim.observe.recording import Recorder
from ddpshim.process import observed
from ddpshim.process.job import current
from ddpshim.process.random_streams import rank_states
from ddpshim.process.say import say, say_once
from ddpshim.shares.passes import Enterable

M = TypeVar("M", bound=Mapping[str, Any])

FOLDER = "resume"  # folder of the progress, in the folder of the run
STREAMS = "streams.pt"  # random streams, in FOLDER


def session() -> Session:
    """Return the training session of the current job. Local."""
    return current().part(Session)


def wants_to_go_on(is_asked: bool = False) -> bool:
    """Whether the option `resume` makes this start resume from saved progress, if there is any. Local.

    With resume=auto it does if a launcher or scheduler has restarted the job, or if `is_asked`: the user requested it.
    """
    here = world()
    choice = here.options.resume
    return here.is_launched and (choice == "always" or (choice == "auto" and (here.is_restarted or is_asked)))


class Session:
    """One training, from `begin` to `end`. Without a launcher it changes nothing in the trainer.

    Attributes:
        seed: the trainer's seed.
        first_epoch: the trainer's number of its first epoch.
        goes_on: whether this start resumes from an earlier one.
        progress: saves the position in the training; None if progress is not saved.
        recorder: writes the records; None if there are none.
    """

    def __init__(self) -> None:
        self.seed = 0
        self.first_epoch = 0
        self.goes_on = False
        self.progress: Optional[Resumable] = None
        self.recorder: Optional[Recorder] = None
        self._folder: Optional[Path] = None  # folder of the progress
        self._metrics, self._validation = _Metrics({}), _Metrics({})  # a save in validation keeps the training's
        self._epoch = _CurrentPass(0, "training", None, None)
        self._noted: Optional[Mapping[str, Any]] = None  # metrics of the last step that are not read yet

    def open(self, folder: checkpoint.PathLike) -> None:
        """Keep records and progress in the existing `folder` (collective)."""
        here = world()
        self._folder = Path(folder, FOLDER)
        if here.is_launched and here.options.record:
            self.recorder = Recorder(folder)
            on_cleanup(self.recorder.stop_counting)  # if an epoch raises

    def look_for_progress(self, folder: checkpoint.PathLike) -> bool:
        """Whether this start resumes from the progress of an earlier one in `folder` (collective).

        Exits with code 0 if the earlier start has finished.
        """
        progress = Path(folder, FOLDER)
        leave_if_finished(progress)
        self.goes_on = world().run_on_main(lambda: wants_to_go_on() and find_progress(progress) is not None)
        return self.goes_on

    def resume(
        self, objects: Mapping[str, Stateful], logger: Any, start_epoch: int, *best_so_far: Any
    ) -> tuple[Any, ...]:
        """Return (epoch to start with, *best_so_far) from the progress of an earlier start, else as given (collective).

        From here on SIGTERM and SIGUSR1 make the ranks save and exit with code 75, and progress is saved regularly
        (`ddpshim.Resumable`). Does nothing without a launcher, or with the option resume=never.
        """
        here = world()
        if not here.is_launched or self._folder is None or here.options.resume == "never":
            return (start_epoch, *best_so_far)
        kept = {**objects, "logger": _LoggerState(logger)}
        training = Resumable(self._folder, kept, before_save=self._join_metrics, before_exit=logger.close)
        self.progress, training.epoch = training, start_epoch - self.first_epoch
        is_repeated = variables.RESUME_FROM in os.environ  # a part of a certified run
        if (self.goes_on or is_repeated) and training.restore(later_than=(training.epoch, 0)):
            return (training.epoch + self.first_epoch, *training.values["best so far"])
        if start_epoch > self.first_epoch:
            self._restore_streams(start_epoch)
        return (start_epoch, *best_so_far)

    def _keep_streams(self, epoch: int) -> None:
        """Save the random streams at the start of `epoch`, for resuming from the trainer's own checkpoint. Local."""
        if self._folder is not None and world().is_main:
            partial = self._folder / f".{STREAMS}.partial"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                streams = {"epoch": epoch, "streams": rank_states(world().device)}
                torch.save(plain_content(streams, partial, is_trusted=False), partial)
                os.replace(partial, self._folder / STREAMS)
            except (OSError, RuntimeError) as error:  # RuntimeError: torch on a full disk. Training can continue
                say_once(f"{partial} could not be written ({error}): a resumed run will draw different random numbers")

    def _restore_streams(self, epoch: int) -> None:
        """Restore the random streams with which the earlier run began `epoch`; report if not saved (collective)."""
        here, path = world(), Path(self._folder or "", STREAMS)
        found = here.run_on_main(lambda: read_plain(path, is_trusted=False) if path.is_file() else {})
        if isinstance(found, dict) and found.get("epoch") == epoch:
            restore_streams(found.get("streams"), here.device, path)
        elif here.is_main:
            say(f"epoch {epoch} draws different random numbers than the resumed run did: {path} is not of that epoch")

    def begin_epoch(
        self,
        loader: Any,
        epoch: int,
        num_steps: Optional[int] = None,
        *,
        validates: bool = False,
        best_so_far: tuple[Any, ...] = (),
    ) -> tuple[Any, Optional[int]]:
        """Return an iterable to use instead of `loader`, and how many of its `num_steps` steps are left (collective).

        Ranks wait here until the main rank has finished rollouts and saving. The order of samples depends on `epoch`,
        and each rank's noise on `epoch` and the rank, so a resumed run sees the samples and noise of an uninterrupted
        one. An epoch that was interrupted is completed, and so are its metrics.

        Args:
            validates: this is a pass over validation data; ranks may save and exit between its batches.
            best_so_far: saved with the progress for `resume`.
        """
        here, training = world(), self.progress
        phase = "validation" if validates else "training"
        batches: Any = loader
        if here.is_launched:
            num_steps = len(loader) if num_steps is None else num_steps
            if isinstance(loader, Enterable):
                loader.set_epoch((epoch - self.first_epoch) * math.ceil(num_steps / len(loader)))
            here.barrier()
        self._epoch, self._noted = _CurrentPass(epoch, phase, num_steps, getattr(loader, "batch_size", None)), None
        if validates:
            self._validation = _Metrics({})
        else:
            self._metrics = _Metrics({})
        if self.recorder is not None:
            self.recorder.start_counting()
        if training is not None and validates:
            batches = _Batches(loader, lambda: _interruptible(loader, training))
        elif training is not None:
            number = epoch - self.first_epoch
            start = training.step if training.epoch == number else 0
            training.values["best so far"] = copy.deepcopy(best_so_far)
            self._metrics = _Metrics(training.values.get("metrics", {}) if start else {})
            if not start:
                self._keep_streams(epoch)
            total = num_steps or 0  # not None, since `progress` exists only in a launched job
            batches, num_steps = _Batches(loader, lambda: training.steps(loader, number, total)), total - start
        return batches, num_steps

    def note_step(self, metrics: M) -> M:
        """Record the metrics of a step, and return them. Local.

        A mapping other than a dict is read only at the next step, or when needed: its numbers may still be in
        transfer from a GPU.
        """
        self._look_at_noted()
        self._noted = metrics
        if isinstance(metrics, dict):
            self._look_at_noted()
        return metrics

    def _look_at_noted(self) -> None:
        noted, self._noted = self._noted, None
        if noted is not None:
            self._of_this_pass().take(noted)

    def _of_this_pass(self) -> _Metrics:
        return self._metrics if self._epoch.phase == "training" else self._validation

    def end_epoch(self, log: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the epoch in `log`, averaged over ranks (collective).

        Raises SyncError if ranks made different numbers of steps.
        """
        epoch, own, metrics = self._epoch, log, self._of_this_pass()
        self._look_at_noted()
        if self.recorder is not None:
            self.recorder.stop_counting()
        if epoch.phase == "training":
            if self.progress is not None and epoch.num_steps is not None:
                self.progress.end_epoch(epoch.num_steps)
            guard.check_equal_steps(f"epoch {epoch.number}")
        if metrics.before:
            log = {**log, **{key: _mean(values) for key, values in metrics.joined().items()}}
        if self.recorder is not None:
            self.recorder.write_epoch(epoch.number, epoch.phase, own, None if log is own else log)
        return log

    def end(self) -> None:
        """Wait until the main rank has saved, and record that training has finished (collective)."""
        checkpoint.flush()
        world().barrier()
        observed.end("finished")
        if self.progress is not None:
            self.progress.finish()

    def _join_metrics(self) -> None:
        self._look_at_noted()
        if self.progress is not None:
            self.progress.values["metrics"] = self._metrics.joined()


class _CurrentPass(NamedTuple):
    """The current pass over data."""

    number: int  # as the trainer counts
    phase: str
    num_steps: Optional[int]
    batch_size: Optional[int]


class _LoggerState:
    """Saves the data of a logger with the progress: robomimic's logs mean and maximum over all rollouts."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def state_dict(self) -> Any:
        return getattr(self._logger, "_data", None)

    def load_state_dict(self, state: Any) -> None:
        if state is not None:
            self._logger._data = state


class _Batches:
    """Replaces a loader: iterates over other batches, has the loader's length and attributes."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._begin = loader, begin

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def _interruptible(loader: Any, training: Resumable) -> Iterator[Any]:
    """Yield the batches of `loader`; between them ranks may save and exit."""
    for batch in loader:
        training.look()
        yield batch


class _Metrics:
    """The metrics of an epoch's steps; `before`: those of the global batches before an interruption."""

    def __init__(self, before: Mapping[str, list[float]]) -> None:
        self.before = before
        self._now: dict[str, list[float]] = {}  # of this rank's rows

    def take(self, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of one step. Local."""
        for key, value in metrics.items():
            self._now.setdefault(key, []).append(float(value))

    def joined(self) -> dict[str, list[float]]:
        """Return each metric of all steps so far. Local."""
        return {**self.before, **{key: [*self.before.get(key, ()), *values] for key, values in self._now.items()}}


def _mean(values: Sequence[float]) -> float:
    """Return the mean, by numpy if the trainer has it, which then computes its own means so."""
    numpy = sys.modules.get("numpy")
    return math.fsum(values) / len(values) if numpy is None else float(numpy.mean(values))
