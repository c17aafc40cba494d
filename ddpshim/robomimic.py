"""What the robomimic patch sets call, each in place of the upstream line it stands for.

Without a launcher every function here does exactly what that line did. robomimic is imported inside the
functions only.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpshim import checkpoint, guard
from ddpshim.failure import abort
from ddpshim.group import cleanup, setup, split_random_streams, world
from ddpshim.launch import read_launch_env
from ddpshim.loader import ShardedLoader, make_loader
from ddpshim.parallel import broadcast_state, wrap_parallel
from ddpshim.rank import has_log, link_log
from ddpshim.rollout import plays_rollouts as plays_rollouts
from ddpshim.rollout import rollout_with_stats as rollout_with_stats
from ddpshim.streams import derive_seed, seed_everything


def quiet() -> None:
    """Lead standard output and warnings nowhere on ranks that are not the main one. Local; before imports.

    Nothing under `python -m ddpshim run`, where they go to the rank's own log. Errors still reach standard error.
    Raises LaunchError where the launcher's variables are impossible.
    """
    if read_launch_env(os.environ).rank > 0 and not has_log():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
        warnings.simplefilter("ignore")


def start(config: Any, device: torch.device) -> torch.device:
    """The device of this rank, in place of `device`; joins the job (collective, once, first of all)."""
    here = setup(device=None if device.type == "cuda" else device)
    if not here.is_launched:
        return device
    return setup(seed=config.train.seed).device


def finish() -> None:
    """Leave the job when training is over: the main rank may be saving still, so all wait (collective)."""
    world().barrier()
    cleanup()


def failed(error: BaseException) -> None:
    """Where upstream swallows `error`: end the job with it. Returns without a launcher, as upstream does."""
    if world().is_launched:
        abort(error)


def is_main() -> bool:
    """Whether this process prints, writes and decides. True without a launcher."""
    return world().is_main


def main_decides(choice: bool) -> bool:
    """The main rank's `choice` on every rank: clocks differ (collective)."""
    return world().broadcast(choice)


def main_only(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` on the main rank; elsewhere something that takes the same calls and does nothing. Local."""
    return make if world().is_main else _Nothing()


def get_exp_dir(config: Any, **options: Any) -> Any:
    """The experiment's directories, asked for, removed and made by the main rank alone (collective).

    The first of them gets each rank's log, where `python -m ddpshim run` keeps one.
    """
    import robomimic.utils.train_utils as TrainUtils

    directories = world().run_on_main(TrainUtils.get_exp_dir, config, **options)
    link_log(directories[0])
    return directories


def loader(**options: Any) -> DataLoader[Any]:
    """torch's DataLoader with upstream's arguments; launched, `make_loader` with the same (then collective)."""
    return make_loader(**options)


def prepare(model: Any) -> Any:
    """`model` (an Algo), every network of which is now reduced over the ranks (collective).

    The networks stay where they are: no wrapper gets between an algorithm, its optimizers, its EMA and its
    checkpoints. Networks that train together share one reducer; target networks and the EMA become the
    main rank's. Then each rank gets random streams of its own.
    """
    here = world()
    if not here.is_launched:
        return model
    torch.set_num_threads(max(1, min(torch.get_num_threads(), _num_cores() // here.local_world_size)))
    for algo in _algos(model):
        for net in _trained_together(algo):
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
    *, model: Any, data_loader: Any, epoch: int, num_steps: Optional[int] = None, **options: Any
) -> dict[str, float]:
    """Upstream's run_epoch, its metrics averaged over the ranks (collective).

    Ranks meet here first, for as long as the main rank rolls out or saves. The order of samples depends on
    `epoch` alone, each rank's noise on `epoch` and the rank, so that a resumed run sees what the uninterrupted one
    would have seen.
    """
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    if isinstance(data_loader, ShardedLoader):
        passes = 1 if num_steps is None else math.ceil(num_steps / len(data_loader))
        data_loader.set_epoch((epoch - 1) * passes)
    if here.is_launched:
        phase = "validation" if options.get("validate") else "training"
        seed_everything(derive_seed(here.seed or 0, "rank", here.rank, phase, epoch))
        _restore_counters(model, epoch, len(data_loader) if num_steps is None else num_steps)
    here.barrier()
    log = TrainUtils.run_epoch(model=model, data_loader=data_loader, epoch=epoch, num_steps=num_steps, **options)
    return {key: float(value) for key, value in here.mean(log).items()} if here.world_size > 1 else log


def save_model(*, ckpt_path: str, **options: Any) -> None:
    """Upstream's save_model, on the main rank alone. Local: nobody waits for it.

    Launched, the file at `ckpt_path` is at any moment the old one or the new one, whole.
    """
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    if not here.is_launched:
        TrainUtils.save_model(ckpt_path=ckpt_path, **options)
    elif here.is_main:
        with checkpoint.written(ckpt_path) as partial:
            TrainUtils.save_model(ckpt_path=partial, **options)


def copyfile(source: str, path: str) -> None:
    """shutil.copyfile, on the main rank alone; launched, `path` is never half a copy. Local."""
    if world().is_launched:
        checkpoint.copy(source, path)
    else:
        shutil.copyfile(source, path)


def _restore_counters(model: Any, epoch: int, num_steps: int) -> None:
    """After `--resume`, give the counters that upstream's checkpoints lack the values they had. Local.

    An EMA that counts from 0 again forgets its average in the next step; a td3_bc updates its actor in other steps.
    """
    for algo in _algos(model) if epoch > 1 else ():
        ema = getattr(algo, "ema", None)
        if ema is not None and ema.optimization_step == 0:
            ema.optimization_step = (epoch - 1) * num_steps
        if getattr(algo, "actor_update_counter", None) == 0:
            num_epochs = sum(bool(algo._check_epoch(net_name="critic", epoch=past)) for past in range(1, epoch))
            algo.actor_update_counter = num_epochs * num_steps


class _Nothing:
    """Takes every call and attribute, does nothing: a logger or a file on a rank that must not write."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: Any) -> None:
        return None


def _algos(model: Any) -> Iterator[Any]:
    """`model` and the algorithms inside it (hbc and iris hold planners, actors and value functions)."""
    from robomimic.algo.algo import Algo

    inner = [value for value in vars(model).values() if isinstance(value, Algo)]
    for algo in inner:
        yield from _algos(algo)
    if "nets" in vars(model):
        yield model


def _trained_together(algo: Any) -> Iterator[nn.Module]:
    """The networks of `algo` that its optimizers train, cut where those cut them; no target networks."""
    optimizers: Mapping[str, Any] = vars(algo).get("optimizers", {})
    flat = [o for made in optimizers.values() for o in (made if isinstance(made, list) else [made])]
    trained = {id(p) for optimizer in flat for group in optimizer.param_groups for p in group["params"]}
    for name, net in algo.nets.items():
        cut = isinstance(net, nn.ModuleList) and isinstance(optimizers.get(name), list)
        yield from (part for part in (net if cut else [net]) if any(id(p) in trained for p in part.parameters()))


def _num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
