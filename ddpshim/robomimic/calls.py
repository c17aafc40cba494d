"""Implements what the robomimic patch sets call, each in place of the line it replaces.

Without a launcher every function here does exactly what that line did. robomimic is imported inside the
functions only.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar, Union

import torch
from torch import nn

from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint.resume import Resumable, Stateful, find_progress
from ddpshim.data.loader import Enterable, scale_lr
from ddpshim.errors import OptionsError
from ddpshim.job import machine, preemption, records
from ddpshim.job.failure import abort
from ddpshim.job.group import cleanup, setup, split_random_streams, world
from ddpshim.job.launch_env import read_launch_env
from ddpshim.job.random_streams import derive_seed, seed_everything
from ddpshim.job.rank_log import has_log, link_log
from ddpshim.model import guard
from ddpshim.model.parallel import wrap_parallel
from ddpshim.model.reducer import average, broadcast_state
from ddpshim.observe.recording import Recorder, numbers
from ddpshim.options import SECTION, Options
from ddpshim.robomimic import rollout
from ddpshim.robomimic.algo import AlgoState, Metrics, algos, flat, trained_together
from ddpshim.robomimic.datasets import advise_on_cache
from ddpshim.robomimic.same_experiment import check_same_experiment
from ddpshim.trainers import import_hook
from ddpshim.trainers.swapping import stand_aside

T = TypeVar("T")


class _Run:
    """What the calls of one training hand to each other."""

    section: Optional[Mapping[str, Any]] = None  # of the config file, for `start`
    recorder: Optional[Recorder] = None
    folder: Optional[Path] = None  # of its progress
    goes_on: bool = False  # in the directory of an earlier start
    training: Optional[Resumable] = None
    state: Optional[AlgoState] = None
    metrics: Optional[Metrics] = None
    made: list[Any]  # loggers and files of the main rank

    def __init__(self) -> None:
        self.made = []


_run = _Run()


def quiet() -> None:
    """Lead standard output and warnings nowhere on ranks that are not the main one. Local; before imports.

    Nothing under `python -m ddpshim run`, where they go to the rank's own log. Errors still reach standard error.
    From here on a config file may have a `ddpshim` section. Raises LaunchError where the launcher's variables are
    impossible.
    """
    stand_aside()  # a patched trainer is not to be hooked as well
    silence_other_ranks()
    keep_the_section()


def silence_other_ranks() -> None:
    """Print nothing on a rank other than the main one that has no log of its own. Local."""
    if read_launch_env(os.environ).rank > 0 and not has_log():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
        warnings.simplefilter("ignore")


def keep_the_section() -> None:
    """Have a config that is updated from a file leave our section to `join`: upstream refuses unknown keys. Local.

    It is not part of the config: what is saved with a checkpoint, code without ddpshim must be able to read.
    """
    from robomimic.config.base_config import BaseConfig
    from robomimic.config.config import Config

    def update(config: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(*args, **kwargs)
        _run.section = given.pop(SECTION, _run.section)
        Config.update(config, given)

    BaseConfig.update = update


def leave_the_section() -> None:
    """Take `keep_the_section` back. Local."""
    from robomimic.config.base_config import BaseConfig

    if "update" in vars(BaseConfig):
        del BaseConfig.update


def start(config: Any, device: torch.device) -> torch.device:
    """The device of this rank, in place of `device`; joins the job (collective, once, first of all).

    Raises OptionsError where the `ddpshim` section of the config file or a variable is wrong, and WorldError, on all
    ranks, where they were given different configs or code.
    """
    device = join(device)
    begin(config)
    return device


def join(device: torch.device) -> torch.device:
    """The device of this rank, in place of `device`; joins the job (collective). The first half of `start`."""
    section, _run.section = _run.section, None
    options = Options.read(section)
    if options.accumulation_steps > 1:
        raise OptionsError(
            f"accumulation_steps={options.accumulation_steps} for robomimic, whose train_on_batch clears gradients, "
            "steps and moves target networks itself, several times for actor-critics; its parts would train another "
            "model. Use a smaller train.batch_size, or more ranks."
        )
    here = setup(device=None if device.type == "cuda" else device, options=options)
    return here.device if here.is_launched else device


def begin(config: Any) -> None:
    """The second half of `start`: all ranks have the same config and the same code, and its seed (collective)."""
    here = world()
    if not here.is_launched:
        return
    check_same_experiment(config)
    if here.is_main:
        # Before the ranks load their data: afterwards it would be too late.
        advise_on_cache(config, here.local_world_size)
    setup(seed=config.train.seed)


def finish() -> None:
    """Leave the job when training is over (collective)."""
    end_training()
    cleanup()


def end_training() -> None:
    """Take note that training is over: the main rank may be saving still, so all wait (collective)."""
    preemption.heard()  # nothing is left to save: the main rank may take its time
    checkpoint.flush()
    world().barrier()
    records.end("finished")
    if _run.training is not None:
        _run.training.finish()


def failed(error: BaseException) -> None:
    """Where upstream swallows `error`: end the job with it. Returns without a launcher, as upstream does."""
    if world().is_launched:
        abort(error)


def device_or(default: T) -> Union[torch.device, T]:
    """The device of this rank, or `default` without a launcher. Local."""
    return world().device if world().is_launched else default


def is_main() -> bool:
    """Whether this process prints, writes and decides. True without a launcher."""
    return world().is_main


def main_decides(choice: bool) -> bool:
    """The main rank's `choice` on every rank: clocks differ (collective)."""
    return world().broadcast(choice)


def main_only(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` on the main rank; elsewhere something that takes the same calls and does nothing. Local."""
    if not world().is_main:
        return Nothing()

    def remembering(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        remember(made)
        return made

    return remembering


def remember(logger: Any) -> None:
    """Keep what `logger` has recorded with the progress, and close it before a signal ends the run. Local."""
    _run.made.append(logger)


def progress() -> dict[str, Any]:
    """What is kept with the progress of the training beside the algorithm; empty where none is kept. Local."""
    return {} if _run.training is None else _run.training.values


def main_computes(compute: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """`compute` on the main rank; elsewhere something that takes the same calls and returns `otherwise`. Local."""
    return compute if world().is_main else lambda *args, **kwargs: otherwise


def get_exp_dir(config: Any, **options: Any) -> Any:
    """The experiment's directories, asked for, removed and made by the main rank alone (collective).

    Where a launcher or scheduler started this job before (or with the option resume=always, or upstream's
    `--resume`) they are those of the last start that left its progress, and nobody is asked. The first of them
    gets each rank's log, where `python -m ddpshim run` keeps one.
    """
    here = world()
    directories, _run.goes_on = here.run_on_main(_get_exp_dir, config, options)
    parent = Path(directories[0]).parent  # where config.json will be
    _run.folder = parent / "resume"
    _run.recorder = Recorder(parent) if here.is_launched and here.options.record else None
    link_log(directories[0])
    return directories


def _get_exp_dir(config: Any, options: dict[str, Any]) -> tuple[Any, bool]:
    """The directories, and whether there is progress in them."""
    import robomimic
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    choice = here.options.resume
    wants = choice == "always" or (choice == "auto" and (here.is_restarted or options.get("resume", False)))
    if here.is_launched and wants:
        output = Path(robomimic.__path__[0], os.path.expanduser(config.train.output_dir), config.experiment.name)
        starts = sorted(p.parent for p in output.glob("*/logs"))
        # Only the newest: older ones are other runs of that name, which were given up.
        if starts and find_progress(starts[-1] / "resume") is not None:
            parent = starts[-1]
            names = (
                "logs",
                "models",
                "videos",
                *(["vis"] if (parent / "vis").is_dir() else []),
            )  # robocasa and DROID have it
            folders = [str(parent / name) for name in names]
            if not config.experiment.save.enabled:
                folders[1] = None  # type: ignore[call-overload]
            return (*folders, str(parent)) if "resume" in options else tuple(folders), True
        if here.is_restarted and not options.get("resume"):
            # The directory that is there is this job's own, of a start that left nothing: keep it, and ask nobody.
            TrainUtils.input = lambda prompt: "n"
    return TrainUtils.get_exp_dir(config, **options), False


def has_checkpoint(resume: bool, *paths: str) -> bool:
    """Upstream's `resume`, but not for a run that was left before its first checkpoint (collective)."""
    if not (resume and _run.goes_on):
        return resume
    return world().run_on_main(lambda: any(os.path.exists(path) for path in paths))


def resume(model: Any, start_epoch: int, *best_so_far: Any) -> tuple[Any, ...]:
    """(epoch to start with, *best_so_far) of the progress that an earlier start left, else as given (collective).

    From here on SIGTERM and SIGUSR1 have the ranks save and leave with exit code 75, and progress is saved now and
    then (`ddpshim.Resumable`). Nothing without a launcher, or with the option resume=never.
    """
    here = world()
    if not here.is_launched or _run.folder is None or here.options.resume == "never":
        return (start_epoch, *best_so_far)
    _run.state = AlgoState(model)
    objects: dict[str, Stateful] = {"algo": _run.state, "loggers": _Loggers()}
    training = Resumable(_run.folder, objects, before_save=_join_metrics, before_exit=_close_loggers)
    _run.training = training
    training.epoch = start_epoch - 1
    if _run.goes_on and training.restore(later_than=(start_epoch - 1, 0)):
        return (training.epoch + 1, *training.values["best so far"])
    return (start_epoch, *best_so_far)


def _join_metrics() -> None:
    assert _run.training is not None
    _run.training.values["metrics"] = {} if _run.metrics is None else _run.metrics.joined()


def _close_loggers() -> None:
    for made in _run.made:
        made.close()


class _Loggers:
    """What robomimic's DataLogger has recorded so far: it logs the mean and the maximum over all rollouts."""

    def state_dict(self) -> list[Any]:
        return [made._data for made in _run.made if hasattr(made, "_data")]

    def load_state_dict(self, state: list[Any]) -> None:
        for made, data in zip([made for made in _run.made if hasattr(made, "_data")], state):
            made._data = data


def mean_over_ranks(statistic: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of what a loss takes from its shard of a batch: that of the whole batch (collective).

    Without gradient; for equal shards, which `loader` gives. In one process `statistic` itself.
    """
    return average(statistic) if world().world_size > 1 else statistic


def prepare(model: Any) -> Any:
    """`model` (an Algo), every network of which is now reduced over the ranks (collective).

    The networks stay where they are: no wrapper gets between an algorithm, its optimizers, its EMA and its
    checkpoints. Networks that train together share one reducer; target networks and the EMA become the
    main rank's. Then each rank gets random streams of its own.
    """
    here = world()
    if not here.is_launched:
        return model
    for module in {kind.__module__ for algo in algos(model) for kind in type(algo).__mro__}:
        refused = import_hook.refused(module)
        if refused is not None:
            raise refused
    torch.set_num_threads(max(1, min(torch.get_num_threads(), machine.num_cores() // here.local_world_size)))
    for algo in algos(model):
        _scale_learning_rates(algo, scale_lr(1.0, here.options.lr_rule))
        for net in trained_together(algo):
            wrap_parallel(net)
        averaged = getattr(getattr(algo, "ema", None), "averaged_model", None)
        for module in (algo.nets, *([averaged] if averaged is not None else [])):
            guard.also_watch(same_on_all_ranks(module))
    split_random_streams()
    return model


def same_on_all_ranks(nets: nn.Module) -> nn.Module:
    """`nets` with the main rank's weights, so that a copy made next (an EMA) is the same everywhere (collective)."""
    if world().world_size > 1:
        broadcast_state(nets)
    return nets


def run_epoch(
    *,
    model: Any,
    data_loader: Any,
    epoch: int,
    num_steps: Optional[int] = None,
    best_so_far: tuple[Any, ...] = (),
    **options: Any,
) -> dict[str, float]:
    """Upstream's run_epoch, its metrics averaged over the ranks (collective).

    Ranks meet here first, for as long as the main rank rolls out or saves. The order of samples depends on
    `epoch` alone, each rank's noise on `epoch` and the rank, so that a resumed run sees what the uninterrupted one
    would have seen. An epoch that was left in the middle is made complete, and so are its metrics. The options
    `precision` and `metrics_every_n_epochs` act here.
    """
    here, training, validates = world(), _run.training, options.get("validate", False)
    every = 1 if validates else here.options.metrics_every_n_epochs
    options.update(model=model, epoch=epoch, num_steps=num_steps)
    phase = "validation" if validates else "training"
    if here.is_launched:
        total = options["num_steps"] = len(data_loader) if num_steps is None else num_steps
        seed_everything(derive_seed(here.seed or 0, "rank", here.rank, phase, epoch))
        _restore_counters(model, epoch, total)
        if isinstance(data_loader, Enterable):
            data_loader.set_epoch((epoch - 1) * math.ceil(total / len(data_loader)))
        here.barrier()
    with here.autocast(), contextlib.nullcontext() if _run.recorder is None else _run.recorder.measured():
        if training is None:
            log = _upstreams_epoch(data_loader=data_loader, **options)
        elif validates:
            batches = _Batches(data_loader, lambda: _with_looks(data_loader, training))
            log = _upstreams_epoch(data_loader=batches, **options)
        else:
            log = _run_what_is_left(training, data_loader, copy.deepcopy(best_so_far), options)
    own = log
    if not validates:
        guard.check_equal_steps(f"epoch {epoch}")
    # Ranks decide by the metrics of validation which checkpoint is the best: those are always averaged.
    if here.world_size > 1 and every and epoch % every == 0:
        log = {key: float(value) for key, value in here.mean(log).items()}
    if _run.metrics is not None and _run.metrics.are_of_two_starts and not validates:
        log = {**log, **_run.metrics.means()}
    if _run.recorder is not None:
        mean = None if log is own else log
        _run.recorder.write_epoch(epoch, phase, own, mean, batch_size=getattr(data_loader, "batch_size", None))
    return log


def _upstreams_epoch(**options: Any) -> dict[str, float]:
    import robomimic.utils.train_utils as TrainUtils

    ran = TrainUtils.run_epoch(**options)
    log: dict[str, float] = ran[0] if isinstance(ran, tuple) else ran  # DROID's returns its iterator as well
    return log


def _run_what_is_left(
    training: Resumable, data_loader: Any, best_so_far: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, float]:
    """Upstream's run_epoch over the steps that an earlier start has left, or all; progress is saved from here."""
    assert _run.state is not None
    model, epoch, total = options["model"], options["epoch"] - 1, options["num_steps"]
    start = training.step if training.epoch == epoch else 0
    training.values["best so far"] = best_so_far
    metrics = _run.metrics = Metrics(training.values.get("metrics", {}) if start else {})
    _run.state.release()
    log_info = model.log_info

    if _run.recorder is not None:
        _run.recorder.first_step = start

    def taken(info: Any) -> dict[str, Any]:
        said = metrics.take(log_info(info))
        if _run.recorder is not None:
            _run.recorder.step_of(said)
        return said

    model.log_info = taken
    try:
        steps = _Batches(data_loader, lambda: training.steps(data_loader, epoch, total))
        log = _upstreams_epoch(data_loader=steps, **{**options, "num_steps": total - start})
    finally:
        del model.log_info
    training.end_epoch(total)
    _run.state.hold()
    return log


class _Batches:
    """What upstream iterates in place of its loader, and sees as its loader."""

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


def rollout_with_stats(**options: Any) -> tuple[Mapping[str, Any], Optional[Mapping[str, str]]]:
    """Upstream's rollout_with_stats on all ranks (`ddpshim.robomimic.rollout`), until a signal ends it (collective)."""
    start = time.perf_counter()
    training = _run.training
    more: dict[str, Any] = {}
    if training is not None:
        more["is_told_to_end"] = lambda: preemption.asked() is not None
    try:
        logs, videos = rollout.rollout_with_stats(**options, **more)
    except rollout.Interrupted as interrupted:
        assert training is not None
        reason = str(interrupted)
    else:
        for name, log in logs.items():
            played = {"epoch": options.get("epoch"), "episodes": options.get("num_episodes"), "metrics": numbers(log)}
            records.note("rollout", environment=name, **played, seconds=time.perf_counter() - start)
        return logs, videos
    training.leave(reason)  # not in the handler: this is no failure on its way out


def save_model(*, ckpt_path: str, **options: Any) -> None:
    """Upstream's save_model, on the main rank alone. Local: nobody waits for it.

    Launched, the file at `ckpt_path` is at any moment the old one or the new one, whole. With the option
    `background_save` the new one may come a moment later (`checkpoint.save_in_background`).
    """
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    if not here.is_launched:
        TrainUtils.save_model(ckpt_path=ckpt_path, **options)
    elif here.is_main:
        in_background = here.options.background_save
        noted = contextlib.nullcontext() if in_background else checkpoint.noted(ckpt_path)
        with noted, checkpoint.written(ckpt_path, in_background=in_background) as partial:
            TrainUtils.save_model(ckpt_path=partial, **options)


def copyfile(source: str, path: str) -> None:
    """shutil.copyfile, on the main rank alone; launched, `path` is never half a copy, and there after `source` is."""
    if world().is_launched:
        checkpoint.copy_in_background(source, path)
    else:
        shutil.copyfile(source, path)


def _scale_learning_rates(algo: Any, factor: float) -> None:
    """Multiply the learning rates of all optimizers and of their schedules. Local.

    Not those in the config: the one that is saved is to be the one that was given.
    """
    for optimizer in flat(vars(algo).get("optimizers", {})):
        for group in optimizer.param_groups:
            group.update({key: group[key] * factor for key in ("lr", "initial_lr") if key in group})
    for scheduler in flat(vars(algo).get("lr_schedulers", {})):
        if scheduler is not None:
            scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]


def _restore_counters(model: Any, epoch: int, num_steps: int) -> None:
    """After `--resume`, give the counters that upstream's checkpoints lack the values they had. Local.

    An EMA that counts from 0 again forgets its average in the next step; a td3_bc updates its actor in other steps.
    """
    for algo in algos(model) if epoch > 1 else ():
        ema = getattr(algo, "ema", None)
        if ema is not None and ema.optimization_step == 0:
            ema.optimization_step = (epoch - 1) * num_steps
        if getattr(algo, "actor_update_counter", None) == 0:
            num_epochs = sum(bool(algo._check_epoch(net_name="critic", epoch=past)) for past in range(1, epoch))
            algo.actor_update_counter = num_epochs * num_steps
        if getattr(algo, "_num_batch_steps", None) == 0:  # of cql, which begins with behavioural cloning
            algo._num_batch_steps = (epoch - 1) * num_steps


class Nothing:
    """Takes every call and attribute, does nothing: a logger or a file on a rank that must not write."""

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *args: Any) -> None:
        return None
