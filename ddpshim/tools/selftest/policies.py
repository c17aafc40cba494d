"""Holds small policies of the usual kinds, and networks with unusual arguments, for the self-test on GPUs.

obs: (B, 8, 24), action: (B, 8, 4). Each policy is trained through its method `loss`, a mean over the batch.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

NUM_STEPS_OF_A_SAMPLE, OBS_DIM, ACTION_DIM = 8, 24, 4
_NUM_TIMESTEPS = 50


class UNet(nn.Module):
    """A diffusion policy: adds noise to the actions and predicts that noise."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv1d(ACTION_DIM, width, 3, padding=1)
        self.down = nn.Conv1d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv1d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.Conv1d(2 * width, width, 3, padding=1)
        self.last = nn.Conv1d(2 * width, ACTION_DIM, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, width), nn.GroupNorm(4, 2 * width), nn.GroupNorm(4, width)])
        # Registered last but used first, as in real diffusion policies: gradients arrive in another order.
        self.condition = nn.Sequential(nn.Linear(OBS_DIM + 1, 2 * width), nn.Mish(), nn.Linear(2 * width, 2 * width))

    def loss(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the mean squared error of the predicted noise; draws the noise and the timesteps."""
        noise = torch.randn_like(action)
        timestep = torch.randint(0, _NUM_TIMESTEPS, (len(action),), device=action.device).to(action.dtype)
        timestep = timestep[:, None] / _NUM_TIMESTEPS
        noisy = (1 - timestep[..., None]) * action + timestep[..., None] * noise
        known = self.condition(torch.cat([obs[:, 0], timestep], 1))[..., None]
        fine = F.mish(self.norms[0](self.first(noisy.transpose(1, 2))))
        coarse = F.mish(self.norms[1](self.middle(self.down(fine) + known)))
        risen = F.mish(self.norms[2](self.up(coarse.repeat_interleave(2, -1))))
        return F.mse_loss(self.last(torch.cat([fine, risen], 1)).transpose(1, 2), noise)


class Transformer(nn.Module):
    """A causal transformer with dropout, whose `forward_train` returns a distribution, as robomimic's do."""

    def __init__(self, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        how = {"dropout": 0.1, "batch_first": True, "norm_first": True}
        self.head = nn.Linear(width, 2 * ACTION_DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, **how)  # type: ignore[arg-type]
            for _ in range(num_layers)
        )
        self.embed = nn.Linear(OBS_DIM, width)
        self.register_buffer("mask", torch.ones(NUM_STEPS_OF_A_SAMPLE, NUM_STEPS_OF_A_SAMPLE).triu(1).bool())

    def forward_train(self, obs: Tensor) -> torch.distributions.Distribution:
        """obs: (B, T, 24) -> a Gaussian over (B, T, 4)."""
        hidden = self.embed(obs)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask)
        mean, scale = self.head(hidden).chunk(2, -1)
        # Validating the arguments would read their values, and so wait for the GPU.
        return torch.distributions.Normal(mean, F.softplus(scale) + 0.1, validate_args=False)

    def loss(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the mean negative log-likelihood."""
        return -self.forward_train(obs).log_prob(action).mean()


class ResNet(nn.Module):
    """Convolutions and BatchNorm over images (B, 3, 8, 8), with in-place operations where torchvision has them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.head = nn.Linear(width, NUM_STEPS_OF_A_SAMPLE * ACTION_DIM)

    def loss(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the mean squared error of the actions."""
        hidden = F.relu(self.stem(obs.reshape(-1, 3, 8, 8)), inplace=True)
        hidden = F.relu(self.block(hidden) + hidden)
        return F.mse_loss(self.head(hidden.mean((2, 3))).view_as(action), action)


class Recurrent(nn.Module):
    """An LSTM, which cuDNN computes on NVIDIA GPUs."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rnn = nn.LSTM(OBS_DIM, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, ACTION_DIM)

    def loss(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the mean squared error of the actions."""
        return F.mse_loss(self.head(self.rnn(obs)[0]), action)


class ActorCritic(nn.Module):
    """Two networks in one module: `loss` trains the actor in every second call only, and one layer is never used."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(OBS_DIM + ACTION_DIM, width), nn.Tanh(), nn.Linear(width, 1))
        self.actor = nn.Sequential(nn.Linear(OBS_DIM, width), nn.Tanh(), nn.Linear(width, ACTION_DIM))
        self.never_used = nn.Linear(width, width)
        self.num_losses = 0

    def value(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return values of shape (B, T, 1)."""
        return self.critic(torch.cat([obs, action], -1))  # type: ignore[no-any-return]

    def loss(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the critic's error, plus the actor's in every second call."""
        self.num_losses += 1
        found = F.mse_loss(self.value(obs, action), action.sum(-1, keepdim=True))
        if self.num_losses % 2:
            return found
        return found + F.mse_loss(self.actor(obs), action)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "U-Net": UNet,
    "transformer": Transformer,
    "ResNet": ResNet,
    "RNN": Recurrent,
    "other methods": ActorCritic,
}


def data(num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return obs and action of `num_samples` samples, with the same values on every rank; on the CPU."""
    numbers = torch.linspace(0, 37.0 * num_samples, num_samples * NUM_STEPS_OF_A_SAMPLE * OBS_DIM, dtype=torch.float64)
    obs = numbers.sin().view(num_samples, NUM_STEPS_OF_A_SAMPLE, OBS_DIM)
    action = (3 * obs[..., :ACTION_DIM]).cos() * obs[..., ACTION_DIM : 2 * ACTION_DIM]
    return obs.to(dtype), action.to(dtype)


class TwoBranches(nn.Module):
    """A network with a branch that a call can skip."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(OBS_DIM, 8), nn.Sequential(nn.Linear(OBS_DIM, 8), nn.Tanh())

    def forward(self, obs: Tensor, leaves_out: bool) -> Tensor:
        return self.trunk(obs) if leaves_out else self.trunk(obs) * self.branch(obs)  # type: ignore[no-any-return]


class _NoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prior = nn.Parameter(torch.linspace(0, 1, 5))

    def forward(self) -> Tensor:
        return self.prior.exp()


class _Scaled(nn.Module):
    """Takes a 0-dim tensor, None and a string in a nested structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, given: dict[str, Any], flag: bool = True) -> Tensor:
        return self.layer(given["obs"][0]) * given["scale"] if flag else given["obs"][0]  # type: ignore[no-any-return]


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 3, batch_first=True)

    def forward(self, sequences: Any) -> Tensor:
        return self.rnn(sequences)[0].data  # type: ignore[no-any-return]


class _InPlace(nn.Module):
    """Writes in place into its buffer, its input and an intermediate result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.num_calls: Tensor
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, obs: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.relu_(self.layer(obs.clamp_(-0.5, 0.5))) * self.num_calls


def _obs(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, 24, device=device).view(2, 3, 4)


ODD_CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.device], tuple[Any, ...]]]] = {
    "no arguments": (_NoArguments, lambda device: ()),
    "a 0-dim tensor in a dict": (
        _Scaled,
        lambda device: ({"obs": [_obs(device), None], "scale": torch.tensor(2.0, device=device), "name": "a"},),
    ),
    "a PackedSequence": (
        _Packed,
        lambda device: (pack_padded_sequence(_obs(device), torch.tensor([3, 2]), batch_first=True),),
    ),
    "writes in place": (_InPlace, lambda device: (_obs(device),)),
}
