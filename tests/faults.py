"""Runs the patched trainer with a fault: `python -m tests.faults --config FILE`.

DDPSHIM_FAULT names the fault as KIND:RANK:CALL, for instance raise@model:1:150: an exception in the 150th call of the
model on rank 1. Without @ the place is the dataset.
"""

from __future__ import annotations

import functools
import importlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable

from ddpshim.variables import RANK_LOGS
from tests import trainer

SKEW_S = 3 * 3600.0
PEERS_DEADLINE_S = 60.0
FULL_AT_BYTES = 1 << 20

# A function that is called in each phase of the trainer, and whether a call belongs to that phase.
PLACES: dict[str, tuple[str, str, Callable[..., bool]]] = {
    "before setup": ("ddpshim", "setup", lambda *args, **options: True),
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
    """Make the `call`-th call at a place cause the fault `kind` before it runs."""
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
        # The kernel refuses further writes, as on a full disk; the limit on file size holds for this process only.
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, FULL_AT_BYTES))
    elif action in ("SIGTERM", "SIGUSR1"):
        # To rank 0, which waits for this rank in a collective.
        os.kill(int(Path("pid_0").read_text()), getattr(signal, action))
        time.sleep(1.0)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[action])


def _break_save() -> None:
    import robomimic.utils.train_utils as TrainUtils

    def broken(**options: Any) -> None:
        raise OSError(28, "No space left on device (on purpose)")

    TrainUtils.save_model = broken


def _set_clock_ahead() -> None:
    here = time.time
    time.time = functools.wraps(here)(lambda: here() + SKEW_S)  # ranks compare the names of what they call together


def _skip_a_step(call: int) -> None:
    """Make this rank skip one step, as a user's `if loss is odd: continue` does."""
    import robomimic.algo.bc

    original = robomimic.algo.bc.BC.train_on_batch
    calls = 0

    def skipping(self: Any, batch: Any, epoch: int, validate: bool = False) -> Any:
        nonlocal calls
        calls += 1
        return original(self, batch, epoch, validate=validate or calls == call)

    robomimic.algo.bc.BC.train_on_batch = skipping


def _use_toy_env() -> None:
    """Play rollouts in an environment that records its episodes, and write videos as arrays, without ffmpeg."""
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
    """Keep the rank that fails first until a peer has printed why it stops: torchrun would end the peers."""
    from ddpshim.failures import failure_notes

    record = failure_notes._record_for_torchrun

    def recorded(error: Exception) -> None:
        record(error)
        end = time.monotonic() + PEERS_DEADLINE_S
        while b"stops because" not in Path("output.txt").read_bytes() and time.monotonic() < end:
            time.sleep(0.02)

    failure_notes._record_for_torchrun = recorded


def _break_model(kind: str, on_this_rank: bool, call: int) -> None:
    """Change a network before the `call`-th batch, as a user might."""
    import robomimic.algo.bc
    import robomimic.algo.td3_bc

    kinds = {"weights": (robomimic.algo.bc.BC, "policy"), "target": (robomimic.algo.td3_bc.TD3_BC, "actor_target")}
    algo, net = kinds[kind]
    train, calls = algo.train_on_batch, 0

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:  # as a checkpoint that one rank loads
            next(self.nets[net].parameters()).data.mul_(1.5)
        return train(self, *args, **options)

    if on_this_rank:
        algo.train_on_batch = broken


def install() -> None:
    kind, rank, call = os.environ["DDPSHIM_FAULT"].split(":")
    is_here = os.environ.get("RANK", "0") == rank
    Path(f"pid_{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    if kind == "code" and is_here:
        sys.path.insert(0, os.environ["FAULT_OTHER_TREE"])
    if kind == "skip":
        os.environ.update(DDPSHIM_TIMEOUT_S="10", DDPSHIM_SIDE_TIMEOUT_S="10")
    if kind == "toy_env":
        _use_toy_env()
        if RANK_LOGS not in os.environ:
            _let_the_peer_speak()
    elif kind in ("weights", "target"):
        _break_model(kind, is_here, int(call))
    elif is_here:
        if kind == "save":
            _break_save()
        elif kind == "skip":
            _skip_a_step(int(call))
        elif kind == "clock":
            _set_clock_ahead()
        elif kind not in ("code", "none"):
            _break(kind, int(call))


def main() -> None:
    trainer.activate()
    install()
    trainer.run_trainer()


if __name__ == "__main__":
    main()
