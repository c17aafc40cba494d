"""Kills one of two ranks repeatedly; measures the time to the next step, and compares the final weights.

Run it: python -m evidence.restarts --kills 50

`python -m ddpshim run --max-restarts` trains a small policy with dropout, which saves its progress every 20 steps.
After a random number of steps a random rank gets SIGKILL. At the end the weights must equal those of an uninterrupted
run, to the last bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS, STEP_S, SAVE_EVERY, DEADLINE_S = 40, 0.01, 20, 120.0


def train(folder: Path) -> None:
    """Run as a rank: record the time of each step, and save the weights at the end."""
    import ddpshim

    world = ddpshim.setup(seed=0)
    policy = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    wrapped, data = ddpshim.wrap_parallel(policy), TensorDataset(torch.randn(400, 16))
    loader = ddpshim.make_loader(data, batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(wrapped.parameters(), 1e-3)
    progress = ddpshim.Resumable(
        folder / "progress", {"net": wrapped, "optimizer": optimizer}, every_n_steps=SAVE_EVERY
    )
    progress.restore()
    with open(folder / f"steps_{world.rank}", "a", buffering=1) as file:
        for epoch in range(progress.epoch, EPOCHS):
            for (x,) in progress.steps(loader, epoch):
                optimizer.zero_grad()
                wrapped(x).pow(2).mean().backward()
                optimizer.step()
                time.sleep(STEP_S)
                file.write(f"{os.getpid()} {time.time()}\n")
    progress.finish()
    if world.is_main:
        torch.save(policy.state_dict(), folder / "policy.pth")
    ddpshim.cleanup()


def steps_of(folder: Path, rank: int) -> list[tuple[int, float]]:
    """Return the process id and the time of each step so far."""
    path = folder / f"steps_{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), float(moment)) for pid, moment in (line.split() for line in lines if line.count(" "))]


def run(folder: Path, num_kills: int) -> list[float]:
    """Train with `num_kills` kills; return the seconds from each kill to the main rank's next step."""
    folder.mkdir()
    command = [sys.executable, "-m", "ddpshim", "run", "--nproc", "2", "--max-restarts", str(num_kills), "--no-logs"]
    draw, seconds = Random(0), list[float]()
    with subprocess.Popen([*command, "-m", "evidence.restarts", "--folder", str(folder)]) as job:
        while len(seconds) < num_kills:
            wanted, victim = len(steps_of(folder, 0)) + draw.randint(5, 40), draw.randint(0, 1)
            _wait_until(job, lambda n=wanted, v=victim: len(steps_of(folder, 0)) >= n and bool(steps_of(folder, v)))
            pid, _ = steps_of(folder, victim)[-1]
            os.kill(pid, signal.SIGKILL)
            killed, before = time.time(), steps_of(folder, 0)[-1][0]
            _wait_until(job, lambda b=before: steps_of(folder, 0)[-1][0] != b)
            seconds.append(
                next(moment for other, moment in steps_of(folder, 0) if moment > killed and other != before) - killed
            )
    if job.returncode:
        sys.exit(f"the job ended with exit code {job.returncode}")
    return seconds


def _wait_until(job: subprocess.Popen[bytes], is_so: object) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_so():  # type: ignore[operator]
        if job.poll() is not None or time.monotonic() > end:
            job.terminate()
            sys.exit("the job makes no step")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    if args.folder is not None:
        train(args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        seconds = run(Path(folder, "killed"), args.kills)
        run(Path(folder, "whole"), 0)
        ended, whole = (torch.load(Path(folder, name, "policy.pth")) for name in ("killed", "whole"))
    first, *others = seconds
    spread = (
        f", later {min(others):.1f} to {max(others):.1f} s (median {statistics.median(others):.1f} s)" if others else ""
    )
    print(f"{len(seconds)} kills: to the next step {first:.1f} s at first{spread}")
    is_same = all(torch.equal(ended[name], whole[name]) for name in whole)
    print(f"weights of the run that nobody killed: {'equal to the last bit' if is_same else 'OTHERS'}")
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
