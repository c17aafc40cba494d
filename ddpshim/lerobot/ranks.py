"""Makes LeRobot's trainer run the same training on all ranks as in one process.

On every rank its Accelerator works as in one process, so batch size, learning rate, steps and the numbers in the log
are those of one process. ddpshim handles what ranks share: gradients, the order of samples, noise, and who writes.
"""

from __future__ import annotations

import functools
import secrets
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpshim.data.loader import arguments_of, make_loader
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import HookError
from ddpshim.job import shares
from ddpshim.job.group import cleanup, draws_alike, setup, world
from ddpshim.job.job import current
from ddpshim.job.random_streams import rank_states, restore_rank_states
from ddpshim.job.say import say
from ddpshim.model.parallel import wrap_parallel
from ddpshim.trainers import place_in_pass
from ddpshim.trainers.session import session
from ddpshim.trainers.unedited.accelerators import in_one_process, strategies

PLACE = "place_in_pass.pt"  # in the training_state of a checkpoint
# The policies that `python -m tests.lerobot_equivalence` has compared with one process.
COMPARED = ("act", "diffusion", "smolvla")
# vqbet fits its codebook to a rank's share of the batch, so ranks would have different codebooks.
REFUSED = ("vqbet",)


class _Training:
    """The training of a job.

    Attributes:
        loader: the loader of its batches.
        checkpoint: the folder of the checkpoint from which it resumes.
        step: the step of that checkpoint.
        wrapped: the wrapped models, kept alive because they reduce the gradients.
    """

    def __init__(self) -> None:
        self.loader: Optional[ShardedLoader] = None
        self.checkpoint: Optional[Path] = None
        self.step = 0
        self.wrapped: list[Any] = []


def join(config: Any) -> None:
    """Join the job with this validated config; its output folder becomes the main rank's (collective).

    Raises HookError if the training would differ from one process, WorldError if configs or code differ between ranks.
    """
    here = setup(device="cpu" if config.policy.device == "cpu" else None)
    if here.world_size > 1:
        _refuse(config)
    # The default name contains the time. Barrier: no rank may make the folder before all have checked that none exists.
    config.output_dir = Path(here.broadcast(str(config.output_dir)))
    here.barrier()
    seed = here.broadcast(secrets.randbits(63)) if config.seed is None else config.seed
    session().begin(config.to_dict(), "lerobot", seed)


def _refuse(config: Any) -> None:
    reasons = {
        "use_rabc": (
            config.use_rabc,
            "samples are weighted over the batch, of which a rank has only a share",
        ),
        "dataset.streaming": (config.dataset.streaming, "a stream's order depends on who reads it"),
        f"policy.type={config.policy.type}": (config.policy.type in REFUSED, "it fits a codebook to a rank's share"),
    }
    for name, (is_asked, reason) in reasons.items():
        if is_asked:
            raise HookError(
                f"{name} on several ranks: {reason}; the model would differ from that of one process. Train it in "
                "one process, or with LeRobot's own distribution (DDPSHIM_HOOKS=off)."
            )
    asked = strategies()
    if asked:
        raise HookError(
            f"{', '.join(asked)} is set: accelerate would divide the model, and ddpshim the batches, by different "
            "groups. Unset it, or leave the trainer as it is with DDPSHIM_HOOKS=off."
        )
    if config.policy.type not in COMPARED and world().is_main:
        say(
            f"policy {config.policy.type} has not been compared with one process ({', '.join(COMPARED)} have): a "
            "loss that is not a mean over samples, or a buffer that depends on the batch, would differ between ranks"
        )


def accelerator(original: Any) -> Any:
    """Return a subclass of accelerate's `original` that works on each rank as in one process. Local."""
    return type("Accelerator", (_OnRanks, original), {})


class _OnRanks:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        with in_one_process():
            super().__init__(*arguments, **options)
        num_processes = getattr(self, "num_processes", 1)
        if num_processes != 1:
            raise HookError(
                f"accelerate has made a group of {num_processes} processes before LeRobot's trainer began; batches "
                "would be divided twice. Make no Accelerator before train()."
            )

    @property
    def is_main_process(self) -> bool:
        """Whether this rank writes the log and the checkpoints. Local."""
        return world().is_main

    def wait_for_everyone(self) -> None:
        """Wait for the main rank, however long it evaluates or saves, and take over its random streams (collective).

        One process would also have drawn the numbers that the main rank has drawn alone.
        """
        here = world()
        here.barrier()
        if here.world_size > 1 and draws_alike():
            restore_rank_states(here.broadcast(rank_states(here.device)), here.device)

    def prepare_model(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Return the policy itself, with its gradients reduced over the ranks (collective)."""
        of_one_process: Any = super()
        prepared = of_one_process.prepare_model(model, *arguments, **options)
        current().part(_Training).wrapped.append(wrap_parallel(prepared))
        return prepared

    def prepare_data_loader(self, data_loader: DataLoader[Any], *arguments: Any, **options: Any) -> Any:
        """Return a loader of this rank's share of one process's batches, continued from a checkpoint (collective)."""
        training = current().part(_Training)
        made = make_loader(**arguments_of(data_loader))
        assert isinstance(made, ShardedLoader)
        training.loader = made
        if training.checkpoint is not None:
            place_in_pass.enter(made, training.checkpoint / "training_state" / PLACE, training.step)
        return made

    def end_training(self) -> None:
        """Leave the job after all ranks have ended their training (collective)."""
        session().end()
        cleanup()
        of_one_process: Any = super()
        of_one_process.end_training()


# The stand-ins for functions of the trainer's module: each takes the original and returns its replacement.


def load_training_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, which also records the checkpoint for the loader that is made next."""

    @functools.wraps(original)
    def load(checkpoint_dir: Any, *arguments: Any, **options: Any) -> Any:
        loaded = original(checkpoint_dir, *arguments, **options)
        training = current().part(_Training)
        training.checkpoint, training.step = Path(checkpoint_dir), loaded[0]
        return loaded

    return load


def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, which also saves the place in the pass over the data; called on the main rank."""

    @functools.wraps(original)
    def save(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        loader = current().part(_Training).loader
        if loader is not None:
            folder = options["checkpoint_dir"] if "checkpoint_dir" in options else arguments[0]
            place_in_pass.keep(loader, Path(folder) / "training_state" / PLACE)

    return save


class _Noted:
    """Receives the metrics that `update_policy` sets in the trainer's MetricsTracker."""


def update_policy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original` with metrics and outputs of the whole batch: means over the ranks (collective)."""

    @functools.wraps(original)
    def update(train_metrics: Any, *arguments: Any, **options: Any) -> Any:
        noted = _Noted()
        _, output = original(noted, *arguments, **options)
        own = {"noted": {"loss": vars(noted)["loss"]}, "output": _numbers(output)}
        means = world().mean(_flat(own))
        for name, value in vars(noted).items():
            setattr(train_metrics, name, means.get(f"noted {name}", value))
        if output:
            output = {name: means.get(f"output {name}", value) for name, value in output.items()}
        return train_metrics, output

    return update


def _numbers(output: Any) -> dict[str, Any]:
    kinds = (int, float)
    return {name: value for name, value in (output or {}).items() if type(value) in kinds or _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _flat(sections: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {f"{section} {name}": float(value) for section, own in sections.items() for name, value in own.items()}


def outside_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, run outside of any batch: the main rank draws as one process, not for its share of a batch."""

    @functools.wraps(original)
    def evaluate(*arguments: Any, **options: Any) -> Any:
        with shares.without_batch():
            return original(*arguments, **options)

    return evaluate
