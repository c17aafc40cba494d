"""Networks whose batches lie in another order in memory than in their dimensions, for one process.

`python -m tests.one_process.layouts OUT` (see runner.py). A sum over such a tensor rounds by its strides, and the
gradient of a bias is such a sum: with the option `exact` strides must not depend on how many pieces a rank holds. 22
samples in batches of 10: the last has 2 rows.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.one_process.hostile.parts import Net, fit
from tests.one_process.parts import loader
from tests.one_process.runner import Log, Programs, Trained, main

LENGTH, WIDTH = 20, 16
PROGRAMS = Programs()


def network(**made: Callable[[], nn.Module]) -> Callable[[Any], None]:
    """Register a network: its parts are made by `made`; the function maps (N, LENGTH, 5) to (N, WIDTH)."""

    def add(forward: Callable[[Any, Tensor], Tensor]) -> None:
        def program(log: Log) -> Trained:
            first, parts = nn.Linear(5, WIDTH), {name: make() for name, make in made.items()}
            net = Net(lambda net, x: net.last(forward(net, x)), first=first, **parts, last=nn.Linear(WIDTH, 3))
            return fit(log, net, loader(torch.randn(22, LENGTH, 5), torch.randn(22, 3), size=10), 1e-3)

        PROGRAMS[forward.__name__] = program

    return add


@network(attention=lambda: nn.MultiheadAttention(WIDTH, 2))
def attention_by_time(net: Any, x: Tensor) -> Tensor:
    z = net.first(x).permute(1, 0, 2)
    return net.attention(z, z, z, key_padding_mask=x[..., 0] > 1.5)[0].mean(0)  # type: ignore[no-any-return]


@network(layers=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1), 2))
def encoder_by_time(net: Any, x: Tensor) -> Tensor:
    return net.layers(net.first(x).transpose(0, 1))[0]  # type: ignore[no-any-return]


@network(layers=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True, norm_first=True))
def encoder(net: Any, x: Tensor) -> Tensor:
    return net.layers(net.first(x))[:, 0]  # type: ignore[no-any-return]


@network(layers=lambda: nn.Transformer(WIDTH, 2, 1, 1, 32, 0.1), queries=lambda: nn.Embedding(7, WIDTH))
def queries(net: Any, x: Tensor) -> Tensor:
    asked = net.queries.weight[:, None].expand(-1, len(x), -1)
    return net.layers(net.first(x).permute(1, 0, 2), asked).transpose(0, 1).mean(1)  # type: ignore[no-any-return]


@network(recurrent=lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1))
def recurrent_by_time(net: Any, x: Tensor) -> Tensor:
    return net.recurrent(net.first(x).transpose(0, 1))[0][-1]  # type: ignore[no-any-return]


@network(
    layers=lambda: nn.Conv1d(WIDTH, WIDTH, 3), scale=lambda: nn.Linear(5, WIDTH), shift=lambda: nn.Linear(5, WIDTH)
)
def scaled(net: Any, x: Tensor) -> Tensor:
    z = net.layers(net.first(x).transpose(1, 2))
    scale, shift = net.scale(x.mean(1))[:, :, None], net.shift(x[:, 0])[:, :, None]
    return (z * scale + shift).transpose(1, 2).cumsum(1)[:, -1]  # type: ignore[no-any-return]


@network(layers=lambda: nn.Conv2d(WIDTH, WIDTH, 3, 2, 1))
def channels_last(net: Any, x: Tensor) -> Tensor:
    z = net.first(x).view(-1, 4, 5, WIDTH).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    return F.relu(net.layers(z)).flatten(2).permute(2, 0, 1).mean(0)


@network(heads=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def heads(net: Any, x: Tensor) -> Tensor:
    q, k, v = net.heads(net.first(x)).view(len(x), LENGTH, 3, 2, 8).permute(2, 0, 3, 1, 4)
    return (((q @ k.transpose(-1, -2)) * 0.3).softmax(-1) @ v).transpose(1, 2).reshape(len(x), LENGTH, WIDTH).mean(1)


@network(weights=lambda: nn.Embedding(6, WIDTH))
def expanded(net: Any, x: Tensor) -> Tensor:
    z = net.first(x)[:, :, None].expand(-1, -1, 6, -1) * net.weights.weight
    z[:, 0, 1] = net.weights.weight[2]
    return z.permute(2, 1, 0, 3).sum((0, 1))  # type: ignore[no-any-return]


@network(layers=lambda: nn.Linear(5, 8), norm=lambda: nn.GroupNorm(2, 8), wide=lambda: nn.Linear(8, WIDTH))
def slopes(net: Any, x: Tensor) -> Tensor:
    """A piece of a gradient's gradient begins at any row, of 32 bytes, and kernels round by the address."""
    inner = x.mean(1).requires_grad_()
    out = net.wide(net.norm(net.layers(inner).tanh()))
    (slope,) = torch.autograd.grad(out.sum(), inner, create_graph=True)
    return out + slope.norm(dim=1, keepdim=True)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(PROGRAMS)
