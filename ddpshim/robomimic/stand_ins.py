"""Replaces functions of an unedited robomimic by those that its patch sets call.

The trainer's file does not change; `own_lines` handles what the trainer does without a call of robomimic.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Callable, NamedTuple

import torch.distributed as dist

from ddpshim.errors import HookError
from ddpshim.job.group import cleanup, has_world, world
from ddpshim.job.launch_env import read_launch_env
from ddpshim.job.say import say
from ddpshim.robomimic import calls as robomimic
from ddpshim.robomimic import datasets, own_lines, rollout
from ddpshim.robomimic.datasets import divided
from ddpshim.robomimic.own_lines import replaced_names as replaced_names
from ddpshim.robomimic.own_lines import trainer
from ddpshim.robomimic.replay import Replay
from ddpshim.trainers.session import session
from ddpshim.trainers.swapping import refuse_unknown, stand_aside, swap, swap_back

ALGORITHMS = "robomimic.algo."


def concerns(name: str) -> bool:
    """Whether this file replaces something in the module of that name. Local."""
    return name in CONCERNED or name.startswith(ALGORITHMS)


def is_patched(name: str) -> bool:
    """Whether the module is patched in memory for every program: algorithms have no calls to hook. Local."""
    return name.startswith(ALGORITHMS)


def begin() -> None:
    """Silence ranks before robomimic's first module is loaded, or at once if it already is. Local."""
    robomimic.silence_other_ranks()


def hook(modules: Sequence[ModuleType]) -> list[str]:
    """Replace the functions in `modules`, all or none; return a line for each. Local.

    Raises HookError, before any change, if a function is not the one that is known here.
    """
    plan = []
    for module in modules:
        for target in TARGETS.get(module.__name__, ()):
            owner: Any = module
            *path, last = target.name.split(".")
            for name in path:
                owner = getattr(owner, name, None)
            function = vars(owner).get(last) if owner is not None else None
            full = f"{module.__name__}.{target.name}"
            refuse_unknown(full, function, target.required.split(), target.optional.split())
            plan.append((full, function, target))
    for full, function, target in plan:
        assert inspect.isfunction(function)
        swap(full, function, target.stand_in, _is_trainer)
    lines = [f"{full}: {target.does}" for full, _, target in plan]
    for module in modules:
        if module.__name__ == "robomimic.config.base_config":
            robomimic.keep_the_section()
            lines.append("robomimic.config.base_config.BaseConfig.update: leaves out our section of a config file")
    return lines


def unhook() -> None:
    """Restore everything. Local. Raises HookError in the middle of a launched training."""
    if trainer.models and not trainer.has_ended and world().is_launched:
        raise HookError(
            "ddpshim.auto.deactivate() during a training; its ranks would continue separately. Call it before or "
            "after the training."
        )
    swap_back()
    own_lines.give_back()
    robomimic.leave_the_section()


def end() -> None:
    """Leave the job at the end of the program, or fail it if the training stopped silently. Raises nothing.

    Collective for the ranks that finished; a rank whose training is incomplete does not wait for the others.
    """
    if not (trainer.has_joined and has_world() and world().is_launched):
        return
    if trainer.loggers and not trainer.has_ended:
        robomimic.failed(
            HookError(
                "the program ended before its training did (its DataLogger was not closed): an exception was "
                "caught, or the trainer returned early. Other ranks would wait for this one. See its output above."
            )
        )
    cleanup()


def _is_trainer(names: dict[str, Any]) -> bool:
    """Whether calls from the module with these globals are a trainer's: neither ddpshim's nor within robomimic."""
    module = str(names.get("__name__"))
    inside = module == "robomimic" or (module.startswith("robomimic.") and not module.startswith("robomimic.scripts."))
    return not (inside or module == "ddpshim" or module.startswith("ddpshim."))


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def _minds_ranks_itself() -> bool:
    """Whether the program has joined the job itself; then robomimic is not distributed."""
    if trainer.has_joined or not (has_world() or (dist.is_available() and dist.is_initialized())):
        return False
    say("the trainer has joined the job itself, so robomimic is left as it is")
    stand_aside()
    return True


# The stand-ins for functions that the trainer calls, in upstream's order of calls.


def _get_torch_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _minds_ranks_itself():
        return original(*args, **kwargs)
    trainer.has_joined = True
    device = robomimic.join(original(*args, **kwargs))
    own_lines.replace_names(sys._getframe(3).f_globals)
    return device


def _get_exp_dir(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _minds_ranks_itself():
        return original(*args, **kwargs)
    options = _named(original, args, kwargs)
    _begin(options["config"])
    own_lines.replace_names(sys._getframe(3).f_globals)
    return robomimic.get_exp_dir(options.pop("config"), **options)


def _begin(config: Any) -> None:
    """Join the job, once, with this config (collective)."""
    if trainer.config is not None:
        return
    trainer.config, trainer.has_joined = config, True
    if not has_world():  # the trainer did not call get_torch_device
        import robomimic.utils.torch_utils as TorchUtils

        robomimic.join(TorchUtils.get_torch_device(try_to_use_cuda=config.train.cuda))
    robomimic.begin(config)
    if world().is_launched:
        trainer.replay = Replay(world())


def _is_main() -> bool:
    return not trainer.has_joined or world().is_main  # without a training, each process writes its files


def _print_logger(original: Callable[..., Any], self: Any, log_file: str) -> None:
    original(self, log_file if _is_main() else os.devnull)


def _create_env(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not trainer.has_joined or rollout.plays_rollouts():
        return original(*args, **kwargs)
    return robomimic.Nothing()


def _wrap_env(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    env = _named(original, args, kwargs)["env"]
    return env if isinstance(env, robomimic.Nothing) else original(*args, **kwargs)


def _make_logger(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    options = _named(original, (self, *args), kwargs)
    if not _is_main():
        options.update(log_tb=False, log_wandb=False)  # the trainer may query it, so it records, but writes nothing
    original(**options)
    if trainer.has_joined:
        trainer.loggers.append(self)
        session().remember(self)


def _record(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    if not own_lines.is_past():
        original(self, *args, **kwargs)


def _close_logger(original: Callable[..., Any], self: Any) -> None:
    original(self)
    # Not in the `finally` of a trainer that fails: the other ranks have not ended, and would not join this collective.
    if self in trainer.loggers and not trainer.has_ended and sys.exc_info()[1] is None:
        trainer.has_ended = True
        _live_again()  # if all epochs were past
        robomimic.end_training()


def _load_data(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options = _named(original, args, kwargs)
    return datasets.load_data_for_training(**options) if trainer.has_joined else original(**options)


def _algo_factory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A program without the trainer's utilities only uses robomimic's networks, in its own loop.
    if "robomimic.utils.train_utils" not in sys.modules or _minds_ranks_itself():
        return original(*args, **kwargs)
    options = _named(original, args, kwargs)
    _begin(options["config"])
    if world().is_launched and options["device"].type == "cuda":
        options["device"] = world().device
    model = original(**options)
    model = robomimic.prepare(model)
    trainer.models.append(model)
    if world().is_launched:
        _watch(model)
    return model


def _watch(model: Any) -> None:
    """Warn if the trainer trains `model` outside of run_epoch, and skip on_epoch_end in past epochs."""
    train_on_batch, on_epoch_end = model.train_on_batch, model.on_epoch_end

    @functools.wraps(train_on_batch)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not (trainer.is_in_epoch or trainer.has_warned):
            trainer.has_warned = True
            say(
                "train_on_batch is called outside of TrainUtils.run_epoch: unless its batches come from "
                "ddpshim.make_loader, all ranks train on the same samples, which is no faster",
                directly=True,
            )
        return train_on_batch(*args, **kwargs)

    def on_live_epoch_end(epoch: int) -> None:
        if not own_lines.is_past():
            on_epoch_end(epoch)

    model.train_on_batch, model.on_epoch_end = watched, on_live_epoch_end


def _run_epoch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options, replay = _named(original, args, kwargs), trainer.replay
    model, loader, epoch = options["model"], options["data_loader"], options["epoch"]
    if not any(model is made for made in trainer.models):
        if _minds_ranks_itself() or not read_launch_env(os.environ).is_launched:
            return original(*args, **kwargs)
        raise HookError(
            f"run_epoch with a {type(model).__name__} that algo_factory did not make under ddpshim's hooks; every "
            "rank would train its own model. Move `import ddpshim.auto` to the first line of the trainer, and make "
            "the model with algo_factory."
        )
    if replay is None:
        return robomimic.run_epoch(**options)
    if id(loader) not in trainer.loaders:
        trainer.loaders[id(loader)] = loader, divided(loader)
    options["data_loader"] = trainer.loaders[id(loader)][1]
    if options.get("validate", False):
        return replay.answer("validation", lambda: robomimic.run_epoch(**options))
    if not trainer.has_resumed:
        trainer.has_resumed = True
        live_from, values = robomimic.resume(model, epoch)[0], session().values
        replay.go_on(values.get("told", {}), live_from)
    told = replay.begin_epoch(epoch)
    if replay.is_past and trainer.screen is None:
        trainer.screen, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - until _live_again
    if not replay.is_past:
        _live_again()
        session().values["told"] = told
    trainer.is_in_epoch = True
    try:
        log = replay.answer("training", lambda: robomimic.run_epoch(**options))
    finally:
        trainer.is_in_epoch = False
    replay.end_epoch()
    return log


def _live_again() -> None:
    if trainer.screen is not None:
        sys.stdout.close()
        sys.stdout, trainer.screen = trainer.screen, None


def _rollout(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options = _named(original, args, kwargs)
    if not trainer.has_joined:
        return original(**options)
    if trainer.replay is None or not rollout.plays_rollouts():
        return robomimic.rollout_with_stats(**options)
    videos: dict[str, str] = {}

    def play() -> Any:
        logs, written = robomimic.rollout_with_stats(**options)
        videos.update(written or {})
        return logs

    return trainer.replay.answer("rollouts", play), videos


def _save_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    if not trainer.has_joined:
        original(*args, **kwargs)
    elif not own_lines.is_past():
        robomimic.save_model(**_named(original, args, kwargs))


class _Target(NamedTuple):
    """A function of robomimic, its stand-in, and its parameters: those it must have, and those it may have."""

    name: str
    stand_in: Callable[..., Any]
    does: str
    required: str
    optional: str = ""


TARGETS: dict[str, tuple[_Target, ...]] = {
    "robomimic.utils.torch_utils": (
        _Target("get_torch_device", _get_torch_device, "joins the job; this rank's device", "try_to_use_cuda"),
    ),
    "robomimic.utils.train_utils": (
        _Target("get_exp_dir", _get_exp_dir, "the main rank's directories", "config auto_remove_exp_dir", "resume"),
        _Target("load_data_for_training", _load_data, "statistics computed once", "config obs_keys"),
        _Target(
            "run_epoch",
            _run_epoch,
            "this rank's share of each batch; metrics averaged; goes on after an interruption",
            "model data_loader epoch validate num_steps obs_normalization_stats",
        ),
        _Target(
            "rollout_with_stats",
            _rollout,
            "episodes dealt to all ranks",
            "policy envs horizon use_goals num_episodes render video_dir video_path epoch video_skip "
            "terminate_on_success verbose",
        ),
        _Target(
            "save_model",
            _save_model,
            "on the main rank alone, whole or not at all",
            "model config env_meta shape_meta ckpt_path obs_normalization_stats",
            "variable_state action_normalization_stats",
        ),
    ),
    "robomimic.utils.env_utils": (
        _Target(
            "create_env_from_metadata",
            _create_env,
            "on ranks that play rollouts",
            "env_meta env_name render render_offscreen use_image_obs",
            "use_depth_obs",
        ),
        _Target("wrap_env_from_config", _wrap_env, "on ranks that play rollouts", "env config"),
    ),
    "robomimic.utils.log_utils": (
        _Target("PrintLogger.__init__", _print_logger, "the main rank's log.txt", "self log_file"),
        _Target("DataLogger.__init__", _make_logger, "writes on the main rank", "self log_dir config log_tb log_wandb"),
        _Target("DataLogger.record", _record, "each epoch once", "self k v epoch data_type log_stats"),
        _Target("DataLogger.close", _close_logger, "ends the training", "self"),
    ),
    "robomimic.algo.algo": (
        _Target(
            "algo_factory",
            _algo_factory,
            "every network reduced over the ranks",
            "algo_name config obs_key_shapes ac_dim device",
        ),
    ),
}
CONCERNED = (*TARGETS, "robomimic.config.base_config")
