"""Threads, the workers of a loader, and ranks."""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
