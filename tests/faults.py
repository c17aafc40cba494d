"""The patched trainer with something that goes wrong: `python -m tests.faults --config FILE`.

What, where and when is read from DDPSHIM_FAULT, as KIND:RANK:CALL, for instance raise@model:1:150: an exception in the
150th call of the model on rank 1. Without @ the place is the dataset. When it happened is written to `fault_moment`.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable

from ddpshim.job.rank_log import has_log
from tests import trainer

SKEW_S = 3 * 3600.0
PEERS_DEADLINE_S = 60.0
FULL_AT_BYTES = 1 << 20

# What is called in each phase of the trainer, and whether that call is meant.
PLACES: dict[str, tuple[str, str, Callable[..., bool]]] = {
    "before setup": ("ddpshim.robomimic", "start", lambda *args, **options: True),
    "setup": ("robomimic.algo", "algo_factory", lambda *args, **options: True),
    "model": (
        "robomimic.algo.bc",
        "BC.train_on_batch",
        lambda self, batch, epoch, validate=False: not validate,
    ),
    "validation": (
        "robomimic.algo.bc",
        "BC.train_on_batch",
        lambda self, batch, epoch, validate=False: validate,
    ),
    "dataset": ("robomimic.utils.dataset", "SequenceDataset.__getitem__", lambda *args: True),
    "logger": ("robomimic.utils.log_utils", "DataLogger.record", lambda *args, **options: True),
    "save": ("robomimic.utils.train_utils", "save_model", lambda *args, **options: True),
    "teardown": ("ddpshim.robomimic", "finish", lambda *args, **options: True),
}


def _break(kind: str, call: int) -> None:
    """Have the `call`-th call at a place do what `kind` says, and then what it always does."""
    action, _, place = kind.partition("@")
    module, name, is_meant = PLACES[place or "dataset"]
    *holders, last = name.split(".")
    holder = importlib.import_module(module)
    for part in holders:
        holder = getattr(holder, part)
    original, calls = getattr(holder, last), 0

    def broken(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += is_meant(*args, **options)
        if calls == call and is_meant(*args, **options):
            Path("fault_moment").write_text(repr(time.time()))
            _act(action, place or "dataset", args)
        return original(*args, **options)

    setattr(holder, last, broken)


def _act(action: str, place: str, args: Any) -> None:
    if action == "raise":
        raise ValueError(f"sample {args[1]} is broken on purpose" if place == "dataset" else f"{place} on purpose")
    if action == "assert":
        assert not args
    if action == "exit":
        sys.exit(3)
    if action == "full":
        # The kernel refuses to write further, as on a full disk; what a file may hold is the process's own limit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, FULL_AT_BYTES))
    elif action == "config":
        with args[0].values_unlocked():
            args[0].train.batch_size = 50
    elif action in ("SIGTERM", "SIGUSR1"):
        # To rank 0, which waits for this one in the middle of a collective.
        os.kill(int(Path("pid_0").read_text()), getattr(signal, action))
        time.sleep(1.0)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}[action])


def _break_save() -> None:
    import robomimic.utils.train_utils as TrainUtils

    def broken(**options: Any) -> None:
        raise OSError(28, "No space left on device (on purpose)")

    TrainUtils.save_model = broken


def _set_clock_ahead() -> None:
    here = time.time
    time.time = lambda: here() + SKEW_S


def _hide_checkpoints() -> None:
    """Have this rank find no checkpoints: another node, or a moment too early."""
    exists = os.path.exists
    os.path.exists = lambda path: not str(path).endswith(".pth") and exists(path)  # type: ignore[assignment]


def _skip_a_step(call: int) -> None:
    """Have this rank leave out one step, as a user's `if loss is odd: continue` does."""
    import robomimic.algo.bc

    original = robomimic.algo.bc.BC.train_on_batch
    calls = 0

    def skipping(self: Any, batch: Any, epoch: int, validate: bool = False) -> Any:
        nonlocal calls
        calls += 1
        return original(self, batch, epoch, validate=validate or calls == call)

    robomimic.algo.bc.BC.train_on_batch = skipping


def _use_toy_env() -> None:
    """Rollouts in an environment that writes down its episodes, and videos as arrays: ffmpeg is no part of the test."""
    import imageio
    import numpy as np
    import robomimic.utils.env_utils as EnvUtils

    from tests.toy_env import ToyEnv

    class Writer:
        def __init__(self, path: str, fps: int) -> None:
            self._path, self._frames = path, list[Any]()

        def append_data(self, frame: Any) -> None:
            self._frames.append(frame)

        def close(self) -> None:
            with open(self._path, "wb") as file:
                np.save(file, np.stack(self._frames))

    imageio.get_writer = Writer
    EnvUtils.create_env_from_metadata = ToyEnv


def _let_the_peer_speak() -> None:
    """Have the rank that fails first stay until a peer has said why it stops: torchrun ends those who are left."""
    from ddpshim.job import failure

    record = failure._record_for_torchrun

    def recorded(error: Exception) -> None:
        record(error)
        end = time.monotonic() + PEERS_DEADLINE_S
        while b"stops because" not in Path("output.txt").read_bytes() and time.monotonic() < end:
            time.sleep(0.02)

    failure._record_for_torchrun = recorded


def _break_model(kind: str, on_this_rank: bool) -> None:
    """What a user may do to a network around the call that wraps it."""
    import robomimic.utils.torch_utils as TorchUtils
    import torch

    import ddpshim.robomimic.calls as adapter

    prepare = adapter.prepare

    def broken(model: Any) -> Any:
        net = model.nets["policy" if "policy" in model.nets else "actor"]
        first = next(net.parameters())
        if kind == "unfrozen":
            first.requires_grad_(False)
        model = prepare(model)
        if kind == "unfrozen":
            first.requires_grad_(True)
        elif kind == "weights" and on_this_rank:
            first.data.mul_(1.5)  # as a checkpoint loaded on one rank only
        elif kind == "target" and on_this_rank:
            next(model.nets["actor_target"].parameters()).data.mul_(1.5)
        elif kind == "noise":
            train_on_batch = model.train_on_batch

            def reseeding(*args: Any, **kwargs: Any) -> Any:
                torch.manual_seed(0)
                return train_on_batch(*args, **kwargs)

            model.train_on_batch = reseeding
        return model

    def by_hand(net: Any, optim: Any, loss: Any, **options: Any) -> float:
        for p, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))):
            p.grad = gradient
        optim.step()
        return 0.0

    adapter.prepare = broken
    if kind == "by_hand":
        TorchUtils.backprop_for_loss = by_hand


def _break_sync() -> None:
    """Leave the reduction of gradients out for good: each rank trains a model of its own."""
    import ddpshim.robomimic.calls as adapter
    from ddpshim.job.job import current
    from ddpshim.model.reducer import Wrapped

    prepare = adapter.prepare

    def broken(model: Any) -> Any:
        model = prepare(model)
        for wrapped in current().part(Wrapped):
            wrapped.require_backward_grad_sync = False
        return model

    adapter.prepare = broken


def _break_split() -> None:
    """Give every rank the shard of the main one: the rest of each global batch is seen by nobody."""
    from ddpshim.data.torchs_order import TorchsBatches

    def broken(self: TorchsBatches, batch: list[int]) -> range:
        return range(0, len(batch), self._world.world_size)

    TorchsBatches._rows = broken  # type: ignore[method-assign]


def install() -> None:
    """Make go wrong in this process what DDPSHIM_FAULT says."""
    kind, rank, call = os.environ["DDPSHIM_FAULT"].split(":")
    is_here = os.environ.get("RANK", "0") == rank
    Path(f"pid_{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    if kind == "code" and is_here:
        sys.path.insert(0, os.environ["FAULT_OTHER_TREE"])
    if kind == "skip":
        from ddpshim.model import guard

        guard.check_equal_steps.__defaults__ = ("the epoch", 2.0)
    if kind == "toy_env":
        _use_toy_env()
        if not has_log():
            _let_the_peer_speak()
    elif kind == "no_sync":
        _break_sync()
    elif kind == "same_data":
        _break_split()
    elif kind in ("weights", "target", "noise", "unfrozen", "by_hand"):
        _break_model(kind, is_here)
    elif is_here:
        if kind == "save":
            _break_save()
        elif kind == "skip":
            _skip_a_step(int(call))
        elif kind == "clock":
            _set_clock_ahead()
        elif kind == "no_checkpoints":
            _hide_checkpoints()
        elif kind not in ("code", "none"):
            _break(kind, int(call))


def main() -> None:
    trainer.activate()
    install()
    trainer.run_trainer()


if __name__ == "__main__":
    main()
