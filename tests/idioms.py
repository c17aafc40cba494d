"""Programs that are distributed correctly, in which `check --read` must find nothing, and ones with a marked hazard."""

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
# "=== NAME" begins an idiom, "--- PART" its text for that place of BASE; other places have the first idiom's text.
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
=== the number of ranks has another name
--- data
world = dist.get_world_size()
sampler = DistributedSampler(data, shuffle=True, drop_last=True)
loader = DataLoader(data, 64 // world, sampler=sampler, drop_last=True)
=== a loader that ddpshim splits
--- model
import ddpshim
model = ddpshim.wrap_parallel(network.to(device))
--- data
loader = ddpshim.make_loader(DataLoader(data, batch_size, shuffle=True))
--- epoch
=== the main rank saves by run_on_main
--- before
def write_last(path):
    torch.save(model.module.state_dict(), path)
start = 0
--- end
world.run_on_main(write_last, "last.pt")
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
=== accumulation in branches
--- loss
if (step + 1) % 4:
    with model.no_sync():
        partial = nn.functional.mse_loss(model(x.to(device)), y.to(device)) / 4
        partial.backward()
    continue
loss = nn.functional.mse_loss(model(x.to(device)), y.to(device)) / 4
=== accumulation in a function
--- before
def forward_backward(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss
--- loss
with model.no_sync():
    forward_backward(x.to(device), y.to(device))
loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
=== seeds far apart
--- device
device = torch.device("cuda", local_rank)
torch.manual_seed(int(os.environ["SEED"]) * world_size + rank)
=== seeds by node and local rank
--- device
device = torch.device("cuda", local_rank)
torch.manual_seed(7 + int(os.environ["GROUP_RANK"]) * 8 + local_rank)
=== bad losses are skipped by all
--- loss
loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
is_bad = (~torch.isfinite(loss.detach())).float()
dist.all_reduce(is_bad)
if is_bad.item() > 0:
    continue
=== a bad loss ends the job
--- loss
loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
if not torch.isfinite(loss):
    raise RuntimeError("the loss is not finite")
=== a number of steps
--- loss
if step >= 100:
    break
loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
=== logged now and then by one rank
--- after
if step % 100 or rank != 0:
    pass
else:
    print(step, loss.item())
=== the main rank's decision is sent
--- before
best, stop = float("inf"), torch.zeros(1, device=device)
--- end
if rank == 0:
    value = loss.item()
    if value > best:
        stop.fill_(1)
    best = min(best, value)
dist.broadcast(stop, src=0)
if stop.item():
    break
=== plateau of all ranks
--- before
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
--- end
total = loss.detach().clone()
dist.all_reduce(total)
plateau.step(total / world_size)
=== masked mean of all ranks
--- loss
keep = y != 0
error = (model(x.to(device)) - y.to(device)) ** 2
count = keep.sum()
dist.all_reduce(count)
loss = (error * keep).sum() * world_size / count
=== epoch through the loader
--- epoch
loader.sampler.set_epoch(epoch)
=== epoch where the sampler is known
--- epoch
if isinstance(loader.sampler, DistributedSampler):
    loader.sampler.set_epoch(epoch)
=== epochs in a while loop
--- before
at = 0
while at < 3:
    sampler.set_epoch(at)
    at += 1
--- epoch
sampler.set_epoch(epoch + at)
=== average by names of the bare network
--- before
import copy
average = copy.deepcopy(model.module)
--- end
with torch.no_grad():
    theirs = dict(model.module.named_parameters())
    for name, value in average.named_parameters():
        value.lerp_(theirs[name], 0.01)
    for a, b in zip(average.buffers(), model.module.buffers()):
        a.copy_(b)
=== all but the main rank wait
--- before
if rank != 0:
    dist.barrier()
os.makedirs("cache", exist_ok=True)
if rank == 0:
    dist.barrier()
"""

HAZARD_TEXT = """\
=== a loader that ddpshim does not split
--- model
import ddpshim
model = ddpshim.wrap_parallel(network.to(device))
--- data
loader = DataLoader(data, batch_size, shuffle=True)  # DDP204
--- epoch
=== epoch before the loop
--- data
sampler = DistributedSampler(data, shuffle=True)  # DDP203
loader = DataLoader(data, batch_size // world_size, sampler=sampler, drop_last=True)
sampler.set_epoch(0)
--- epoch
pass
=== epoch behind the end of a round
--- data
sampler = DistributedSampler(data, shuffle=True)  # DDP203
loader = DataLoader(data, batch_size // world_size, sampler=sampler, drop_last=True)
--- epoch
pass
--- end
continue
sampler.set_epoch(epoch)
=== epoch on one rank
--- data
sampler = DistributedSampler(data, shuffle=True)  # DDP203
loader = DataLoader(data, batch_size // world_size, sampler=sampler, drop_last=True)
--- epoch
if rank == 0:
    sampler.set_epoch(epoch)
=== epoch of the validation alone
--- data
sampler = DistributedSampler(data, shuffle=True)  # DDP203
loader = DataLoader(data, batch_size // world_size, sampler=sampler, drop_last=True)
val_sampler = DistributedSampler(data, shuffle=False)
--- epoch
val_sampler.set_epoch(epoch)
=== a count of its own
--- loss
valid = y != 0
error = (model(x.to(device)) - y.to(device)) ** 2
num = valid.sum().clamp(min=1)
loss = (error * valid).sum() / num  # DDP108
=== a mean over what is kept
--- loss
error = (model(x.to(device)) - y.to(device)) ** 2
loss = error[y != 0].mean()  # DDP108
=== a sum over tokens
--- loss
mask = y != 0
total = nn.functional.cross_entropy(model(x.to(device)), y.to(device), reduction="sum")
loss = total / mask.sum()  # DDP108
"""


def texts_in(text: str) -> dict[str, str]:
    """Return the text below each `=== NAME`, by name."""
    return dict(re.findall(r"^=== (.*)\n((?:(?!=== ).*\n)*)", text, re.MULTILINE))


def parts_in(text: str) -> dict[str, str]:
    """Return the text below each `--- PLACE`, by place."""
    return dict(re.findall(r"^--- ([\w.]+)\n((?:(?!--- ).*\n)*)", text, re.MULTILINE))


def _named(text: str) -> dict[str, dict[str, str]]:
    return {name: parts_in(of) for name, of in texts_in(text).items()}


IDIOMS, HAZARDS = _named(TEXT), _named(HAZARD_TEXT)


def program(name: str) -> str:
    """Return the program with an idiom or a hazard."""
    made = BASE
    for part, code in {**IDIOMS["as in torch's tutorial"], **{**IDIOMS, **HAZARDS}[name]}.items():
        indent = re.search(rf"^( *)\{{{part}\}}$", made, re.MULTILINE)
        assert indent is not None, part
        made = made.replace(indent[0], textwrap.indent(code.rstrip(), indent[1]))
    return made
