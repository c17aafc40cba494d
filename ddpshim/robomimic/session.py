"""Saves the progress of a robomimic training, beside the trainer's own files, and writes its records.

robomimic is imported inside the functions only.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim import variables
from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint.progress_folder import plain_content, read_plain, restore_streams
from ddpshim.checkpoint.resume import Resumable
from ddpshim.errors import CheckpointError, DataError
from ddpshim.job.group import world
from ddpshim.model import guard
from ddpshim.observe.recording import Recorder
from ddpshim.process.job import current
from ddpshim.process.random_streams import rank_states
from ddpshim.process.say import say, say_once
from ddpshim.shares.batch import Batches

FOLDER = "resume"  # folder of the progress, in the folder of the run
STREAMS = "streams.pt"  # random streams, in FOLDER
_FIRST_EPOCH = 1  # as the trainer counts


def session() -> Session:
    """Return the training of the current job. Local."""
    return current().part(Session)


class Session:
    """One training. Without a launcher it changes nothing in the trainer."""

    def __init__(self) -> None:
        self.seed = 0  # the trainer's
        self.goes_on = False  # this start resumes from an earlier one
        self.progress: Optional[Resumable] = None  # saves the position in the training; None if it is not saved
        self._algo: Optional[AlgoState] = None
        self._recorder: Optional[Recorder] = None
        self._folder: Optional[Path] = None  # of the progress
        self._epoch, self._num_steps, self._validates = 0, 0, False
        self._metrics: dict[str, list[float]] = {}  # each step's, of the training epoch
        self._is_continued = False  # whether the training epoch began in an earlier start

    def open(self, folder: checkpoint.PathLike) -> None:
        """Keep records and progress in the existing `folder` (collective)."""
        here = world()
        self._folder = Path(folder, FOLDER)
        if here.is_launched and here.options.record:
            self._recorder = Recorder(folder)

    def resume(self, model: Any, logger: Any, start_epoch: int, *best_so_far: Any) -> tuple[Any, ...]:
        """Return (epoch to start with, *best_so_far) from the progress of an earlier start, else as given (collective).

        From here on SIGTERM and SIGUSR1 make the ranks save, close `logger` and exit with code 75, and progress is
        saved regularly (`ddpshim.Resumable`): all state of the Algo `model` that training changes, and the logger's
        data. Does nothing without a launcher, or with the option resume=never.
        """
        here = world()
        if not here.is_launched or self._folder is None or here.options.resume == "never":
            return (start_epoch, *best_so_far)
        self._algo = AlgoState(model)
        self.progress = Resumable(self._folder, {"algo": self._algo}, before_exit=logger.close)
        self.progress.epoch = start_epoch - _FIRST_EPOCH
        is_repeated = variables.RESUME_FROM in os.environ  # a part of a certified run
        is_restored = (self.goes_on or is_repeated) and self.progress.restore(later_than=(self.progress.epoch, 0))
        if hasattr(logger, "_data"):  # robomimic's logs mean and maximum over all rollouts
            logger._data = self.progress.values.setdefault("logged", logger._data)
        if is_restored:
            return (self.progress.epoch + _FIRST_EPOCH, *self.progress.values["best so far"])
        if start_epoch > _FIRST_EPOCH:
            self._restore_streams(start_epoch)
        return (start_epoch, *best_so_far)

    def _keep_streams(self, epoch: int) -> None:
        """Save the random streams at the start of `epoch`, for resuming from the trainer's own checkpoint. Local."""
        if self._folder is not None and world().is_main:
            partial = self._folder / f".{STREAMS}.partial"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                streams, content = {"epoch": epoch, "streams": rank_states(world().device)}, io.BytesIO()
                torch.save(plain_content(streams, partial, is_trusted=False), content)  # to a path it is a checkpoint
                partial.write_bytes(content.getvalue())
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
        self, loader: Any, epoch: int, num_steps: Optional[int], validates: bool, best_so_far: tuple[Any, ...]
    ) -> tuple[Any, Optional[int]]:
        """Return the batches to use instead of `loader`, and how many of its `num_steps` steps are left (collective).

        Ranks wait here until the main rank has finished rollouts and saving. An epoch that was interrupted is
        completed, and so are its metrics.

        Args:
            validates: this is a pass over validation data.
            best_so_far: saved with the progress for `resume`.

        Raises DataError if the loader has no batch: upstream would fail with a StopIteration without words.
        """
        here, training = world(), self.progress
        if here.is_launched:
            num_steps = len(loader) if num_steps is None else num_steps
            if num_steps and not len(loader):
                raise DataError(
                    f"a {'validation' if validates else 'training'} epoch has {num_steps} steps, but its "
                    f"{len(loader.dataset)} samples are fewer than a batch of {loader.batch_size} (train.batch_size): "
                    "robomimic drops incomplete batches, so it has none. Name a filter key with more demonstrations, "
                    "lower train.batch_size, or, if this is the validation set, set experiment.validate to false."
                )
            here.barrier()
        self._epoch, self._num_steps, self._validates = epoch, num_steps or 0, validates
        if training is None or validates:
            return loader, num_steps
        assert self._algo is not None
        self._algo.release()
        number, total = epoch - _FIRST_EPOCH, self._num_steps
        start = training.step if training.epoch == number else 0
        training.values["best so far"] = copy.deepcopy(best_so_far)
        self._metrics = training.values["metrics"] = training.values.get("metrics", {}) if start else {}
        self._is_continued = start > 0
        if not start:
            self._keep_streams(epoch)
        return Batches(loader, lambda: training.steps(loader, number, total)), total - start

    def note_step(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note the metrics of a step, and return them; after one of validation ranks may save and exit (collective)."""
        if self.progress is not None and self._validates:
            self.progress.look()
        elif self.progress is not None:
            for key, value in metrics.items():
                self._metrics.setdefault(key, []).append(float(value))
        return metrics

    def end_epoch(self, log: dict[str, float]) -> dict[str, float]:
        """Return `log`, with the means of all steps of an epoch that an earlier start began (collective).

        Raises SyncError if ranks made different numbers of steps.
        """
        counted = {} if self._recorder is None else self._recorder.counted()
        if not self._validates:
            if self.progress is not None and self._algo is not None:
                self.progress.end_epoch(self._num_steps)
                self._algo.hold()
            guard.check_equal_steps(f"epoch {self._epoch}")
            if self._is_continued:
                import numpy  # as upstream computes them

                log = {**log, **{key: float(numpy.mean(values)) for key, values in self._metrics.items()}}
        if self._recorder is not None:
            self._recorder.write_epoch(self._epoch, "validation" if self._validates else "training", log, counted)
        return log


def algos(model: Any) -> Iterator[Any]:
    """Yield `model` and the algorithms inside it (hbc and iris hold planners, actors and value functions)."""
    from robomimic.algo.algo import Algo

    inner = [value for value in vars(model).values() if isinstance(value, Algo)]
    for algo in inner:
        yield from algos(algo)
    if "nets" in vars(model):
        yield model


class AlgoState:
    """All state of an Algo and its inner ones that training changes: networks, EMA, optimizers, schedules, counters."""

    def __init__(self, model: Any) -> None:
        self._algos = list(algos(model))
        self._before = [_counters(algo) for algo in self._algos]
        self._held: Optional[list[dict[str, Any]]] = None

    def hold(self) -> None:
        """Save schedules and counters as they are now: a resumed trainer repeats its changes after an epoch."""
        self._held = copy.deepcopy([self._light(*pair) for pair in zip(self._algos, self._before)])

    def release(self) -> None:
        """Save the current schedules and counters again."""
        self._held = None

    def state_dict(self) -> list[dict[str, Any]]:
        out = []
        for i, algo in enumerate(self._algos):
            light = self._light(algo, self._before[i]) if self._held is None else self._held[i]
            ema = getattr(algo, "ema", None)
            optimizers = [o.state_dict()["state"] for o in flat(vars(algo).get("optimizers"))]
            averaged = None if ema is None else ema.averaged_model.state_dict()
            out.append({"nets": algo.nets.state_dict(), "ema": averaged, "optimizers": optimizers, **light})
        return out

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        current = self.state_dict()
        for kind in ("optimizers", "lr_schedulers", "ema"):
            was, now = ([len(part[kind] or ()) for part in parts] for parts in (state, current))
            if was != now:
                raise CheckpointError(
                    f"the progress has {kind} of sizes {was}, the algorithm {now}; a part of it would start over. "
                    "Resume with the config that the run was started with, or set DDPSHIM_RESUME=never."
                )
        for algo, saved in zip(self._algos, state):
            algo.nets.load_state_dict(saved["nets"])
            for o, held, groups in zip(flat(vars(algo).get("optimizers")), saved["optimizers"], saved["param_groups"]):
                o.load_state_dict({"state": held, "param_groups": groups})
            for schedule, held in zip(flat(vars(algo).get("lr_schedulers")), saved["lr_schedulers"]):
                schedule.load_state_dict(held)
            vars(algo).update(saved["counters"])
            if saved["ema"] is not None:
                algo.ema.averaged_model.load_state_dict(saved["ema"])
                vars(algo.ema).update(saved["ema_counters"])

    @staticmethod
    def _light(algo: Any, before: dict[str, Any]) -> dict[str, Any]:
        ema = getattr(algo, "ema", None)
        return {
            "param_groups": [o.state_dict()["param_groups"] for o in flat(vars(algo).get("optimizers"))],
            "lr_schedulers": [s.state_dict() for s in flat(vars(algo).get("lr_schedulers"))],
            # Only those that training has changed: the others come from the config, which may differ after a resume.
            "counters": {name: n for name, n in _counters(algo).items() if before.get(name) != n},
            "ema_counters": {} if ema is None else _counters(ema),
        }


def _counters(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if type(value) in (int, float)}


def flat(made: Any) -> list[Any]:
    """Return the optimizers or schedules of an Algo as one list; it keeps them by name, in lists, or as None."""
    if isinstance(made, Mapping):
        made = list(made.values())
    if isinstance(made, list):
        return [inner for value in made for inner in flat(value)]
    return [] if made is None else [made]
