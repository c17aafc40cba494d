"""Resume on another number of ranks a training that was interrupted on two ranks, in the middle of an epoch.

    python examples/resume.py --demo                                          # starts these runs, and compares them
    python -m ddpshim run --nproc 2 examples/resume.py --out out/resume       # one run, which SIGTERM may end
    python -m ddpshim run --nproc 3 examples/resume.py --out out/resume       # makes the remaining steps

Expect of --demo: the interrupted run exits with code 75. Resumed on 1 rank and on 3 ranks it makes the remaining
steps, each with exactly the samples of an uninterrupted run, and ends with the same weights up to rounding.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim

BATCH_SIZE, NUM_EPOCHS = 24, 4  # a step has the same samples on 1, 2 and 3 ranks
NUM_STEPS = 960 // BATCH_SIZE


def train(out, stop_at):
    """Train, from the progress in `out` if there is any; at step `stop_at` the last rank gets a SIGTERM."""
    world = ddpshim.setup(seed=1)
    obs = torch.randn(960, 6, dtype=torch.float64)
    dataset = TensorDataset(torch.arange(960), obs, obs.sum(1, keepdim=True).sin())
    policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)).double().to(world.device)
    policy = ddpshim.wrap_parallel(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    loader = ddpshim.make_loader(dataset, batch_size=BATCH_SIZE, shuffle=True)

    training = ddpshim.Resumable(out / "progress", {"policy": policy, "optimizer": optimizer})
    training.restore()
    for epoch in range(training.epoch, NUM_EPOCHS):
        for index, obs, action in training.steps(loader, epoch):
            step = epoch * NUM_STEPS + training.step
            with open(out / f"samples_of_rank_{world.rank}.txt", "a") as file:  # only for the comparison
                print(step, *index.tolist(), file=file)
            if step == stop_at and world.rank == world.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = (policy(obs.to(world.device)) - action.to(world.device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss = world.mean(loss.item())
        if world.is_main:
            print(f"epoch {epoch}: loss {loss:.8f}", flush=True)
    if world.is_main:
        torch.save(policy.state_dict(), out / "policy.pth")
    training.finish()
    ddpshim.cleanup()


def demo(folder):
    """Start the runs, each in its own folder, and compare their files."""
    run(1, folder / "whole")
    code = run(2, folder / "left", "--stop-at", str(NUM_STEPS + 5))
    whole, left = samples(folder / "whole"), samples(folder / "left")
    epoch, step = divmod(len(left), NUM_STEPS)
    print(f"uninterrupted, on 1 rank: {len(whole)} steps")
    print(f"interrupted, on 2 ranks: left after {len(left)} steps (epoch {epoch}, step {step}) with exit code {code}")
    for num_ranks in (1, 3):
        # This runs in the process that starts the ranks, not in a rank.
        shutil.copytree(folder / "left", folder / f"on_{num_ranks}")
        run(num_ranks, folder / f"on_{num_ranks}")
        rest = samples(folder / f"on_{num_ranks}")
        same = sum(rest.get(step) == drawn for step, drawn in whole.items())
        weights = [torch.load(folder / name / "policy.pth").values() for name in ("whole", f"on_{num_ranks}")]
        off = max((a - b).abs().max().item() for a, b in zip(*weights))
        title = f"continued on {num_ranks} rank{'s' * (num_ranks > 1)}: {len(rest) - len(left)} steps"
        print(f"{title}; {same} of {len(whole)} had the same samples; largest difference of a weight {off:.0e}")


def run(num_ranks, out, *options):
    """Train on `num_ranks` ranks, and return the exit code."""
    out.mkdir(exist_ok=True)
    launch = [sys.executable, "-m", "ddpshim", "run", "--nproc", str(num_ranks), "--no-logs"]
    command = [*launch, __file__, "--out", str(out), *options]
    code = subprocess.run(command, timeout=120, stdout=subprocess.DEVNULL, check=False).returncode
    if code not in (0, 75):
        sys.exit(f"the training on {num_ranks} ranks ended with exit code {code}")
    return code


def samples(out):
    """Return the samples of all ranks by step."""
    by_step = {}
    for file in out.glob("samples_of_rank_*.txt"):
        for line in file.read_text().splitlines():
            step, *drawn = map(int, line.split())
            by_step.setdefault(step, []).extend(drawn)
    return {step: sorted(drawn) for step, drawn in by_step.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="start the runs and compare them")
    parser.add_argument("--out", type=Path, default=Path("out/resume"), help="for progress and the trained policy")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="have the last rank get a SIGTERM there")
    args = parser.parse_args()
    if args.demo:
        with tempfile.TemporaryDirectory() as folder:
            demo(Path(folder))
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        train(args.out, args.stop_at)
