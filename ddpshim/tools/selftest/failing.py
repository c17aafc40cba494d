"""Trains a few steps, then rank 1 fails, at each start in a different way: a program for the self-test on GPUs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Callable

import torch

from ddpshim.job.group import setup
from ddpshim.model.parallel import wrap_parallel
from ddpshim.tools.selftest.policies import ActorCritic, data

_FAILS_AT = 20  # step


def _raise() -> None:
    raise ValueError("planted by the self-test")


def _allocate() -> None:
    torch.empty(2**48, dtype=torch.float64, device="cuda")  # 2 PB


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


# One per start of the job, in this order. A killed rank is reported only by the launcher, at the end: it must be last.
FAULTS: dict[str, Callable[[], None]] = {"exception": _raise, "out of memory": _allocate, "stop": _stop, "kill": _kill}


def main(folder: Path) -> None:
    """Train until this start's fault."""
    world = setup(seed=1)
    fault = list(FAULTS)[world.num_restarts]
    wrapped = wrap_parallel(ActorCritic().to(world.device))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    batch = [part.to(world.device) for part in data(4, torch.float32)]
    (folder / f"process {fault} {world.rank}").write_text(str(os.getpid()))
    (folder / f"begun {fault} {world.rank}").touch()
    for step in range(10**9):
        if step == _FAILS_AT and world.rank == 1:
            # Renamed when complete: gpu_programs.py reads the file's time and this pid as soon as it exists.
            planted = folder / f"planted {fault}.part"
            planted.write_text(str(os.getpid()))
            planted.rename(folder / f"planted {fault}")
            FAULTS[fault]()
        optimizer.zero_grad()
        wrapped.loss(*batch).backward()
        optimizer.step()
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
