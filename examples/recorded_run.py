"""A custom trainer that records what its report shows: run it with python, or on several ranks.

python -m ddpshim run --nproc 2 examples/recorded_run.py out/recorded_run
python -m ddpshim report out/recorded_run
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim


def main(folder):
    world = ddpshim.setup(seed=1)
    obs = torch.randn(2400, 8)
    targets = torch.stack([obs.sum(1), obs.prod(1)], 1)
    train, valid = TensorDataset(obs[:2000], targets[:2000]), (obs[2000:], targets[2000:])
    net = ddpshim.wrap_parallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)).to(world.device))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loader = ddpshim.make_loader(train, batch_size=100, shuffle=True)
    with ddpshim.record(folder) as run:
        for epoch in range(1, 9):
            losses = []
            for x, y in loader:
                loss = (net(x.to(world.device)) - y.to(world.device)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            with torch.no_grad():
                x, y = (part.to(world.device) for part in valid)
                valid_loss = (net(x) - y).square().mean().item()
            run.epoch(epoch, loss=sum(losses) / len(losses), valid=valid_loss)
            if world.is_main:
                print(f"epoch {epoch}: loss {losses[-1]:.4f}, validation {valid_loss:.4f}")
    ddpshim.cleanup()


if __name__ == "__main__":
    main(sys.argv[1])
