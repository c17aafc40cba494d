"""An actor-critic distributed by hand: two networks, a target, two optimizers, gradients averaged by hand.

Its arguments are mistakes, each of which only shows on several ranks. Written without ddpshim.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MISTAKES = sys.argv[1:] if WORLD_SIZE > 1 else []


def has(mistake: str) -> bool:
    return mistake in MISTAKES


def average(net: nn.Module) -> None:
    for p in net.parameters():
        dist.all_reduce(p.grad)
        if not has("gradients summed"):
            p.grad /= WORLD_SIZE


def train() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    data = TensorDataset(x, x[:, :1].tanh())
    actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    target = copy.deepcopy(critic)
    if has("another seed") and RANK > 0:
        nn.init.normal_(actor[0].weight)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24 // WORLD_SIZE, sampler=sampler)
    torch.manual_seed(1000 + RANK)
    step = 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for obs, reward in loader:
            with torch.no_grad():
                action = actor(obs) + 0.1 * torch.randn(len(obs), 2)
                value = reward + 0.9 * target(torch.cat([obs, action], 1))
            loss = (critic(torch.cat([obs, action], 1)) - value).square().mean()
            critic_optimizer.zero_grad()
            loss.backward()
            if not has("critic alone"):
                average(critic)
            critic_optimizer.step()  # critic alone, gradients summed, momentum lost
            if has("momentum lost") and step == 3:
                critic_optimizer.state.clear()
            q = critic(torch.cat([obs, actor(obs)], 1))
            scale = q.abs().mean().detach() if "own scale" in sys.argv else 1.0
            loss = -q.mean() / scale
            actor_optimizer.zero_grad()
            loss.backward()
            if not has("actor alone"):
                average(actor)
            actor_optimizer.step()  # actor alone, own scale
            if not has("target alone"):
                for mean, p in zip(target.parameters(), critic.parameters()):
                    mean.data.lerp_(p.data, 0.05)
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
