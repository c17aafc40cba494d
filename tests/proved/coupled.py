"""A trainer on ddpshim whose losses are no means over samples, and BatchNorm. Its argument says what is forgotten."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim

FORGOTTEN = sys.argv[1:]


def has(mistake: str) -> bool:
    return mistake in FORGOTTEN


def masked(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (out.square().mean(1) * mask).sum() / mask.sum()


def compared(out: torch.Tensor) -> torch.Tensor:
    rows = nn.functional.normalize(out, dim=1)
    return nn.functional.cross_entropy(rows @ rows.roll(1, 0).T, torch.arange(len(rows)))


def train() -> None:
    world = ddpshim.setup(seed=0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, (torch.arange(96) % 5 < 2).float())
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    net = ddpshim.wrap_parallel(net, sync_batchnorm=not has("own batchnorm"))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(4):
        for obs, mask in ddpshim.make_loader(data, batch_size=24, shuffle=True):
            out = net(obs)
            loss = masked(out, mask) if has("own count") else ddpshim.whole_batch(masked)(out, mask)
            if has("own pairs"):
                loss = loss + compared(out)
            elif has("cut gather") and world.world_size > 1:
                rows = world.all_gather(out.detach())
                rows[world.rank :: world.world_size] = out
                loss = loss + compared(rows)
            else:
                loss = loss + ddpshim.whole_batch(compared)(out)
            optimizer.zero_grad()
            loss.backward()  # own batchnorm, own count, own pairs
            optimizer.step()  # cut gather
    ddpshim.cleanup()


if __name__ == "__main__":
    train()
