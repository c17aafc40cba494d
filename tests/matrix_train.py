"""Trains a few steps with exact numbers: `python tests/matrix_train.py FOLDER`, with any launcher.

Data, weights and the learning rate are chosen so that float64 rounds no sum: the result is equal, bit for bit, on any
number of ranks. Each rank writes its samples and results to FOLDER/rank_N.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim


def main() -> None:
    world = ddpshim.setup(seed=0, device="cpu", timeout_s=60)
    numbers = torch.arange(32, dtype=torch.float64)
    obs = torch.stack([numbers % 2, numbers % 3 - 1, numbers % 5 - 2], 1)
    dataset = TensorDataset(numbers, obs, obs @ torch.tensor([[2.0], [-1.0], [1.0]], dtype=torch.float64))
    policy = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        policy.weight.zero_()
    policy = ddpshim.wrap_parallel(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1 / 8)
    seen = []
    for number, x, y in ddpshim.make_loader(dataset, batch_size=16, shuffle=False):
        loss = (policy(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += number.int().tolist()
    report = {
        "rank": world.rank,
        "local_rank": world.local_rank,
        "world_size": world.world_size,
        "node_rank": world.node_rank,
        "launcher": world.launcher,
        "seen": seen,
        "loss": world.mean(loss.item()),
        "weight": [value.hex() for value in policy.weight.flatten().tolist()],
    }
    Path(sys.argv[1], f"rank_{world.rank}.json").write_text(json.dumps(report))
    world.barrier()
    ddpshim.cleanup()


if __name__ == "__main__":
    main()
