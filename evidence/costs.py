"""Measures what ddpshim's checks add to a step: the guards, and a certificate.

    python -m evidence.costs [--quick]

Of the guards is measured the time inside their own code, of two ranks that train a policy of 5M parameters: ratios of
whole steps are mostly noise. Of a certificate is counted, over 200 steps of a program with a mark every 100, the time
inside the recorder with its waiting for the other rank, and the CPU time of its thread, which may also run beside the
steps: the most that it can cost.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddpshim
from ddpshim.model import guard
from ddpshim.model.equality import hash_of
from ddpshim.process.job import current
from evidence.certified_steps import EVERY
from evidence.results import ROOT, Result, main, measured
from tests.ranks import run_ranks

BATCH_SIZE, DEADLINE_S, MOST, WIDTHS = 128, 600, 0.02, (288, *[1100] * 4, 224)


def guards_own_ms() -> dict[str, float]:
    """Return the milliseconds inside the guards' own code, by occasion (collective)."""
    layers = [layer for a, b in zip(WIDTHS, WIDTHS[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    wrapped: Any = ddpshim.wrap_parallel(nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-4)
    wrapped(torch.randn(BATCH_SIZE // ddpshim.world().world_size, WIDTHS[0])).square().mean().backward()
    optimizer.step()
    watched = current().part(guard.GuardState)

    def in_a_step() -> None:
        watched.steps.clear()  # as after a new backward pass, when the check takes longest
        guard._check_step(optimizer, (), {})

    occasions = {
        "guards' own code in a step": in_a_step,
        "one comparison of weights and Adam's state, of 1000 steps": lambda: guard._compare(wrapped),
        "a hash of them, at the end of an epoch": lambda: hash_of(*guard._everything()),
    }
    found = {}
    for what, function in occasions.items():
        ms = []
        for _ in range(20):
            start = time.perf_counter()
            function()
            ms.append((time.perf_counter() - start) * 1000)
        found[what] = statistics.median(ms)
    return found


# Python runs it before each rank's program: the recorder hands its methods to torch before the program starts.
AT_START = """
from ddpshim.process.replaced import after_import

def time_recorder():
    from evidence.certified_steps import time_recorder
    time_recorder()

after_import("ddpshim.tools.certifying", time_recorder)
"""


def certified(name: str) -> dict[str, Any]:
    """Run a program of one_process_programs.py under `run --certify`, and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(AT_START)
        command = ["-m", "ddpshim", "run", "--nproc", "2", "--certify", f"{folder}/run.json", "--certify-every"]
        program = [str(EVERY), "-m", "evidence.certified_steps", name]
        return measured([*command, *program], {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}, DEADLINE_S)


def run(quick: bool) -> Iterator[Result]:
    for what, ms in run_ranks(guards_own_ms, 2, timeout_s=300)[0].items():
        yield Result("costs", what, ms, "ms")
    for name in ("unet_16",) if quick else ("unet_16", "unet_64", "act"):
        found = certified(name)
        cost = found["recorder"] + found["thread"]
        note = f"a step {found['ms']:.0f} ms; recorder {found['recorder']:.2%}, its thread {found['thread']:.2%}"
        yield Result("costs", f"{name}, certified", cost, "of a step", at_most=MOST, note=note)


if __name__ == "__main__":
    main(run, __doc__)
