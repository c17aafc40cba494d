"""Training programs for one process, as users write them; one_process.py runs them on ranks.

`python evidence/one_process_programs.py NAME NUM_BLOCKS OUT` runs a block of steps to warm up, then NUM_BLOCKS
measured ones, and writes OUT: {"ms": milliseconds of a step in each block, "cpu_ms": the CPU time of all its threads,
"main_ms": that of the main thread, "loss": the last loss, and, by `run`, what a step needed}. Started by torchrun with
DDP_BY_HAND=1, it is what people write instead: torch's DDP, a DistributedSampler and a synced BatchNorm, at the same
global batch.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

BY_HAND = "DDP_BY_HAND" in os.environ
WIDTHS = (64, 128, 256)
NUM_BATCHES = 100  # of an epoch, at whose end ranks compare weights
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class SyncedByHand(nn.BatchNorm2d):
    """BatchNorm over all ranks as one writes it for CPUs, where torch's SyncBatchNorm does not run."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        of_rank = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        mean, square = all_reduce(of_rank) / dist.get_world_size()
        variance, num = square - mean.square(), x.numel() // x.shape[1] * dist.get_world_size()
        with torch.no_grad():
            for statistic, value in ((self.running_mean, mean), (self.running_var, variance * (num / (num - 1)))):
                statistic.lerp_(value, self.momentum)  # type: ignore[union-attr, arg-type]
        scale = self.weight * (variance + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def with_ddp(net: nn.Module, syncs_batchnorm: bool = True) -> nn.Module:
    """Return torch's DDP of a network, whose BatchNorm is synced by hand."""
    for module in net.modules():
        if syncs_batchnorm and type(module) is nn.BatchNorm2d:
            module.__class__ = SyncedByHand
    return nn.parallel.DistributedDataParallel(net)


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(num_in, num_out, 5, padding=2), nn.GroupNorm(8, num_out), nn.Mish())
        self.second = nn.Sequential(nn.Conv1d(num_out, num_out, 5, padding=2), nn.GroupNorm(8, num_out), nn.Mish())
        self.condition, self.skip = nn.Sequential(nn.Mish(), nn.Linear(96, 2 * num_out)), nn.Conv1d(num_in, num_out, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, bias = self.condition(condition).unsqueeze(-1).chunk(2, dim=1)
        return self.second(scale * self.first(x) + bias) + self.skip(x)


class UNet(nn.Module):
    """Predicts the noise in actions (B, 16, 7) at timesteps (B,), given observations (B, 20)."""

    def __init__(self, block: Callable[[int, int], nn.Module] = Block) -> None:
        super().__init__()
        self.observation = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 64))
        self.timestep, widths = nn.Embedding(100, 32), (7, *WIDTHS)
        self.down = nn.ModuleList(block(a, b) for a, b in zip(widths, WIDTHS))
        self.middle = block(WIDTHS[-1], WIDTHS[-1])
        self.up = nn.ModuleList(block(a + b, b) for a, b in zip((WIDTHS[-1], *WIDTHS[:0:-1]), WIDTHS[::-1]))
        self.last = nn.Conv1d(WIDTHS[0], 7, 1)

    def forward(self, actions: Tensor, timestep: Tensor, observation: Tensor) -> Tensor:
        condition = torch.cat([self.timestep(timestep), self.observation(observation)], 1)
        y, skipped = actions.transpose(1, 2), []
        for block in self.down:
            skipped.append(y := block(y, condition))
        y = self.middle(y, condition)
        for block in self.up:
            y = block(torch.cat([y, skipped.pop()], 1), condition)
        return self.last(y).transpose(1, 2)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _batches(data: Dataset[Any], batch_size: int, num_workers: int = 0) -> Iterator[Any]:
    if BY_HAND:
        size, sampler = batch_size // dist.get_world_size(), DistributedSampler(data)
        return endless(DataLoader(data, size, sampler=sampler, num_workers=num_workers))
    return endless(DataLoader(data, batch_size, shuffle=True, num_workers=num_workers))


def _placed(net: nn.Module) -> Any:
    return with_ddp(net.to(DEVICE)) if BY_HAND else net.to(DEVICE)


def unet(batch_size: int) -> Callable[[], float]:
    net = _placed(UNet())
    ema = copy.deepcopy(net.module if BY_HAND else net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=1e-6)
    data = TensorDataset(torch.randn(NUM_BATCHES * batch_size, 20), torch.randn(NUM_BATCHES * batch_size, 16, 7))
    batches = _batches(data, batch_size)

    def step() -> float:
        observation, actions = (part.to(DEVICE) for part in next(batches))
        noise, timestep = torch.randn_like(actions), torch.randint(0, 100, (len(actions),), device=DEVICE)
        kept = 1 - timestep[:, None, None] / 100
        loss = F.mse_loss(net(kept * actions + (1 - kept) * noise, timestep, observation), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), net.parameters()):
                average.lerp_(weight, 0.01)
        return loss.item()

    return step


class ACT(nn.Module):
    """Predicts chunks of actions (B, 20, 7) from two images (B, 2, 3, 96, 96) and a latent of the actions."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.images = nn.Sequential(
            *(nn.Conv2d(3, 32, 7, 4, 3), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Conv2d(64, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()),
        )
        self.latent, self.joints = nn.Linear(7 * 20, 2 * 32), nn.Linear(14, width)
        self.of_latent, self.places = nn.Linear(32, width), nn.Parameter(0.02 * torch.randn(74, 1, width))
        self.transformer = nn.Transformer(width, 6, 3, 3, 512, 0.1)
        self.queries, self.head = nn.Parameter(0.02 * torch.randn(20, 1, width)), nn.Linear(width, 7)

    def forward(self, joints: Tensor, images: Tensor, actions: Tensor) -> Any:
        num = joints.shape[0]
        mean, log_variance = self.latent(actions.flatten(1)).chunk(2, 1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        seen = self.images(images.flatten(0, 1)).flatten(2).unflatten(0, (num, 2)).permute(1, 3, 0, 2).flatten(0, 1)
        tokens = torch.cat([self.of_latent(z)[None], self.joints(joints)[None], seen]) + self.places
        out = self.transformer(tokens, self.queries.expand(-1, num, -1)).transpose(0, 1)
        return self.head(out), mean, log_variance


def act(batch_size: int = 16) -> Callable[[], float]:
    net = _placed(ACT())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    num = NUM_BATCHES * batch_size
    tensors = (
        torch.randn(num, 14),
        torch.randint(0, 256, (num, 2, 3, 96, 96), dtype=torch.uint8),
        torch.randn(num, 20, 7),
    )
    batches = _batches(TensorDataset(*tensors, torch.rand(num, 20) < 0.2), batch_size)

    def step() -> float:
        joints, images, actions, is_pad = (part.to(DEVICE) for part in next(batches))
        predicted, mean, log_variance = net(joints, images / 255.0, actions)
        l1 = (F.l1_loss(actions, predicted, reduction="none") * ~is_pad.unsqueeze(-1)).mean()
        kl = (-0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp())).sum(-1).mean()
        loss = l1 + 10 * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def resnet(batch_size: int = 16) -> Callable[[], float]:
    """robomimic's image encoder, and a head."""
    from robomimic.models.base_nets import ResNet18Conv, SpatialSoftmax

    conv = ResNet18Conv(input_channel=3, pretrained=False)
    points = SpatialSoftmax(conv.output_shape([3, 84, 84]), num_kp=32)
    net = _placed(nn.Sequential(conv, points, nn.Flatten(), nn.Linear(64, 7)))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    tensors = (
        torch.randint(0, 256, (NUM_BATCHES * batch_size, 84, 84, 3), dtype=torch.uint8),
        torch.randn(NUM_BATCHES * batch_size, 7),
    )
    batches = _batches(TensorDataset(*tensors), batch_size)

    def step() -> float:
        images, actions = (part.to(DEVICE) for part in next(batches))
        loss = F.mse_loss(net(images.permute(0, 3, 1, 2).float() / 255.0), actions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


class GPT(nn.Module):
    """Predicts the next of 65 characters from (B, T) of them; without dropout."""

    def __init__(self, width: int = 192, length: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(65, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(width, 65)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Any:
        seen = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.layers(seen, self.mask, is_causal=True))


def gpt(batch_size: int = 64) -> Callable[[], float]:
    net = _placed(GPT())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    batches = _batches(TensorDataset(torch.randint(0, 65, (NUM_BATCHES * batch_size, 65))), batch_size)

    def step() -> float:
        (tokens,) = (part.to(DEVICE) for part in next(batches))
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


class Crops(Dataset[Any]):
    """Images that are flipped and cropped at random places, with jittered colours, and their actions."""

    def __init__(self, num: int) -> None:
        self.images, self.actions = torch.randint(0, 256, (num, 3, 96, 96), dtype=torch.uint8), torch.randn(num, 7)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        top, left = torch.randint(0, 13, (2,)).tolist()
        image = self.images[index][:, top : top + 84, left : left + 84].float() / 255.0
        image = image.flip(-1) if torch.rand(()) < 0.5 else image
        return image * (0.8 + 0.4 * torch.rand(3, 1, 1)), self.actions[index]


def augmented(batch_size: int = 32) -> Callable[[], float]:
    """Four convolutions on augmented images, and two data workers."""
    kept = (nn.Conv2d(3, 32, 7, 2, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1))
    net = _placed(nn.Sequential(*kept, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 7)))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    batches = _batches(Crops(NUM_BATCHES * batch_size), batch_size, num_workers=2)

    def step() -> float:
        images, actions = (part.to(DEVICE) for part in next(batches))
        loss = F.mse_loss(net(images), actions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


_UNETS = {1: 20, 16: 20, 64: 10, 256: 5}  # steps of a block, by batch


PROGRAMS: dict[str, tuple[Callable[[], Callable[[], float]], int]] = {  # and the steps of a block
    **{f"unet_{batch}": (functools.partial(unet, batch), steps) for batch, steps in _UNETS.items()},
    "act": (act, 6),
    "resnet": (resnet, 4),
    "gpt": (gpt, 4),
    "augmented": (augmented, 12),
}


def needed(step: Callable[[], float]) -> dict[str, float]:
    """Return what a step on ranks needs: operations on rows, gathers and their bytes, messages of all kinds."""
    counts = sys.modules["ddpshim.rows.tensor"].Counts
    of_job = sys.modules["ddpshim.process.job"].current().part(counts)

    def counted() -> tuple[int, ...]:
        return of_job.on_rows, sum(of_job.gathered.values()), sum(of_job.num_bytes.values())

    before = counted()
    with torch.profiler.profile() as seen:
        step()
    found = dict(zip(("operations", "gathers", "bytes"), (float(b - a) for a, b in zip(before, counted()))))
    return {**found, "messages": float(sum(event.name.startswith("gloo:") for event in seen.events()))}


def main(name: str, num_blocks: int, out: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if BY_HAND:
        dist.init_process_group("gloo")
    make, num_steps = PROGRAMS[name]
    num_steps *= 10 if DEVICE.type == "cuda" else 1  # a step is short there
    clocks: dict[str, Callable[[], float]] = {
        "ms": time.perf_counter,
        "cpu_ms": time.process_time,
        "main_ms": time.thread_time,
    }
    step, loss = make(), 0.0
    found: dict[str, Any] = {clock: [] for clock in clocks}
    for _ in range(num_blocks + 1):
        starts = {clock: read() for clock, read in clocks.items()}
        for _ in range(num_steps):
            loss = step()
        for clock, read in clocks.items():
            found[clock].append(1000 * (read() - starts[clock]) / num_steps)
    found = {**{clock: times[1:] for clock, times in found.items()}, "loss": loss}
    if "ddpshim.rows.tensor" in sys.modules:
        found.update(needed(step))
    if not BY_HAND or dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
