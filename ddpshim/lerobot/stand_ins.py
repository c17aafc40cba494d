"""Replaces names in the module of LeRobot's trainer, when its `train` validates the config.

`Accelerator` becomes ddpshim's (`ddpshim.lerobot.ranks`), `update_policy` returns the numbers of the whole batch,
`eval_policy_all` draws as in one process, and the functions of checkpoints keep the place in the pass over the data.
The module may be `lerobot.scripts.lerobot_train`, `__main__`, or a copy. Without a launcher nothing is replaced.
"""

from __future__ import annotations

import os
import sys
from types import FrameType, FunctionType, ModuleType
from typing import Any, Callable

from ddpshim.errors import HookError
from ddpshim.job.launch_env import read_launch_env
from ddpshim.trainers.exchanging import ByItsConfig
from ddpshim.trainers.swapping import refuse_unknown, swap

CONFIG = "lerobot.configs.train"
VALIDATE = f"{CONFIG}.TrainPipelineConfig.validate"
# The names of its Accelerator that `train` of LeRobot 0.4.4 uses: all are known to be right on several ranks.
ASKED = {
    *("device", "is_main_process", "wait_for_everyone", "num_processes", "prepare", "unwrap_model", "autocast"),
    *("backward", "clip_grad_norm_", "end_training"),
}
# The functions of the trainer's module that are replaced: the parameters that they must have, and may have.
FUNCTIONS = {
    "update_policy": (
        "train_metrics policy batch optimizer grad_clip_norm accelerator lr_scheduler lock",
        "rabc_weights_provider",
    ),
    "load_training_state": ("checkpoint_dir optimizer scheduler", ""),
    "save_checkpoint": ("checkpoint_dir step cfg policy optimizer scheduler preprocessor postprocessor", ""),
}


def _swap_in(module: ModuleType) -> str:
    """Make `train`, in any module, call `_validate` when it validates its config."""
    function = getattr(getattr(module, "TrainPipelineConfig", None), "validate", None)
    refuse_unknown(VALIDATE, function, ["self"])
    assert isinstance(function, FunctionType)
    swap(VALIDATE, function, _validate, lambda names: True)
    return f"{VALIDATE}: joins the job; the batch, the noise, the log and the checkpoints of one process"


at_config = ByItsConfig(CONFIG, _swap_in)


def _validate(original: Callable[..., Any], config: Any) -> None:
    original(config)
    if not read_launch_env(os.environ).is_launched:
        return
    from ddpshim.lerobot import ranks

    caller = sys._getframe(3)
    _refuse_unknown_trainer(caller)
    ranks.join(config)
    names = caller.f_globals
    stand_ins: dict[str, Any] = {
        "Accelerator": ranks.accelerator(names["Accelerator"]),
        "eval_policy_all": ranks.outside_batches(names["eval_policy_all"]),
        **{name: getattr(ranks, name)(names[name]) for name in FUNCTIONS},
    }
    for name, value in stand_ins.items():
        at_config.put(names, name, value)


def _refuse_unknown_trainer(caller: FrameType) -> None:
    """Raise HookError if the caller is not `lerobot_train`'s `train`, or uses other names of its Accelerator. Local."""
    names, code = caller.f_globals, caller.f_code
    where = f"{code.co_name} in {code.co_filename}"
    more = "Train with lerobot.scripts.lerobot_train, or leave the trainer as it is with DDPSHIM_HOOKS=off."
    lacking = [name for name in ("Accelerator", "eval_policy_all", *FUNCTIONS) if name not in names]
    if lacking:
        raise HookError(
            f"{where} validates a TrainPipelineConfig of LeRobot, and its module has no {', '.join(lacking)}: it is "
            f"not the trainer that the hooks know, and each rank would train its own model. {more}"
        )
    kind = names["Accelerator"]
    if (kind.__module__, kind.__qualname__) != ("accelerate.accelerator", "Accelerator"):
        raise HookError(
            f"Accelerator in {code.co_filename} is {kind!r}, not accelerate's: something else has replaced it, and "
            f"ranks would not share gradients. {more}"
        )
    for name, (required, optional) in FUNCTIONS.items():
        refuse_unknown(f"{names['__name__']}.{name}", names[name], required.split(), optional.split())
    asked = {*code.co_names, *names["update_policy"].__code__.co_names}
    new = sorted(name for name in asked - ASKED if hasattr(kind, name))
    if new:
        raise HookError(
            f"{where} asks its Accelerator for {', '.join(new)}, which the hooks do not know; on several ranks the "
            f"answer might differ from one process. {more}"
        )
    if caller.f_locals.get("accelerator") is not None:
        raise HookError(
            f"{where} was given an Accelerator; it has joined its own process group and would divide the batches a "
            "second time. Call train() without one."
        )
