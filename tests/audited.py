"""A trainer in raw torch DDP, as in torch's tutorial, with the mistakes that the command line names.

Written without ddpshim: `python -m ddpshim audit` must find each mistake from outside. Arguments: a folder to write to,
and mistakes.
"""

import copy
import os
import shutil
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

FOLDER, *MISTAKES = sys.argv[1:]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EPOCHS = 2


def has(mistake: str) -> bool:
    return mistake in MISTAKES


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Stream(IterableDataset):
    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


def loader_and_sampler(data: Dataset):
    if has("iterable unsharded"):
        return DataLoader(Stream(data), batch_size=4), None
    if has("own shuffle"):
        return DataLoader(data, batch_size=4, shuffle=True), None
    if has("all data"):
        return DataLoader(data, batch_size=4), None
    if has("uneven share"):
        data = Subset(data, range(RANK, len(data) - 9 * RANK, WORLD_SIZE))
        return DataLoader(data, batch_size=4, shuffle=True), None
    sampler = DistributedSampler(data)
    return DataLoader(data, batch_size=4, sampler=sampler), sampler


def files_of_all_ranks(policy: nn.Module) -> None:
    torch.save(policy.state_dict(), os.path.join(FOLDER, "all.pth"))
    with open(os.path.join(FOLDER, "log.txt"), "a") as log:
        log.write("a line\n")
    shutil.rmtree(os.path.join(FOLDER, "old"), ignore_errors=True)


def train() -> None:
    if not has("no group"):
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(47, 8)
    data, valid = TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(x[:10], x[:10].sum(1, keepdim=True))
    policy = Policy()
    ema = copy.deepcopy(policy) if RANK == 0 else None
    is_bare = has("no group") or has("not wrapped")
    model = policy if is_bare else DistributedDataParallel(policy)
    if has("own weights") and RANK == 1:
        nn.init.ones_(policy.head.bias)  # without drawing random numbers
    if not has("one seed"):
        torch.manual_seed(1000 + RANK)
    of_another = copy.deepcopy(policy) if has("late network") else model
    optimizer = torch.optim.Adam(of_another.parameters(), lr=1e-3 * (1 + RANK * has("own rate")))
    loader, sampler = loader_and_sampler(data)
    os.makedirs(os.path.join(FOLDER, "out"), exist_ok=True)
    for epoch in range(EPOCHS):
        if sampler is not None and not has("no set_epoch"):
            sampler.set_epoch(epoch)
        policy.train()
        for i, (obs, action) in enumerate(loader):
            net = model.module if has("through module") else model
            if i % 2 == 0 and not is_bare:  # every second batch makes a step
                with model.no_sync():
                    nn.functional.mse_loss(net(obs), action).backward()
                continue
            loss = nn.functional.mse_loss(net(obs), action)
            if has("swallows") and RANK == 1 and i == 5:
                raise ValueError("a bad batch")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item()!r}", flush=True)
            if ema is not None:
                for mean, p in zip(ema.parameters(), policy.parameters()):
                    mean.data.lerp_(p.data, 0.1)
        if RANK == 0:  # validation and checkpoint
            policy.eval()
            for obs, action in DataLoader(valid, batch_size=5):
                nn.functional.mse_loss(policy(obs), action)
            torch.save(policy.state_dict(), os.path.join(FOLDER, "out", "policy.pth"))
        if has("files of all"):
            files_of_all_ranks(policy)
        if not has("no group"):
            dist.barrier()
    del model, of_another, net  # before the group: torch may hang if DDP holds the last reference to it
    if not has("no group"):
        dist.destroy_process_group()


if __name__ == "__main__":
    if has("swallows"):
        try:
            train()
        except ValueError as error:
            print("failed:", error)
    else:
        train()
