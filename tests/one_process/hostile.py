"""Programs for one process, each of which may find a way around row tensors.

`python tests/one_process/hostile.py OUT` (see runner.py). No program knows of ranks, and on any number of ranks each
must end as on one. Of batches of 16, 10 or 7 of 50 samples, ranks get unequal shares and sometimes no row.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import os
import pickle
import queue
import random
import sys
import threading
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Callable, ClassVar, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from runner import Log, Programs, Trained, main
from torch import Tensor, distributions, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vmap
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

PROGRAMS: Programs = {}


def program(function: Callable[[Log], Trained]) -> Callable[[Log], Trained]:
    PROGRAMS[function.__name__] = function
    return function


class Net(nn.Module):
    """A network of `parts` whose forward is `function(self, ...)`."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def data(features: int = 6, n: int = 50) -> tuple[Tensor, Tensor]:
    """Return inputs (N, features) and targets (N, 1)."""
    x = torch.randn(n, features)
    return x, x[:, :2].sum(1, keepdim=True).sin()


def classes(features: int = 6, n: int = 50) -> tuple[Tensor, Tensor]:
    """Return inputs (N, features) and one of four classes (N,)."""
    x = torch.randn(n, features)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def sequences(n: int = 50, length: int = 5, features: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences (N, T, features), targets (N, T, 1) and lengths (N,)."""
    x = torch.randn(n, length, features)
    return x, x.cumsum(1)[..., :1].tanh(), torch.randint(1, length + 1, (n,))


def images(n: int = 50, channels: int = 4, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return images (N, channels, size, size) and targets (N, 1)."""
    x = torch.randn(n, channels, size, size)
    return x, x.mean((1, 2, 3))[:, None]


def loader(*tensors: Tensor, size: int = 16, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), size, **{"shuffle": True, **options})


def mlp(features: int = 6, out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, out))


def train(
    log: Log, net: nn.Module, loss_of: Callable[..., Tensor], batches: Optional[Iterable[Any]] = None, lr: float = 0.1
) -> Trained:
    """Train `net` by SGD for one pass over `batches`; log each loss."""
    optimizer = SGD(net.parameters(), lr)
    for batch in loader(*data()) if batches is None else batches:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        log(loss.item())
    return [net]


def fit(log: Log, net: nn.Module, batches: Optional[Iterable[Any]] = None, lr: float = 0.1) -> Trained:
    """Train `net` by SGD to predict the last tensor of each batch from the others."""
    return train(log, net, lambda *batch: F.mse_loss(net(*batch[:-1]), batch[-1]), batches, lr)


def changed(log: Log, change: Callable[[Tensor], Tensor], size: int = 16) -> Trained:
    """Train with `change` ((B, 6) to (B, 6)) on batches of a loader, on a network's inputs and on its hidden values.

    What `change` does in place to its argument counts too.
    """

    def forward(net: Net, x: Tensor) -> Tensor:
        x = x.clone()
        h = net.body(change(x) + x)
        return net.head(torch.tanh(h + change(h * 0.5)))

    net = Net(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 1))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x = change(x) - 0.5 * x
        log(x.sum(0))
        return F.mse_loss(net(x), y)

    return train(log, net, loss_of, loader(*data(), size=size))


# In place, through views and other names of the same memory


@program
def column_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x[:, 0] = x[:, 1] * 2
        x[..., -1] += 1
        return x

    return changed(log, change)


@program
def rows_zeroed(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x[3:5].zero_()
        x[-1:].mul_(3)
        x[::4] += 1
        return x

    return changed(log, change)


@program
def row_taken_and_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        row = x[1]
        row += 1
        last = x.select(0, -1)
        last.neg_()
        x[0, 2] = 5
        return x

    return changed(log, change)


@program
def noise_added_in_place(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x += 0.1 * torch.randn_like(x)
        x.add_(torch.randn(x.shape[0], 1), alpha=0.1)
        return x

    return changed(log, change)


@program
def clamped_in_place(log: Log) -> Trained:
    return changed(log, lambda x: x.clamp_(-1, 1).mul_(2).sub_(x.mean(0)))


@program
def masked_fill_in_place(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.masked_fill_(x.abs() > 1, 0.5)
        x.masked_fill_(torch.rand(len(x), 1) < 0.3, -1)
        x.masked_scatter_(x > 0.4, torch.arange(x.numel(), dtype=x.dtype) / 50)
        return x

    return changed(log, change)


@program
def index_put_in_place(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        rows, columns = torch.randint(len(x), (9,)), torch.randint(6, (9,))
        x.index_put_((rows, columns), torch.rand(9, dtype=x.dtype), accumulate=True)
        x[torch.arange(len(x)), x.argmax(1)] = 0
        return x

    return changed(log, change)


@program
def scattered_in_place(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.scatter_(1, x.detach().argmin(1, keepdim=True), 0.3)
        x.scatter_add_(0, torch.randint(len(x), (3, 6)), torch.ones(3, 6))
        return x.scatter_reduce_(0, torch.zeros(len(x), 6, dtype=torch.long), x.detach() * 2, "mean")

    return changed(log, change)


@program
def rows_indexed_in_place(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        two = torch.tensor([0, len(x) - 1])
        x.index_add_(0, two, torch.ones(2, 6), alpha=0.5)
        x.index_copy_(0, two, x[two.flip(0)].clone())
        x.index_fill_(0, two[:1], 0.1)
        return x.index_fill_(1, torch.tensor([2]), 0.2)

    return changed(log, change)


@program
def copied_into_buffer(log: Log) -> Trained:
    buffer = torch.zeros(16, 6)

    def change(x: Tensor) -> Tensor:
        part = buffer[: len(x)]
        part.copy_(x.detach()).mul_(0.5)
        buffer[0] = 1
        return x + part.clone()

    return changed(log, change)


@program
def halves_copied(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        half = len(x) // 2
        x[half:].copy_(x[:half].detach() * 0.5)
        x[:half, :3].copy_(x[half:, 3:].detach())
        return x

    return changed(log, change, size=10)


@program
def out_arguments(log: Log) -> Trained:
    buffer, mean = torch.zeros(16, 6), torch.empty(6)

    def change(x: Tensor) -> Tensor:
        plain = x.detach()
        torch.mul(plain, 0.5, out=plain)
        torch.add(plain, 1, out=buffer[: len(x)])
        torch.mean(plain, 0, out=mean)
        both = torch.empty(0)
        torch.cat([plain, plain], out=both)
        values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.sort(plain, 0, out=(values, places))
        return x + buffer[: len(x)] * mean + both[len(x) :] + values * 0.1

    return changed(log, change)


@program
def inplace_layers(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        kept = h
        net.relu(h)
        h = net.drop(net.b(kept + h) * 1)
        again = h.view(-1)
        F.elu_(h)
        other = x * 1
        F.leaky_relu(other, 0.3, inplace=True)
        return net.c(h + again.view(h.shape) + other)

    parts = {k: nn.Linear(6, 6) for k in "ab"}
    net = Net(forward, relu=nn.ReLU(inplace=True), drop=nn.Dropout(0.5, inplace=True), c=nn.Linear(6, 1), **parts)
    return fit(log, net)


@program
def data_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.data[0] = 0
        x.data.mul_(0.5)
        x.data[:, 1].clamp_(0)
        return x

    return changed(log, change)


@program
def data_replaced(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        h = x * 1
        h.data = h.data.flip(0) * 2
        return x + h

    return changed(log, change)


@program
def detached_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        other = x.detach()
        other[1:3] = 0
        other += 0.1
        return x + 1

    return changed(log, change)


@program
def flat_view_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.view(-1)[::7] = 0
        x.reshape(-1, 2)[3:].mul_(0.5)
        x.flatten().add_(0.1)
        x.unflatten(1, (2, 3))[:, 1] *= 2
        return x

    return changed(log, change)


@program
def transposed_view_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.t()[1].add_(1)
        x.T[:, 0] = 0.3
        x.transpose(0, 1).mul_(0.5)
        x[None].squeeze(0).unsqueeze(-1)[:, :2].neg_()
        x.movedim(0, 1)[2:4, ::3] += 1
        return x

    return changed(log, change)


@program
def expanded_base_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        base = torch.zeros(len(x), 1)
        wide = base.expand(-1, 6)
        base.add_(x.detach()[:, :1])
        repeated = x[:, None].expand(-1, 3, -1)
        x.mul_(0.5)
        return x + wide + repeated.sum(1)

    return changed(log, change)


@program
def numpy_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.detach().numpy()[:, 0] = 0.5
        x.detach().numpy()[2:4] *= 2
        return x

    return changed(log, change)


@program
def asarray_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        np.asarray(x.detach())[0] = 0.5
        np.clip(x.detach(), -1, 1, out=x.detach().numpy())
        memoryview(x.detach().numpy())[0, 1] = 0.1
        return x

    return changed(log, change)


@program
def dlpack_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        torch.from_dlpack(x.detach())[1].mul_(2)
        np.from_dlpack(x.detach().clone())
        return x

    return changed(log, change)


@program
def numpy_array_written_later(log: Log) -> Trained:
    inputs, targets = (t.numpy() for t in data())
    array = np.zeros((10, 6), inputs.dtype)
    batch, net = torch.from_numpy(array), mlp()
    optimizer = SGD(net.parameters(), 0.1)
    for i in range(0, 50, 10):
        array[:] = inputs[i : i + 10]
        first = net(batch)
        array *= 0.5
        loss = F.mse_loss(net(batch) + first.detach(), torch.from_numpy(targets[i : i + 10]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss.item(), array.sum())
    return [net, batch]


@program
def chunks_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        a, b = x[: len(x) // 2], x[len(x) // 2 :]
        b.mul_(0.5)
        a.add_(b.mean(0))
        with torch.no_grad():
            first, second = x.detach().chunk(2)
            first.sub_(second)
        return x

    return changed(log, change)


@program
def unbound_rows_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        for row in x.detach().unbind():
            row.div_(row.norm())
        for i, part in enumerate(x.detach().split([1, len(x) - 1])):
            part.add_(i)
        return x

    return changed(log, change)


@program
def narrow_filled(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.narrow(0, len(x) // 2, 1).fill_(0.2)
        x.narrow(1, 2, 2).fill_(0.3)
        x.detach().tensor_split(2)[0].mul_(2)
        return x

    return changed(log, change, size=7)


@program
def iterated_rows_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        for row in x.detach():
            row.sub_(row.mean())
        for i in range(len(x)):
            x.detach()[i].mul_(i / 8)
        return x

    return changed(log, change)


@program
def diagonals_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.diagonal().mul_(2)
        likeness = x @ x.T
        likeness.fill_diagonal_(0)
        likeness.diagonal().add_(0.5)
        return torch.tanh(likeness) @ x

    return changed(log, change)


@program
def strided_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.as_strided((2, 3), (6, 2)).add_(1)
        return x + x.as_strided((len(x), 6), (0, 1))

    return changed(log, change)


@program
def shape_changed_in_place(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x.unsqueeze_(1)
        x.squeeze_(1).t_()
        x[0] = 0.5
        x.transpose_(0, 1)
        return x

    return changed(log, change)


@program
def storage_replaced(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        plain = x.detach().clone()
        plain.resize_(len(x) + 1, 6)[-1] = 0
        other = torch.empty(0)
        other.set_(plain)
        other.untyped_storage().copy_(plain.flip(0).contiguous().untyped_storage())
        return x + plain[:-1]

    return changed(log, change)


@program
def reinterpreted_written(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.view(len(x), 3, 2))
        pairs.mul_(1j)
        torch.view_as_real(pairs)[0] = 0.5
        x.detach().view(torch.uint8)[-1].zero_()
        return x

    return changed(log, change)


@program
def integers_and_masks_in_place(log: Log) -> Trained:
    table = nn.Embedding(16, 6)

    def loss_of(x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        mask = x > 0
        mask &= x < 1
        mask[0] = True
        mask ^= torch.tensor([True, False] * 3)
        ids += 1
        ids <<= 1
        ids %= 15
        ids[-1] = 3
        x **= 2
        x //= 0.3
        return F.mse_loss((table(ids) * mask + 0.1 * x).sum(1, keepdim=True), y)

    x, y = data()
    return train(log, table, loss_of, loader(x, torch.randint(8, (50,)), y))


@program
def rows_swapped(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x[[0, -1]] = x[[-1, 0]]
        x[torch.randperm(len(x))] = x.clone() * 0.5
        return x

    return changed(log, change)


@program
def masks_assigned(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        x[x > 1] = 1
        kept = x.sum(1) > 0
        x[kept] = x[kept].mean(0) + 0.1
        x[~kept, 1:3] *= 2
        x[x < -1] *= torch.rand(int((x < -1).sum()))
        return x

    return changed(log, change)


@program
def foreach_in_place(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        parts = [x.detach(), x.detach()[1:], torch.ones(len(x), 6)]
        torch._foreach_mul_(parts, 0.5)
        torch._foreach_add_(parts[:1], parts[2:])
        log(*torch._foreach_norm(parts))
        return x + 0.5

    return changed(log, change)


@program
def filled_with_draws(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        noise = (
            torch.empty_like(x).normal_() + torch.zeros_like(x).uniform_(-1, 1) + x.new_empty(x.shape).exponential_()
        )
        x.detach()[:, 0].normal_()
        x.detach()[1].uniform_()
        x.detach()[:, 1].bernoulli_(0.5)
        log(torch.ones_like(x).cauchy_(), torch.ones_like(x).geometric_(0.5), torch.ones_like(x).random_(9))
        return x + 0.1 * noise.detach()

    return changed(log, change)


@program
def added_to_plain_tensors(log: Log) -> Trained:
    sums, total, per_sample, net = torch.zeros(6), torch.zeros(()), torch.zeros(16, 1), mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal total
        out = net(x)
        losses = (out - y).square()
        sums.add_(x.sum(0))
        sums.lerp_(x[0], 0.1)
        per_sample[: len(x)] += losses.detach()
        total += losses.sum().detach()
        total.addcmul_(out.detach().mean(), y.mean())
        log(sums, total)
        return losses.mean()

    return [*train(log, net, loss_of), sums, total, per_sample]


@program
def outputs_written(log: Log) -> Trained:
    net = mlp(out=3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x) * 1
        out[:, 0] *= 2
        out[2:4] = 0
        out[torch.arange(len(x)) % 3 == 0] += y[torch.arange(len(x)) % 3 == 0]
        out[:, 1:].mul_(x[:, :2])
        out.view(-1)[::5].sub_(1)
        return (out - y).square().mean()

    return train(log, net, loss_of)


@program
def leaf_written(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        F.mse_loss(net(x), y).backward()
        with torch.no_grad():
            x[1:] -= x.grad[1:].sign() * 0.1
            x.grad.zero_()
            x.clamp_(-1, 1)
        net.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward(retain_graph=True)
        log(x.grad.norm(), x.grad[0])
        x.grad = None
        x.requires_grad = False
        return loss

    return train(log, net, loss_of)


@program
def same_batch_twice(log: Log) -> Trained:
    inputs, targets = data()
    net, batches = mlp(), list(loader(inputs, targets, size=7))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.9)
        y[0] = 0
        return F.mse_loss(net(x), y)

    return train(log, net, loss_of, batches * 2) + [x for x, _ in batches]


@program
def dataset_written(log: Log) -> Trained:
    inputs, targets = data()
    net = mlp()
    optimizer = SGD(net.parameters(), 0.1)
    for i in range(0, 50, 16):
        x = inputs[i : i + 16]
        out = net(x)
        x.mul_(0.5)[0] = 0
        inputs[i : i + 16] += out.detach() * 0.1
        loss = F.mse_loss(net(x), targets[i : i + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss.item(), inputs.sum())
    return [net, inputs]


# Draws: as many numbers, in the same order, as one process draws for the layout of the whole


@program
def like_transposed(log: Log) -> Trained:
    return changed(log, lambda x: x + 0.1 * torch.randn_like(x.t()).t() + 0.1 * torch.rand_like(x[:, ::2]).sum(1, True))


@program
def like_permuted(log: Log) -> Trained:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x = x.permute(1, 2, 0)
        x = x + 0.3 * torch.randn_like(x) + 0.1 * torch.rand_like(x.contiguous())
        return F.mse_loss(net((x * torch.empty_like(x).bernoulli_(0.5)).permute(2, 0, 1)), y)

    net = nn.Linear(3, 1)
    return train(log, net, loss_of, loader(*sequences()[:2]))


@program
def like_channels_last(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        h = net.conv(x + 0.1 * torch.randn_like(x))
        h = F.dropout(h.relu() + torch.zeros_like(h).normal_(), 0.5)
        return net.head(
            h.contiguous(memory_format=torch.channels_last).mean((2, 3)) + 0.1 * torch.rand_like(h)[..., 0, 0]
        )

    return fit(log, Net(forward, conv=nn.Conv2d(4, 8, 3), head=nn.Linear(8, 1)), loader(*images()))


@program
def like_expanded(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        wide = x[:, None].expand(-1, 3, -1)
        tall = x[0].expand(len(x), -1)
        return x + 0.1 * (torch.randn_like(wide).sum(1) + torch.rand_like(tall) + torch.randint_like(x[:, :1], 5))

    return changed(log, change)


@program
def dropout_of_views(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        return F.dropout(x.t(), 0.5).t() + F.dropout(x[::2], 0.3).sum(0) + F.dropout(x[:, :3].t(), 0.3).t().repeat(1, 2)

    return changed(log, change)


@program
def dropout_of_features(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = F.dropout2d(net.conv(x), 0.5) + F.feature_alpha_dropout(x, 0.3, training=net.training)
        h = F.dropout1d(h.flatten(2), 0.2).unflatten(2, (4, 4)) + F.dropout3d(h[..., None], 0.2)[..., 0]
        return net.head(F.alpha_dropout(F.rrelu(h.mean((2, 3)), training=True), 0.3, training=True))

    return fit(log, Net(forward, conv=nn.Conv2d(4, 4, 1), head=nn.Linear(4, 1)), loader(*images()))


@program
def dropout_without_training(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    fit(log, net)
    net.eval()
    for x, y in loader(*data(), shuffle=False):
        log(F.mse_loss(net(x), y), net(x)[0])
    net[1].train()
    samples = torch.stack([net(x) for _ in range(3)])  # Monte Carlo dropout
    log(samples.mean(0), samples.var(0))
    return [net]


@program
def gumbel_softmax_drawn(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        return F.gumbel_softmax(x, hard=True) + F.gumbel_softmax(x.t(), tau=2, dim=0).t()

    return changed(log, change)


@program
def normal_of_tensors(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        p = x.detach().sigmoid()
        drawn = torch.normal(p, 0.1) + torch.normal(0.5, p.t()).t() + torch.normal(p, p) + torch.poisson(p.t()).t()
        return x + 0.1 * (
            drawn + torch.bernoulli(p) + torch.bernoulli(p.t()).t() + torch.binomial(torch.ones_like(p) * 4, p)
        )

    return changed(log, change)


@program
def multinomial_of_rows(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        p = x.detach().softmax(1)
        places = torch.multinomial(p, 2) + torch.multinomial(p, 2, replacement=True)
        rows = p[:, 0].multinomial(len(x), replacement=True)
        log(places, rows)
        return x.gather(1, places % 6).repeat(1, 3) + x[rows]

    return changed(log, change)


@program
def policy_gradient(log: Log) -> Trained:
    net = mlp(out=4)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        policy = distributions.Categorical(logits=net(x))
        action = policy.sample()
        reward = (action == y).to(x.dtype)
        log(action, reward.mean(), policy.entropy().mean().item(), policy.probs[0])
        return -(policy.log_prob(action) * (reward - reward.mean())).mean() - 0.01 * policy.entropy().mean()

    return train(log, net, loss_of, loader(*classes()))


@program
def squashed_gaussian(log: Log) -> Trained:
    net = mlp(out=4)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        mean, scale = net(x).chunk(2, -1)
        normal = distributions.Normal(mean, F.softplus(scale) + 0.1)
        policy = distributions.Independent(
            distributions.TransformedDistribution(normal, distributions.TanhTransform(cache_size=1)), 1
        )
        action = policy.rsample()
        prior = distributions.Normal(torch.zeros(2), torch.ones(2))
        log(normal.sample((2,)), policy.log_prob(action.detach()).mean())
        return (action - y).square().mean() + 0.01 * distributions.kl_divergence(normal, prior).sum(-1).mean()

    return train(log, net, loss_of)


@program
def mixture_of_gaussians(log: Log) -> Trained:
    net = mlp(out=6)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits, mean, scale = net(x).chunk(3, 1)
        parts = distributions.Normal(mean, scale.exp())
        mixture = distributions.MixtureSameFamily(distributions.Categorical(logits=logits), parts)
        log(mixture.sample(), mixture.mean.sum())
        return -mixture.log_prob(y[:, 0]).mean()

    return train(log, net, loss_of)


@program
def many_distributions(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        p = F.softplus(x) + 0.5
        drawn = distributions.Beta(p[:, :1], p[:, 1:2]).rsample() + distributions.Gamma(p, 1.0).rsample()
        drawn = drawn + distributions.Dirichlet(p).rsample() + distributions.Laplace(x, p).rsample()
        eye = torch.eye(6).expand(len(x), 6, 6)
        drawn = drawn + distributions.MultivariateNormal(x, eye * p[:, None]).rsample()
        drawn = drawn + distributions.RelaxedOneHotCategorical(torch.tensor(1.0), logits=x).rsample()
        log(distributions.Bernoulli(logits=x).sample(), distributions.OneHotCategorical(logits=x).sample())
        return x + 0.1 * (drawn + distributions.StudentT(4.0, x, p).sample())

    return changed(log, change)


@program
def mixed_with_a_permutation(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        weight, order = np.random.beta(0.5, 0.5), torch.randperm(x.size(0))
        mixed = weight * x + (1 - weight) * x[order]
        kept = torch.rand(x.shape[0], 1) > 0.2  # stochastic depth
        per_sample = distributions.Beta(0.5, 0.5).sample((x.size(0), 1))
        out = net(mixed) * kept / 0.8 + net(x * per_sample + x.flip(0) * (1 - per_sample))
        return weight * F.mse_loss(out, y) + (1 - weight) * F.mse_loss(out, y[order])

    return train(log, net, loss_of)


@program
def attention_dropout(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h, weights = net.attention(x, x, x, need_weights=True)
        log(weights.mean((0, 1)))
        h, _ = net.attention(h, x, x, need_weights=False)
        q = h.unflatten(-1, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3, is_causal=True).transpose(1, 2).flatten(2)
        return net.head(net.layer(h))

    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)
    net = Net(forward, attention=nn.MultiheadAttention(8, 2, 0.3, batch_first=True), head=nn.Linear(8, 1), layer=layer)
    return fit(log, net, loader(*sequences(features=8)[:2]))


@program
def recurrent_dropout(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h, _ = net.lstm(x)
        h, _ = net.gru(h.transpose(0, 1))
        return net.head(h.transpose(0, 1))

    lstm = nn.LSTM(3, 6, 2, batch_first=True, dropout=0.3, bidirectional=True)
    return fit(
        log, Net(forward, lstm=lstm, gru=nn.GRU(12, 6, 2, dropout=0.5), head=nn.Linear(6, 1)), loader(*sequences()[:2])
    )


@program
def own_generator(log: Log) -> Trained:
    generator = torch.Generator().manual_seed(3)

    def change(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        x.detach()[:, :2].normal_(generator=generator)
        x.detach()[1:].bernoulli_(0.5, generator=generator)
        log(
            torch.randperm(len(x), generator=generator),
            torch.bernoulli(x.detach().sigmoid(), generator=generator).sum(),
        )
        return x + noise + torch.rand_like(x)

    return changed(log, change)


@program
def generator_state_read(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = net(x)
        log(torch.get_rng_state()[:64], torch.initial_seed())
        torch.set_rng_state(state)
        assert torch.equal(first, net(x))
        with torch.random.fork_rng():
            torch.manual_seed(len(x))
            first = first + net(x + torch.randn_like(x))
        log(torch.rand(2), random.random(), np.random.rand())
        return F.mse_loss(first, y)

    return train(log, net, loss_of)


@program
def draws_of_three_libraries(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        n = x.shape[0]
        noise = torch.as_tensor(np.random.randn(n, 6), dtype=x.dtype) + random.gauss(0, 1)
        picked = random.sample(range(n), n // 2)
        places = torch.from_numpy(np.random.permutation(n))
        return (
            x[places]
            + 0.1 * noise
            + x[picked].mean(0)
            + x[np.random.choice(n, n)] * random.choice(x.detach()[:, :1].tolist())[0]
        )

    return changed(log, change)


@program
def repeated_for_samples(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        stacked = net(x.repeat(3, 1)).view(3, -1, 1)
        wide = net(x.expand(3, *x.shape))
        each = net(x.repeat_interleave(2, 0)).view(len(x), 2, 1)
        log(stacked.std(0).mean(), wide.var(0).mean(), each.mean(1)[0])
        return (stacked.logsumexp(0) + wide.mean(0) + each.mean(1) - y).square().mean()

    return train(log, net, loss_of)


# Autograd: checkpoints, functions of the program's own, hooks, gradients that are asked for or changed


def block(features: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, features), nn.Tanh(), nn.Dropout(0.3), nn.Linear(features, features))


@program
def checkpoint_reentrant(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        h = checkpoint(net.middle, h, use_reentrant=True)
        return net.last(h + checkpoint(lambda a, b: a * b.mean(0) + b, h, x, use_reentrant=True))

    return fit(log, Net(forward, first=nn.Linear(6, 6), middle=block(), last=nn.Linear(6, 1)))


@program
def checkpoint_not_reentrant(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = checkpoint(net.middle, x, use_reentrant=False)
        coupled = checkpoint(lambda a: a - F.dropout(a, 0.2).mean(0), h, use_reentrant=False)
        return net.last(coupled + checkpoint(net.middle, h, use_reentrant=False, preserve_rng_state=False))

    return fit(log, Net(forward, middle=block(), last=nn.Linear(6, 1)))


@program
def checkpoint_of_segments(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        x = checkpoint_sequential(net.blocks, 2, x.requires_grad_(), use_reentrant=True)
        return net.last(checkpoint_sequential(net.blocks, 3, x, use_reentrant=False))

    return fit(log, Net(forward, blocks=nn.Sequential(block(), block(), block()), last=nn.Linear(6, 1)))


@program
def checkpoint_outside_a_network(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        loss = checkpoint(lambda a: F.mse_loss(net(a), y) + a.std(0).mean(), x, use_reentrant=True)
        again = checkpoint(lambda a, scale: (net(a * scale) - y).abs().mean(), x, 0.5, use_reentrant=False)
        return loss + again

    return train(log, net, loss_of)


class Sign(torch.autograd.Function):
    """Straight through, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.sign() * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1) * ctx.scale, None


class Centred(torch.autograd.Function):
    """Couples rows in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.sum(0) / ctx.rows


class Affine(torch.autograd.Function):
    """Its parameters' gradients are sums over rows, which it computes itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.with_bias = bias is not None
        return x @ weight.t() + (0 if bias is None else bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        to_x = g @ weight if ctx.needs_input_grad[0] else None
        to_weight = g.t() @ x if ctx.needs_input_grad[1] else None
        return to_x, to_weight, g.sum(0) if ctx.with_bias and ctx.needs_input_grad[2] else None


class SetUp(torch.autograd.Function):
    """The style in which forward has no ctx; several outputs, one of them without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * y, x + y, (x > y).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return product * y + total, product * x + total


class Doubled(torch.autograd.Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Reversed(torch.autograd.Function):
    """Scales by what it reads of the gradient as a whole."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Reversed.seen += [g.shape[0], g.norm().item(), float(g.max())]
        return -g / g.norm() / g.shape[0]


@program
def function_of_rows(log: Log) -> Trained:
    return changed(log, lambda x: Sign.apply(x, 0.5) + Sign.apply(x.t(), 0.1).t())


@program
def function_that_couples(log: Log) -> Trained:
    return changed(log, lambda x: Centred.apply(x) + Centred.apply(x.t()).t())


@program
def function_with_parameters(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = Affine.apply(x, net.one.weight, net.one.bias).tanh()
        return Affine.apply(Affine.apply(h, net.scale[:, None] * net.one.weight[:, :6]), net.last.weight, net.last.bias)

    net = Net(forward, one=nn.Linear(6, 6), last=nn.Linear(6, 1), scale=nn.Parameter(torch.ones(6)))
    return fit(log, net)


@program
def function_with_a_frozen_weight(log: Log) -> Trained:
    net = mlp()
    frozen = torch.randn(6, 6)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        loss = F.mse_loss(net(Affine.apply(x, frozen, None)), y)
        log(torch.autograd.grad(loss, x, create_graph=True)[0].square().sum())
        return loss

    return train(log, net, loss_of)


@program
def function_of_several_outputs(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        product, total, larger = SetUp.apply(x, x.flip(0))
        other, _, _ = SetUp.apply(x, torch.ones(len(x), 6))
        return product + larger * 0.1 + other * total

    return changed(log, change)


@program
def function_that_writes(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        y = x * 1
        z = Doubled.apply(y)
        Doubled.apply(x)
        return y + z + Doubled.apply(x[1:].clone()).sum(0)

    return changed(log, change)


@program
def function_that_reads_the_gradient(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.body(x)
        return net.a(h), net.b(Reversed.apply(h))

    net = Net(forward, body=nn.Linear(6, 6), a=nn.Linear(6, 1), b=nn.Linear(6, 1))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b = net(x)
        return F.mse_loss(a, y) + F.binary_cross_entropy_with_logits(b, (y > 0).to(y.dtype))

    Reversed.seen.clear()
    out = train(log, net, loss_of)
    log(*Reversed.seen)
    return out


class Solved(torch.autograd.Function):
    """Differentiates by itself inside forward (as reentrant checkpoints do)."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = function(x)
            (ctx.slope,) = torch.autograd.grad(out.sum(), x)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, ctx.slope * g


@program
def function_that_differentiates(log: Log) -> Trained:
    return changed(
        log, lambda x: Solved.apply(lambda h: (h * h).tanh() * 0.5, x) + Solved.apply(lambda h: h.softmax(0), x)
    )


@program
def function_with_double_backward(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        out = net(Centred.apply(x) + SetUp.apply(x, x)[0])
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + (slope.norm(dim=1) - 1).square().mean()

    return train(log, net, loss_of)


@program
def hooks_on_hidden_values(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.body(x).tanh()
        h.register_hook(lambda g: g * 0.5)
        k = net.middle(h)
        k.register_hook(lambda g: g / (g.norm() + 1))
        k.register_hook(lambda g: log(g.norm(), g.shape[0], g.abs().max()))
        handle = k.register_hook(lambda g: g * 100)
        handle.remove()
        out = net.head(k)
        out.register_hook(lambda g: g.clamp(-0.05, 0.05) - g.mean())
        return out

    return fit(log, Net(forward, body=nn.Linear(6, 6), middle=nn.Linear(6, 6), head=nn.Linear(6, 1)))


@program
def gradients_retained(log: Log) -> Trained:
    hidden: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        hidden[:] = [net.body(x)]
        hidden[0].retain_grad()
        return net.head(hidden[0].tanh())

    net = Net(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 1))
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data()):
        x.requires_grad_()
        loss = F.mse_loss(net(x), y)
        loss.retain_grad()
        optimizer.zero_grad()
        loss.backward()
        log(
            loss.item(), loss.grad, hidden[0].grad.norm(), hidden[0].grad[0], x.grad, hidden[0].grad.shape[0], x.is_leaf
        )
        net.head.weight.grad += hidden[0].grad.mean(0)
        optimizer.step()
    return [net]


@program
def optimizer_in_backward(log: Log) -> Trained:
    net = mlp()
    optimizers = {p: SGD([p], 0.1, momentum=0.9) for p in net.parameters()}

    def step(p: Tensor) -> None:
        log(p.grad.norm())
        p.grad.clamp_(-0.1, 0.1)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in loader(*data()):
        F.mse_loss(net(x), y).backward()
    return [net]


@program
def hooks_on_parameters(log: Log) -> Trained:
    net = mlp()
    mask = (torch.rand(8, 6) > 0.5).to(torch.get_default_dtype())
    net[0].weight.register_hook(lambda g: g * mask)
    net[2].weight.register_hook(lambda g: g.clamp(-0.02, 0.02))
    net[0].bias.register_hook(lambda g: torch.zeros_like(g))
    for p in net.parameters():
        p.register_hook(lambda g: log(g.norm().item(), g.abs().max()))
    return fit(log, net)


@program
def hooks_on_parameters_accumulated(log: Log) -> Trained:
    net = mlp()
    for p in net.parameters():
        p.register_hook(lambda g: g / (g.norm() + 0.1))
    optimizer = SGD(net.parameters(), 0.1)
    for i, (x, y) in enumerate(loader(*data(), size=7)):
        (F.mse_loss(net(x), y) / 2).backward()
        if i % 2:
            log(net[0].weight.grad.norm())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return [net]


@program
def hooks_on_modules(log: Log) -> Trained:
    net = mlp()
    seen: dict[str, Tensor] = {}
    net[0].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0),))
    net[0].register_forward_hook(lambda module, args, out: seen.update(first=out))
    net[1].register_forward_hook(lambda module, args, out: out / out.norm())
    net[2].register_forward_hook(lambda module, args, kwargs, out: log(out.mean(), len(args[0])), with_kwargs=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(net(x), y) + seen["first"].square().mean()

    return train(log, net, loss_of)


@program
def hooks_on_modules_backward(log: Log) -> Trained:
    net = mlp()

    def backward_hook(module: nn.Module, to_input: tuple[Tensor, ...], of_output: tuple[Tensor, ...]) -> Any:
        log(to_input[0].mean() if to_input[0] is not None else 0, of_output[0].norm(), of_output[0].shape[0])
        return None if to_input[0] is None else (to_input[0] - to_input[0].mean(0),)

    net[1].register_full_backward_hook(backward_hook)
    net[2].register_full_backward_pre_hook(lambda module, of_output: (of_output[0] / of_output[0].abs().max(),))
    net.register_full_backward_hook(backward_hook)
    return fit(log, net)


@program
def hooks_on_all_modules(log: Log) -> Trained:
    everywhere = nn.modules.module
    handles = [
        everywhere.register_module_forward_hook(lambda module, args, out: log(type(module).__name__, out.std())),
        everywhere.register_module_forward_pre_hook(lambda module, args: log(args[0].shape[0])),
        everywhere.register_module_full_backward_hook(lambda module, to_input, of_output: log(of_output[0].norm())),
    ]
    out = fit(log, mlp())
    for handle in handles:
        handle.remove()
    return out


@program
def saved_tensors_packed(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        packed: list[int] = []

        def pack(t: Tensor) -> np.ndarray:
            packed.append(t.numel())
            return t.detach().numpy().copy()

        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            loss = F.mse_loss(net(x), y)
        with torch.autograd.graph.save_on_cpu():
            loss = loss + net(x.flip(0)).square().mean()
        return loss

    return train(log, net, loss_of)


@program
def gradients_of_parameters(log: Log) -> Trained:
    net, unused = mlp(), nn.Parameter(torch.ones(2))
    for x, y in loader(*data()):
        loss = F.mse_loss(net(x), y)
        grads = torch.autograd.grad(loss, [*net.parameters(), unused], retain_graph=True, allow_unused=True)
        log(loss, grads[-1] is None, torch.stack([g.norm() for g in grads[:-1]]).norm())
        again = torch.autograd.grad(loss, tuple(net.parameters()))
        with torch.no_grad():
            for p, g, h in zip(net.parameters(), grads, again):
                p -= 0.05 * (g + h)
                p.grad = g
    return [net]


@program
def gradients_of_inputs(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
        h = net[0](x)
        (of_hidden,) = torch.autograd.grad(net[2](net[1](h)).sum(), h, retain_graph=True)
        log(slope.abs().max(), slope[0], of_hidden.mean(0))
        adversarial = (x + 0.1 * slope.sign()).detach()
        return F.mse_loss(net(adversarial), y) + slope.square().sum(1).mean()

    return train(log, net, loss_of)


@program
def gradient_penalty(log: Log) -> Trained:
    critic = mlp()

    def loss_of(real: Tensor, _: Tensor) -> Tensor:
        fake = torch.randn_like(real)
        weight = torch.rand(real.size(0), 1)
        between = (weight * real + (1 - weight) * fake).requires_grad_(True)
        score = critic(between)
        slope = torch.autograd.grad(
            outputs=score, inputs=between, grad_outputs=torch.ones(score.size()), create_graph=True, retain_graph=True
        )[0]
        log(critic(real).mean() - critic(fake).mean())
        return critic(fake).mean() - critic(real).mean() + 10 * ((slope.view(len(real), -1).norm(2, 1) - 1) ** 2).mean()

    return train(log, critic, loss_of, lr=0.02)


@program
def penalty_on_gradients_of_parameters(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), y)
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in grads)

    return train(log, net, loss_of)


@program
def forces_of_an_energy(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(1, 8), nn.Softplus(), nn.Linear(8, 1))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        position = x.unflatten(1, (2, 3)).clone().requires_grad_()
        distance = (position[:, 0] - position[:, 1]).norm(dim=-1, keepdim=True)
        energy = net(distance).sum()
        force = -torch.autograd.grad(energy, position, create_graph=True)[0]
        return (force[:, 0, :1] - y).square().mean() + energy / len(x) * 0.01

    return train(log, net, loss_of)


@program
def jacobian_rows(log: Log) -> Trained:
    net = mlp(out=2)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        out = net(x)
        rows = [torch.autograd.grad(out[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
        batched = torch.autograd.grad(
            out, x, torch.eye(2)[:, None].expand(2, len(x), 2), is_grads_batched=True, retain_graph=True
        )
        jacobian = torch.stack(rows, 1)
        log(batched[0][1, 0], jacobian[0])
        return F.mse_loss(out[:, :1], y) + (jacobian @ jacobian.mT - torch.eye(2)).square().mean()

    return train(log, net, loss_of)


@program
def functional_jacobians(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        whole = torch.autograd.functional.jacobian(lambda a: net(a).sum(0), x, create_graph=True)
        curvature = torch.autograd.functional.hessian(lambda row: net(row).sum(), x[0], create_graph=True)
        product = torch.autograd.functional.vjp(lambda a: net(a).mean(), x)[1]
        log(whole.sum(), curvature.diagonal(), product.norm())
        return F.mse_loss(net(x), y) + whole.square().mean() + curvature.trace()

    return train(log, net, loss_of)


@program
def hessian_vector_products(log: Log) -> Trained:
    net = mlp()
    parameters = list(net.parameters())
    vector = [torch.ones_like(p) for p in parameters]
    for x, y in loader(*data()):
        loss = F.mse_loss(net(x), y)
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        dot = sum((g * v).sum() for g, v in zip(grads, vector))
        products = torch.autograd.grad(dot, parameters)
        log(loss, dot)
        with torch.no_grad():
            for p, g, h in zip(parameters, grads, products):
                p.sub_(g / (1 + h.abs()), alpha=0.1)
        vector = [h / h.norm().clamp(min=1e-3) for h in products]
    return [net]


@program
def maml_by_hand(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        weights = dict(net.named_parameters())
        inner = F.mse_loss(functional_call(net, weights, (x[:half],)), y[:half])
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {k: w - 0.3 * g for (k, w), g in zip(weights.items(), grads)}
        log(inner)
        return F.mse_loss(functional_call(net, adapted, (x[half:],)), y[half:])

    return train(log, net, loss_of)


@program
def maml_over_tasks(log: Log) -> Trained:
    net = mlp(3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        weights = dict(net.named_parameters())

        def task(x: Tensor, y: Tensor) -> Tensor:
            def inner(weights: dict[str, Tensor]) -> Tensor:
                return F.mse_loss(functional_call(net, weights, (x[:3],)), y[:3])

            grads = grad(inner)(weights)
            return inner({k: w - 0.2 * grads[k] for k, w in weights.items()}) + F.mse_loss(
                functional_call(net, weights, (x[3:],)), y[3:]
            )

        return vmap(task)(x, y).mean()

    return train(log, net, loss_of, loader(*sequences()[:2]))


@program
def gradients_of_each_sample(log: Log) -> Trained:
    net = mlp()

    def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(net, weights, (x[None],)), y[None])

    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data()):
        weights = {k: p.detach() for k, p in net.named_parameters()}
        grads, losses = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0))(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (1 / norms).clamp(max=1)  # differential privacy
        log(losses, norms)
        for k, p in net.named_parameters():
            p.grad = torch.einsum("b,b...->...", scale, grads[k]) / len(x) + 0.01 * torch.randn_like(p)
        optimizer.step()
    return [net]


@program
def functional_transforms(log: Log) -> Trained:
    net = mlp(out=2)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        each = vmap(jacrev(net))(x)
        _, along = jvp(net, (x,), (torch.ones_like(x),))
        log(vmap(hessian(lambda row: net(row).sum()))(x[:2]).sum(0), vmap(lambda row: row @ row)(x))
        noisy = vmap(lambda row: row + 0.1 * torch.randn_like(row), randomness="different")(x)
        return F.mse_loss(net(noisy)[:, :1], y) + each.square().mean() + along.mean(0).square().sum()

    return train(log, net, loss_of)


@program
def forward_derivatives(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            out = torch.autograd.forward_ad.unpack_dual(net(dual))
            log(out.tangent[0], out.tangent.mean())
        return F.mse_loss(out.primal, y) + out.tangent.square().mean()

    return train(log, net, loss_of)


@program
def lbfgs_closures(log: Log) -> Trained:
    net = mlp()
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    for x, y in loader(*data()):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            log(loss.item())
            return loss

        log(optimizer.step(closure))
    return [net]


@program
def gradients_changed_before_the_step(log: Log) -> Trained:
    net = mlp()
    optimizer = Adam(net.parameters(), 0.01, eps=1e-3)
    for x, y in loader(*data()):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        log(nn.utils.clip_grad_norm_(net.parameters(), 0.5), sum(p.grad.abs().sum() for p in net.parameters()))
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        for p in net.parameters():
            p.grad += 0.01 * torch.randn_like(p.grad)
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
            p.grad.data.mul_(0.5)
        net[2].bias.grad = None
        net[0].bias.grad = net[0].weight.grad.sum(1)
        optimizer.step()
    return [net]


@program
def conflicting_gradients(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.body(x).tanh()
        return net.a(h), net.b(h)

    net = Net(forward, body=nn.Linear(6, 6), a=nn.Linear(6, 1), b=nn.Linear(6, 1))
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data()):
        a, b = net(x)
        grads = []
        for loss in (F.mse_loss(a, y), (b + y).square().mean()):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            grads.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        dot = sum((g * h).sum() for g, h in zip(*grads) if g is not None and h is not None)
        log(dot)
        for p, g, h in zip(net.parameters(), *grads):
            kept = [t for t in (g, h) if t is not None]
            p.grad = sum(kept) if dot > 0 or len(kept) < 2 else g - dot / h.square().sum().clamp(min=1e-6) * h
        optimizer.step()
    return [net]


@program
def gradients_saved_and_restored(log: Log) -> Trained:
    net = mlp()
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data()):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        saved = {k: p.grad for k, p in net.named_parameters()}
        optimizer.zero_grad(set_to_none=True)
        net(x.flip(1)).square().mean().backward()
        log(net[0].weight.grad.norm())
        for k, p in net.named_parameters():
            p.grad = saved[k] * 0.5 + p.grad
        optimizer.step()
        for p in net.parameters():
            p.grad.zero_()
        F.l1_loss(net(x), y).backward()
        optimizer.step()
    return [net]


@program
def several_backward_calls(log: Log) -> Trained:
    net = mlp(out=2)
    optimizer = SGD(net.parameters(), 0.05)
    for x, y in loader(*data()):
        optimizer.zero_grad(set_to_none=False)
        out = net(x)
        F.mse_loss(out[:, :1], y).backward(retain_graph=True)
        out[:, 1].square().mean().backward(retain_graph=True)
        out.backward(torch.full_like(out, 0.01), retain_graph=True)
        torch.autograd.backward([out[:, 0].mean(), out[:, 1].sum()], [None, torch.tensor(0.1)], retain_graph=True)
        out[0].sum().backward(inputs=list(net[0].parameters()))
        log(net[0].weight.grad.sum())
        optimizer.step()
    return [net]


@program
def backward_of_each_sample(log: Log) -> Trained:
    net = mlp()
    fisher = [torch.zeros_like(p) for p in net.parameters()]
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data(), size=7):
        optimizer.zero_grad()
        for xi, yi in zip(x, y):
            (F.mse_loss(net(xi), yi) / len(x)).backward()
        for loss in (net(x) - y).square().mean(1):
            for f, g in zip(fisher, torch.autograd.grad(loss, net.parameters(), retain_graph=True)):
                f += g**2 / len(x)
        optimizer.step()
    log(*[f.sum() for f in fisher])
    return [net, *fisher]


@program
def accumulated(log: Log) -> Trained:
    net = mlp()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    for i, (x, y) in enumerate(loader(*data(), size=7)):
        loss = F.mse_loss(net(x), y) / 3
        loss.backward()
        if (i + 1) % 3 == 0 or i == 7:
            log(net[0].weight.grad.norm(), loss.item() * 3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 2 == 0)
    return [net]


@program
def adversaries(log: Log) -> Trained:
    generator, critic = mlp(4, 6), mlp()
    of_g, of_c = SGD(generator.parameters(), 0.1), SGD(critic.parameters(), 0.1)
    bce = nn.BCEWithLogitsLoss()
    for (real,) in loader(data()[0]):
        one, zero = torch.ones(real.size(0), 1), torch.zeros(real.size(0), 1)
        fake = generator(torch.randn(real.size(0), 4))
        for p in critic.parameters():
            p.requires_grad_(True)
        of_c.zero_grad()
        loss = bce(critic(real), one) + bce(critic(fake.detach()), zero)
        loss.backward()
        of_c.step()
        for p in critic.parameters():
            p.requires_grad_(False)
        of_g.zero_grad()
        fooled = bce(critic(fake), one)
        fooled.backward()
        of_g.step()
        log(loss.item(), fooled.item(), fake.mean(), fake.std(0))
    return [generator, critic]


@program
def actor_and_critic(log: Log) -> Trained:
    actor, critic = mlp(6, 2), mlp(8)
    target = copy.deepcopy(critic).requires_grad_(False)
    alpha = torch.zeros(1, requires_grad=True)
    optimizers = [SGD(p, 0.05) for p in (actor.parameters(), critic.parameters(), [alpha])]
    for x, y in loader(*data()):
        with torch.no_grad():
            goal = y + 0.9 * target(torch.cat([x.roll(1, 0), actor(x.roll(1, 0))], 1))
        action = actor(x) + 0.1 * torch.randn(len(x), 2)
        q = critic(torch.cat([x, action], 1))
        losses = [action.square().mean() - q.mean(), F.mse_loss(critic(torch.cat([x, action.detach()], 1)), goal)]
        losses.append(-(alpha.exp() * (q.detach().mean() + 0.5)).mean())
        for optimizer, loss in zip(optimizers, losses):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
        for a, b in zip(target.parameters(), critic.parameters()):
            a.data.copy_(0.1 * b.data + 0.9 * a.data)
    return [actor, critic, target, alpha]


@program
def parameters_without_gradients(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.body(x).tanh()
        if h.mean() > 0:
            return net.a(h)
        return net.b(h)

    net = Net(forward, body=nn.Linear(6, 6), a=nn.Linear(6, 1), b=nn.Linear(6, 1), unused=nn.Linear(3, 3))
    net.body.bias.requires_grad_(False)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), y)
        log(*[k for k, p in net.named_parameters() if p.grad is None])
        return loss

    out = train(log, net, loss_of)
    log(*[k for k, p in net.named_parameters() if p.grad is None])
    return out


@program
def unfrozen_later(log: Log) -> Trained:
    net = mlp()
    net[0].requires_grad_(False)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for i, (x, y) in enumerate(loader(*data(), size=10)):
        if i == 2:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.05})
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, net[0].weight.grad is None)
    return [net]


@program
def tied_weights(log: Log) -> Trained:
    def forward(net: Net, ids: Tensor) -> Tensor:
        h = net.embedding(ids)
        return net.out(net.body(h) + h)

    net = Net(forward, embedding=nn.Embedding(9, 6), body=nn.Linear(6, 6), out=nn.Linear(6, 9, bias=False))
    net.out.weight = net.embedding.weight
    net.body.weight = nn.Parameter(net.body.weight.t().clone())
    ids = torch.randint(9, (50, 5))
    return train(
        log, net, lambda x, y: F.cross_entropy(net(x).flatten(0, 1), y.flatten()), loader(ids, ids.roll(-1, 1))
    )


@program
def weights_made_of_others(log: Log) -> Trained:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).mT

    one = parametrizations.weight_norm(nn.Linear(6, 6))
    two = parametrizations.orthogonal(nn.Linear(6, 6))
    parametrize.register_parametrization(three := nn.Linear(6, 6), "weight", Symmetric())
    four = nn.utils.spectral_norm(nn.Linear(6, 6))
    five = parametrizations.spectral_norm(nn.Linear(6, 1))
    return fit(log, nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), three, four, nn.Tanh(), five))


@program
def latents_of_samples(log: Log) -> Trained:
    table, decoder = nn.Embedding(50, 4), mlp(4)
    whole = torch.zeros(50, 4, requires_grad=True)
    optimizer = Adam([*table.parameters(), *decoder.parameters(), whole], 0.01, eps=1e-3)
    for index, y in loader(torch.arange(50), data()[1]):
        latent = table(index) + whole[index]
        loss = F.mse_loss(decoder(latent), y) + 0.01 * latent.norm(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss.item(), whole.grad.abs().sum(), whole.grad[index].sum())
    return [table, decoder, whole]


@program
def latents_of_the_batch(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        latent = torch.zeros(len(x), 6, requires_grad=True)
        scale = torch.ones((), requires_grad=True)
        inner = SGD([latent, scale], 0.5)
        for _ in range(2):
            inner.zero_grad()
            F.mse_loss(net((x + latent) * scale), y).backward()
            log(latent.grad.norm(), scale.grad)
            inner.step()
        delta = torch.zeros_like(x, requires_grad=True)
        F.mse_loss(net(x + delta), y).backward()
        net.zero_grad()
        delta.data = (delta + 0.1 * delta.grad.sign()).clamp(-0.1, 0.1)
        return F.mse_loss(net(x + latent.detach() + delta.detach()), y)

    return train(log, net, loss_of)


@program
def sgd_by_hand(log: Log) -> Trained:
    w, b = torch.randn(6, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    velocity = torch.zeros_like(w)
    for x, y in loader(*data()):
        loss = ((x @ w + b).tanh() - y).pow(2).mean()
        loss.backward()
        w.data -= 0.1 * w.grad.data
        with torch.no_grad():
            velocity.mul_(0.9).add_(w.grad)
            w -= 0.05 * velocity
            b.copy_(b - 0.1 * b.grad)
        w.grad.zero_()
        b.grad = None
        log(loss.item(), w)
    return [w, b]


@program
def parameters_in_no_module(log: Log) -> Trained:
    parameters = {k: nn.Parameter(torch.randn(s)) for k, s in (("w", (6, 4)), ("v", (4, 1)), ("t", ()))}
    optimizer = Adam(parameters.values(), 0.01, eps=1e-3)
    for x, y in loader(*data()):
        h = torch.addmm(parameters["t"].expand(4), x, parameters["w"]).tanh()
        loss = F.mse_loss(torch.mm(h, parameters["v"]) * parameters["t"].exp(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, parameters["t"].grad)
    return list(parameters.values())


@program
def parameters_in_lists(log: Log) -> Trained:
    def forward(net: Net, x: Tensor, which: str) -> Tensor:
        for w in net.weights:
            x = torch.tanh(x @ w + net.shifts["all"])
        return F.linear(x, net.heads[which], net.shifts[which])

    net = Net(
        forward,
        weights=nn.ParameterList([torch.randn(6, 6) for _ in range(2)]),
        shifts=nn.ParameterDict({"all": torch.zeros(6), "a": torch.zeros(1), "b": torch.zeros(1)}),
        heads=nn.ParameterDict({"a": nn.Parameter(torch.randn(1, 6)), "b": nn.Parameter(torch.randn(1, 6))}),
    )
    turns = iter("abab")
    return train(log, net, lambda x, y: F.mse_loss(net(x, which=next(turns)), y))


@program
def averaged_models(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    ema = copy.deepcopy(net)
    averaged = AveragedModel(net)
    decaying = AveragedModel(net, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b, use_buffers=True)
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data(), size=10):
        loss = F.mse_loss(net(x), y) + 0.1 * F.mse_loss(net(x), ema(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaged.update_parameters(net)
        decaying.update_parameters(net)
        for (_, a), b in zip(ema.state_dict().items(), net.state_dict().values()):
            a.copy_(a * 0.9 + b * 0.1) if a.is_floating_point() else a.copy_(b)
        log(loss.item(), ema(x).mean())
    update_bn(loader(*data(), shuffle=False), averaged)
    return [net, ema, averaged, decaying]


@program
def copied_and_pickled(log: Log) -> Trained:
    net, kept = mlp(), []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        kept.append(copy.deepcopy(x))
        kept.append(pickle.loads(pickle.dumps(out.detach())))
        torch.save({"x": x, "out": out.detach()}, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        twin = pickle.loads(pickle.dumps(net))
        log(loaded["x"].shape[0], loaded["x"].sum(), twin(loaded["x"]).mean(), kept[-1].mean(0), copy.copy(x)[0])
        log(x.__reduce_ex__(2)[0].__name__, len(pickle.dumps(x.clone())) > 24 * len(x))
        return F.mse_loss(out, y) + 0.1 * F.mse_loss(copy.deepcopy(net)(loaded["x"]), loaded["out"])

    return train(log, net, loss_of) + kept


@program
def network_copied_in_mid_training(log: Log) -> Trained:
    nets = [mlp()]
    optimizer = SGD(nets[0].parameters(), 0.1)
    for x, y in loader(*data()):
        loss = sum(F.mse_loss(net(x), y) for net in nets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nets.append(copy.deepcopy(nets[-1]))
        nets[-1].load_state_dict({k: v * 0.9 for k, v in nets[0].state_dict().items()})
        optimizer = SGD([p for net in nets for p in net.parameters()], 0.1)
        log(loss)
    return list(nets)


@program
def graph_inspected(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        loss = F.mse_loss(out, y)
        log(out.requires_grad, out.is_leaf, x.requires_grad, x.is_leaf, out.detach().requires_grad, y.grad_fn is None)
        log(
            loss.grad_fn is not None,
            x.grad is None,
            out._version,
            out.dtype == x.dtype,
            out.is_contiguous(),
            out.stride(),
        )
        assert out.detach().grad_fn is None
        assert isinstance(x, Tensor)
        assert type(x) is Tensor
        return loss

    return train(log, net, loss_of)


@program
def modes_of_gradients(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            best = net(x).argmax(0)
            log(best, net(x).mean())
        with torch.set_grad_enabled(False):
            weights = torch.softmax(-(net(x) - y).square(), 0)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return (weights * (net(x) - y).square()).sum() + F.mse_loss(net(x[best]), y[best])

    return train(log, net, loss_of)


@program
def hooks_on_several_gradients(log: Log) -> Trained:
    net = mlp(out=2)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = net[1](net[0](x))
        out = net[2](h)
        torch.autograd.graph.register_multi_grad_hook(
            (h, out), lambda grads: log(*[g.norm() for g in grads if g is not None])
        )
        out.grad_fn.register_hook(lambda to_inputs, of_outputs: log(of_outputs[0].sum()))
        out.grad_fn.register_prehook(lambda of_outputs: (of_outputs[0] * 0.5,))
        return F.mse_loss(out[:, :1], y) + out[:, 1].var()

    return train(log, net, loss_of)


@program
def sharpness_aware(log: Log) -> Trained:
    net = mlp()
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data()):
        F.mse_loss(net(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        moves = [p.grad * (0.05 / norm) for p in net.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), moves)
            optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()
        log(loss, norm)
    return [net]


@program
def optimizer_of_its_own(log: Log) -> Trained:
    class Signed(torch.optim.Optimizer):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Optional[Callable[[], float]] = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.5)
                    p.add_(mean / (mean.abs() + 0.01), alpha=-group["lr"])
                    log(p.grad.norm())

    net = mlp()
    optimizer = Signed(net.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in loader(*data(), size=7):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        log(optimizer.param_groups[0]["lr"])
    return [net, *[s["mean"] for s in optimizer.state.values()]]


@program
def evolution_without_gradients(log: Log) -> Trained:
    net = mlp().requires_grad_(False)
    vector = nn.utils.parameters_to_vector(net.parameters())
    for x, y in loader(*data()):
        noise = torch.randn(5, len(vector))
        scores = []
        for n in noise:
            nn.utils.vector_to_parameters(vector + 0.1 * n, net.parameters())
            scores.append(-F.mse_loss(net(x), y).item())
        weights = torch.tensor(scores).sub(np.mean(scores)).div(np.std(scores) + 1)
        vector = vector + 0.1 * (weights @ noise)
        log(scores, max(scores))
    return [vector]


@program
def weights_of_losses_learned(log: Log) -> Trained:
    net, logs = mlp(out=2), torch.zeros(2, requires_grad=True)
    temperature = nn.Parameter(torch.tensor(0.5))
    optimizer = SGD([*net.parameters(), logs, temperature], 0.05)
    for x, y in loader(*data()):
        out = net(x)
        losses = torch.stack([F.mse_loss(out[:, :1], y), (out[:, 1] / temperature - x[:, 3]).abs().mean()])
        loss = (losses * torch.exp(-logs) + logs).sum()
        optimizer.zero_grad()
        loss.backward()
        log(loss, logs.grad, temperature.grad)
        optimizer.step()
    return [net, logs, temperature]


@program
def scaled_gradients(log: Log) -> Trained:
    net = mlp()
    optimizer, scaler = SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
    for i, (x, y) in enumerate(loader(*data(), size=10)):
        if i == 1:
            x[-1, -1] = float("inf")
        loss = F.mse_loss(net(x).nan_to_num(), y) if i != 1 else net(x).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        log(scaler.get_scale(), norm.isfinite())
    return [net]


# Shapes: states, batches in another dimension, merged dimensions, sizes that are equal by chance


@program
def states_carried_across_batches(log: Log) -> Trained:
    series, goal = torch.randn(40, 7, 3), torch.randn(40, 7, 1)  # (T, B, features)
    rnn_, head = nn.GRU(3, 6), nn.Linear(6, 1)
    optimizer = SGD([*rnn_.parameters(), *head.parameters()], 0.1)
    state = None
    for t in range(0, 40, 8):
        out, state = rnn_(series[t : t + 8], state)
        loss = F.mse_loss(head(out), goal[t : t + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach()
        state[:, 3] = 0  # an episode ends
        log(loss.item(), state.norm(), state.shape)
    return [rnn_, head, state]


@program
def states_of_an_lstm_in_tuples(log: Log) -> Trained:
    def forward(net: Net, x: Tensor, state: Optional[tuple[Tensor, Tensor]] = None) -> tuple[Tensor, Any]:
        if state is None:
            state = (torch.zeros(2, x.size(0), 6), torch.zeros(2, x.size(0), 6))
        h, state = net.lstm(x, state)
        return net.head(h), state

    net = Net(forward, lstm=nn.LSTM(3, 6, 2, batch_first=True), head=nn.Linear(6, 1))
    optimizer = SGD(net.parameters(), 0.1)
    state = None
    for x, y, _ in loader(*sequences(48), size=16):
        out, state = net(x, state)
        state = tuple(s.detach() for s in state)
        loss = F.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, state[0].mean(), state[1][-1, 0])
    return [net, *state]


@program
def cells_in_a_python_loop(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 6)
        c = torch.zeros_like(h)
        outs = []
        for t in range(x.shape[1]):
            h, c = net.lstm(x[:, t], (h, c))
            h = net.gru(x[:, t], net.norm(h))
            outs += [net.head(h)]
        return torch.stack(outs, dim=1)

    parts = {"lstm": nn.LSTMCell(3, 6), "gru": nn.GRUCell(3, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 1)}
    return fit(log, Net(forward, **parts), loader(*sequences()[:2]))


@program
def recurrent_batch_first_or_second(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        a, last = net.one(x)
        b, (_, cell) = net.two(x.transpose(0, 1))
        c, _ = net.three(x.permute(1, 0, 2).contiguous())
        out = torch.cat([a, b.transpose(0, 1), c.permute(1, 0, 2)], -1) + last[-1][:, None].repeat(1, 1, 3)
        return net.head(out + cell.permute(1, 0, 2).flatten(1)[:, None].repeat(1, 1, 3))

    three = nn.RNN(3, 4, nonlinearity="relu")
    net = Net(forward, one=nn.GRU(3, 4, batch_first=True), two=nn.LSTM(3, 4), three=three, head=nn.Linear(12, 1))
    return fit(log, net, loader(*sequences()[:2], size=10))


@program
def packed_sequences(log: Log) -> Trained:
    def forward(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, (last, _) = net.lstm(packed)
        log(packed.batch_sizes, packed.data.sum())
        h, n = rnn.pad_packed_sequence(packed, batch_first=True, total_length=5)
        assert torch.equal(n, lengths)
        return net.head(h + last[-1][:, None])

    net = Net(forward, lstm=nn.LSTM(3, 6, batch_first=True), head=nn.Linear(6, 1))

    def loss_of(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(5)[None] < lengths[:, None]
        return (net(x, lengths) - y).square()[mask].mean()

    return train(log, net, loss_of, loader(*sequences()))


@program
def packed_by_a_collate_function(log: Log) -> Trained:
    x, y, lengths = sequences()
    items = [(x[i, : lengths[i]], y[i, 0]) for i in range(50)]

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Any, Tensor, Tensor]:
        items = sorted(items, key=lambda item: -len(item[0]))
        rows = [item[0] for item in items]
        return rnn.pack_sequence(rows), rnn.pad_sequence(rows), torch.stack([item[1] for item in items])

    def forward(net: Net, packed: Any, padded: Tensor) -> Tensor:
        _, last = net.gru(packed)
        other, _ = net.gru(padded)
        return net.head(last[0] + other.mean(0))

    net = Net(forward, gru=nn.GRU(3, 6), head=nn.Linear(6, 1))
    return fit(log, net, DataLoader(items, 16, shuffle=True, collate_fn=collate))


@program
def transformer_with_batch_second(log: Log) -> Trained:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0])
        missing = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool)
        missing[:, -1] = True
        h = net.embed(x) + net.places[: len(x)]
        return net.head(net.body(h, h + y, tgt_mask=mask, src_key_padding_mask=missing))

    body = nn.Transformer(8, 2, 1, 1, 16, 0.1)
    net = Net(
        forward, embed=nn.Linear(3, 8), body=body, head=nn.Linear(8, 1), places=nn.Parameter(torch.zeros(9, 1, 8))
    )

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
        return F.mse_loss(net(x, F.pad(y[:-1], (0, 0, 0, 0, 1, 0))), y)

    return train(log, net, loss_of, loader(*sequences()[:2], size=10))


@program
def transformer_with_masks(log: Log) -> Trained:
    def forward(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
        missing = torch.arange(x.shape[1]) >= lengths[:, None]
        h = net.body(net.embed(x), src_key_padding_mask=missing)
        each = torch.zeros(len(x), 2, 5, 5).masked_fill(missing[:, None, None], -1e4)
        h, weights = net.attention(h, h, h, attn_mask=each.flatten(0, 1), average_attn_weights=False)
        log(weights.sum((0, 1)))
        return net.head(h.masked_fill(missing[..., None], 0).sum(1) / lengths[:, None])

    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    net = Net(forward, embed=nn.Linear(3, 8), body=body, attention=attention, head=nn.Linear(8, 1))
    x, y, lengths = sequences()
    out = fit(log, net, loader(x, lengths, y[:, 0]))
    net.eval()
    with torch.no_grad():  # torch's fast path
        log(net(x[:7], lengths[:7]), net.body(net.embed(x[:7])).mean())
    return out


@program
def data_parallel_in_dimension_one(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h, _ = net.gru(x)
        return net.head(h - h.mean(0))

    net = nn.DataParallel(Net(forward, gru=nn.GRU(3, 6), head=nn.Linear(6, 1)), dim=1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x.transpose(0, 1).contiguous())
        log(out.shape, net.module.head.weight.norm())
        return F.mse_loss(out, y.transpose(0, 1))

    return train(log, net, loss_of, loader(*sequences()[:2]))


@program
def dimensions_merged_and_separated(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        h = net.body(x.view(b * t, -1)).view(b, t, -1)
        h = h + net.body(x.flatten(0, 1)).reshape(-1, t, 6)
        mixed = h.transpose(0, 1).reshape(b, t, 6)  # mixes samples
        k = h.reshape(b * t // 5, 5, 6).sum(1, keepdim=True) + h.reshape(t, b, 6).mean(0)[:, None]
        return net.head(h + 0.1 * mixed + 0.1 * k) + h.view(-1, 2).sum(1).view(b, t, 3).mean(-1, keepdim=True)

    return fit(log, Net(forward, body=nn.Linear(3, 6), head=nn.Linear(6, 1)), loader(*sequences()[:2], size=10))


@program
def batch_moved_around(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        a = x.permute(2, 0, 1).movedim(1, -1).swapaxes(0, 1)  # (T, 3, B)
        h = net.body(a.transpose(0, 2).transpose(0, 1))  # (3, B, 3)
        turned = torch.rot90(x, 1, (1, 2)).mT.flip(1)
        return net.head(x + turned + h.movedim(1, 0).mean(1, keepdim=True) + a.T.mT.mT.diagonal(0, 1, 2)[:, None])

    return fit(log, Net(forward, body=nn.Linear(5, 3), head=nn.Linear(3, 1)), loader(*sequences()[:2]))


@program
def einsum_of_all_kinds(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        e = torch.einsum
        h = e("bti,ij->btj", x, net.w)
        h = h + e("bti,bsi,bsj->btj", x, x, h) * 0.1
        h = h + e("bti,cti->bc", x, x).softmax(-1).mean(1)[:, None, None] + e("...i->i", h)
        h = h + e("tbi,ij->btj", x.transpose(0, 1), net.w) + e("bii->bi", x[:, :3])[:, None] + e("bti->", x) / 20
        same = e("bti,bti->b", x, h)
        h = h + same[:, None, None] + e("i,bti->bt", net.w[0], x)[..., None] + e(x, [0, 1, 2], net.w, [2, 3], [0, 1, 3])
        return net.head(
            (h + torch.tensordot(x, x, dims=([0, 1], [0, 1]))[0]).tanh() + torch.tensordot(x, net.w, dims=1)
        )

    return fit(log, Net(forward, w=nn.Parameter(torch.randn(3, 3) / 3), head=nn.Linear(3, 1)), loader(*sequences()[:2]))


@program
def sizes_equal_by_chance(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))
    x, w = torch.randn(50, 10), torch.randn(10, 10)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        likeness = out @ x.T + x @ w + w @ x + x.mm(x) + torch.matmul(x.T, out) + x.T
        row = out.mean(0)
        column = out.mean(1)
        likeness = likeness + row + column + column[:, None] + row[:, None] + torch.arange(10) * out
        likeness = (
            likeness
            + F.linear(x, out)
            + F.linear(out, w, column)
            + F.embedding(y, out)
            + torch.addmm(column, x, w)
            + torch.outer(row, column)
        )
        log(likeness.trace(), likeness[0])
        return F.cross_entropy(likeness * 0.1, y) + F.cross_entropy(likeness.T * 0.1, torch.arange(10))

    return train(log, net, loss_of, loader(x, torch.randint(10, (50,)), size=10), lr=0.01)


@program
def length_equals_batch(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = net.qkv(x).chunk(3, -1)
        h = (q @ k.mT).softmax(-1) @ v
        h = h + h.transpose(0, 1) + h.mean(0) + h.mean(1) + x.sum(-1)[..., None] + x.sum(-1).T[..., None]
        return net.head(
            h + torch.bmm(h.transpose(0, 1), torch.eye(4).expand(5, 4, 4)) + net.places[:, None] + net.places
        )

    net = Net(forward, qkv=nn.Linear(4, 12), head=nn.Linear(4, 1), places=nn.Parameter(torch.randn(5, 4)))
    return fit(log, net, loader(*sequences(features=4)[:2], size=5), lr=0.001)


@program
def broadcast_from_the_right(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out, goal = net(x)[:, 0], y[:, 0]
        square = (out - y).square()  # (B,) against (B, 1): the usual mistake
        log(square.shape, square.mean())
        weights = torch.linspace(0, 1, len(x))
        table = torch.stack([out, goal])  # (2, B)
        table = table * weights + table.mean(1, keepdim=True) + torch.tensor([[0.1], [0.2]])
        each = x[:, None] - x[None]  # (B, B, 6)
        mask = ~torch.eye(len(x), dtype=torch.bool)
        near = each.square().sum(-1)[mask].view(len(x), len(x) - 1).min(1).values
        return (
            square.mean()
            + (table[0] - table[1]).square().mean()
            + (near * out).mean()
            + F.mse_loss(out, goal * weights)
        )

    return train(log, net, loss_of)


@program
def batches_of_one(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        log(out.squeeze(), out.item(), x.squeeze(0)[0], float(x.sum()), x.std(0, unbiased=False))
        return F.mse_loss(net(x[0]), y[0]) + F.mse_loss(out.expand(3, 1), y.expand(3, 1)) + (out - out.mean(0)).sum()

    x, y = data(n=6)
    train(log, net, loss_of, loader(x, y, size=1), lr=0.02)
    return fit(log, net, loader(x, y, size=2), lr=0.02)


@program
def empty_batches(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        chosen = x[:, 0] > 2
        few = net(x[chosen])
        log(few.shape, few.sum(), net(x[:0]).shape, x[3:3].sum(0), len(x[len(x) :]), torch.cat([x[:0], x]).mean())
        return F.mse_loss(net(x), y) + few.sum() * 0.1 + net(x[:0]).sum()

    return train(log, net, loss_of)


@program
def last_batch_dropped_or_odd(log: Log) -> Trained:
    net, x, y = mlp(), *data(n=23)
    for size, drop in ((7, True), (7, False), (23, False), (40, False), (11, False)):
        fit(log, net, loader(x, y, size=size, drop_last=drop))
        log(len(loader(x, y, size=size, drop_last=drop)), len(loader(x, y, size=size).dataset))
    return [net]


@program
def tensors_without_dimensions(log: Log) -> Trained:
    def forward(net: Net, x: Tensor, scale: Tensor, step: int) -> Tensor:
        return net.body(x * scale) + scale + step + net.shift

    net = Net(forward, body=mlp(), shift=nn.Parameter(torch.tensor(0.1)))
    items = [(x, y[0]) for x, y in zip(*data())]
    count = torch.tensor(0)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count = count + 1
        losses = (net(x, torch.tensor(0.5), int(count))[:, 0] - y).square()
        best = losses.min()
        log(best, losses[0].dim(), torch.stack([best, losses[-1]]), count)
        return sum(losses[i] for i in range(len(losses))) / losses.numel() + best

    return train(log, net, loss_of, DataLoader(items, 16))


@program
def dimensions_by_names_and_numbers(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        a = x.sum(dim=-2, keepdim=True) + x.mean(axis=0) + x.amax((0, 1)) + torch.sum(input=x, dim=[1], keepdim=True)
        b = (
            x.logsumexp(-2)
            + x.softmax(-2)
            + x.std(dim=0, correction=0)
            + x.norm(dim=0)
            + torch.linalg.vector_norm(x, dim=-1)[:, None]
        )
        c = (
            x.cumsum(-2) * 0.1
            + x.prod(0)
            + x.median(0)[0]
            + x.quantile(0.3, 0)
            + x.detach().aminmax(dim=0)[1]
            + x.mode(0).values
        )
        return x + 0.1 * (
            a + b + c + x.sort(dim=0, descending=True)[0] + x.diff(dim=0, prepend=x[:1]) + torch.var_mean(x, 0)[0]
        )

    return changed(log, change, size=10)


# Routing by data, decisions, Python's loops over samples


@program
def mixture_of_experts(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = net.router(x).softmax(-1)
        weights, chosen = gates.topk(2, -1)
        capacity, out = math.ceil(len(x) / 3), torch.zeros(len(x), 1)
        for i, expert in enumerate(net.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            rows, place = rows[:capacity], place[:capacity]
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        used = F.one_hot(chosen, 3).sum(1).to(x.dtype).mean(0)
        log(used, capacity)
        return out, 3 * (used * gates.mean(0)).sum()

    net = Net(forward, router=nn.Linear(6, 3), experts=nn.ModuleList(mlp() for _ in range(3)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out, balance = net(x)
        return F.mse_loss(out, y) + 0.01 * balance

    return train(log, net, loss_of)


@program
def experts_that_choose_rows(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        scores, rows = net.router(x).softmax(0).topk((len(x) + 1) // 2, dim=0)
        out = x.new_zeros(len(x), 1)
        for i, expert in enumerate(net.experts):
            out = out.scatter_add(0, rows[:, i : i + 1], expert(x[rows[:, i]]) * scores[:, i : i + 1])
        return out

    return fit(log, Net(forward, router=nn.Linear(6, 2), experts=nn.ModuleList([mlp(), mlp()])))


@program
def rows_chosen_by_masks(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        positive = x[:, 0] > 0
        out = torch.empty(len(x), 1)
        out[positive] = net.a(x[positive])
        out[~positive] = net.b(x[~positive])
        log(int(positive.sum()), positive.nonzero()[:, 0], torch.where(positive)[0].max() if positive.any() else -1)
        return out + torch.masked_select(x, x > 1).sum() * 0.01

    return fit(log, Net(forward, a=mlp(), b=mlp()))


@program
def sorted_by_length_and_unique(log: Log) -> Trained:
    net = nn.Linear(3, 1)

    def loss_of(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True, stable=True)
        x, y = x[order], y[order]
        sums = x.new_zeros(6, 3).index_add(0, lengths, x.sum(1))
        values, inverse, counts = torch.unique(lengths, return_inverse=True, return_counts=True)
        means = (sums[values] / counts[:, None])[inverse]
        log(values, counts, lengths.bincount(minlength=6), torch.unique_consecutive(lengths), lengths.tolist())
        return F.mse_loss(net(means), y[torch.arange(len(x)), lengths - 1]) + F.mse_loss(
            net(x[:, : lengths[0]]), y[:, : lengths[0]]
        )

    return train(log, net, loss_of, loader(*sequences()))


@program
def exits_by_data(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h, steps = net.body(x), 0
        while (h.abs() > 0.3).any() and steps < 5:
            h = net.body(h) * 0.7
            steps += 1
        halting, ponder = torch.zeros(len(x)), torch.zeros(len(x))
        for _ in range(6):
            running = halting < 0.95
            if not running.any():
                break
            halting = halting + torch.sigmoid(net.halt(h)[:, 0]) * running
            ponder += running.to(ponder.dtype)
        log(steps, ponder.sum())
        return net.head(h) * halting[:, None]

    return fit(log, Net(forward, body=nn.Linear(6, 6), halt=nn.Linear(6, 1), head=nn.Linear(6, 1)))


@program
def decisions_on_values(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        if x[0, 0] > 0 and x.sum() > -20:
            out = out * 2
        if (out.mean() > y.mean()).item():
            out = out - 0.1
        if not torch.isfinite(out).all() or torch.equal(out, y) or torch.allclose(out, y):
            log("never")
        scale = 1.0 if max(out.abs().max(), 0.5) < 3 else 0.5
        assert x.abs().max() < 10, "too large"
        log(bool((x > 0).any()), bool(out.max() > 1), scale, "large" if x.norm() > 5 else "small", out[0] > out[1])
        return F.mse_loss(out * scale, y)

    return train(log, net, loss_of)


@program
def python_loops_over_rows(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        outs = [net(row) for row in x]
        losses = []
        for i, (out, goal) in enumerate(zip(outs, y)):
            if goal < 0:
                continue
            losses.append((out - goal).square() * (1 + i / 10))
        rows = torch.stack(list(x))
        first, *rest = x
        a, b = x.chunk(2)
        picked = torch.stack([row[i % 6] for i, row in enumerate(x)])
        log(len(losses), rows.mean(0), first[0], len(rest), [float(r.sum()) for r in reversed(list(x))], a[0], b[-1])
        return torch.cat(losses).sum() / len(x) + net(rows).mean() * 0.1 + picked.mean() if losses else net(rows).mean()

    return train(log, net, loss_of)


@program
def lengths_used_in_numbers(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        n, (rows, columns) = len(x), x.size()
        ones = torch.ones(n, 1) * torch.linspace(0, 1, rows)[:, None]
        index = torch.arange(x.size(0))
        out = net(x + ones / n) * torch.full((x.shape[0], 1), 1 / columns)
        out = out + x[index, index % columns, None] * 0.1 + torch.zeros(y.shape).fill_(0.1)
        log(
            n,
            rows,
            x.numel(),
            x.nelement(),
            list(x.shape),
            x.size(-2),
            x.shape.numel(),
            y.shape == (n, 1),
            x.stride(),
            x.ndim,
        )
        return (out - y).square().sum() / n + (out - y).abs().sum() / y.numel() * math.log(n)

    return train(log, net, loss_of)


@program
def gathers_and_one_hots(log: Log) -> Trained:
    net = mlp(out=4)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        scores = net(x).log_softmax(-1)
        a = scores.gather(1, y[:, None]) + scores.take_along_dim(y[:, None], 1) + scores[range(len(x)), y][:, None]
        b = (scores * F.one_hot(y, 4)).sum(1) + scores[y == 1].sum() / 10 + scores.take(torch.arange(len(y)) * 4 + y)
        counts = torch.bincount(y, minlength=4).clamp(min=1)
        histogram = torch.histc(scores.detach(), 5)
        log(counts, histogram, scores.argmax(1).eq(y).sum().item() / len(y), scores.gather(0, y[None, :4] % len(y)))
        return -(a[:, 0] + b).mean() - (scores.sum(0) / counts).mean() + scores.index_select(0, y % len(y)).mean()

    return train(log, net, loss_of, loader(*classes()))


@program
def operations_along_the_batch(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        a = x.roll(1) + x.roll(2, 0) + x.flip(0) + x.flip([0, 1]) + x.flipud() + torch.roll(x, (1, 1), (0, 1))
        b = x.cumsum(0) + x.cummax(0)[0] + x.logcumsumexp(0) + x.sort(0)[0] + x.argsort(0) + x.kthvalue(1, 0)[0]
        c = torch.cov(x.T).sum(0) + x.T.cov()[0] + F.normalize(x, dim=0) + torch.corrcoef(x.T).nan_to_num()[0]
        d = (
            x.repeat(2, 1)[: len(x)]
            + x.repeat_interleave(2, 0)[: len(x)]
            + x.tile(2, 1)[-len(x) :]
            + torch.tril(x)
            + x.triu(1)
        )
        return (
            x
            + 0.02 * (a + b + c + d)
            + 0.1 * torch.trapezoid(x, dim=0)
            + x.unfold(0, 2, 1).mean((0, 2))
            + torch.renorm(x, 2, 0, 1)
        )

    return changed(log, change)


@program
def distances_of_pairs(log: Log) -> Trained:
    net = mlp(out=4)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(net(x), dim=-1)
        other = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=-1)
        distance = torch.cdist(z, other) + F.pairwise_distance(z[:, None], other[None]) + torch.cdist(z, z[:2])[:, :1]
        logits = torch.cat([z, other]) @ torch.cat([z, other]).T / 0.5
        logits.fill_diagonal_(-1e9)
        n = len(x)
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        hardest = (distance + 10 * torch.eye(n)).min(1)[0]
        covariance = z.T @ z / n
        log(logits.argmax(1).eq(target).sum(), F.pdist(z).mean(), covariance.diagonal())
        triplet = F.triplet_margin_loss(z, other, z.roll(1, 0))
        return (
            F.cross_entropy(logits, target)
            + (distance.diagonal() - hardest).relu().mean()
            + triplet
            + covariance.square().mean()
        )

    return train(log, net, loss_of)


@program
def comparisons_of_whole_batches(log: Log) -> Trained:
    net, best, seen = mlp(), torch.full((6,), -math.inf), []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal best
        best = torch.maximum(best, x.max(0).values)
        order = torch.argsort(y[:, 0])
        middle = y.median()
        seen.extend(y[y > middle].tolist())
        bins = torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])) + torch.searchsorted(
            y[order, 0].contiguous(), y[:, :1].contiguous()
        )
        log(
            torch.isin(bins, bins[0]).sum(),
            torch.combinations(y[:3, 0]),
            torch.cartesian_prod(y[:2, 0], y[:2, 0]),
            best,
        )
        return (
            F.mse_loss(net(x / best.abs()), y)
            + net(bins.to(x.dtype)).mean() * 0.1
            + F.margin_ranking_loss(net(x[order])[1:], net(x[order])[:-1], torch.ones(len(x) - 1, 1))
        )

    return [*train(log, net, loss_of), torch.tensor(seen)]


# Layers and losses


@program
def batch_norms(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.two(net.conv(x)).relu()
        h = net.one(h.flatten(1)) + F.batch_norm(h.flatten(1), None, None, training=True)
        return net.head(net.cumulative(h) + net.plain(h))

    parts = {
        "conv": nn.Conv2d(4, 4, 3),
        "two": nn.BatchNorm2d(4, momentum=0.3),
        "one": nn.BatchNorm1d(16, affine=False),
    }
    parts.update(cumulative=nn.BatchNorm1d(16, momentum=None), plain=nn.BatchNorm1d(16, track_running_stats=False))
    net = Net(forward, head=nn.Linear(16, 1), **parts)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), y)
        log(net.two.running_mean, net.cumulative.running_var, net.one.num_batches_tracked)
        return loss + net.two.running_mean.norm() * 0

    train(log, net, loss_of, loader(*images(48)))
    net.eval()
    log(*[F.mse_loss(net(x), y) for x, y in loader(*images(48), shuffle=False, size=7)])
    net.two.train()
    return fit(log, net, loader(*images(48), size=10))


@program
def batch_norm_by_hand(log: Log) -> Trained:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("var", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            mean, var = (x.mean(0), x.var(0, unbiased=False)) if self.training else (self.mean, self.var)
            if self.training:
                self.mean += 0.1 * (mean.detach() - self.mean)
                self.var.mul_(0.9).add_(0.1 * var.detach())
            return (x - mean) / (var + 1e-5).sqrt() * self.scale + self.shift

    net = nn.Sequential(nn.Linear(6, 8), Norm(), nn.Tanh(), nn.Linear(8, 1))
    fit(log, net)
    net.eval()
    return fit(log, net)


@program
def norms_of_other_kinds(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.conv(x)
        h = (
            net.group(h)
            + net.instance(h)
            + net.layer(h)
            + F.local_response_norm(h, 2)
            + F.instance_norm(h[:, :2]).repeat(1, 2, 1, 1)
        )
        h = h + F.layer_norm(h, h.shape[1:]) + F.normalize(h) + F.normalize(h.flatten(1), dim=1).view_as(h)
        h = h + F.layer_norm(h.transpose(0, 1), (h.shape[0], 4, 4)).transpose(0, 1)  # over the batch
        h = h + F.group_norm(h.transpose(0, 1), 2).transpose(0, 1) + F.rms_norm(h, (4,))
        return net.head(h.amax((2, 3)).tanh())

    parts = {
        "group": nn.GroupNorm(2, 4),
        "instance": nn.InstanceNorm2d(4, track_running_stats=True),
        "layer": nn.LayerNorm([4, 4, 4]),
    }
    return fit(
        log,
        Net(forward, conv=nn.Conv2d(4, 4, 3, padding=1), head=nn.Linear(4, 1), **parts),
        loader(*images()),
        lr=0.05,
    )


@program
def convolutions_of_all_kinds(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x).relu() + net.b(F.avg_pool2d(x, 2))
        h = F.pixel_shuffle(h, 2) if h.shape[1] % 4 == 0 else h
        h = F.interpolate(h, size=(4, 4), mode="bilinear", align_corners=False) + F.interpolate(h, scale_factor=0.5)
        h = F.max_pool2d(F.pad(h, (1, 1, 1, 1), mode="reflect"), 3, 1) + F.adaptive_max_pool2d(h, 4)
        pooled, places = F.max_pool2d(h, 2, return_indices=True)
        h = h + F.max_unpool2d(pooled, places, 2) + F.lp_pool2d(h.abs() + 1, 2, 3, 1).mean()
        return net.head(
            (0.1 * (h.flatten(1) + net.c(h.flatten(2)).flatten(1) + F.conv2d(x[:, :1], x[:1, :1]).flatten(1))).tanh()
        )

    parts = {
        "a": nn.Conv2d(4, 4, 3, padding="same", groups=2),
        "b": nn.ConvTranspose2d(4, 4, 2, 2),
        "c": nn.Conv1d(1, 1, 3, padding=1),
    }
    return fit(log, Net(forward, head=nn.Linear(16, 1), **parts), loader(*images()), lr=0.05)


@program
def convolution_over_the_batch(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        over = net.conv(x.t()[None])[0].t()  # the batch is time
        unbatched = net.image(x.view(1, len(x), 6))[0]
        return net.head(x + over + unbatched + net.pool(x.t()).t() + F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t())

    pool = nn.MaxPool1d(3, 1, 1)
    net = Net(
        forward,
        conv=nn.Conv1d(6, 6, 3, padding=1),
        image=nn.Conv2d(1, 1, 3, padding=1),
        head=nn.Linear(6, 1),
        pool=pool,
    )
    return fit(log, net)


@program
def grids_and_patches(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        theta = net.theta(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        grid = F.affine_grid(theta, x.shape, align_corners=False)
        moved = F.grid_sample(x, grid, align_corners=False)
        patches = F.unfold(moved, 2, stride=2)
        back = F.fold(patches * net.weight, (4, 4), 2, stride=2)
        tiles = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(-1, 16)
        shared = F.grid_sample(x[:1].expand_as(x), grid, align_corners=False)
        return net.head(back.flatten(1) + shared.flatten(1)) + net.tile(tiles).view(len(x), 4).mean(1, keepdim=True)

    parts = {"theta": nn.Linear(64, 6), "head": nn.Linear(64, 1), "tile": nn.Linear(16, 1)}
    return fit(log, Net(forward, weight=nn.Parameter(torch.ones(16, 1)), **parts), loader(*images()), lr=0.05)


@program
def cross_entropies(log: Log) -> Trained:
    net = mlp(out=4)
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1])

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        y = torch.where(x[:, 2] > 1, -100, y)
        a = (
            F.cross_entropy(out, y)
            + F.cross_entropy(out, y, weight)
            + F.cross_entropy(out, y, reduction="sum") / len(y)
        )
        b = F.cross_entropy(out, y.clamp(min=0), weight, label_smoothing=0.1, ignore_index=2) + F.nll_loss(
            out.log_softmax(1), y, weight
        )
        c = F.cross_entropy(out, F.one_hot(y.clamp(min=0), 4).to(out.dtype), weight) + F.cross_entropy(
            out[0], y[0].clamp(min=0)
        )
        each = F.cross_entropy(out, y, weight, reduction="none")
        pixels = F.cross_entropy(out.view(-1, 2, 2), (y[:, None] > 0).long().repeat(1, 2))
        log(a, b, c, each, pixels)
        return a + b + c + each.topk(2).values.mean() + pixels

    return train(log, net, loss_of, loader(*classes()), lr=0.05)


@program
def losses_of_all_kinds(log: Log) -> Trained:
    net = mlp(out=3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out, goal = net(x), y.repeat(1, 3)
        p = out.sigmoid()
        positive, sign = (goal > 0).to(p.dtype), goal.sign()
        kinds = [
            F.smooth_l1_loss(out, goal, beta=0.5),
            F.huber_loss(out, goal, delta=0.3),
            F.mse_loss(out, goal, reduction="sum") / out.numel(),
            F.l1_loss(out, goal, reduction="none").mean(1).max(),
            F.binary_cross_entropy(p, positive, weight=torch.rand(len(x), 1)),
            F.binary_cross_entropy_with_logits(out, positive, pos_weight=torch.tensor([1.0, 2.0, 3.0])),
            F.kl_div(out.log_softmax(1), p.detach()),
            F.kl_div(out.log_softmax(1), p.detach(), reduction="batchmean"),
            F.gaussian_nll_loss(out, goal, p),
            F.poisson_nll_loss(out, goal.abs()),
            F.soft_margin_loss(out, sign),
            F.hinge_embedding_loss(out, sign),
            F.multilabel_soft_margin_loss(out, positive),
            F.multi_margin_loss(out, positive[:, 0].long()),
            F.margin_ranking_loss(p, p.flip(0), sign),
            F.cosine_embedding_loss(out, goal, sign[:, 0]),
            F.cosine_similarity(out, goal).mean(),
            F.cosine_similarity(out, goal, dim=0).sum(),
            F.triplet_margin_with_distance_loss(out, goal, goal.roll(1, 0)),
            torch.dist(out, goal),
            torch.trapezoid(out).mean(),
        ]
        log(*kinds)
        return sum(kinds) / len(kinds)

    return train(log, net, loss_of)


@program
def ctc_loss(log: Log) -> Trained:
    net = nn.GRU(3, 5)

    def loss_of(x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        scores = net(x.transpose(0, 1))[0].log_softmax(-1)
        steps = torch.full((len(x),), 5)
        joined = torch.cat([row[: n // 2] for row, n in zip(labels, lengths)])
        flat = F.ctc_loss(scores, joined, steps, lengths // 2, zero_infinity=True, reduction="none")
        log(flat)
        return nn.CTCLoss(zero_infinity=True)(scores, labels, steps, lengths // 2) + flat.mean()

    x, _, lengths = sequences()
    return train(log, net, loss_of, loader(x, torch.randint(1, 5, (50, 4)), lengths))


@program
def embeddings_of_all_kinds(log: Log) -> Trained:
    def forward(net: Net, ids: Tensor, lengths: Tensor) -> Tensor:
        flat = torch.cat([row[:n] for row, n in zip(ids, lengths)])
        offsets = F.pad(lengths.cumsum(0), (1, 0))[:-1]
        bags = net.bag(flat, offsets) + net.bag(ids) + F.embedding_bag(ids, net.table.weight, mode="max")
        weighted = F.embedding_bag(ids, net.bag.weight, per_sample_weights=ids.to(bags.dtype) / 9, mode="sum")
        padded = net.table(ids).mean(1) + F.embedding(
            ids[:, 0], net.table.weight, max_norm=2.0, scale_grad_by_freq=True
        )
        return net.head(net.bilinear(bags, padded) + F.bilinear(bags, weighted, net.bilinear.weight)).tanh()

    parts = {
        "bag": nn.EmbeddingBag(9, 4, mode="mean"),
        "table": nn.Embedding(9, 4, padding_idx=0),
        "head": nn.Linear(3, 1),
    }
    net = Net(forward, bilinear=nn.Bilinear(4, 4, 3), **parts)
    _, y, lengths = sequences()
    return fit(log, net, loader(torch.randint(9, (50, 5)), lengths, y[:, 0]))


@program
def sparse_gradients(log: Log) -> Trained:
    table, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1)
    optimizers = [torch.optim.SparseAdam(table.parameters(), 0.05, eps=1e-3), SGD(head.parameters(), 0.1)]
    for ids, y in loader(torch.randint(20, (50, 3)), data()[1]):
        loss = F.mse_loss(head(table(ids).mean(1)), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        log(loss.item(), table.weight.grad.is_sparse, table.weight.grad.coalesce().values().norm())
        for optimizer in optimizers:
            optimizer.step()
    return [table, head]


@program
def attention_of_all_kinds(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        a, w = net.attention(x, x, x, key_padding_mask=x[..., 0] > 1.5, need_weights=True)
        b, _ = net.attention(
            x.transpose(0, 1)[:, :, :], *[x.transpose(0, 1)] * 2
        )  # the batch as the length: another meaning
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        c = F.scaled_dot_product_attention(q, q[:1].expand_as(q), q, attn_mask=w[:, None]).transpose(1, 2).flatten(2)
        d = F.scaled_dot_product_attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), is_causal=True)
        return net.head(a + b.transpose(0, 1) + c + d.transpose(0, 1))

    net = Net(forward, attention=nn.MultiheadAttention(8, 2, batch_first=True), head=nn.Linear(8, 1))
    return fit(log, net, loader(*sequences(features=8)[:2], size=10))


@program
def spectra_and_solvers(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        a = torch.fft.irfft(spectrum * 0.5, n=6, dim=1) + torch.fft.fft(x, dim=0).real + torch.fft.fft2(x).imag * 0.1
        gram = x.T @ x / len(x) + torch.eye(6)
        b = torch.linalg.solve(gram, x.T).T + torch.linalg.cholesky(gram)[0] + x @ torch.linalg.inv(gram)
        singular = torch.linalg.svdvals(x)
        each = torch.linalg.solve(x[:, :, None] * x[:, None] + torch.eye(6), x[..., None])[..., 0]
        log(
            singular,
            torch.linalg.det(gram),
            torch.linalg.matrix_norm(x),
            torch.logdet(gram),
        )
        return x + 0.1 * (a + b + each) + 0.01 * singular.sum()

    return changed(log, change)


# Kinds of numbers and of tensors


@program
def complex_numbers(log: Log) -> Trained:
    net = nn.Linear(6, 6)
    w = nn.Parameter(torch.randn(6, 6, dtype=torch.promote_types(torch.get_default_dtype(), torch.complex64)) / 3)
    optimizer = SGD([*net.parameters(), w], 0.1)
    for x, y in loader(*data()):
        z = torch.complex(net(x), x.flip(1)) @ w
        z = z * torch.exp(1j * x) + torch.polar(x.abs(), x)
        loss = (z.abs().mean(1, keepdim=True) - y).abs().mean() + (z.real * z.conj().imag).mean() + z.mH.H.real.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, z[0], z.is_conj(), torch.is_complex(z), z.sum())
    return [net, w]


@program
def mixed_kinds_of_numbers(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        wide, half = x.double(), x.half()
        mixed = (
            ids * 0.5
            + wide
            + half
            + (x > 0)
            + torch.tensor(2) * np.float64(0.5)
            + np.float32(0.1) * x
            + ids / 2
            + ids // 2
        )
        mask = (ids > 3) | (x < 0) & ~(x == 0)
        log(
            mixed.dtype == torch.float64,
            (ids + True).dtype == torch.int64,
            mask.sum(),
            mask.to(x.dtype).mean(0),
            (-ids).sum(),
            ids.sum(),
        )
        log(
            ids.float().mean().dtype == torch.float32,
            half.sum().dtype == torch.float16,
            torch.result_type(x, ids) == x.dtype,
            ids.max(0).values,
        )
        return F.mse_loss(net(mixed.to(x.dtype).type_as(x)) * mask.any(1, keepdim=True), y.to(x)) + (
            mixed.mean() * 0
        ).to(x.dtype)

    x, y = data()
    return train(log, net, loss_of, loader(x, torch.randint(9, (50, 1)), y))


@program
def autocast_to_bfloat16(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
            log(out.dtype == torch.bfloat16, (x @ x.T).dtype == torch.bfloat16, (out + x[:, :1]).dtype == x.dtype)
        return F.mse_loss(out.to(y.dtype), y)

    return train(log, net, loss_of)


@program
def networks_in_other_precisions(log: Log) -> Trained:
    double, narrow = mlp().double(), mlp().bfloat16()
    optimizer = SGD([*double.parameters(), *narrow.parameters()], 0.1)
    for x, y in loader(*data()):
        a, b = double(x.double()), narrow(x.bfloat16())
        loss = F.mse_loss(a, y.double()) + F.mse_loss(b.to(y), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss.dtype == torch.float64, b.dtype == torch.bfloat16, loss.item())
    return [double, narrow.to(torch.float32)]


@program
def sparse_tensors(log: Log) -> Trained:
    net, w = mlp(), nn.Parameter(torch.randn(6, 6))
    optimizer = SGD([*net.parameters(), w], 0.1)
    for x, y in loader(*data()):
        sparse = (x * (x > 0.5)).to_sparse()
        graph = torch.sparse_coo_tensor(
            torch.stack([torch.arange(len(x)), torch.randperm(len(x))]), torch.ones(len(x)), (len(x), len(x))
        )
        h = torch.sparse.mm(sparse, w) + torch.sparse.mm(graph, x) + (sparse.to_dense() @ w)
        loss = F.mse_loss(net(h), y) + torch.sparse.sum(sparse) * 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, sparse.coalesce().indices()[:, :3], x.to_sparse_csr().values().sum(), sparse.is_sparse, x.is_sparse)
    return [net, w]


@program
def nested_tensors(log: Log) -> Trained:
    net = nn.Linear(3, 1)

    def loss_of(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([row[:n] for row, n in zip(x, lengths)])
        out = torch.nested.to_padded_tensor(net(nested), 0.0, (len(x), 5, 1))
        mask = torch.arange(5) < lengths[:, None]
        return ((out - y).square()[..., 0] * mask).sum() / mask.sum()

    return train(log, net, loss_of, loader(*sequences()))


@program
def tensors_without_data(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        shape = copy.deepcopy(net).to("meta")(x.to("meta")).shape
        empty = torch.empty_like(x, device="meta")
        log(
            shape,
            empty.shape,
            empty.is_meta,
            x.is_meta,
            x.device.type,
            str(x.dtype),
            x.layout == torch.strided,
            x.get_device(),
        )
        return F.mse_loss(net(x), y) + net(torch.zeros(empty.shape)).mean()

    return train(log, net, loss_of)


class Named(Tensor):
    """A program's own kind of tensor: its operations keep the kind."""

    def doubled(self) -> Tensor:
        return self * 2


class Counted(Tensor):
    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


@program
def tensors_of_its_own_kind(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        named, counted = x.as_subclass(Named), x.clone().as_subclass(Counted)
        total = (named.doubled() + x)[1:].mean(0)
        log(
            type(total).__name__,
            type(named + y).__name__,
            isinstance(named, Tensor),
            (counted * x).sum().as_subclass(Tensor),
        )
        return (
            F.mse_loss(net(named * 0.5).as_subclass(Tensor), y)
            + net(counted.as_subclass(Tensor)).mean()
            + total.as_subclass(Tensor).mean()
        )

    Counted.calls.clear()
    out = train(log, net, loss_of)
    log(Counted.calls.count("mul"))
    return out


@program
def modes_over_functions(log: Log) -> Trained:
    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is F.linear:
                log(out.shape, out.mean())
                out = out * 0.9
            return out

    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with Calls():
            return F.mse_loss(net(x), y)

    return train(log, net, loss_of)


@program
def modes_over_dispatch(log: Log) -> Trained:
    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.addmm.default:
                log(args[1].shape[0], out.sum())
                return out * 0.9
            return out

    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with Shapes():
            return F.mse_loss(net(x), y)

    return train(log, net, loss_of)


@program
def operators_by_their_names(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        aten = torch.ops.aten
        h = (
            aten.mul(x, 2.0)
            + aten.roll.default(x, [1], [0])
            + torch._C._nn.gelu(x)
            + torch._C._VariableFunctions.sub(x, x.mean(0))
        )
        out = aten.linear(aten.tanh(net[0](h)), net[2].weight, net[2].bias)
        aten.add_.Tensor(out.detach(), 0.1)
        log(aten.sum.dim_IntList(x, [0]), aten.sym_size.int(x, 0), aten.mean.default(out))
        return aten.mse_loss(out, y) + torch._VF.chunk(out, 2)[0].mean()

    return train(log, net, loss_of)


# Compiled, scripted and traced


def fresh_compiler(function: Callable[[Log], Trained]) -> Callable[[Log], Trained]:
    """Compile nothing of earlier programs."""

    def run(log: Log) -> Trained:
        torch._dynamo.reset()
        return function(log)

    run.__name__ = function.__name__
    return run


@program
@fresh_compiler
def compiled_eager(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    compiled = torch.compile(net, backend="eager")
    out = fit(log, compiled)
    log(*[k.replace("_orig_mod.", "") for k in compiled.state_dict()])
    return [*out, net]


@program
@fresh_compiler
def compiled_aot(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.body(x) - x.mean(0)
        return net.head(h.softmax(0) + h * x.shape[0] / 16)

    return fit(log, torch.compile(Net(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 1)), backend="aot_eager"))


@program
@fresh_compiler
def compiled_by_inductor(log: Log) -> Trained:
    net = torch.compile(mlp(), dynamic=True)
    return train(log, net, lambda x, y: F.mse_loss(net(x), y) + net(x).std(), loader(*data(), size=25))


@program
@fresh_compiler
def compiled_loss(log: Log) -> Trained:
    net = mlp()

    @torch.compile(backend="aot_eager", dynamic=True)
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        error = (out - y).square()
        return (error / error.sum() * error).sum() + error.mean()

    return train(log, net, lambda x, y: loss_of(net(x), y))


@program
@fresh_compiler
def compiled_in_place(log: Log) -> Trained:
    net = mlp()
    net[0].compile(backend="eager")
    net.compile(backend="aot_eager", dynamic=True)

    @torch.compile(backend="eager", dynamic=True)
    def shift(x: Tensor) -> Tensor:
        x -= x.mean(0)
        x[0] = 0
        return x * 2

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(shift(x)), y)
        log(x.sum(0))
        return loss

    return train(log, net, loss_of)


@program
@fresh_compiler
def compiled_step(log: Log) -> Trained:
    net = mlp()
    optimizer = SGD(net.parameters(), 0.1)

    @torch.compile(backend="eager", dynamic=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    for x, y in loader(*data()):
        optimizer.zero_grad()
        log(step(x, y))
        optimizer.step()
    return [net]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if bool(h.mean() > 0):
            h = h - h.mean(0)
        for i in range(x.size(0)):
            h = h + 0.01 * i * x[i]
        return self.head(h.tanh())


@program
def scripted(log: Log) -> Trained:
    net = torch.jit.script(Scripted())

    @torch.jit.script
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).pow(2).sum() / out.size(0)

    return train(log, net, lambda x, y: loss_of(net(x), y))


@program
def traced(log: Log) -> Trained:
    net = Net(lambda net, x: net.head((net.body(x) - x.mean(0)).softmax(0)), body=nn.Linear(6, 6), head=nn.Linear(6, 1))
    x, y = data()
    out = fit(log, torch.jit.trace(net, x[:16]), loader(x, y))
    for a, b in loader(x, y):
        again = torch.jit.trace(net, a, check_trace=False)
        log(F.mse_loss(again(a), b))
    return out


@program
def graph_module(log: Log) -> Trained:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.body(x) - x.mean(0)).relu() * x.shape[0])

    net = torch.fx.symbolic_trace(Steps())
    for x, y in loader(*data()):
        shapes = torch.fx.Interpreter(net).run(x)
        log(shapes.shape, F.mse_loss(shapes, y))
    return fit(log, net, lr=0.001)


# Other libraries, Python's own operations


@program
def numpy_in_the_middle(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        array = out.detach().numpy()
        ranks = np.argsort(np.argsort(array[:, 0]))
        weights = torch.from_numpy(np.exp(-ranks / len(ranks))).to(x.dtype)[:, None]
        more = np.concatenate([x, y], 1).mean(0)
        log(
            np.mean(x.numpy(), 0),
            np.asarray(x).shape,
            np.array(y).sum(),
            x.__array__().std(),
            more,
            np.corrcoef(array[:, 0], y[:, 0]),
        )
        log(
            np.sum(array),
            np.maximum(x, 0).sum(),
            np.percentile(y, 50),
            np.stack([x, x]).shape,
            np.dot(y[:, 0], y[:, 0]),
            np.ones(6) @ x[0].numpy(),
        )
        return (weights * (out - y).square()).mean() + (torch.as_tensor(array) * out).mean()

    return train(log, net, loss_of)


@program
def memory_looked_at(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        view, other = x.view(-1), x.clone()
        log(
            x.data_ptr() == view.data_ptr(),
            x.data_ptr() == other.data_ptr(),
            x[1:].data_ptr() - x.data_ptr(),
            x.storage_offset(),
        )
        log(
            x.untyped_storage().nbytes(),
            x[2:].storage_offset(),
            x.nbytes,
            x.is_contiguous(),
            x.t().is_contiguous(),
            y.element_size(),
        )
        log(
            view._base is x or view._base is None,
            x.is_set_to(x),
            x.is_shared(),
            torch.from_dlpack(x).sum(),
        )
        log(len(bytes(x.numpy().data)), len(x.numpy().tobytes()))
        return F.mse_loss(net(x), y)

    return train(log, net, loss_of)


@program
def python_builtins(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        total, largest, least = sum(out), max(out), min(out)
        ordered = sorted(y[:, 0], reverse=True)
        log(
            total,
            largest,
            least,
            ordered[0],
            sorted(x[:, 0].tolist())[:2],
            any(y > 1),
            all(y[:, 0] < 2),
            abs(y[0]),
            round(float(y[0]), 3),
        )
        log(
            f"{out.mean():.3f} {y[0].item():.2e} {len(x)}",
            "%.3f" % y.mean(),  # noqa: UP031
            str(x.shape),
            repr(y[0])[:6],
            math.sqrt(x.square().mean()),
        )
        log(
            int(out.sum() * 10),
            float(x[0, 0]),
            str(complex(1, 2) * y[0].item())[:6],
            divmod(len(x), 3),
            pow(x[0, 1], 2),
            x[0, 0].__index__ is not None,
        )
        log(
            list(map(float, y))[:2],
            [tuple(r.shape) for r in out][:1],
            list(range(int(y.argmax()))),
            [0, 1, 2][(y[0] > 0).long()],
            bool(y[0] > 0),
        )
        log(
            y[0, 0] in y,
            Counter((y[:, 0] > 0).tolist()).most_common(),
            dict(enumerate(y[:2, 0].tolist())),
            max(0, out[0].item()),
        )
        return (
            (total / len(x)).square().mean()
            + F.mse_loss(out, y)
            + (largest - least).sum() * 0.1
            + math.exp(-y.std()) * out.std()
        )

    return train(log, net, loss_of)


@program
def tensors_as_keys(log: Log) -> Trained:
    net, weights, order = mlp(), {}, []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        weights[x] = y.mean().item()
        weights[y] = x.mean().item()
        order.append(x)
        log(
            len(weights),
            weights[x],
            x in weights,
            hash(x) == hash(x),
            hash(x) == hash(y),
            any(x is t for t in order),
            {y: 1}.get(y),
        )
        log(id(x) == id(order[-1]), x.tolist()[0] in x.tolist(), [tuple(r) for r in y.tolist()].index((y[1].item(),)))
        return F.mse_loss(net(x), y) * weights[order[0]]

    return train(log, net, loss_of)


@program
def printed(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        loss = F.mse_loss(out, y)
        log(
            repr(x)[:40],
            str(out.detach())[:30],
            f"{loss:.3f}",
            f"{loss.item():8.4f}",
            f"{x[0]}"[:16],
            format(y.mean(), ".2f"),
            str(x.dtype),
        )
        log(repr(torch.Size(x.shape)), str(x.shape), out.type(), type(x).__name__, str(y[:, 0].long()))
        return loss

    torch.set_printoptions(precision=2)
    out = train(log, net, loss_of)
    torch.set_printoptions(profile="default")
    return out


# Threads, containers, networks of unusual make


@program
def batches_moved_by_a_thread(log: Log) -> Trained:
    net, waiting = mlp(), queue.Queue(maxsize=2)

    def fetch() -> None:
        for x, y in loader(*data()):
            x.mul_(0.5)[0] += 1
            waiting.put((x.to(torch.get_default_dtype()) - x.mean(0), y.clone()))
        waiting.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    out = fit(log, net, iter(waiting.get, None))
    thread.join()
    return out


@program
def loss_in_a_thread(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out, found = net(x), []
        thread = threading.Thread(
            target=lambda: found.extend([F.mse_loss(out, y), net(x.flip(0)).var(), out.detach().max().item()])
        )
        thread.start()
        thread.join()
        log(found[2])
        return found[0] + found[1]

    return train(log, net, loss_of)


@program
def networks_in_two_threads(log: Log) -> Trained:
    nets = [mlp(), mlp()]
    optimizer = SGD([p for net in nets for p in net.parameters()], 0.1)
    for x, y in loader(*data()):
        outs: dict[int, Tensor] = {}

        def call(i: int, x: Tensor = x, y: Tensor = y, outs: dict[int, Tensor] = outs) -> None:
            outs[i] = F.mse_loss(nets[i](x - x.mean(0)), y)

        threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.zero_grad()
        (outs[0] + outs[1]).backward()
        optimizer.step()
        log(outs[0], outs[1])
    return list(nets)


@dataclasses.dataclass
class Sample:
    x: Tensor
    names: list[str]
    y: Optional[Tensor] = None

    def to(self, dtype: torch.dtype) -> Sample:
        return dataclasses.replace(self, x=self.x.to(dtype))


class Result(NamedTuple):
    out: Tensor
    hidden: tuple[Tensor, ...]
    loss: Optional[Tensor] = None


class Lazy:
    """A container that torch does not know."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.make(), self.make() * 2])


@program
def containers_of_the_program(log: Log) -> Trained:
    def forward(net: Net, sample: Sample, *, extra: Optional[dict[str, Any]] = None) -> Result:
        h = net.body(sample.x)
        shift, double = extra["lazy"]
        h = h + shift + double.mean(0) + sum(extra["more"][1]) + extra["deque"][-1]
        extra["written"] = h.detach()
        loss = None if sample.y is None else F.mse_loss(net.head(h), sample.y)
        return Result(out=net.head(h), hidden=(h, sample.x), loss=loss)

    net = Net(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 1))
    rows = [(x, f"sample {i}", y) for i, (x, y) in enumerate(zip(*data()))]

    def collate(items: list[Any]) -> Sample:
        xs, names, ys = zip(*items)
        return Sample(torch.stack(xs), list(names), torch.stack(ys))

    optimizer = SGD(net.parameters(), 0.1)
    for sample in DataLoader(rows, 16, shuffle=True, collate_fn=collate):
        x = sample.x
        extra = {"lazy": Lazy(lambda x=x: x * 0.1), "more": [1, (x, x.flip(0))], "deque": deque([x[:1], x], maxlen=1)}
        result = net(sample.to(x.dtype), extra=extra)
        optimizer.zero_grad()
        (result.loss + result.hidden[0].square().mean()).backward()
        optimizer.step()
        assert len(sample.names) == len(x) == len(result.out)
        log(
            result.loss,
            extra["written"].mean(0),
            sample.names[:2],
            result._replace(loss=0).out.mean(),
            dataclasses.astuple(sample)[0].sum(),
        )
    return [net]


@program
def networks_called_in_unusual_ways(log: Log) -> Trained:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.memory = nn.Linear(6, 4), nn.Linear(4, 1), None
            self.seen: list[Tensor] = []

        def encode(self, x: Tensor) -> Tensor:
            self.memory = self.encoder(x).tanh()
            self.seen.append(self.memory.detach().mean(0))
            return self.memory

        def sample(self, n: int) -> Tensor:
            return self.decoder(torch.randn(n, 4))

        def loss(self, y: Tensor) -> Tensor:
            return F.mse_loss(self.decoder(self.memory), y)

        def forward(self, *, batch: dict[str, Tensor], weights: Optional[Tensor] = None) -> dict[str, Tensor]:
            out = self.decoder(self.encode(batch["x"]))
            return {"out": out, "weights": torch.ones(len(out)) if weights is None else weights}

    net = Unusual()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        net.encode(x)
        loss = net.loss(y) + net.sample(len(x)).mean() + net.sample(5).square().mean()
        out = net(batch={"x": x})
        by_hand = net.decoder(net.encoder(x - x.mean(0)))
        log(
            net.memory.shape,
            net.memory[0],
            Unusual.encode(net, x).sum(),
            nn.Module.__call__(net.decoder, net.memory).mean(),
        )
        return (
            loss
            + ((out["out"] - y).square()[:, 0] * out["weights"]).mean()
            + by_hand.var()
            + net.forward(batch={"x": x})["out"].mean()
        )

    return train(log, net, loss_of) + net.seen


@program
def networks_without_tensors(log: Log) -> Trained:
    def forward(net: Net, n: int, power: float = 1.0) -> Tensor:
        z = torch.randn(n, 4) ** power
        table = net.table(torch.arange(n) % 5)
        return net.head(z + table - z.mean(0)) * net.scale

    net = Net(forward, table=nn.Embedding(5, 4), head=nn.Linear(4, 1), scale=nn.Parameter(torch.tensor(1.0)))
    return train(log, net, lambda x, y: F.mse_loss(net(len(x)), y) + net(n=3, power=2.0).mean())


@program
def activations_kept_in_attributes(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.body(x)
        if net.previous is not None:
            k = min(len(net.previous), len(h))
            h = torch.cat([h[:k] + 0.1 * net.previous[:k], h[k:]])
        net.previous = h.detach()
        net.history.append(h.detach())
        net.count += h.shape[0]
        return net.head(h.tanh() + torch.cat(list(net.history)).mean(0))

    net = Net(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 1), previous=None, history=deque(maxlen=3), count=0)
    out = fit(log, net, loader(*data(), size=10))
    log(net.count, *[h.norm() for h in net.history])
    return [*out, *net.history]


@program
def momentum_encoder_with_a_queue(log: Log) -> Trained:
    encoder = mlp(out=4)
    momentum = copy.deepcopy(encoder).requires_grad_(False)
    kept, place = F.normalize(torch.randn(4, 24), dim=0), torch.zeros(1, dtype=torch.long)

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        q = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            for p, m in zip(encoder.parameters(), momentum.parameters()):
                m.data = m.data * 0.9 + p.data * 0.1
            shuffled = torch.randperm(len(x))
            k = F.normalize(momentum(x[shuffled]), dim=1)[shuffled.argsort()]
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, kept.clone().detach()])
        places = (int(place) + torch.arange(len(x))) % 24
        kept[:, places] = k.T
        place[0] = (place + len(x)) % 24
        log(place, kept.sum(1), positive.mean())
        return F.cross_entropy(torch.cat([positive, negative], 1) / 0.2, torch.zeros(len(x), dtype=torch.long))

    return [*train(log, encoder, loss_of), momentum, kept, place]


@program
def running_normalisers(log: Log) -> Trained:
    class Normaliser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("square", torch.zeros(6))
            self.register_buffer("count", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.count += x.shape[0]
                delta = x - self.mean
                self.mean += delta.sum(0) / self.count
                self.square += (delta * (x - self.mean)).sum(0)
            return (x - self.mean) / (self.square / self.count + 0.1).sqrt()

    net, smallest, scale = nn.Sequential(Normaliser(), mlp()), np.inf, None

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal smallest, scale
        smallest = min(smallest, y.min())
        scale = y.abs().mean() if scale is None else 0.9 * scale + 0.1 * y.abs().mean()
        log(smallest, scale, net[0].count)
        return F.mse_loss(net(x), (y - smallest) / scale)

    return train(log, net, loss_of)


@program
def codebook_that_follows_its_codes(log: Log) -> Trained:
    encoder, decoder = nn.Linear(6, 3), nn.Linear(3, 1)
    codes, sizes, sums = torch.randn(5, 3), torch.zeros(5), torch.zeros(5, 3)
    optimizer = SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
    for x, y in loader(*data()):
        z = encoder(x)
        nearest = torch.cdist(z, codes).argmin(1)
        one_hot = F.one_hot(nearest, 5).to(z.dtype)
        quantised = codes[nearest]
        loss = F.mse_loss(decoder(z + (quantised - z).detach()), y) + 0.25 * F.mse_loss(z, quantised)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            sizes.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            sums.data.mul_(0.9).add_(one_hot.t() @ z, alpha=0.1)
            codes.copy_(sums / (sizes[:, None] + 0.1))
            dead = sizes < 0.1
            codes[dead] = z[torch.randint(len(z), (int(dead.sum()),))]
        used = one_hot.mean(0)
        log(loss, torch.exp(-(used * (used + 1e-10).log()).sum()), nearest, dead.sum())
    return [encoder, decoder, codes, sizes]


@program
def replay_buffer(log: Log) -> Trained:
    buffer, goals, net, size = torch.zeros(30, 6), torch.zeros(30, 1), mlp(), 0
    priorities = torch.ones(30)
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data(), size=7):
        for i in range(len(x)):
            buffer[size % 30] = x[i]
            goals[size % 30] = y[i]
            size += 1
        drawn = torch.multinomial(priorities[: min(size, 30)], 7, replacement=True)
        out = net(buffer[drawn])
        errors = (out - goals[drawn]).square()[:, 0]
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
        priorities[drawn] = errors.detach() + 0.01
        buffer[drawn[0]] *= 0.9
        log(errors, priorities.sum(), net(buffer[torch.randint(0, size if size < 30 else 30, (5,))]).mean())
    return [net, buffer, priorities]


@program
def whole_data_in_memory(log: Log) -> Trained:
    x, y = data()
    net = mlp()
    x = (x - x.mean(0)) / x.std(0)
    optimizer = Adam(net.parameters(), 0.01, eps=1e-3)
    for epoch in range(2):
        order = torch.randperm(50)
        for i in range(0, 50, 16):
            rows = order[i : i + 16]
            loss = F.mse_loss(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
        drawn = torch.randint(0, 50, (13,))
        loss = (net(x)[drawn] - y[drawn]).square().mean() + net(x.split(16)[epoch]).mean() + F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            outs = torch.cat([net(part) for part in x.split(16)])
            log((outs - y).square().mean(), ((outs > 0) == (y > 0)).sum() / len(y))
    return [net]


# Loaders


class Drawing(Dataset):
    """Augments by draws of its own."""

    def __init__(self) -> None:
        self.x, self.y = data()
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        noise = torch.randn(6) + np.random.randn() + random.random()
        return {"x": self.x[i] + 0.1 * noise, "y": self.y[i], "name": f"{i:02}", "index": i, "epoch": (self.epoch, 0.5)}


@program
def loader_whose_samples_draw(log: Log) -> Trained:
    net, dataset = mlp(), Drawing()
    for epoch in range(2):
        dataset.epoch = epoch
        for batch in DataLoader(dataset, 16, shuffle=True):
            log(batch["name"], batch["index"], batch["epoch"][0][0], batch["epoch"][1].sum(), batch["x"].sum(0))
            fit(log, net, [(batch["x"], batch["y"])])
    return [net]


@program
def loader_with_workers(log: Log) -> Trained:
    net = mlp()
    for batch in DataLoader(Drawing(), 16, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1)):
        batch["x"][0] = 0
        log(batch["index"], batch["x"].sum(0))
        fit(log, net, [(batch["x"], batch["y"])])
    return [net]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(23):
            x = torch.randn(6) + i / 23
            yield x, x[:1].sin()


@program
def loader_of_a_stream(log: Log) -> Trained:
    net = mlp()
    fit(log, net, DataLoader(Stream(), 7))
    fit(log, net, DataLoader(Stream(), 7, drop_last=True))
    return fit(log, net, ((x[None], y[None]) for x, y in DataLoader(Stream(), batch_size=None)))


class Batched(Dataset):
    """Makes whole batches itself."""

    def __init__(self) -> None:
        self.x, self.y = data()

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i >= 5:
            raise IndexError
        return self.x[i * 10 : i * 10 + 10], self.y[i * 10 : i * 10 + 10]


@program
def loader_without_batches(log: Log) -> Trained:
    net = mlp()
    fit(log, net, DataLoader(Batched(), batch_size=None, shuffle=True))
    fit(log, net, Batched())
    fit(log, net, ((x[0], y[0]) for x, y in DataLoader(Batched())))
    x, y = data()
    rows = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(50)), 16, False)
    return fit(log, net, DataLoader(TensorDataset(x, y), sampler=rows, batch_size=None))


class Balanced(Sampler):
    """As many samples of each class, drawn anew."""

    def __init__(self, labels: Tensor, size: int) -> None:
        self.labels, self.size = labels, size

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield [int(torch.multinomial((self.labels == k).to(torch.float64), 1)) for k in torch.arange(self.size) % 4]

    def __len__(self) -> int:
        return 4


@program
def loader_with_samplers(log: Log) -> Trained:
    net = mlp(out=4)
    x, y = classes()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        log(y)
        return F.cross_entropy(net(x), y)

    train(log, net, loss_of, DataLoader(TensorDataset(x, y), batch_sampler=Balanced(y, 11)))
    sampler = torch.utils.data.WeightedRandomSampler(torch.rand(50), 30, generator=torch.Generator().manual_seed(2))
    train(log, net, loss_of, DataLoader(TensorDataset(x, y), 7, sampler=sampler))
    subset = torch.utils.data.Subset(TensorDataset(x, y), range(3, 33))
    joined = torch.utils.data.ConcatDataset([subset, *torch.utils.data.random_split(TensorDataset(x, y), [10, 40])[:1]])
    return train(log, net, loss_of, DataLoader(joined, 16, shuffle=True))


@program
def loader_with_a_collate_function(log: Log) -> Trained:
    def collate(items: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        x, y = default_collate(items)
        x = (x - x.mean(0)) / (x.std(0) + 1)
        lines = [f"{float(v):.1f}" for v in y]
        return {
            "x": x,
            "y": y,
            "lines": lines,
            "n": len(items),
            "other": {"rows": list(x), "sum": x.sum().item()},
            "none": None,
        }

    net = mlp()
    for batch in DataLoader(TensorDataset(*data()), 16, True, collate_fn=collate):
        assert len(batch["lines"]) == batch["n"] == len(batch["other"]["rows"])
        log(batch["lines"][-1], batch["n"], batch["other"]["sum"], torch.stack(batch["other"]["rows"]).norm())
        fit(log, net, [(batch["x"], batch["y"])])
    return [net]


@program
def loaders_side_by_side(log: Log) -> Trained:
    net, endless = mlp(), iter(loader(*data(), size=7))

    def again() -> Any:
        nonlocal endless
        try:
            return next(endless)
        except StopIteration:
            endless = iter(loader(*data(), size=7))
            return next(endless)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b = again()
        k = min(len(a), len(x))
        mixed = torch.cat([x, a])
        log(len(mixed), a[0], net(mixed).mean())
        return F.mse_loss(net(mixed), torch.cat([y, b])) + (x[:k] - a[:k]).square().mean() * net(x[:k]).mean()

    first = next(iter(loader(*data())))
    for i, (pair, other) in enumerate(zip(loader(*data()), loader(*data(), size=10))):
        if i == 2:
            break
        train(log, net, loss_of, [pair, other, first])
    return [net]


# More roads


@program
def parameters_made_of_rows(log: Log) -> Trained:
    net = mlp()
    for x, y in loader(*data()):
        p = nn.Parameter(x[:, :3].clone())
        pixels = x.clone().requires_grad_()
        state = nn.Parameter(net(x).detach())
        optimizer = Adam([p, pixels, state, *net.parameters()], 0.01, eps=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(net(pixels + torch.cat([p, p], 1)) + state, y) + p.square().sum()
            loss.backward()
            log(loss, p.grad.shape, p.grad.norm(), pixels.grad[0], state.grad.mean())
            nn.utils.clip_grad_norm_([p, pixels, state], 0.1)
            optimizer.step()
        log(p, isinstance(p, nn.Parameter), p.is_leaf, pixels.mean(0))
    return [net, p, pixels, state]


@program
def buffers_made_of_rows(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        if hasattr(net, "last") and len(net.last) == len(x):
            x = x + 0.1 * net.last
        net.register_buffer("last", x.detach() * 2)
        net.body[0].shift = x.mean(0)
        return net.body(x + net.body[0].shift)

    net = Net(forward, body=mlp())
    out = fit(log, net)
    torch.save(net.state_dict(), file := io.BytesIO())
    file.seek(0)
    log(*torch.load(file, weights_only=True).values(), net.last.shape)
    return out


@program
def initialised_by_the_first_batch(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        if not net.ready:
            with torch.no_grad():
                net.shift.copy_(-x.mean(0))
                net.scale.data = 1 / (x.std(0) + 0.1)
            net.ready = True
        return net.body((x + net.shift) * net.scale) + net.other(x)

    body = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))
    net = Net(
        forward,
        shift=nn.Parameter(torch.zeros(6)),
        scale=nn.Parameter(torch.ones(6)),
        ready=False,
        body=body,
        other=nn.Linear(6, 1),
    )
    x, _ = data()
    net(x[:7])
    with torch.no_grad():
        net.other.weight = nn.Parameter(net(x[:7]).mean() * x[:1])
    return fit(log, net)


@program
def constructed_from_rows(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        means = torch.tensor([x.mean(), y.mean().item(), float(y[0])])
        rows = (
            torch.tensor(np.array([r.numpy() for r in x]), dtype=x.dtype)
            + torch.tensor(x.tolist())
            + torch.as_tensor(x)
        )
        rows = (
            rows
            + x.new_tensor(y.tolist())
            + x.new_full(x.shape, 0.1)
            + x.new_zeros(len(x), 1)
            + torch.asarray(x)
            + torch.stack([*x])
        )
        x.label = "kept"
        log(
            means,
            x.label,
            hasattr(x * 1, "label"),
            torch.DoubleTensor(y.tolist()).mean(),
            torch.from_numpy(np.array(x)).sum(),
        )
        wide = torch.hstack([x, y]) + torch.column_stack([x, y[:, 0]]) + torch.vstack([x, x])[: len(x)].mean()
        corner = (
            torch.block_diag(x, y)[: len(x), :6]
            + torch.kron(x[:1], y)[:, :6]
            + torch.meshgrid(y[:, 0], y[:2, 0], indexing="ij")[0][:, :1]
        )
        return (
            F.mse_loss(net(rows * 0.2 + corner), y)
            + (wide.mean() + torch.dstack([x, x]).mean() + torch.concat((x, x), 0).mean()).square()
        )

    return train(log, net, loss_of)


@program
def applied_by_python(log: Log) -> Trained:
    def change(x: Tensor) -> Tensor:
        plain = x.detach().clone()
        plain.apply_(lambda v: v * 0.5 + 0.1)
        plain.map_(x.detach().clone(), lambda a, b: a + b)
        shared = x.detach().clone().share_memory_()
        shared[0] = 0
        return x + plain + shared

    return changed(log, change)


@program
def two_batches_of_other_lengths(log: Log) -> Trained:
    net, kept = mlp(out=2), []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        kept.append((out, y))
        pairs = [(out[:, None] * o.detach()[None]).sum(-1) for o, _ in kept]
        log(*[p.shape for p in pairs], torch.cat([t for _, t in kept]).mean())
        return F.mse_loss(out[:, :1], y) + sum(p.tanh().mean() for p in pairs)

    out = train(log, net, loss_of, loader(*data(), size=7))
    outs, goals = (torch.cat(part) for part in zip(*kept))
    log((outs[:, :1] - goals).square().mean(), torch.cat(list(outs.split(16))[::-1]).cumsum(0)[-1])
    return out


@program
def one_backward_for_an_epoch(log: Log) -> Trained:
    net = mlp()
    optimizer = SGD(net.parameters(), 0.1)
    for _ in range(2):
        outs, total = [], 0.0
        for x, y in loader(*data()):
            outs.append(net(x))
            total = total + F.mse_loss(outs[-1], y, reduction="sum")
        joined = torch.cat(outs)
        loss = total / len(joined) + (joined.std() - 1).square() + (outs[0][:2] - outs[-1]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, len(joined))
    return [net]


@program
def networks_that_differentiate_inside(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = torch.zeros(len(x), 4, requires_grad=True)
            for _ in range(3):
                energy = (net.energy(torch.cat([x, z], 1)).square() + z.square()).sum()
                z = z - 0.3 * torch.autograd.grad(energy, z, create_graph=True)[0]
            weight = net.fast * 1
            inner = F.mse_loss(x @ weight, x.roll(1, 0))  # test-time training on the batch
            weight = weight - torch.autograd.grad(inner, weight, create_graph=True)[0]
        return net.head(z) + net.out(x @ weight)

    parts = {"energy": mlp(10), "head": nn.Linear(4, 1), "out": nn.Linear(6, 1)}
    net = Net(forward, fast=nn.Parameter(torch.randn(6, 6) / 3), **parts)
    out = fit(log, net)
    with torch.no_grad():
        log(net(data()[0][:7]))
    return out


@program
def fixed_points(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros(len(x), 6)
            steps = 0
            while steps < 50:
                new = torch.tanh(net.body(z) * 0.5 + x)
                if (new - z).norm() / (z.norm() + 1e-3) < 1e-3:
                    break
                z, steps = new, steps + 1
            log(steps)
        z = torch.tanh(net.body(z) * 0.5 + x)
        z0 = z.detach().requires_grad_()
        f0 = torch.tanh(net.body(z0) * 0.5 + x)

        def backward_hook(g: Tensor) -> Tensor:
            total = g
            for _ in range(5):
                total = torch.autograd.grad(f0, z0, total, retain_graph=True)[0] + g
            return total

        if z.requires_grad:
            z.register_hook(backward_hook)
        return net.head(z)

    return fit(log, Net(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 1)))


@program
def ensembles(log: Log) -> Trained:
    nets = [mlp() for _ in range(3)]
    weights, _ = torch.func.stack_module_state(nets)
    skeleton = copy.deepcopy(nets[0]).to("meta")
    optimizer = SGD(weights.values(), 0.1)
    for x, y in loader(*data(), size=10):
        outs = vmap(lambda w, x: functional_call(skeleton, w, (x,)), in_dims=(0, None))(weights, x)
        others = vmap(lambda w, x: functional_call(skeleton, w, (x,)))(weights, x.expand(3, *x.shape))
        loss = (outs - y).square().mean() + others.var(0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, outs.std(0).mean())
    return list(weights.values())


@program
def forward_that_yields(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Iterator[Tensor]:
        for layer in net.layers:
            x = layer(x - x.mean(0)).tanh()
            yield x

    net = Net(forward, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(3)))
    return train(log, net, lambda x, y: sum(F.mse_loss(h[:, :1], y) + (h * torch.rand_like(h)).mean() for h in net(x)))


@program
def errors_caught(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        def broken() -> Tensor:
            return net(x)[:, 5]

        calls = [
            broken,
            lambda: x @ torch.ones(5, 5),
            lambda: x[100],
            lambda: x.item(),
            lambda: net(x[:, :3]),
            lambda: x.view(7, 13),
        ]
        calls += [
            lambda: x + torch.ones(len(x) + 1, 6),
            lambda: bool(x),
            lambda: x.sum(5),
            lambda: x.nothing,
            lambda: torch.cat([x, y]),
        ]
        for call in calls:
            try:
                call()
            except (RuntimeError, IndexError, ValueError, AttributeError) as error:
                log(type(error).__name__)
        try:
            loss = F.mse_loss(net(x), y, reduction="no such")
        except ValueError:
            loss = F.mse_loss(net(x), y)
        return loss

    return train(log, net, loss_of)


@program
def contexts_of_torch(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.device("cpu"):
            noise = torch.randn(len(x), 6) + torch.zeros_like(x)
            h = x + noise
        kind = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        wide = torch.ones(len(x), 1) * x.to(torch.float64).mean(0)
        torch.set_default_dtype(kind)
        with torch.autograd.profiler.record_function("step"), torch.backends.mkldnn.flags(enabled=False):
            out = net(h + wide.to(kind))
        with torch._C.DisableTorchFunctionSubclass():
            out = out + x.mean(1, keepdim=True) - x.mean()
        return F.mse_loss(out, y)

    return train(log, net, loss_of)


@program
def asks_for_ranks(log: Log) -> Trained:
    log(
        torch.distributed.is_initialized(),
        *[k in os.environ for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")],
    )
    log(torch.utils.data.get_worker_info() is None, __name__ == "__main__", sys.argv[0].endswith("hostile.py"))
    seed = int(os.environ.get("RANK", 0)) + 5
    torch.manual_seed(seed)
    net = mlp()
    out = fit(log, net)
    log(torch.seed() is not None, len(threading.enumerate()) > 0)
    torch.manual_seed(seed)
    return out


@program
def dictionaries_of_other_kinds(log: Log) -> Trained:
    class Batch(UserDict):
        def __getattr__(self, name: str) -> Any:
            return self.data[name]

        def to(self, kind: Any) -> Batch:
            return Batch({k: v.to(kind) for k, v in self.items()})

    def forward(net: Net, batch: Batch, **inputs: Tensor) -> OrderedDict[str, Tensor]:
        h = net.body(batch.x + inputs["more"]) + batch["y"].mean()
        return OrderedDict(out=h, again=net.body(inputs["more"]))

    net = Net(forward, body=mlp())

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        batch = Batch(x=x, y=y).to(x.dtype)
        outs = net(batch, more=x.flip(0))
        return sum(F.mse_loss(o, y) for o in outs.values()) + net(batch=batch, more=x)["again"].mean()

    return train(log, net, loss_of)


@program
def written_to_files(log: Log) -> Trained:
    net, lines = mlp(), []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        np.savez(file := io.BytesIO(), x=x, out=out.detach())
        file.seek(0)
        arrays = np.load(file)
        lines.append(json.dumps({"out": out.tolist(), "loss": (out - y).square().mean().item(), "n": len(x)}))
        lines.extend(",".join(f"{v:.4f}" for v in row) for row in x[:2])
        log(arrays["x"].shape, arrays["out"].sum(), len(json.loads(lines[-3])["out"]), lines[-1])
        return F.mse_loss(out, torch.from_numpy(arrays["x"][:, :1]))

    return train(log, net, loss_of)


@program
def weights_read_in_mid_training(log: Log) -> Trained:
    net = mlp()
    optimizer = Adam(net.parameters(), 0.01, eps=1e-3)
    best, bad, kept = math.inf, 0, None
    x, y = data()
    for epoch in range(4):
        for a, b in loader(x, y):
            optimizer.zero_grad()
            F.mse_loss(net(a), b).backward()
            optimizer.step()
            if net[0].weight.abs().max() > 0.5:
                net[0].weight.data.clamp_(-0.5, 0.5)
        with torch.no_grad():
            validation = (
                sum(F.mse_loss(net(a), b, reduction="sum").item() for a, b in loader(x, y, size=7, shuffle=False)) / 50
            )
        log(validation, optimizer.state[net[0].weight]["exp_avg"].norm())
        if validation < best - 0.001:
            best, bad, kept = validation, 0, copy.deepcopy(net.state_dict())
        elif (bad := bad + 1) > 1:
            break
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 if epoch else 1 + validation
    net.load_state_dict(kept)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [net]


@program
def aliases_of_outputs(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = net.body(x) * 1
        return h, h, h[:, :2]

    net = Net(forward, body=nn.Linear(6, 4))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b, c = net(x)
        with torch.no_grad():
            b.add_(1)
        c.mul_(2)
        same = (lambda t: t)(x)
        log(
            a is b,
            same is x,
            x.view_as(x) is x,
            x.to(x.dtype) is x,
            x.contiguous() is x,
            x.detach() is x,
            x.cpu() is x,
            x.requires_grad_(False) is x,
        )
        return F.mse_loss(a[:, :1], y) + (a - b).square().sum() + a.square().mean() * 0.1

    return train(log, net, loss_of)


@program
def arguments_that_look_like_rows(log: Log) -> Trained:
    """Tensors whose first dimension is the batch's by chance, and is no batch."""

    def forward(net: Net, x: Tensor, table: Tensor, order: Tensor, matrix: Tensor) -> Tensor:
        return net.body(x + table.mean(0) + table[order]) + (matrix @ net.body(x)) + matrix.T.sum(1, keepdim=True) * 0.1

    net = Net(forward, body=mlp())
    table, matrix = torch.randn(10, 6, requires_grad=True), torch.randn(10, 10) / 10

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(net(x, table, torch.randperm(10), matrix), y) + table.square().mean()

    out = train(log, net, loss_of, loader(*data(), size=10))
    log(table.grad)
    return [*out, table]


@program
def networks_over_weights_and_pairs(log: Log) -> Trained:
    """The first dimension of networks' arguments is pairs, positions, features or layers."""
    pairs, places, hyper = mlp(12), nn.Embedding(16, 6), nn.Linear(6, 6)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        n = len(x)
        both = torch.cat([x[:, None].expand(n, n, 6), x[None].expand(n, n, 6)], -1)
        scores = pairs(both.reshape(n * n, 12)).view(n, n)
        position = places(torch.arange(n))
        weight = hyper(torch.eye(6))  # (6, 6): features as rows
        over_features = nn.functional.linear(x.T.contiguous(), scores)  # (6, n)
        out = (x + position) @ weight + over_features.T + hyper(x.mean(0, keepdim=True)) + hyper(x.mean(0))
        return F.mse_loss(out[:, :1], y) + scores.softmax(0).diagonal().mean() + hyper(weight).norm()

    return train(log, nn.ModuleList([pairs, places, hyper]), loss_of, loader(*data(), size=16), lr=0.02)


@program
def gradients_that_keep_their_graph(log: Log) -> Trained:
    """AdaHessian's step, then a penalty on `.grad`, added to gradients of a pass before."""
    net, scale = nn.Sequential(mlp(), nn.LayerNorm(1)), nn.Parameter(torch.ones(1))
    parameters = [*net.parameters(), scale]
    optimizer = SGD(parameters, 0.02)
    for x, y in loader(*data(), size=14):
        optimizer.zero_grad()
        F.l1_loss(net(x) * scale, y).backward()
        loss = F.mse_loss(net(x) * scale, y)
        loss.backward(create_graph=True)
        signs = [torch.randint(0, 2, p.shape) * 2.0 - 1 for p in parameters]
        grads = [p.grad for p in parameters]
        products = torch.autograd.grad(grads, parameters, grad_outputs=signs, retain_graph=True)
        (sum(g.square().sum() for g in grads if g is not None) * 0.1).backward()
        with torch.no_grad():
            for p, product, sign in zip(parameters, products, signs):
                p.grad.add_((product * sign).abs(), alpha=0.1)
        optimizer.step()
        log(loss, scale.grad, products[-1])
    return [net, scale]


class _Negatives(Dataset):
    """Fetches whole batches, and gives each sample the target of the next one of its batch."""

    def __init__(self) -> None:
        self.x, self.y = data()

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [*zip(self.x[indices], self.y[indices].roll(1, 0))]


class _DrawnAtOnce:
    """A batch sampler that draws when it is asked for an iterator."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(42).reshape(-1, 7).tolist())

    def __len__(self) -> int:
        return 6


@program
def batches_that_combine_samples(log: Log) -> Trained:
    net = nn.Sequential(mlp(), nn.Dropout(0.2))
    optimizer = SGD(net.parameters(), 0.02)
    for workers in (0, 2):
        for x, y in DataLoader(_Negatives(), batch_sampler=_DrawnAtOnce(), num_workers=workers):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            log(loss)
    return [net]


if __name__ == "__main__":
    main(PROGRAMS)
