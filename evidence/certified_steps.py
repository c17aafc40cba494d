"""Makes the steps of a program under `run --certify`, and writes what the recorder took: for costs.py."""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from evidence.one_process_programs import PROGRAMS

EVERY, NUM_STEPS = 100, 200
SEEN = ("_see_loss", "_after_step")
SPENT = {"recorder": 0.0, "thread": 0.0}


def time_recorder() -> None:
    """Count the time inside the recorder from now on; called once its module is imported."""
    # Not imported here: this would be an edited program.
    Recorder = sys.modules["ddpshim.tools.certifying"].Certifier

    def timed(method: Any, clock: Any, key: str) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                SPENT[key] += clock() - start

        return call

    for seen in SEEN:
        setattr(Recorder, seen, timed(getattr(Recorder, seen), time.perf_counter, "recorder"))
    Recorder._add = timed(Recorder._add, time.thread_time, "thread")


def program(name: str, out: str) -> None:
    """Make the steps of a program that is being certified, and write where the time went."""
    spent = sys.modules["evidence.certified_steps"].SPENT
    torch.manual_seed(0)
    one = PROGRAMS[name][0]()
    for _ in range(EVERY):
        one()
    before, start = dict(spent), time.perf_counter()
    for _ in range(NUM_STEPS):
        one()
    whole = time.perf_counter() - start
    parts = {key: (value - before[key]) / whole for key, value in spent.items()}
    Path(out).write_text(json.dumps({"ms": 1000 * whole / NUM_STEPS, **parts}))


if __name__ == "__main__":
    program(*sys.argv[1:])
