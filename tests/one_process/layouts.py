"""Networks whose batches lie in another order in memory than in their dimensions, for one process.

`python -m tests.one_process.layouts OUT` (see runner.py). A sum over such a tensor rounds by its strides, and the
gradient of a bias is such a sum: with the option `exact` strides must not depend on how many pieces a rank holds. 22
samples in batches of 10: the last has 2 rows.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.one_process.runner import Log, Programs, Trained, main

LENGTH, WIDTH = 20, 16
PROGRAMS = Programs()


def network(**made: Callable[[], nn.Module]) -> Callable[[Any], None]:
    """Register a network: its modules are made by `made`; the function maps (N, LENGTH, 5) to (N, WIDTH)."""

    def add(forward: Callable[[Any, Tensor], Tensor]) -> None:
        PROGRAMS[forward.__name__] = functools.partial(train, forward, made)

    return add


def train(forward: Callable[[Any, Tensor], Tensor], made: dict[str, Callable[[], nn.Module]], log: Log) -> Trained:
    nets = nn.ModuleDict({"first": nn.Linear(5, WIDTH), **{name: make() for name, make in made.items()}})
    nets["last"] = nn.Linear(WIDTH, 3)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nets

        def forward(self, x: Tensor) -> Tensor:
            return self.nets["last"](forward(self.nets, x))  # type: ignore[no-any-return]

    net, data = Network(), TensorDataset(torch.randn(22, LENGTH, 5), torch.randn(22, 3))
    optimizer = SGD(net.parameters(), 1e-3)
    for x, y in DataLoader(data, 10, shuffle=True):
        loss = F.mse_loss(net(x), y)
        log(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [net]


@network(attention=lambda: nn.MultiheadAttention(WIDTH, 2))
def attention_by_time(nets: Any, x: Tensor) -> Tensor:
    z = nets["first"](x).permute(1, 0, 2)
    return nets["attention"](z, z, z, key_padding_mask=x[..., 0] > 1.5)[0].mean(0)  # type: ignore[no-any-return]


@network(layers=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1), 2))
def encoder_by_time(nets: Any, x: Tensor) -> Tensor:
    return nets["layers"](nets["first"](x).transpose(0, 1))[0]  # type: ignore[no-any-return]


@network(layers=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True, norm_first=True))
def encoder(nets: Any, x: Tensor) -> Tensor:
    return nets["layers"](nets["first"](x))[:, 0]  # type: ignore[no-any-return]


@network(layers=lambda: nn.Transformer(WIDTH, 2, 1, 1, 32, 0.1), queries=lambda: nn.Embedding(7, WIDTH))
def queries(nets: Any, x: Tensor) -> Tensor:
    asked = nets["queries"].weight[:, None].expand(-1, len(x), -1)
    return nets["layers"](nets["first"](x).permute(1, 0, 2), asked).transpose(0, 1).mean(1)  # type: ignore[no-any-return]


@network(recurrent=lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1))
def recurrent_by_time(nets: Any, x: Tensor) -> Tensor:
    return nets["recurrent"](nets["first"](x).transpose(0, 1))[0][-1]  # type: ignore[no-any-return]


@network(
    layers=lambda: nn.Conv1d(WIDTH, WIDTH, 3), scale=lambda: nn.Linear(5, WIDTH), shift=lambda: nn.Linear(5, WIDTH)
)
def scaled(nets: Any, x: Tensor) -> Tensor:
    z = nets["layers"](nets["first"](x).transpose(1, 2))
    scale, shift = nets["scale"](x.mean(1))[:, :, None], nets["shift"](x[:, 0])[:, :, None]
    return (z * scale + shift).transpose(1, 2).cumsum(1)[:, -1]  # type: ignore[no-any-return]


@network(layers=lambda: nn.Conv2d(WIDTH, WIDTH, 3, 2, 1))
def channels_last(nets: Any, x: Tensor) -> Tensor:
    z = nets["first"](x).view(-1, 4, 5, WIDTH).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    return F.relu(nets["layers"](z)).flatten(2).permute(2, 0, 1).mean(0)


@network(heads=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def heads(nets: Any, x: Tensor) -> Tensor:
    q, k, v = nets["heads"](nets["first"](x)).view(len(x), LENGTH, 3, 2, 8).permute(2, 0, 3, 1, 4)
    return (((q @ k.transpose(-1, -2)) * 0.3).softmax(-1) @ v).transpose(1, 2).reshape(len(x), LENGTH, WIDTH).mean(1)


@network(weights=lambda: nn.Embedding(6, WIDTH))
def expanded(nets: Any, x: Tensor) -> Tensor:
    z = nets["first"](x)[:, :, None].expand(-1, -1, 6, -1) * nets["weights"].weight
    return z.permute(2, 1, 0, 3).sum((0, 1))  # type: ignore[no-any-return]


@network(layers=lambda: nn.Linear(5, 8), norm=lambda: nn.GroupNorm(2, 8), wide=lambda: nn.Linear(8, WIDTH))
def slopes(nets: Any, x: Tensor) -> Tensor:
    """A piece of a gradient's gradient begins at any row, of 32 bytes, and kernels round by the address."""
    inner = x.mean(1).requires_grad_()
    out = nets["wide"](nets["norm"](nets["layers"](inner).tanh()))
    (slope,) = torch.autograd.grad(out.sum(), inner, create_graph=True)
    return out + slope.norm(dim=1, keepdim=True)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(PROGRAMS)
