"""Measures what `run --certify` adds to a step, with a mark every 100 steps: `python -m benchmarks.certificate_cost`.

Programs of one_process_programs.py run on two ranks. Counted is the time inside the recorder, with its waiting for the
other rank, and the CPU time of its thread, which hashes and writes; both as a part of the wall time of 200 steps, after
100 that are not counted. The thread may also run beside the steps, so this is the most that it can cost.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.one_process_programs import PROGRAMS
from benchmarks.results import Result, main

ROOT = Path(__file__).resolve().parent.parent
EVERY, NUM_STEPS, DEADLINE_S = 100, 200, 600
MOST = 0.02
SEEN = ("_see_batch", "_see_loss", "_see_number", "_after_step")
SPENT = {"recorder": 0.0, "thread": 0.0}
# Python runs it before each rank's program: the recorder hands its methods to torch before the program starts.
AT_START = """
from ddpshim.process.after_import import after_import

def time_recorder():
    from benchmarks.certificate_cost import time_recorder
    time_recorder()

after_import("ddpshim.tools.certificate.recording", time_recorder)
"""


def measured(name: str) -> dict[str, float]:
    """Run a program under `run --certify`, and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        (Path(folder) / "sitecustomize.py").write_text(AT_START)
        command = [sys.executable, "-m", "ddpshim", "run", "--nproc", "2", "--certify", f"{folder}/run.json"]
        ran = subprocess.run(
            [*command, "--certify-every", str(EVERY), "-m", "benchmarks.certificate_cost", name, str(out)],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            },
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(f"{name}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}")
        found: dict[str, float] = json.loads(out.read_text())
        return found


def time_recorder() -> None:
    """Count the time inside the recorder from now on; called once its module is imported."""
    # Not imported here: this would be an edited program.
    Recorder = sys.modules["ddpshim.tools.certificate.recording"].Recorder

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
    import torch

    spent = sys.modules["benchmarks.certificate_cost"].SPENT
    torch.manual_seed(0)
    step = PROGRAMS[name][0]()
    for _ in range(EVERY):
        step()
    before, start = dict(spent), time.perf_counter()
    for _ in range(NUM_STEPS):
        step()
    whole = time.perf_counter() - start
    parts = {key: (value - before[key]) / whole for key, value in spent.items()}
    Path(out).write_text(json.dumps({"ms": 1000 * whole / NUM_STEPS, **parts}))


def run(quick: bool) -> Iterator[Result]:
    for name in ("unet_16",) if quick else ("unet_16", "unet_64", "act", "mingpt"):
        found = measured(name)
        cost = found["recorder"] + found["thread"]
        note = f"a step {found['ms']:.0f} ms; recorder {found['recorder']:.2%}, its thread {found['thread']:.2%}"
        yield Result("certificate_cost", f"{name}, certified", cost, "of a step", at_most=MOST, note=note)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        program(*sys.argv[1:])
    else:
        main(run, __doc__)
