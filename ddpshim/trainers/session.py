"""Does what every trainer needs between its own lines on several ranks; an adapter or a patch set calls it.

Same config and code on all ranks, each epoch's noise, equal numbers of steps, averaged metrics, records, and progress
from which a later start goes on.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, TypeVar

import torch

from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint import plain_files
from ddpshim.checkpoint.progress_folder import find_progress, leave_if_finished
from ddpshim.checkpoint.resume import Resumable, Stateful
from ddpshim.data.sharded_loader import Enterable
from ddpshim.job import events, preemption, shares
from ddpshim.job.group import draws_alike, on_cleanup, setup, world
from ddpshim.job.job import current
from ddpshim.job.random_streams import derive_seed, rank_states, seed_everything
from ddpshim.job.rank_log import link_log
from ddpshim.job.say import say, say_once
from ddpshim.job.turns import in_order_of_numbers
from ddpshim.model import guard
from ddpshim.observe.recording import Recorder
from ddpshim.trainers.same_experiment import check_same_experiment

M = TypeVar("M", bound=Mapping[str, Any])

FOLDER = "resume"  # of the progress, in that of the run
STREAMS = "streams.pt"  # in it


def session() -> Session:
    """The training of the job that this process is in, or would join. Local."""
    return current().part(Session)


def wants_to_go_on(is_asked: bool = False) -> bool:
    """Whether this start takes up what an earlier one left, if there is any: by the option `resume`. Local.

    With resume=auto it does where a launcher or scheduler started the job before, or the trainer's user asked for it.
    """
    here = world()
    choice = here.options.resume
    return here.is_launched and (choice == "always" or (choice == "auto" and (here.is_restarted or is_asked)))


class Session:
    """One training, from `begin` to `end`. Without a launcher it changes nothing of what the trainer does.

    Attributes:
        first_epoch: the trainer's number of its first epoch.
        goes_on: whether the folder is that of an earlier start.
        progress: what keeps the place in the training; None where none is kept.
        recorder: what writes the records; None without.
    """

    def __init__(self) -> None:
        self.first_epoch = 0
        self.goes_on = False
        self.progress: Optional[Resumable] = None
        self.recorder: Optional[Recorder] = None
        self._folder: Optional[Path] = None  # of the progress
        self._loggers: list[Any] = []
        self._metrics, self._validation = _Metrics({}), _Metrics({})
        self._epoch = _Epoch(0, "training", None, None)
        self._noted: tuple[Mapping[str, Any], ...] = ()  # of the last step, if nobody has looked at it yet
        self._share: Optional[shares.Share] = None  # of the batch that they are about

    def begin(self, config: Mapping[str, Any], package: str, seed: int, first_epoch: int = 0) -> None:
        """Compare the config and the code between ranks, then seed this one (collective, once, before networks).

        Args:
            config: of the run, with mappings inside; every value is compared.
            package: the trainer's; what is imported of it is compared.
            seed: of all ranks, for networks and the order of samples.
            first_epoch: the trainer's number of its first epoch.

        Raises WorldError, on all ranks, where a value of the config or a file of the code is not the main rank's.
        """
        self.first_epoch = first_epoch
        if world().is_launched:
            check_same_experiment(config, package)
            setup(seed=seed)

    def open(self, folder: checkpoint.PathLike, logs: Optional[checkpoint.PathLike] = None) -> None:
        """Keep records and progress in the existing `folder`, and links to the ranks' logs in `logs` (collective)."""
        here = world()
        self._folder = Path(folder, FOLDER)
        if here.is_launched and here.options.record:
            self.recorder = Recorder(folder)
            on_cleanup(self.recorder.stop_counting)  # of an epoch that raised
        link_log(os.fspath(logs or folder))

    def look_for_progress(self, folder: checkpoint.PathLike) -> bool:
        """Whether this start goes on in `folder`, where an earlier one has left its progress (collective).

        Where an earlier one has finished, it ends with exit code 0.
        """
        progress = Path(folder, FOLDER)
        leave_if_finished(progress)
        self.goes_on = world().run_on_main(lambda: wants_to_go_on() and find_progress(progress) is not None)
        return self.goes_on

    def remember(self, logger: Any) -> None:
        """Close `logger` before a signal ends the run, and keep with the progress what it has in `_data`. Local."""
        self._loggers.append(logger)

    def resume(self, objects: Mapping[str, Stateful], start_epoch: int, *best_so_far: Any) -> tuple[Any, ...]:
        """(epoch to start with, *best_so_far) of the progress that an earlier start left, else as given (collective).

        From here on SIGTERM and SIGUSR1 have the ranks save and leave with exit code 75, and progress is saved now and
        then (`ddpshim.Resumable`). Nothing without a launcher, or with the option resume=never.
        """
        here = world()
        if not here.is_launched or self._folder is None or here.options.resume == "never":
            return (start_epoch, *best_so_far)
        kept = {**objects, "loggers": _Loggers(self._loggers)}
        training = Resumable(self._folder, kept, before_save=self._join_metrics, before_exit=self._close_loggers)
        self.progress, training.epoch = training, start_epoch - self.first_epoch
        if self.goes_on and training.restore(later_than=(training.epoch, 0)):
            return (training.epoch + self.first_epoch, *training.values["best so far"])
        if start_epoch > self.first_epoch and draws_alike():
            self._restore_streams(start_epoch)
        return (start_epoch, *best_so_far)

    def _keep_streams(self, epoch: int) -> None:
        """For a run that goes on from the trainer's own checkpoint: the streams with which `epoch` begins. Local."""
        if self._folder is not None and world().is_main:
            partial = self._folder / f".{STREAMS}.partial"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                streams = {"epoch": epoch, "streams": rank_states(world().device)}
                torch.save(plain_files.content(streams, partial, is_trusted=False), partial)
                os.replace(partial, self._folder / STREAMS)
            except (OSError, RuntimeError) as error:  # torch's, of a full disk: the training does not need it
                say_once(f"{partial} could not be written ({error}): a resumed run will draw different random numbers")

    def _restore_streams(self, epoch: int) -> None:
        """Draw in `epoch` what the run that left its checkpoint would have drawn, where it is known (collective)."""
        here, path = world(), Path(self._folder or "", STREAMS)
        found = here.run_on_main(lambda: plain_files.read(path, is_trusted=False) if path.is_file() else {})
        if isinstance(found, dict) and found.get("epoch") == epoch:
            plain_files.restore_streams(found.get("streams"), here.device, path)
        elif here.is_main:
            say(f"epoch {epoch} draws different random numbers than the resumed run did: {path} is not of that epoch")

    @property
    def values(self) -> dict[str, Any]:
        """What is kept with the progress beside the objects; the trainer may write to it. Empty where none is kept."""
        return {} if self.progress is None else self.progress.values

    def begin_epoch(
        self,
        loader: Any,
        epoch: int,
        num_steps: Optional[int] = None,
        *,
        validates: bool = False,
        best_so_far: tuple[Any, ...] = (),
    ) -> tuple[Any, Optional[int]]:
        """What to iterate in place of `loader`, and how many of its `num_steps` steps are left (collective).

        Ranks meet here, for as long as the main rank rolls out or saves. The order of samples depends on `epoch`,
        each rank's noise on `epoch` and the rank: a resumed run sees what the uninterrupted one would have seen.
        An epoch that was left in the middle is made complete, and so are its metrics.

        Args:
            validates: this is a pass over data that are not trained on; ranks may leave between its batches.
            best_so_far: kept with the progress for `resume`.
        """
        here, training = world(), self.progress
        phase = "validation" if validates else "training"
        batches: Any = loader
        if here.is_launched:
            num_steps = len(loader) if num_steps is None else num_steps
            if not draws_alike():
                seed_everything(derive_seed(here.seed or 0, "rank", here.rank, phase, epoch))
            if isinstance(loader, Enterable):
                loader.set_epoch((epoch - self.first_epoch) * math.ceil(num_steps / len(loader)))
            here.barrier()
        self._epoch, self._noted = _Epoch(epoch, phase, num_steps, getattr(loader, "batch_size", None)), ()
        if validates:
            self._validation = _Metrics({})
        else:
            self._metrics = _Metrics({})
        if self.recorder is not None:
            self.recorder.start_counting()
        if training is not None and validates:
            batches = _Batches(loader, lambda: _with_looks(loader, training))
        elif training is not None:
            number = epoch - self.first_epoch
            start = training.step if training.epoch == number else 0
            training.values["best so far"] = copy.deepcopy(best_so_far)
            self._metrics = _Metrics(training.values.get("metrics", {}) if start else {})
            if not start and draws_alike():
                self._keep_streams(epoch)
            if self.recorder is not None:
                self.recorder.first_step = start
            total = num_steps or 0  # a launched one has a number
            batches, num_steps = _Batches(loader, lambda: training.steps(loader, number, total)), total - start
        return batches, num_steps

    def note_step(self, metrics: M, *of_others: Mapping[str, Any]) -> M:
        """Take note of the metrics of a step, and return them. Local.

        A mapping that is no dict is looked at in the next step, or where it is needed: its numbers may still be on
        their way from a GPU.

        Args:
            of_others: of the further virtual ranks of this process, in their order (option exact).
        """
        self._look_at_noted()
        self._noted, self._share = (metrics, *of_others), shares.at_hand()
        if isinstance(metrics, dict):
            self._look_at_noted()
        return metrics

    def _look_at_noted(self) -> None:
        noted, self._noted = self._noted, ()
        if noted:
            trains = self._epoch.phase == "training"
            (self._metrics if trains else self._validation).take(*noted, share=self._share)
            if trains and self.progress is not None and self.recorder is not None:
                self.recorder.step_of(noted[0])

    def end_epoch(self, log: dict[str, float]) -> dict[str, float]:
        """The metrics of the epoch in `log`, averaged over the ranks where it is time to (collective).

        Those of training as often as the option `metrics_every_n_epochs` says; of validation always, as ranks decide by
        them which checkpoint is the best. Raises SyncError where ranks made different numbers of steps.
        """
        here, epoch, own = world(), self._epoch, log
        trains = epoch.phase == "training"
        self._look_at_noted()
        if self.recorder is not None:
            self.recorder.stop_counting()
        if trains:
            if self.progress is not None and epoch.num_steps is not None:
                self.progress.end_epoch(epoch.num_steps)
            guard.check_equal_steps(f"epoch {epoch.number}")
        every = here.options.metrics_every_n_epochs if trains else 1
        is_exact, metrics = here.options.exact is not None, self._metrics if trains else self._validation
        if here.world_size > 1 and every and epoch.number % every == 0:
            log = {key: float(value) for key, value in here.mean(log).items()}
            whole = metrics.of_whole_batches(epoch.batch_size)
            log.update({key: _mean(values) for key, values in whole.items() if key in log})
        if is_exact or metrics.before or (metrics.are_weighed and here.world_size > 1 and every):
            log = {**log, **{key: float(value) for key, (value, _) in metrics.joined(epoch.batch_size).items()}}
        if self.recorder is not None:
            mean = None if log is own else log
            self.recorder.write_epoch(epoch.number, epoch.phase, own, mean, batch_size=epoch.batch_size)
        return log

    def end(self) -> None:
        """Take note that training is over: the main rank may be saving still, so all wait (collective)."""
        preemption.heard()  # nothing is left to save: the main rank may take its time
        checkpoint.flush()
        world().barrier()
        events.end("finished")
        if self.progress is not None:
            self.progress.finish()

    def _join_metrics(self) -> None:
        self._look_at_noted()
        self.values["metrics"] = self._metrics.joined(self._epoch.batch_size)

    def _close_loggers(self) -> None:
        for logger in self._loggers:
            logger.close()


class _Epoch(NamedTuple):
    """A pass over data that goes on: the trainer's number of it, and what it began with."""

    number: int
    phase: str
    num_steps: Optional[int]
    batch_size: Optional[int]


class _Loggers:
    """What loggers have recorded so far: robomimic's logs the mean and the maximum over all rollouts."""

    def __init__(self, loggers: list[Any]) -> None:
        self._loggers = loggers

    def _recording(self) -> list[Any]:
        return [logger for logger in self._loggers if hasattr(logger, "_data")]

    def state_dict(self) -> list[Any]:
        return [logger._data for logger in self._recording()]

    def load_state_dict(self, state: list[Any]) -> None:
        for logger, data in zip(self._recording(), state):
            logger._data = data


class _Batches:
    """What a trainer iterates in place of its loader, and sees as its loader."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._begin = loader, begin

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def _with_looks(loader: Any, training: Resumable) -> Iterator[Any]:
    """The batches of `loader`, between which ranks may leave."""
    for batch in loader:
        training.look()
        yield batch


_SMALLEST = 1 << 1074


class _Metrics:
    """The metrics of an epoch's steps, those from before a break included."""

    def __init__(self, before: Mapping[str, tuple[Any, int]]) -> None:
        self.before = before  # by an earlier start: mean over steps and ranks, and number of steps
        self._now: list[dict[str, list[float]]] = []  # of this process's virtual ranks, or of the one rank that it is
        self._counts: dict[str, list[int]] = {}  # of this rank's rows, in each step
        self._weights: dict[str, list[float]] = {}  # of its mean over them
        self.are_weighed = False  # since ranks did not divide a batch

    def take(self, *of_each: Mapping[str, Any], share: Optional[shares.Share] = None) -> None:
        """Take note of the metrics of one step, on a `share` of a batch. Local."""
        self._now = self._now or [{} for _ in of_each]
        if share is not None:
            self.are_weighed |= bool(share.totals)
            for key in of_each[0]:
                self._counts.setdefault(key, []).append(share.num_counted)
                self._weights.setdefault(key, []).append(share.weight)
        for now, metrics in zip(self._now, of_each):
            for key, value in metrics.items():
                now.setdefault(key, []).append(float(value))

    def _of_all(self, keys: Sequence[str]) -> list[dict[str, list[float]]]:
        """Of all ranks, or virtual ranks in the order of their numbers (collective)."""
        return in_order_of_numbers(world().gather([{key: own[key] for key in keys} for own in self._now]))

    def of_whole_batches(self, num_rows: Optional[int]) -> dict[str, list[float]]:
        """Maxima, minima and deviations of the global batch, of each step, known by the end of their names.

        Collective. A deviation is made of the ranks' own (unbiased, as torch.std's) and of the metric that is named as
        it with "mean" in place of "std", for one number a sample; `num_rows` is the rank's batch.
        """
        own = self._now[0] if self._now else {}
        is_alone = world().world_size * len(self._now) <= 1
        asked = [key for key in own if key.endswith(("max", "min", "std")) and not is_alone]
        asked += [key[:-3] + "mean" for key in asked if key.endswith("std") and key[:-3] + "mean" in own]
        if not asked:
            return {}
        of_ranks = self._of_all(asked)
        num_rows = num_rows and num_rows // len(self._now)
        counts = world().gather(self._counts) if self.are_weighed else None
        out = {}
        for key in asked:
            steps = [*zip(*(own[key] for own in of_ranks))]
            if key.endswith(("max", "min")):
                out[key] = [max(step) if key.endswith("max") else min(step) for step in steps]
            elif key.endswith("std") and num_rows and num_rows > 1 and key[:-3] + "mean" in of_ranks[0]:
                means = [*zip(*(own[key[:-3] + "mean"] for own in of_ranks))]
                if counts is None:
                    of_steps = [[num_rows] * len(of_ranks)] * len(steps)
                else:
                    of_steps = [[*of_step] for of_step in zip(*(of_rank[key] for of_rank in counts))]
                out[key] = [_deviation(*of_step) for of_step in zip(steps, means, of_steps)]
        return out

    def joined(self, num_rows: Optional[int]) -> dict[str, tuple[Any, int]]:
        """Mean and number of steps so far of each metric of the global batch (collective).

        With the option exact a mean is a fraction without rounding: it does not depend on the number of ranks, nor on
        where the epoch was left.
        """
        own = self._now[0] if self._now else {}
        whole: Mapping[str, Any] = self.of_whole_batches(num_rows)
        if world().options.exact is not None:
            of_all = self._of_all(list(own))
            every = {key: [value for each in of_all for value in each[key]] for key in own}
            now: dict[str, Any] = {key: _exact_mean(values) for key, values in {**every, **whole}.items()}
        else:
            now = world().mean({key: self._weighed_mean(key, values) for key, values in own.items()})
            now.update((key, _mean(values)) for key, values in whole.items())
        out = dict(self.before)
        for key, of_now in now.items():
            (before, num_before), num_now = self.before.get(key, (0, 0)), len(own[key])
            out[key] = ((before * num_before + of_now * num_now) / (num_before + num_now), num_before + num_now)
        return out

    def _weighed_mean(self, key: str, values: Sequence[float]) -> float:
        if not self.are_weighed:
            return _mean(values)
        return _mean([value * weight if weight else 0.0 for value, weight in zip(values, self._weights[key])])


def _mean(values: Sequence[float]) -> float:
    """The mean, of a sum that is rounded once."""
    return math.fsum(values) / len(values)


def _exact_mean(values: Sequence[float]) -> Any:
    """The mean as a fraction; a float where there is none of infinities."""
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values)
    ratios = map(float.as_integer_ratio, values)  # over powers of two, the smallest of which is that of 5e-324
    return Fraction(sum(number * (_SMALLEST // power) for number, power in ratios), _SMALLEST * len(values))


def _deviation(deviations: Sequence[float], means: Sequence[float], counts: Sequence[int]) -> float:
    """The deviation of all numbers together, of groups of so many."""
    total = sum(counts)
    mean = math.fsum(mean * num for mean, num in zip(means, counts)) / total
    inside = math.fsum(deviation**2 * (num - 1) for deviation, num in zip(deviations, counts) if num > 1)
    between = math.fsum((of_group - mean) ** 2 * num for of_group, num in zip(means, counts))
    return math.sqrt((inside + between) / (total - 1))
