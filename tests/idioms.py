"""Programs that are distributed correctly, in the ways that torch's tutorials and users have; the doctor is silent."""

from __future__ import annotations

import re
import textwrap

BASE = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main(network, data, batch_size):
    dist.init_process_group("nccl")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    {device}
    {model}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    {data}
    {before}
    for epoch in range(10):
        {epoch}
        for step, (x, y) in enumerate(loader):
            {loss}
            optimizer.zero_grad()
            loss.backward()
            {after}
            optimizer.step()
        {end}
    dist.destroy_process_group()
"""
# "=== NAME" begins an idiom, "--- PART" what it has in that place of BASE; else there is what the first one has.
TEXT = """\
=== as in torch's tutorial
--- device
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
--- model
model = DDP(network.to(device), device_ids=[local_rank])
--- data
sampler = DistributedSampler(data, shuffle=True, drop_last=True)
loader = DataLoader(data, batch_size // world_size, sampler=sampler, drop_last=True)
--- before
start = 0
--- epoch
sampler.set_epoch(epoch)
--- loss
loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
--- after
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
--- end
if rank == 0:
    torch.save(model.module.state_dict(), "last.pt")
=== device by index
--- device
device = torch.device("cuda", local_rank)
=== device by f-string
--- device
device = torch.device(f"cuda:{local_rank}")
=== device by format
--- device
device = torch.device("cuda:{}".format(local_rank))
=== current_device
--- device
torch.cuda.set_device(local_rank)
device = torch.cuda.current_device()
=== device is a number
--- device
device = local_rank
=== CPU without a GPU
--- device
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
=== rank modulo GPUs
--- device
device = rank % torch.cuda.device_count()
=== cuda() after set_device
--- device
torch.cuda.set_device(local_rank)
device = "cuda"
--- model
model = DDP(network.cuda(), device_ids=[local_rank])
=== synced BatchNorm
--- model
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(network).to(device), device_ids=[local_rank])
=== accumulation
--- loss
import contextlib
with model.no_sync() if (step + 1) % 4 else contextlib.nullcontext():
    loss = nn.functional.mse_loss(model(x.to(device)), y.to(device)) / 4
=== seeds that differ
--- device
device = torch.device("cuda", local_rank)
torch.manual_seed(1000 * 7 + rank)
=== barrier of all
--- end
if rank == 0:
    torch.save(model.module.state_dict(), "last.pt")
dist.barrier()
=== logged mean
--- end
total = loss.detach().clone()
dist.all_reduce(total)
if rank == 0:
    print(epoch, total.item() / world_size)
=== workers
--- data
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=batch_size // world_size, sampler=sampler, num_workers=4, pin_memory=True)
=== resume on the device
--- before
state = torch.load("last.pt", map_location=device)
model.module.load_state_dict(state)
=== resume by a map
--- before
state = torch.load("last.pt", map_location={"cuda:0": f"cuda:{local_rank}"})
model.module.load_state_dict(state)
=== resume on the CPU
--- before
state = torch.load("last.pt", map_location="cpu")
model.module.load_state_dict(state)
=== folder that may be there
--- before
os.makedirs("out", exist_ok=True)
=== one writer
--- before
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("out") if rank == 0 else None
--- end
if rank == 0:
    writer.add_scalar("loss", loss.item(), epoch)
=== best of all ranks
--- before
best = float("inf")
--- end
total = loss.detach().clone()
dist.all_reduce(total, op=dist.ReduceOp.AVG)
if total.item() < best:
    best = total.item()
    if rank == 0:
        torch.save(model.module.state_dict(), "best.pt")
=== early stop of all
--- end
stop = torch.tensor([float(loss < 0.1)], device=device)
dist.all_reduce(stop)
if stop.item() > 0:
    break
=== validation on one rank
--- end
if rank == 0:
    model.module.eval()
    with torch.no_grad():
        print(model.module(x.to(device)).mean())
    model.module.train()
dist.barrier()
=== average of weights
--- before
import copy
ema = copy.deepcopy(model.module).eval()
--- after
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
--- end
with torch.no_grad():
    for a, b in zip(ema.parameters(), model.module.parameters()):
        a.lerp_(b, 0.01)
=== autocast
--- before
scaler = torch.cuda.amp.GradScaler()
--- loss
with torch.autocast("cuda"):
    loss = nn.functional.mse_loss(model(x.to(device, non_blocking=True)), y.to(device))
=== first rank prepares
--- before
if rank == 0:
    os.makedirs("cache", exist_ok=True)
dist.barrier()
=== compiled
--- model
model = torch.compile(DDP(network.to(device), device_ids=[local_rank]))
--- end
if rank == 0:
    torch.save(network.state_dict(), "last.pt")
=== schedule
--- before
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
--- end
schedule.step()
"""


def texts_in(text: str) -> dict[str, str]:
    """What stands below each `=== NAME`, by the name."""
    return dict(re.findall(r"^=== (.*)\n((?:(?!=== ).*\n)*)", text, re.MULTILINE))


def parts_in(text: str) -> dict[str, str]:
    """What stands below each `--- PLACE`, by the place."""
    return dict(re.findall(r"^--- ([\w.]+)\n((?:(?!--- ).*\n)*)", text, re.MULTILINE))


IDIOMS = {name: parts_in(text) for name, text in texts_in(TEXT).items()}


def program(name: str) -> str:
    """The program with that idiom."""
    made = BASE
    for part, code in {**IDIOMS["as in torch's tutorial"], **IDIOMS[name]}.items():
        indent = re.search(rf"^( *)\{{{part}\}}$", made, re.MULTILINE)
        assert indent is not None, part
        made = made.replace(indent[0], textwrap.indent(code.rstrip(), indent[1]))
    return made
