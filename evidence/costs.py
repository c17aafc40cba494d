"""Measures what ddpshim's checks add to a step: the guards, a record for the report, and a certificate.

    python -m evidence.costs [--quick]

Steps of a policy of 5M parameters with guards and without alternate, on two ranks and one thread each. On a busy
machine such a ratio is mostly noise; the time inside a guard's own code is reliable. Of a certificate is counted, over
200 steps of a program with a mark every 100, the time inside the recorder with its waiting for the other rank, and the
CPU time of its thread, which may also run beside the steps: the most that it can cost.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn
from torch.utils.data import DataLoader

import ddpshim
from ddpshim.job import shares
from ddpshim.model import guard
from ddpshim.process.job import current
from evidence.certified_steps import EVERY
from evidence.results import Result, main, median_and_quartiles, ratio
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
BATCH_SIZE = 128
DEADLINE_S = 600
MOST = 0.02


def policy() -> tuple[nn.Module, torch.Tensor]:
    """Return a policy, and this rank's share of a batch."""
    widths = [288, *[1100] * 4, 224]
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(BATCH_SIZE // ddpshim.world().world_size, widths[0])


def step(net: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def step_ms(num_rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of this rank's steps without guards, and with them (collective)."""
    torch.set_num_threads(1)
    plain, found = ddpshim.world(), dict[str, list[float]](without=[], to=[])
    worlds = {"without": replace(plain, options=replace(plain.options, guard=False)), "to": plain}
    arms: dict[str, Callable[[], Any]] = {}
    for name, world in worlds.items():
        current().world = world
        with ddpshim.shared_random_streams(0):
            net, x = policy()
        arms[name] = functools.partial(step, ddpshim.wrap_parallel(net), torch.optim.Adam(net.parameters(), lr=1e-4), x)
    watched = current().part(guard.Watched)
    for number in range(num_rounds + 2):
        for name in sorted(arms, reverse=number % 2 == 1):
            current().world = worlds[name]
            # The hooks belong to the process, not to a policy.
            (guard.watch_optimizers if name == "to" else watched.unwatch_optimizers)()
            shares.begin_batch(len(x))
            plain.barrier()
            start = time.perf_counter()
            arms[name]()
            if number > 1:  # the first rounds warm up
                found[name].append((time.perf_counter() - start) * 1000)
    current().world = plain
    return found


def guards_own_ms() -> dict[str, float]:
    """Return the milliseconds inside the guards' own code, by occasion (collective)."""
    net, x = policy()
    wrapped = ddpshim.wrap_parallel(net)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-4)
    step(wrapped, optimizer, x)
    watched, presence = current().part(guard.Watched), wrapped._presence.grad

    def in_a_step() -> None:
        watched.steps.clear()  # as after a new backward pass, when the check takes longest
        guard._check_step(optimizer, (), {})
        wrapped._agreement.fill(presence, False, 1, [1e-4])
        wrapped._agreement.read(presence)

    def compare() -> None:
        wrapped._equality.start(1)
        wrapped._equality.finish()

    occasions = {
        "guards' own code in a step": in_a_step,
        "one comparison of weights and Adam's state, of 1000 steps": compare,
        "a hash of them, at the end of an epoch": guard._hash_of_all,
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


def record_us(num_rounds: int) -> float:
    """Return the CPU microseconds that recording adds to an empty step, in one process."""
    optimizer, loader = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0), DataLoader(range(2000), None)

    def epoch(run: Any) -> float:
        start = time.process_time()
        for _ in loader:
            optimizer.step()
            if run is not None:
                run.step(0.5)
        return (time.process_time() - start) / 2000

    without = [epoch(None) for _ in range(num_rounds)]  # first: once times are counted, they are until the job ends
    with tempfile.TemporaryDirectory() as folder, ddpshim.record(folder) as run:
        return 1e6 * (statistics.median(epoch(run) for _ in range(num_rounds)) - statistics.median(without))


# Python runs it before each rank's program: the recorder hands its methods to torch before the program starts.
AT_START = """
from ddpshim.process.after_import import after_import

def time_recorder():
    from evidence.certified_steps import time_recorder
    time_recorder()

after_import("ddpshim.tools.certificate.recording", time_recorder)
"""


def certified(name: str) -> dict[str, float]:
    """Run a program of one_process_programs.py under `run --certify`, and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        (Path(folder) / "sitecustomize.py").write_text(AT_START)
        command = [sys.executable, "-m", "ddpshim", "run", "--nproc", "2", "--certify", f"{folder}/run.json"]
        command += ["--certify-every", str(EVERY), "-m", "evidence.certified_steps", name, str(out)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        ran = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"{name}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}")
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def run(quick: bool) -> Iterator[Result]:
    got = run_ranks(step_ms, 2, 4 if quick else 60, timeout_s=900)[0]
    value, quartiles = ratio(got["to"], got["without"])
    note = f"{median_and_quartiles(got['without'])[0]:.0f} ms without"
    yield Result("costs", "a step with guards over one without", value, "x", quartiles, note=note)
    for what, ms in run_ranks(guards_own_ms, 2, timeout_s=300)[0].items():
        yield Result("costs", what, ms, "ms")
    yield Result("costs", "recording's own code in a step", record_us(4 if quick else 20), "us of CPU", at_most=50.0)
    for name in ("unet_16",) if quick else ("unet_16", "unet_64", "act"):
        found = certified(name)
        cost = found["recorder"] + found["thread"]
        note = f"a step {found['ms']:.0f} ms; recorder {found['recorder']:.2%}, its thread {found['thread']:.2%}"
        yield Result("costs", f"{name}, certified", cost, "of a step", at_most=MOST, note=note)


if __name__ == "__main__":
    main(run, __doc__)
