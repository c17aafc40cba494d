"""Threads, the workers of a loader, and ranks."""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.one_process.hostile.parts import fit, program, trains
from tests.one_process.parts import data, loader, mlp
from tests.one_process.runner import Log, Trained


@program
def batches_moved_by_a_thread(log: Log) -> Trained:
    net, waiting = mlp(), queue.Queue(maxsize=2)

    def fetch() -> None:
        for x, y in loader(*data()):
            x.mul_(0.5)[0] += 1
            waiting.put((x.to(torch.get_default_dtype()) - x.mean(0), y.clone()))
        waiting.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    out = fit(log, net, iter(waiting.get, None))
    thread.join()
    return out


@trains()
def loss_in_a_thread(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    out, found = net(x), []
    thread = threading.Thread(
        target=lambda: found.extend([F.mse_loss(out, y), net(x.flip(0)).var(), out.detach().max().item()])
    )
    thread.start()
    thread.join()
    log(found[2])
    return found[0] + found[1]


class Drawing(Dataset):
    """Augments by draws of its own."""

    def __init__(self) -> None:
        self.x, self.y = data()
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        noise = torch.randn(6) + np.random.randn() + random.random()
        return {"x": self.x[i] + 0.1 * noise, "y": self.y[i], "name": f"{i:02}", "index": i, "epoch": (self.epoch, 0.5)}


@program
def loader_whose_samples_draw(log: Log) -> Trained:
    net, dataset = mlp(), Drawing()
    for epoch in range(2):
        dataset.epoch = epoch
        for batch in DataLoader(dataset, 16, shuffle=True):
            log(batch["name"], batch["index"], batch["epoch"][0][0], batch["epoch"][1].sum(), batch["x"].sum(0))
            fit(log, net, [(batch["x"], batch["y"])])
    return [net]


@program
def loader_with_workers(log: Log) -> Trained:
    net = mlp()
    for batch in DataLoader(Drawing(), 16, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1)):
        batch["x"][0] = 0
        log(batch["index"], batch["x"].sum(0))
        fit(log, net, [(batch["x"], batch["y"])])
    return [net]


@program
def asks_for_ranks(log: Log) -> Trained:
    log(*[k in os.environ for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")])
    log(torch.distributed.is_initialized(), torch.utils.data.get_worker_info() is None, sys.argv[0])
    seed = int(os.environ.get("RANK", 0)) + 5
    torch.manual_seed(seed)
    net = mlp()
    out = fit(log, net)
    log(torch.seed() is not None, len(threading.enumerate()) > 0)
    torch.manual_seed(seed)
    return out


class _Negatives(Dataset):
    """Fetches whole batches, and gives each sample the target of the next one of its batch."""

    def __init__(self) -> None:
        self.x, self.y = data()

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [*zip(self.x[indices], self.y[indices].roll(1, 0))]


class _DrawnAtOnce:
    """A batch sampler that draws when it is asked for an iterator."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(42).reshape(-1, 7).tolist())

    def __len__(self) -> int:
        return 6


@program
def batches_that_combine_samples(log: Log) -> Trained:
    net = nn.Sequential(mlp(), nn.Dropout(0.2))
    for workers in (0, 2):
        fit(log, net, DataLoader(_Negatives(), batch_sampler=_DrawnAtOnce(), num_workers=workers), lr=0.02)
    return [net]
