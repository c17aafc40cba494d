"""Runs the patched trainer with a fault: `python -m tests.faults --config FILE`.

DDPSHIM_FAULT names the fault as KIND:RANK:CALL, for instance raise@model:1:150: an exception in the 150th call of the
model on rank 1. Without @ the place is the dataset. With +toy_env behind KIND rollouts are played in tests/toy_env.py.
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
from typing import Any

from tests import trainer

SKEW_S = 3 * 3600.0
FULL_AT_BYTES = 1 << 20

# A function that is called in each phase of the trainer.
PLACES = {
    "before setup": ("ddpshim", "setup"),
    "setup": ("robomimic.algo", "algo_factory"),
    "model": ("robomimic.algo.bc", "BC.train_on_batch"),
    "td3": ("robomimic.algo.td3_bc", "TD3_BC.train_on_batch"),
    "validation": ("robomimic.algo.bc", "BC.train_on_batch"),
    "dataset": ("robomimic.utils.dataset", "SequenceDataset.__getitem__"),
    "logger": ("robomimic.utils.log_utils", "DataLogger.record"),
    "save": ("robomimic.utils.train_utils", "save_model"),
    "teardown": ("ddpshim.robomimic", "finish"),
}


def _break(kind: str, call: int) -> None:
    """Make the `call`-th call at a place cause the fault `kind` before it runs."""
    action, _, place = kind.partition("@")
    place = place or "dataset"
    module, name = PLACES[place]
    *holders, last = name.split(".")
    holder = importlib.import_module(module)
    for part in holders:
        holder = getattr(holder, part)
    original, calls = getattr(holder, last), 0
    moment = os.open("fault_moment", os.O_WRONLY | os.O_CREAT)  # now: later the main rank alone opens files to write

    def broken(*args: Any, **options: Any) -> Any:
        nonlocal calls
        if options.get("validate", False) == (place == "validation"):
            calls += 1
            if calls == call:
                os.write(moment, b"now")
                _act(action, place, args)
        return original(*args, **options)

    setattr(holder, last, broken)


def _act(action: str, place: str, args: Any) -> None:
    if action == "raise":
        raise ValueError(f"sample {args[1]} is broken on purpose" if place == "dataset" else f"{place} on purpose")
    if action == "assert":
        assert not args
    if action == "exit":
        sys.exit(3)
    if action == "weights":  # as a checkpoint that one rank loads
        next(args[0].nets["policy" if place == "model" else "actor_target"].parameters()).data.mul_(1.5)
    elif action == "full":
        # The kernel refuses further writes, as on a full disk; the limit on file size holds for this process only.
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, FULL_AT_BYTES))
    elif action in ("SIGTERM", "SIGUSR1"):
        # To rank 0, which waits for this rank in a collective.
        os.kill(int(Path("pid_0").read_text()), getattr(signal, action))
        time.sleep(1.0)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[action])


def _set_clock_ahead() -> None:
    here = time.time
    time.time = functools.wraps(here)(lambda: here() + SKEW_S)  # ranks compare the names of what they call together


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


def install() -> None:
    kind, rank, call = os.environ["DDPSHIM_FAULT"].split(":")
    Path(f"pid_{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    if kind.endswith("toy_env"):
        _use_toy_env()
        kind = kind.partition("+")[0]
    if os.environ.get("RANK", "0") != rank or kind in ("none", "toy_env"):
        return
    if kind == "code":
        sys.path.insert(0, os.environ["FAULT_OTHER_TREE"])
    elif kind == "clock":
        _set_clock_ahead()
    else:
        _break(kind, int(call))


def main() -> None:
    trainer.activate()
    install()
    trainer.run_trainer()


if __name__ == "__main__":
    main()
