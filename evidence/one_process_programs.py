"""Training programs for one process, as users write them; one_process.py runs them on ranks.

`python evidence/one_process_programs.py NAME NUM_BLOCKS OUT` runs a block of steps to warm up, then NUM_BLOCKS
measured ones, and writes OUT: {"ms": milliseconds of a step in each block, "cpu_ms": those in which the main thread
computed, "loss": the last loss, and, on ranks, what a step needed}.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTHS = (64, 128, 256)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


def unet(batch_size: int) -> Callable[[], float]:
    net = UNet().to(DEVICE)
    ema, optimizer = copy.deepcopy(net), torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=1e-6)
    data = TensorDataset(torch.randn(4 * batch_size, 20), torch.randn(4 * batch_size, 16, 7))
    batches = endless(DataLoader(data, batch_size, shuffle=True))

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
    net = ACT().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    num = 4 * batch_size
    tensors = (
        torch.randn(num, 14),
        torch.randint(0, 256, (num, 2, 3, 96, 96), dtype=torch.uint8),
        torch.randn(num, 20, 7),
    )
    batches = endless(DataLoader(TensorDataset(*tensors, torch.rand(num, 20) < 0.2), batch_size, shuffle=True))

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
    net = nn.Sequential(conv, points, nn.Flatten(), nn.Linear(64, 7)).to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    tensors = torch.randint(0, 256, (4 * batch_size, 84, 84, 3), dtype=torch.uint8), torch.randn(4 * batch_size, 7)
    batches = endless(DataLoader(TensorDataset(*tensors), batch_size, shuffle=True))

    def step() -> float:
        images, actions = (part.to(DEVICE) for part in next(batches))
        loss = F.mse_loss(net(images.permute(0, 3, 1, 2).float() / 255.0), actions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


_UNETS = {1: 20, 16: 20, 64: 10, 256: 3}  # steps of a block, by batch


PROGRAMS: dict[str, tuple[Callable[[], Callable[[], float]], int]] = {  # and the steps of a block
    **{f"unet_{batch}": (functools.partial(unet, batch), steps) for batch, steps in _UNETS.items()},
    "act": (act, 6),
    "resnet": (resnet, 4),
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
    make, num_steps = PROGRAMS[name]
    num_steps *= 10 if DEVICE.type == "cuda" else 1  # a step is short there
    step, times, cpu_times, loss = make(), [], [], 0.0
    for _ in range(num_blocks + 1):
        start, cpu_start = time.perf_counter(), time.thread_time()
        for _ in range(num_steps):
            loss = step()
        times.append(1000 * (time.perf_counter() - start) / num_steps)
        cpu_times.append(1000 * (time.thread_time() - cpu_start) / num_steps)
    found: dict[str, Any] = {"ms": times[1:], "cpu_ms": cpu_times[1:], "loss": loss}
    if "ddpshim.rows.tensor" in sys.modules:
        found.update(needed(step))
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
