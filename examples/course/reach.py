"""The task of the course (move a gripper above an object, then down to it), its scripted expert, and a policy."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

NEAR = 0.05  # metres


def expert(obs: torch.Tensor) -> torch.Tensor:
    """Return velocities (N, 3) for obs (N, 6), the positions of gripper and object: first above it, then down."""
    gripper, thing = obs[:, :3], obs[:, 3:]
    is_above = (gripper - thing)[:, :2].norm(dim=1, keepdim=True) < NEAR
    above = torch.tensor([0.0, 0.0, 0.2], dtype=obs.dtype)
    return (5 * (thing + above * ~is_above - gripper)).clamp(-1, 1)


def starts(num_episodes: int, seed: int) -> torch.Tensor:
    """Return initial positions of gripper and object: (num_episodes, 6)."""
    drawn = torch.rand(num_episodes, 6, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.tensor([1, 1, 0.5, 1, 1, 0.05]) + torch.tensor([0, 0, 0.3, 0, 0, 0])


def play(act: nn.Module, obs: torch.Tensor, num_steps: int = 40) -> torch.Tensor:
    """Return the observations (num_steps, N, 6) of N episodes in which `act` chooses the velocity."""
    seen = []
    for _ in range(num_steps):
        seen.append(obs)
        obs = torch.cat([obs[:, :3] + 0.05 * act(obs), obs[:, 3:]], 1)
    return torch.stack(seen)


def demonstrations(num_episodes: int, seed: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Return (obs, action) of the expert's episodes, 40 steps each."""
    obs = play(expert, starts(num_episodes, seed).to(dtype)).flatten(0, 1)
    return TensorDataset(obs, expert(obs))


class Policy(nn.Module):
    """Trained through a method other than `forward`, as robomimic's networks are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward_train(self, obs: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.net(obs), 0.2)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs).clamp(-1, 1)


@torch.no_grad()
def error(policy: Policy, held_out: TensorDataset) -> float:
    """Return the mean squared error of the actions on demonstrations that were not trained on."""
    obs, action = held_out.tensors
    return float((policy(obs) - action).square().mean())


@torch.no_grad()
def success_rate(policy: Policy, num_episodes: int = 200) -> float:
    """Return the share of episodes in which the gripper ends near the object."""
    last = play(policy, starts(num_episodes, seed=99).to(next(policy.parameters()).dtype))[-1]
    return float(((last[:, :3] - last[:, 3:]).norm(dim=1) < NEAR).double().mean())
