"""Implements the functions that robomimic's patch sets call; each replaces a line of robomimic.

Without a launcher every function here does exactly what that line did. robomimic is imported inside the
functions only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar, Union

import torch
from torch import nn

from ddpshim.checkpoint import files as checkpoint
from ddpshim.checkpoint.progress_folder import find_progress, last_save, leave_if_finished
from ddpshim.data.batch import OnDevice
from ddpshim.data.loader_builder import scale_lr
from ddpshim.errors import LaunchError
from ddpshim.evaluation.dealing import render_on_own_gpu
from ddpshim.evaluation.evaluating import exact_interval
from ddpshim.failures import preemption
from ddpshim.failures.failure import abort
from ddpshim.job.collectives import StandIn
from ddpshim.job.group import cleanup, setup
from ddpshim.job.noise import split_random_streams
from ddpshim.job.world import world, world_of_shares
from ddpshim.model import guard
from ddpshim.model.broadcasting import broadcast_state
from ddpshim.model.parallel import wrap_parallel
from ddpshim.model.reducer import average
from ddpshim.observe.recording import numbers
from ddpshim.process import machine, observed
from ddpshim.process.job import current
from ddpshim.process.launch_env import read_launch_env
from ddpshim.process.observed import outside_steps
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say
from ddpshim.robomimic import rollout
from ddpshim.robomimic.algo import AlgoState, algos, flat, norms_read_at_once, read_later, trained_together
from ddpshim.trainers.session import FOLDER, session, wants_to_go_on
from ddpshim.variables import RANK_LOGS

T = TypeVar("T")
_COMPUTED_ON_CPU = ("rewards", "dones")  # upstream discounts rewards before it moves a batch to the GPU


class _RunOfRobomimic:
    """State that the calls of one job's training share, beside its session."""

    state: Optional[AlgoState] = None


def quiet() -> None:
    """Discard standard output and warnings on all ranks but the main one. Local; call it before imports.

    Under `python -m ddpshim run` they go to the rank's own log instead. Errors still reach standard error.
    Raises LaunchError if the launcher's variables are impossible.
    """
    if read_launch_env(os.environ).rank > 0 and RANK_LOGS not in os.environ:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
        warnings.simplefilter("ignore")


def start(config: Any, device: torch.device) -> torch.device:
    """Join the job, and return this rank's device, to use instead of `device` (collective, once, before other calls).

    Raises OptionsError if a variable is wrong, and WorldError, on all ranks, if their configs differ.
    """
    if not current().holds_whole_batches:
        setup(device=None if device.type == "cuda" else device)
    here = world_of_shares()
    render_on_own_gpu(here)
    session().begin(config, config.train.seed, first_epoch=1)
    return here.device if here.is_launched else device


def get_exp_dir(config: Any, **options: Any) -> Any:
    """Return the experiment's directories; only the main rank asks about, removes and makes them (collective).

    If a launcher or scheduler has started this job before (or with the option resume=always, or upstream's `--resume`),
    they are those of the last start that saved its progress, and the user is not asked; if that start has finished,
    this one ends with exit code 0. Before upstream asks whether to overwrite, a line says which unfinished progress
    that deletes. The first directory gets links to the ranks' logs, if `ddpshim run` keeps them.

    Raises LaunchError if upstream asks about an existing directory while standard input is closed.
    """
    here = world_of_shares()
    newest = here.run_on_main(_newest_start, config, options.get("resume", False))
    if newest is not None and not options.get("resume"):
        leave_if_finished(newest / FOLDER)
    directories, session().goes_on = here.run_on_main(_get_exp_dir, config, options, newest)
    session().open(Path(directories[0]).parent)  # where config.json will be
    return directories


def finish() -> None:
    """Mark the training as finished when the main rank has saved its files, and leave the job (collective)."""
    session().end()
    if not current().holds_whole_batches:  # else who has joined the job leaves it
        cleanup()


def failed(error: BaseException) -> None:
    """End the job with `error`, which upstream would swallow. Without a launcher return, as upstream does."""
    if world().is_launched:
        abort(error)


def device_or(default: T) -> Union[torch.device, T]:
    """Return this rank's device, or `default` without a launcher. Local."""
    return world_of_shares().device if world_of_shares().is_launched else default


def is_main() -> bool:
    """Whether this process prints, writes and decides. True without a launcher."""
    return world_of_shares().is_main


def main_decides(choice: bool) -> bool:
    """Return the main rank's `choice` on every rank, since the ranks' clocks differ (collective)."""
    return world_of_shares().broadcast(choice)


def main_only(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make` on the main rank; on others an object that accepts the same calls and does nothing. Local."""
    if not world_of_shares().is_main:
        return StandIn()

    def remembering(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        session().remember(made)
        return made

    return remembering


def main_computes(compute: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """Return `compute` on the main rank; on others a function that returns `otherwise`. Local."""
    return compute if world_of_shares().is_main else lambda *args, **kwargs: otherwise


def has_checkpoint(resume: bool, *paths: str) -> bool:
    """Return upstream's `resume`, but False for a run that stopped before its first checkpoint (collective)."""
    if not (resume and session().goes_on):
        return resume
    return world_of_shares().run_on_main(lambda: any(os.path.exists(path) for path in paths))


def resume(model: Any, start_epoch: int, *best_so_far: Any) -> tuple[Any, ...]:
    """Call `Session.resume` for all state of an Algo that training changes (collective)."""
    state = current().part(_RunOfRobomimic).state = AlgoState(model)
    return session().resume({"algo": state}, start_epoch, *best_so_far)


def mean_over_ranks(statistic: torch.Tensor) -> torch.Tensor:
    """Return the whole batch's value of a statistic that a loss takes from its shard: the mean over ranks (collective).

    Without gradient; for equal shards, as `loader` makes them. In one process returns `statistic` itself.
    """
    return average(statistic) if world_of_shares().world_size > 1 else statistic


def prepare(model: Any) -> Any:
    """Return `model` (an Algo), with the gradients of all its networks reduced over the ranks (collective).

    The networks are not wrapped, so the algorithm, its optimizers, its EMA and its checkpoints hold the same modules.
    Networks that train together share one reducer; target networks and the EMA get the main rank's weights. The last
    step is `split_random_streams`.
    """
    here = world_of_shares()
    if not here.is_launched:
        return model
    torch.set_num_threads(max(1, min(torch.get_num_threads(), machine.num_cores() // here.local_world_size)))
    for algo in algos(model):
        _scale_learning_rates(algo, scale_lr(1.0, here.options.lr_rule))
        for net in trained_together(algo):
            wrap_parallel(net)
        averaged = getattr(getattr(algo, "ema", None), "averaged_model", None)
        for module in (algo.nets, *([averaged] if averaged is not None else [])):
            guard.watch(same_on_all_ranks(module))
    split_random_streams()
    return model


def same_on_all_ranks(nets: nn.Module) -> nn.Module:
    """Return `nets` with the main rank's weights, so that a copy made next (an EMA) is equal too (collective)."""
    if world_of_shares().world_size > 1:
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
    """Run upstream's run_epoch between `Session.begin_epoch` and `Session.end_epoch` (collective)."""
    import robomimic.utils.train_utils as TrainUtils

    training, state, validates = session(), current().part(_RunOfRobomimic).state, options.get("validate", False)
    is_launched, is_on_gpu, log_info = world_of_shares().is_launched, model.device.type == "cuda", model.log_info
    batches, left = training.begin_epoch(data_loader, epoch, num_steps, validates=validates, best_so_far=best_so_far)
    trains = training.progress is not None and not validates
    if is_launched:
        _restore_counters(model, epoch, len(data_loader) if num_steps is None else num_steps)
    if trains and state is not None:
        state.release()
    with contextlib.ExitStack() as meanwhile:
        meanwhile.enter_context(world_of_shares().autocast())
        if is_launched:
            meanwhile.enter_context(norms_read_at_once())
            # Not for a user's own algorithm, which may first compute something else on the CPU.
            if is_on_gpu and type(model).__module__.startswith("robomimic.algo."):
                batches = OnDevice(batches, model.device, but=_COMPUTED_ON_CPU)
        if is_launched or training.progress is not None:
            log = functools.partial(read_later, log_info) if is_launched and is_on_gpu else log_info
            meanwhile.enter_context(replaced(model, "log_info", lambda info: training.note_step(log(info))))
        ran = TrainUtils.run_epoch(model=model, data_loader=batches, epoch=epoch, num_steps=left, **options)
    logged = training.end_epoch(ran[0] if isinstance(ran, tuple) else ran)  # DROID's returns its iterator as well
    if trains and state is not None:
        state.hold()
    return logged


def rollout_with_stats(**options: Any) -> tuple[Mapping[str, Any], Optional[Mapping[str, str]]]:
    """Run upstream's rollout_with_stats on all ranks (`ddpshim.robomimic.rollout`); a signal ends it (collective)."""
    start, training = time.perf_counter(), session().progress
    more: dict[str, Any] = {} if training is None else {"is_told_to_end": lambda: preemption.asked() is not None}
    try:
        with outside_steps():
            logs, videos, returns = rollout.rollout_with_stats(**options, **more)
    except rollout.Interrupted as interrupted:
        assert training is not None
        reason = str(interrupted)
    else:
        for name, log in logs.items():
            metrics, episodes = numbers(log), options.get("num_episodes")
            if metrics.get("Success_Rate") == -1:  # robocasa's: no episode was played
                del metrics["Success_Rate"]
            played = {"epoch": options.get("epoch"), "episodes": episodes, "metrics": metrics}
            played |= {"returns": returns.get(name), "seconds": time.perf_counter() - start}
            ends = _interval(metrics.get("Success_Rate"), episodes)
            observed.note("rollout", environment=name, interval=ends, **played)
        return logs, videos
    training.leave(reason)  # outside of the handler, since this is not a failure


def _interval(rate: Optional[float], episodes: Optional[int]) -> Optional[tuple[float, float]]:
    """Return the interval of a success rate, with 95% confidence; None if that is no number of whole episodes."""
    if not episodes or rate is None or not 0 <= rate <= 1:
        return None
    number = round(rate * episodes)
    return exact_interval(number, episodes) if abs(number - rate * episodes) < 1e-6 * episodes else None


def save_model(*, ckpt_path: str, **options: Any) -> None:
    """Call upstream's save_model on the main rank only. Local: other ranks do not wait for it.

    Launched, the file at `ckpt_path` is always complete: the old one or the new one. With the option `background_save`
    the new one may appear a moment later (`checkpoint.save_in_background`).
    """
    import robomimic.utils.train_utils as TrainUtils

    here = world_of_shares()
    if not here.is_launched:
        TrainUtils.save_model(ckpt_path=ckpt_path, **options)
    elif here.is_main:
        original = torch.save

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if f != ckpt_path:
                original(obj, f, *args, **kwargs)
            elif here.options.background_save and not args and not kwargs:
                checkpoint.save_in_background(obj, f)
            else:
                with checkpoint.whole(f) as partial:
                    original(obj, partial, *args, **kwargs)

        with replaced(torch, "save", save):
            TrainUtils.save_model(ckpt_path=ckpt_path, **options)


def copyfile(source: str, path: str) -> None:
    """Copy a file on the main rank only; launched, `path` is never incomplete, and appears only after `source`."""
    if world_of_shares().is_launched:
        checkpoint.copy(source, path)
    else:
        shutil.copyfile(source, path)


def _scale_learning_rates(algo: Any, factor: float) -> None:
    """Multiply the learning rates of all optimizers and of their schedules. Local.

    Those in the config do not change: the saved config must equal the given one.
    """
    for optimizer in flat(vars(algo).get("optimizers", {})):
        for group in optimizer.param_groups:
            group.update({key: group[key] * factor for key in ("lr", "initial_lr") if key in group})
    for scheduler in flat(vars(algo).get("lr_schedulers", {})):
        if scheduler is not None:
            scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]


def _restore_counters(model: Any, epoch: int, num_steps: int) -> None:
    """After `--resume`, restore the counters that upstream's checkpoints lack. Local.

    An EMA that counts from 0 again loses its average in the next step; td3_bc would update its actor in other steps.
    """
    for algo in algos(model) if epoch > 1 else ():
        ema = getattr(algo, "ema", None)
        if ema is not None and ema.optimization_step == 0:
            ema.optimization_step = (epoch - 1) * num_steps
        if getattr(algo, "actor_update_counter", None) == 0:
            num_epochs = sum(bool(algo._check_epoch(net_name="critic", epoch=past)) for past in range(1, epoch))
            algo.actor_update_counter = num_epochs * num_steps
        if getattr(algo, "_num_batch_steps", None) == 0:  # cql's; it begins with behavioural cloning
            algo._num_batch_steps = (epoch - 1) * num_steps


def _starts(config: Any) -> list[Path]:
    """Return the folders of all starts under this name, the newest last."""
    import robomimic

    output = Path(robomimic.__path__[0], os.path.expanduser(config.train.output_dir), config.experiment.name)
    return sorted(logs.parent for logs in output.glob("*/logs"))


def _newest_start(config: Any, is_asked: bool) -> Optional[Path]:
    """Return the folder of the last start if this one may resume it. Older ones are never resumed."""
    return next(reversed(_starts(config)), None) if wants_to_go_on(is_asked) else None


def _get_exp_dir(config: Any, options: dict[str, Any], newest: Optional[Path]) -> tuple[Any, bool]:
    """Return the directories, and whether they contain progress."""
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    if newest is not None and find_progress(newest / FOLDER) is not None:
        in_some = ["vis"] if (newest / "vis").is_dir() else []  # robocasa and DROID have it
        folders = [str(newest / name) for name in ("logs", "models", "videos", *in_some)]
        if not config.experiment.save.enabled:
            folders[1] = None  # type: ignore[call-overload]
        return (*folders, str(newest)) if "resume" in options else tuple(folders), True
    if not here.is_launched:
        return TrainUtils.get_exp_dir(config, **options), False
    # After a restart an existing directory is this job's own, from a start that saved nothing: keep it without asking.
    is_own = here.is_restarted and wants_to_go_on() and not options.get("resume")
    about = "" if is_own or options.get("resume") else _about(_starts(config))
    if about:
        say(about)

    def ask(prompt: str) -> str:
        try:
            return input(prompt)
        except (EOFError, OSError, RuntimeError) as error:  # RuntimeError: there is no standard input at all
            raise LaunchError(
                f"an experiment of this name exists, and robomimic asks: {' '.join(prompt.split())} Standard input is "
                f"closed ({type(error).__name__}), so nothing was started. {about and about + ' '}To train from the "
                "beginning, use another experiment.name, or remove that directory."
            ) from error

    with replaced(TrainUtils, "input", (lambda prompt: "n") if is_own else ask):
        return TrainUtils.get_exp_dir(config, **options), False


def _about(starts: list[Path]) -> str:
    """Return which progress of earlier `starts` would be lost, or that there is none although it was asked for."""
    chosen = world().options
    unfinished = next((start for start in reversed(starts) if last_save(start / FOLDER)), None)
    if unfinished is not None:
        later = " and ".join(str(start) for start in starts if start > unfinished)
        return (
            f"{unfinished} holds unfinished progress ({last_save(unfinished / FOLDER)}); overwriting deletes it. "
            f"To resume it, {f'remove the later {later}, and ' if later else ''}start again with DDPSHIM_RESUME=always."
        )
    if starts and chosen.resume == "always":
        names = ("checkpoint_every_s", "checkpoint_every_n_steps")
        every = " and ".join(f"{name}={value:g}" for name in names if (value := getattr(chosen, name)) is not None)
        return f"resume=always, but {starts[-1]} holds no saved step: a run saves at SIGTERM, and by {every}."
    return ""
