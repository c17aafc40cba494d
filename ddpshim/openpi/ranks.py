"""Makes openpi's PyTorch trainer run the same training on all ranks as in one process.

Each rank runs the trainer as one process does (`use_ddp` is False): batch size, seeds and the numbers in the log are
those of one process. ddpshim handles what ranks share: gradients, the order of samples, noise, and who writes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

from ddpshim.data.loader import arguments_of, make_loader
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.job.group import cleanup, setup, world
from ddpshim.job.job import current
from ddpshim.job.replaced import replaced
from ddpshim.model.parallel import wrap_parallel
from ddpshim.trainers import place_in_pass
from ddpshim.trainers.session import session

PLACE = "place_in_pass.pt"  # in the folder of a checkpoint


class _Training:
    """The training of a job: the loader of its batches, and the model that reduces the gradients."""

    def __init__(self) -> None:
        self.loader: Optional[ShardedLoader] = None
        self.wrapped: Any = None


def join(config: Any) -> Any:
    """Join the job; return this rank's config, by which only the main rank overwrites a folder (collective)."""
    here = setup()
    session().begin(dataclasses.asdict(config), "openpi", config.seed)
    if here.is_main:
        return config
    logging.getLogger().setLevel(logging.WARNING)
    return dataclasses.replace(config, overwrite=False)


# The stand-ins for functions of the trainer's module: each takes the original and returns its replacement.


def setup_ddp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reports one process, on this rank's device."""
    return lambda: (False, 0, world().device)


def set_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seed as one process does. Then the main rank makes the folder, and the others wait for it (collective)."""

    def seeded(seed: int, local_rank: int) -> None:
        original(seed, local_rank)
        if not world().is_main:
            world().barrier()

    return seeded


def init_wandb(original: Callable[..., Any]) -> Callable[..., Any]:
    """Log on the main rank only. By now it has made the folder: it joins the others' barrier in `set_seed`."""

    def init(config: Any, *, resuming: bool, enabled: bool = True) -> None:
        here = world()
        if here.is_main:
            here.barrier()
        original(config, resuming=resuming, enabled=enabled and here.is_main)

    return init


def create_torch_data_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the loader of one process, by hiding torch's process group."""

    @functools.wraps(original)
    def create(*arguments: Any, **options: Any) -> Any:
        with replaced(dist, "is_initialized", lambda: False):
            return original(*arguments, **options)

    return create


def build_datasets(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load this rank's share of one process's batches (collective)."""

    def build(config: Any) -> Any:
        made, data_config = original(config)
        inner = made._data_loader
        loader = make_loader(**arguments_of(inner._data_loader))
        assert isinstance(loader, ShardedLoader)
        inner._data_loader = current().part(_Training).loader = loader
        return made, data_config

    return build


def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Save on the main rank only, with the place in the pass and the random streams."""

    def save(model: Any, optimizer: Any, global_step: int, config: Any, is_main: bool, data_config: Any) -> None:
        loader = current().part(_Training).loader
        folder = Path(config.checkpoint_dir, str(global_step))
        before = folder.stat().st_ino if folder.is_dir() else None
        original(model, optimizer, global_step, config, world().is_main, data_config)
        if world().is_main and loader is not None and folder.is_dir() and folder.stat().st_ino != before:
            place_in_pass.keep(loader, folder / PLACE, with_streams=True)

    return save


def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Resume with the next sample and the next noise, on any number of ranks (collective)."""

    def load(model: Any, optimizer: Any, checkpoint_dir: Any, device: Any) -> Any:
        step = original(model, optimizer, checkpoint_dir, device)
        loader = current().part(_Training).loader
        if loader is not None:
            place_in_pass.enter(loader, Path(checkpoint_dir, str(step), PLACE), step)
        return step

    return load


def cleanup_ddp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the job after all ranks have ended their training (collective)."""

    def leave() -> None:
        session().end()
        cleanup()

    return leave


def policy(original: Any) -> Any:
    """Return a subclass of openpi's policy: gradients reduced over ranks, and the loss of the whole batch. Local."""
    return type(original.__name__, (_OnRanks, original), {"__module__": original.__module__})


class _OnRanks:
    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return the losses of this rank's samples, shifted so that their mean is the whole batch's (collective).

        Gradients are still those of this rank's samples; the backward pass averages them.
        """
        training = current().part(_Training)
        itself: Any = self
        of_one_process: Any = super()
        if training.wrapped is None:
            training.wrapped = wrap_parallel(itself)
        losses = of_one_process.forward(*arguments, **options)
        if isinstance(losses, (list, tuple)):
            losses = torch.stack(list(losses))
        own = float(losses.detach().mean())
        return losses + (world().mean(own) - own)
