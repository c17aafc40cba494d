"""Replaces functions in the module of openpi's PyTorch trainer, when its `main` reads the config.

The module is `scripts/train_pytorch.py`, or a copy of it. Without a launcher nothing is replaced.
"""

from __future__ import annotations

import os
import sys
from types import FunctionType, ModuleType
from typing import Any, Callable

from ddpshim.errors import HookError
from ddpshim.job.launch_env import read_launch_env
from ddpshim.trainers.exchanging import ByItsConfig
from ddpshim.trainers.swapping import refuse_unknown, swap

CONFIG = "openpi.training.config"
# The functions of the trainer's module that are replaced, with their parameters.
FUNCTIONS = {
    "setup_ddp": "",
    "set_seed": "seed local_rank",
    "init_wandb": "config resuming enabled",
    "build_datasets": "config",
    "save_checkpoint": "model optimizer global_step config is_main data_config",
    "load_checkpoint": "model optimizer checkpoint_dir device",
    "cleanup_ddp": "",
}
# The parameters of `create_torch_data_loader` in openpi's data_loader.
CREATE = (
    "data_config model_config action_horizon batch_size sharding skip_norm_stats shuffle num_batches num_workers seed "
    "framework"
)


def _swap_in(module: ModuleType) -> str:
    """Make the trainer call `_cli` when it reads its config."""
    function = getattr(module, "cli", None)
    refuse_unknown(f"{CONFIG}.cli", function, [])
    assert isinstance(function, FunctionType)
    swap(f"{CONFIG}.cli", function, _cli, lambda names: "train_loop" in names and "torch" in names)
    return f"{CONFIG}.cli: joins the job; the batch, the noise, the log and the checkpoints of one process"


at_config = ByItsConfig(CONFIG, _swap_in)


def _cli(original: Callable[..., Any]) -> Any:
    config = original()
    if not read_launch_env(os.environ).is_launched:
        return config
    from ddpshim.openpi import ranks

    names = sys._getframe(3).f_globals
    where = names.get("__file__", names.get("__name__"))
    lacking = [name for name in FUNCTIONS if name not in names]
    if lacking:
        raise HookError(
            f"{where} is not openpi's trainer for PyTorch that the hooks know: it has no {', '.join(lacking)}, and "
            "only a part of it would be distributed. Train with scripts/train_pytorch.py, or leave it as it is with "
            "DDPSHIM_HOOKS=off."
        )
    for name, parameters in FUNCTIONS.items():
        refuse_unknown(f"{names['__name__']}.{name}", names[name], parameters.split())
    data, model = sys.modules["openpi.training.data_loader"], sys.modules["openpi.models_pytorch.pi0_pytorch"]
    create: Any = vars(data).get("create_torch_data_loader")
    refuse_unknown("openpi.training.data_loader.create_torch_data_loader", create, CREATE.split())
    exchanged = [(names, name, getattr(ranks, name)(names[name])) for name in FUNCTIONS]
    exchanged.append((vars(data), "create_torch_data_loader", ranks.create_torch_data_loader(create)))
    exchanged.append((vars(model), "PI0Pytorch", ranks.policy(model.PI0Pytorch)))
    for owner, name, value in exchanged:
        at_config.put(owner, name, value)
    return ranks.join(config)
