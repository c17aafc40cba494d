"""A trainer of a usual port by hand: raw DistributedDataParallel, an average of weights, clipping, a schedule.

Its arguments are mistakes, each of which only shows on several ranks. Written without ddpshim.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MISTAKES = sys.argv[1:] if WORLD_SIZE > 1 else []


def has(mistake: str) -> bool:
    return mistake in MISTAKES


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(32, 2)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        if self.training and has("stale buffer"):
            self.seen.lerp_(x.mean(0), 0.1)
        return self.head(self.body(x + 0.1 * torch.randn_like(x)))  # equal noise


def train() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, x[:, :2].sin())
    policy = Policy()
    average = copy.deepcopy(policy)
    policy.head.weight.requires_grad_(not has("unfrozen later"))
    model = DistributedDataParallel(policy, broadcast_buffers=not has("stale buffer"))
    policy.head.weight.requires_grad_(True)
    if has("own weights") and RANK == 1:
        nn.init.ones_(policy.head.bias)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3 * (1 + RANK * has("own rate")))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    limit = 0.01 if "clipped before" in sys.argv else 1e9
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24 // (1 if has("whole batches") else WORLD_SIZE), sampler=sampler)
    if not has("equal noise"):
        torch.manual_seed(1000 + RANK)
    for epoch in range(4):
        sampler.set_epoch(epoch + (epoch > 0) * has("off by one"))
        for x, y in loader:  # off by one, whole batches
            optimizer.zero_grad()
            net = model.module if has("past the wrapper") or has("clipped before") else model
            loss = (net(x) - y).square().mean()
            if has("scaled loss"):
                loss = loss / WORLD_SIZE
            if has("clipped before"):
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), limit)
                for p in policy.parameters():
                    dist.all_reduce(p.grad, dist.ReduceOp.SUM)
                    p.grad /= WORLD_SIZE
            else:
                loss.backward()  # scaled loss, own weights
                if has("summed"):
                    for p in policy.parameters():
                        p.grad *= WORLD_SIZE
                nn.utils.clip_grad_norm_(policy.parameters(), limit)
            optimizer.step()  # past the wrapper, clipped before, summed, own rate, schedule of each
            schedule.step()
            if has("schedule of each"):
                schedule.step()
            for mean, p in zip(average.parameters(), policy.parameters()):
                if not has("frozen average"):
                    mean.data.lerp_(p.data, 0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
