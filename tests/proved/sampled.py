"""A trainer whose samples are drawn by weight, plainly and on ranks. Its argument is a mistake on ranks alone."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
MISTAKES = sys.argv[1:] if WORLD_SIZE > 1 else []
BATCH = 24


class Share:
    """Every W-th sample of those that one process draws."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(list(self.sampler)[RANK::WORLD_SIZE])

    def __len__(self):
        return len(self.sampler) // WORLD_SIZE


def train() -> None:
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, x[:, :2].cos())
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DistributedDataParallel(net) if WORLD_SIZE > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(5 + RANK * ("own seed" in MISTAKES))
    sampler = WeightedRandomSampler(torch.arange(1.0, 97.0), 480, generator=drawn)
    if "weights lost" in MISTAKES:
        sampler = DistributedSampler(data)
    elif WORLD_SIZE > 1 and "not divided" not in MISTAKES:
        sampler = Share(sampler)
    size = BATCH if "not divided" in MISTAKES else BATCH // WORLD_SIZE
    for obs, action in DataLoader(data, batch_size=size, sampler=sampler):  # weights lost, not divided, own seed
        optimizer.zero_grad()
        (model(obs) - action).square().mean().backward()
        optimizer.step()
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
