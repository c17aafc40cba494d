"""Trains on several ranks until rank 1 kills itself: a program of the self-test."""

from __future__ import annotations

import os
import signal

import torch

from ddpshim.job.group import setup
from ddpshim.model.parallel import wrap_parallel

_DIES_AT = 5  # step


def main() -> None:
    """Train for ever (collective)."""
    world = setup(seed=1)
    net = wrap_parallel(torch.nn.Linear(4, 1).to(world.device))
    step = 0
    while True:
        net(torch.ones(2, 4, device=world.device)).sum().backward()
        step += 1
        if step == _DIES_AT and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
