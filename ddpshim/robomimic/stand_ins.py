"""Replaces functions of an unedited robomimic by what its patch sets call there.

The trainer itself is not touched. What it does at its own lines is replaced where it looks names up: the files it
opens, its clock, and the exception that it catches and prints.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddpshim.checkpoint import files as checkpoint
from ddpshim.errors import HookError
from ddpshim.job.group import cleanup, has_world, world
from ddpshim.job.launch_env import read_launch_env
from ddpshim.job.say import say
from ddpshim.robomimic import calls as robomimic
from ddpshim.robomimic import datasets, rollout
from ddpshim.robomimic.datasets import divided
from ddpshim.robomimic.replay import Replay
from ddpshim.trainers.session import session
from ddpshim.trainers.swapping import refuse_unknown, stand_aside, swap, swap_back

ALGORITHMS = "robomimic.algo."


class _Trainer:
    """The training that goes on in this process, as its calls show it."""

    def __init__(self) -> None:
        self.has_joined = False
        self.config: Any = None
        self.replay: Optional[Replay] = None
        self.models: list[Any] = []
        self.loaders: dict[int, tuple[Any, DataLoader[Any]]] = {}
        self.loggers: list[Any] = []
        self.has_resumed = self.has_ended = self.is_in_epoch = self.has_warned = False
        self.screen: Any = None  # standard output, while the past is told again
        self.changed: list[tuple[dict[str, Any], str, Any]] = []  # names of its modules, and what they were


_trainer = _Trainer()


def concerns(name: str) -> bool:
    """Whether the module of that name has something to replace. Local."""
    return name in CONCERNED or name.startswith(ALGORITHMS)


def is_patched(name: str) -> bool:
    """Whether every program gets the module of that name patched: an algorithm has no calls to hook. Local."""
    return name.startswith(ALGORITHMS)


def begin() -> None:
    """Before the first module of robomimic is loaded, or at once where it was. Local."""
    robomimic.silence_other_ranks()


def hook(modules: Sequence[ModuleType]) -> list[str]:
    """Hook what concerns us in `modules`, all or nothing; a line for each symbol. Local.

    Raises HookError, with nothing changed, where a function is not the one that is known here.
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
            refuse_unknown(full, function, target.required, target.optional)
            plan.append((full, function, target))
    for full, function, target in plan:
        assert inspect.isfunction(function)
        swap(full, function, target.stand_in, _is_trainer)
    said = [f"{full}: {target.does}" for full, _, target in plan]
    for module in modules:
        if module.__name__ == "robomimic.config.base_config":
            robomimic.keep_the_section()
            said.append("robomimic.config.base_config.BaseConfig.update: leaves out our section of a config file")
    return said


def unhook() -> None:
    """Give everything back. Local. Raises HookError in the middle of a training on several ranks."""
    if _trainer.models and not _trainer.has_ended and world().is_launched:
        raise HookError(
            "ddpshim.auto.deactivate() in the middle of a training; its ranks would go on without each other. "
            "Call it before the trainer or after."
        )
    swap_back()
    for names, name, value in reversed(_trainer.changed):
        names.pop(name, None) if value is _MISSING else names.__setitem__(name, value)
    _trainer.changed.clear()
    robomimic.leave_the_section()


def end() -> None:
    """At the end of the program: leave the job. Raises nothing; a training that broke off without a word ends the job.

    Collective for those that come; a rank whose training is not complete does not wait for the others.
    """
    if not (_trainer.has_joined and has_world() and world().is_launched):
        return
    if _trainer.loggers and not _trainer.has_ended:
        robomimic.failed(
            HookError(
                "the program ended before its training did (its DataLogger was not closed): an exception was caught, "
                "or the trainer returned early. Other ranks would wait for this one. Look above for what it printed."
            )
        )
    cleanup()


def _is_trainer(names: dict[str, Any]) -> bool:
    """Whether calls from the module with these names are a trainer's: not ours, nor those inside of robomimic."""
    module = str(names.get("__name__"))
    inside = module == "robomimic" or (module.startswith("robomimic.") and not module.startswith("robomimic.scripts."))
    return not (inside or module == "ddpshim" or module.startswith("ddpshim."))


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def _minds_ranks_itself() -> bool:
    """Whether the program has joined the job on its own; then it is left alone."""
    if _trainer.has_joined or not (has_world() or (dist.is_available() and dist.is_initialized())):
        return False
    say("the trainer has joined the job itself, so robomimic is left as it is")
    stand_aside()
    return True


# What the trainer calls, in the order in which upstream's calls it.


def _get_torch_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _minds_ranks_itself():
        return original(*args, **kwargs)
    _trainer.has_joined = True
    device = robomimic.join(original(*args, **kwargs))
    _lead_aside(sys._getframe(3).f_globals)
    return device


def _get_exp_dir(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _minds_ranks_itself():
        return original(*args, **kwargs)
    options = _named(original, args, kwargs)
    _begin(options["config"])
    _lead_aside(sys._getframe(3).f_globals)
    return robomimic.get_exp_dir(options.pop("config"), **options)


def _begin(config: Any) -> None:
    """Join the job, once, with this config (collective)."""
    if _trainer.config is not None:
        return
    _trainer.config, _trainer.has_joined = config, True
    if not has_world():  # the trainer did not ask for its device
        import robomimic.utils.torch_utils as TorchUtils

        robomimic.join(TorchUtils.get_torch_device(try_to_use_cuda=config.train.cuda))
    robomimic.begin(config)
    if world().is_launched:
        _trainer.replay = Replay(world())


def _is_main() -> bool:
    return not _trainer.has_joined or world().is_main  # without a training, files are the program's own


def _print_logger(original: Callable[..., Any], self: Any, log_file: str) -> None:
    original(self, log_file if _is_main() else os.devnull)


def _create_env(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _trainer.has_joined or rollout.plays_rollouts():
        return original(*args, **kwargs)
    return robomimic.Nothing()


def _wrap_env(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    env = _named(original, args, kwargs)["env"]
    return env if isinstance(env, robomimic.Nothing) else original(*args, **kwargs)


def _make_logger(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    options = _named(original, (self, *args), kwargs)
    if not _is_main():
        options.update(log_tb=False, log_wandb=False)  # it records, for what the trainer asks it, and writes nothing
    original(**options)
    if _trainer.has_joined:
        _trainer.loggers.append(self)
        session().remember(self)


def _record(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    if not _is_past():
        original(self, *args, **kwargs)


def _close_logger(original: Callable[..., Any], self: Any) -> None:
    original(self)
    # Not in a `finally` of a trainer that fails: the others are not at their end, and would not come.
    if self in _trainer.loggers and not _trainer.has_ended and sys.exc_info()[1] is None:
        _trainer.has_ended = True
        _live_again()  # if all epochs were past
        robomimic.end_training()


def _load_data(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options = _named(original, args, kwargs)
    return datasets.load_data_for_training(**options) if _trainer.has_joined else original(**options)


def _algo_factory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _minds_ranks_itself():
        return original(*args, **kwargs)
    options = _named(original, args, kwargs)
    _begin(options["config"])
    if world().is_launched and options["device"].type == "cuda":
        options["device"] = world().device
    model = original(**options)
    model = robomimic.prepare(model)
    _trainer.models.append(model)
    if world().is_launched:
        _watch(model)
    return model


def _watch(model: Any) -> None:
    """Speak up where the trainer trains `model` on batches of its own, and let no past epoch change it."""
    train_on_batch, on_epoch_end = model.train_on_batch, model.on_epoch_end

    @functools.wraps(train_on_batch)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not (_trainer.is_in_epoch or _trainer.has_warned):
            _trainer.has_warned = True
            say(
                "train_on_batch is called outside of TrainUtils.run_epoch: unless its batches come from "
                "ddpshim.make_loader, all ranks train on the same samples, and nothing is faster",
                directly=True,
            )
        return train_on_batch(*args, **kwargs)

    def on_live_epoch_end(epoch: int) -> None:
        if not _is_past():
            on_epoch_end(epoch)

    model.train_on_batch, model.on_epoch_end = watched, on_live_epoch_end


def _run_epoch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options, replay = _named(original, args, kwargs), _trainer.replay
    model, loader, epoch = options["model"], options["data_loader"], options["epoch"]
    if not any(model is made for made in _trainer.models):
        if _minds_ranks_itself() or not read_launch_env(os.environ).is_launched:
            return original(*args, **kwargs)
        raise HookError(
            f"run_epoch with a {type(model).__name__} that algo_factory did not make under ddpshim's hooks; every rank "
            "would train a model of its own. Move `import ddpshim.auto` to the first line of the trainer, and make the "
            "model with algo_factory."
        )
    if replay is None:
        return robomimic.run_epoch(**options)
    if id(loader) not in _trainer.loaders:
        _trainer.loaders[id(loader)] = loader, divided(loader)
    options["data_loader"] = _trainer.loaders[id(loader)][1]
    if options.get("validate", False):
        return replay.answer("validation", lambda: robomimic.run_epoch(**options))
    if not _trainer.has_resumed:
        _trainer.has_resumed = True
        live_from, values = robomimic.resume(model, epoch)[0], session().values
        replay.go_on(values.get("told", {}), live_from)
    told = replay.begin_epoch(epoch)
    if replay.is_past and _trainer.screen is None:
        _trainer.screen, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - until _live_again
    if not replay.is_past:
        _live_again()
        session().values["told"] = told
    _trainer.is_in_epoch = True
    try:
        log = replay.answer("training", lambda: robomimic.run_epoch(**options))
    finally:
        _trainer.is_in_epoch = False
    replay.end_epoch()
    return log


def _live_again() -> None:
    if _trainer.screen is not None:
        sys.stdout.close()
        sys.stdout, _trainer.screen = _trainer.screen, None


def _rollout(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options = _named(original, args, kwargs)
    if not _trainer.has_joined:
        return original(**options)
    if _trainer.replay is None or not rollout.plays_rollouts():
        return robomimic.rollout_with_stats(**options)
    videos: dict[str, str] = {}

    def play() -> Any:
        logs, written = robomimic.rollout_with_stats(**options)
        videos.update(written or {})
        return logs

    return _trainer.replay.answer("rollouts", play), videos


def _save_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    if not _trainer.has_joined:
        original(*args, **kwargs)
    elif not _is_past():
        robomimic.save_model(**_named(original, args, kwargs))


# What the trainer does at its own lines.

_MISSING = object()


def _lead_aside(names: dict[str, Any]) -> None:
    """Have the trainer's module, whose names these are, find what fits a rank under them. Launched runs only."""
    if not world().is_launched or _are_replaced(names):
        return
    files = {name: _once(getattr(shutil, name)) for name in ("copy", "copy2", "copytree", "move", "rmtree")}
    found = {
        "open": (_MISSING, _open),
        "time": (time, _Seen(time, time=_time)),
        "shutil": (shutil, _Seen(shutil, copyfile=_copyfile, **files)),
        "traceback": (traceback, _Seen(traceback, format_exc=_format_exc, print_exc=_print_exc)),
    }
    for name, (expected, put) in found.items():
        if names.get(name, _MISSING) is expected:
            _trainer.changed.append((names, name, expected))
            names[name] = put
    swap("torch.save", inspect.unwrap(torch.save), _save, _are_replaced)


def _are_replaced(names: dict[str, Any]) -> bool:
    return any(names is changed for changed, _, _ in _trainer.changed)


def replaced_names() -> list[str]:
    """A line for each name of the trainer that has been replaced."""
    does = {
        "open": "writes on the main rank alone",
        "time": "time() is the main rank's",
        "shutil": "copies, moves and removes on the main rank alone",
        "traceback": "an exception that the trainer catches and prints ends the job",
    }
    said = [f"{names.get('__name__')}.{name}: {does[name]}" for names, name, _ in _trainer.changed]
    return [*said, "torch.save: where the trainer calls it, on the main rank alone, whole or not"] if said else []


class _Seen:
    """A module in which some names are ours."""

    def __init__(self, module: ModuleType, **ours: Any) -> None:
        self.__dict__.update(ours)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    # A trainer that knows of no ranks means each file once.
    writes = not world().is_main and set(mode) & set("wax+")
    if not set(mode) & set("wax"):
        checkpoint.flush()  # it may be what was just saved
    return open(os.devnull if writes else file, "w" + "b" * ("b" in mode) if writes else mode, *args, **kwargs)


def _time() -> float:
    return time.time() if _trainer.replay is None else _trainer.replay.now


def _is_past() -> bool:
    return _trainer.replay is not None and _trainer.replay.is_past


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on the main rank, and not in epochs that are done; what was saved before is on the disk by then."""

    @functools.wraps(function)
    def on_main(*args: Any, **kwargs: Any) -> Any:
        if not world().is_main or _is_past():
            return None
        checkpoint.flush()
        return function(*args, **kwargs)

    return on_main


def _save(original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    if world().is_main and not _is_past():
        checkpoint.save_whole(original, obj, f, *args, **kwargs)


def _copyfile(source: str, path: str, **options: Any) -> Any:
    if not _is_past():
        robomimic.copyfile(source, path)
    return path


def _format_exc(*args: Any, **kwargs: Any) -> str:
    _fail()
    return traceback.format_exc(*args, **kwargs)


def _print_exc(*args: Any, **kwargs: Any) -> None:
    _fail()
    traceback.print_exc(*args, **kwargs)


def _fail() -> None:
    error = sys.exc_info()[1]
    if error is not None and not _trainer.has_ended:
        robomimic.failed(error)


class _Target(NamedTuple):
    """A function of robomimic: the parameters that it has, and may have, and what stands in for it."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    stand_in: Callable[..., Any]
    does: str


def _target(name: str, stand_in: Callable[..., Any], does: str, required: str, optional: str = "") -> _Target:
    return _Target(name, tuple(required.split()), tuple(optional.split()), stand_in, does)


TARGETS: dict[str, tuple[_Target, ...]] = {
    "robomimic.utils.torch_utils": (
        _target("get_torch_device", _get_torch_device, "joins the job; this rank's device", "try_to_use_cuda"),
    ),
    "robomimic.utils.train_utils": (
        _target("get_exp_dir", _get_exp_dir, "the main rank's directories", "config auto_remove_exp_dir", "resume"),
        _target("load_data_for_training", _load_data, "statistics computed once", "config obs_keys"),
        _target(
            "run_epoch",
            _run_epoch,
            "this rank's share of each batch; metrics averaged; goes on after an interruption",
            "model data_loader epoch validate num_steps obs_normalization_stats",
        ),
        _target(
            "rollout_with_stats",
            _rollout,
            "episodes dealt to all ranks",
            "policy envs horizon use_goals num_episodes render video_dir video_path epoch video_skip "
            "terminate_on_success verbose",
        ),
        _target(
            "save_model",
            _save_model,
            "on the main rank alone, whole or not at all",
            "model config env_meta shape_meta ckpt_path obs_normalization_stats",
            "variable_state action_normalization_stats",
        ),
    ),
    "robomimic.utils.env_utils": (
        _target(
            "create_env_from_metadata",
            _create_env,
            "on ranks that play rollouts",
            "env_meta env_name render render_offscreen use_image_obs",
            "use_depth_obs",
        ),
        _target("wrap_env_from_config", _wrap_env, "on ranks that play rollouts", "env config"),
    ),
    "robomimic.utils.log_utils": (
        _target("PrintLogger.__init__", _print_logger, "the main rank's log.txt", "self log_file"),
        _target("DataLogger.__init__", _make_logger, "writes on the main rank", "self log_dir config log_tb log_wandb"),
        _target("DataLogger.record", _record, "each epoch once", "self k v epoch data_type log_stats"),
        _target("DataLogger.close", _close_logger, "ends the training", "self"),
    ),
    "robomimic.algo.algo": (
        _target(
            "algo_factory",
            _algo_factory,
            "every network reduced over the ranks, noise of its own for each",
            "algo_name config obs_key_shapes ac_dim device",
        ),
    ),
}
CONCERNED = (*TARGETS, "robomimic.config.base_config")
