"""A trainer for one process, as users write it: `python trainer.py OUT [options]`. It knows nothing of ranks.

BatchNorm, dropout, augmentation in data workers, noise in the loss; 53 samples, which batches of 16 and 7 do not
divide. OUT gets steps.jsonl (samples, draws and loss of each step), log.csv, runs.db and last.pth.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):  # type: ignore[type-arg]
    """Sample i, with noise of the workers."""

    def __init__(self, fails: str) -> None:
        self.x, self.fails = torch.randn(53, 6), fails

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if self.fails == "dataset" and i == 13:
            raise ValueError("sample 13 is broken")
        return self.x[i] * (1 + 0.1 * torch.rand(())) + 0.01 * random.random() + 0.01 * np.random.rand(), i


RANK = os.environ.get("DDPSHIM_RANK", os.environ.get("RANK"))  # the first where `run` hides that there are ranks


def fail(how: str, step: int) -> None:
    """Do on rank 1, after three steps, what ends a job."""
    if step == 3 and RANK == "1":
        if how == "raises":
            raise ArithmeticError("the loss is no number")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        if how == "leaves":
            os._exit(0)
        if how == "hangs":
            time.sleep(3600)


def main(door: Any = None) -> None:
    """Train. `door`: what by_calls.py puts in the place of torch's loader and of plain modules."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--ordered", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--how", default="", help="some of clipped, accumulated, by_momentum, with_critic")
    parser.add_argument("--fail", default="")
    parser.add_argument("--stop-at", type=int, default=-1)
    args = parser.parse_args()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    torch.set_default_dtype(torch.float64)
    net: Any = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    critic: Any = nn.Linear(6, 1)
    data = Windows(args.fail)
    settings = {"batch_size": args.batch, "shuffle": not args.ordered, "drop_last": args.drop_last}
    settings["num_workers"] = args.workers
    if door:
        net, critic = door.wrap_parallel(net), door.wrap_parallel(critic)
    loader = (door.make_loader if door else DataLoader)(data, **settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9 * ("by_momentum" in args.how))
    second = torch.optim.Adam(critic.parameters(), lr=args.lr)
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    training = door.training(out / "progress", {"net": net, "optimizer": optimizer}) if door else None
    rank = door.rank if door else ""
    number, average = 0, 0.0
    with (
        open(out / f"steps{rank}.jsonl", "a", buffering=1) as steps,
        open(out / f"log{rank}.csv", "a", newline="") as log,
        sqlite3.connect(out / f"runs{rank}.db") as runs,
    ):
        rows = csv.writer(log)
        runs.execute("create table if not exists losses (epoch integer, loss real)")
        for epoch in range(training.epoch if training else 0, args.epochs):
            for x, i in training.steps(loader, epoch) if training else loader:
                number += 1
                fail(args.fail, number)
                if number == args.stop_at and RANK == "1":
                    os.kill(os.getpid(), signal.SIGTERM)
                drawn = [torch.randn(()).item(), random.random(), np.random.rand()]
                noise = torch.randn_like(x)
                loss = (net(x + 0.1 * noise) - x.sum(1, keepdim=True).sin()).square().mean()
                if "with_critic" in args.how:
                    second.zero_grad()
                    (critic(x) - x.sum(1, keepdim=True)).square().mean().backward()
                    second.step()
                loss.backward()
                if "clipped" in args.how:  # but for one tensor, or no weight would depend on the size of gradients
                    nn.utils.clip_grad_norm_([*net.parameters()][1:], 0.1)
                if "accumulated" not in args.how or number % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                average = loss.item()
                steps.write(json.dumps({"samples": i.tolist(), "noise": noise.tolist(), "drawn": drawn, "x": x.tolist(),
                                        "loss": average}) + "\n")  # fmt: skip
            rows.writerow([epoch, average])
            runs.execute("insert into losses values (?, ?)", (epoch, average))
            print(f"epoch {epoch}: {average:.6f}", flush=True)
            if not rank or rank == "0":
                torch.save({"net": net.state_dict(), "critic": critic.state_dict()}, out / "last.pth")
    if training:
        training.finish()


if __name__ == "__main__":
    main()
