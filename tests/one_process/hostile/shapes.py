"""Batches in another dimension, states, sizes that are equal by chance, rows that are chosen by the data."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils.data import DataLoader

from tests.one_process.hostile.parts import Net, computes, fit, program, sequences, trains
from tests.one_process.parts import data, loader, mlp, train
from tests.one_process.runner import Log, Trained


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
def sizes_equal_by_chance(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))
    x, w = torch.randn(50, 10), torch.randn(10, 10)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        likeness = out @ x.T + x @ w + torch.mm(w, x) + x.mm(x) + torch.matmul(x.T, out) + x.T
        row = out.mean(0)
        column = out.mean(1)
        likeness = likeness + row + column + column[:, None] + row[:, None] + torch.arange(10) * out
        likeness = likeness + F.linear(x, out) + F.linear(out, w, column) + F.embedding(y, out)
        likeness = likeness + torch.addmm(column, x, w) + torch.outer(row, column)
        log(likeness.trace(), likeness[0])
        return F.cross_entropy(likeness * 0.1, y) + F.cross_entropy(likeness.T * 0.1, torch.arange(10))

    return train(log, net, loss_of, loader(x, torch.randint(10, (50,)), size=10), lr=0.01)


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


@trains()
def empty_batches(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    chosen = x[:, 0] > 2
    few = net(x[chosen])
    log(few.shape, few.sum(), net(x[:0]).shape, x[3:3].sum(0), len(x[len(x) :]), torch.cat([x[:0], x]).mean())
    return F.mse_loss(net(x), y) + few.sum() * 0.1 + net(x[:0]).sum()


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


@computes(lambda: {"router": nn.Linear(6, 2), "experts": nn.ModuleList([mlp(), mlp()])})
def experts_that_choose_rows(net: Net, x: Tensor) -> Tensor:
    scores, rows = net.router(x).softmax(0).topk((len(x) + 1) // 2, dim=0)
    out = x.new_zeros(len(x), 1)
    for i, expert in enumerate(net.experts):
        out = out.scatter_add(0, rows[:, i : i + 1], expert(x[rows[:, i]]) * scores[:, i : i + 1])
    return out


@computes(lambda: {"a": mlp(), "b": mlp()})
def rows_chosen_by_masks(net: Net, x: Tensor) -> Tensor:
    positive = x[:, 0] > 0
    out = torch.empty(len(x), 1)
    out[positive] = net.a(x[positive])
    out[~positive] = net.b(x[~positive])
    net.log(int(positive.sum()), positive.nonzero()[:, 0], torch.where(positive)[0].max() if positive.any() else -1)
    return out + torch.masked_select(x, x > 1).sum() * 0.01


@trains(lambda: nn.Linear(3, 1), batches=lambda: loader(*sequences()))
def sorted_by_length_and_unique(net: Any, log: Log, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    lengths, order = lengths.sort(descending=True, stable=True)
    x, y = x[order], y[order]
    sums = x.new_zeros(6, 3).index_add(0, lengths, x.sum(1))
    values, inverse, counts = torch.unique(lengths, return_inverse=True, return_counts=True)
    means = (sums[values] / counts[:, None])[inverse]
    log(values, counts, lengths.bincount(minlength=6), torch.unique_consecutive(lengths), lengths.tolist())
    loss = F.mse_loss(net(means), y[torch.arange(len(x)), lengths - 1])
    return loss + F.mse_loss(net(x[:, : lengths[0]]), y[:, : lengths[0]])


@trains()
def decisions_on_values(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
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


@trains()
def lengths_used_in_numbers(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    n, (rows, columns) = len(x), x.size()
    ones = torch.ones(n, 1) * torch.linspace(0, 1, rows)[:, None]
    index = torch.arange(x.size(0))
    out = net(x + ones / n) * torch.full((x.shape[0], 1), 1 / columns)
    out = out + x[index, index % columns, None] * 0.1 + torch.zeros(y.shape).fill_(0.1)
    log(n, rows, x.numel(), x.nelement(), list(x.shape), x.size(-2), x.shape.numel(), x.stride(), x.ndim)
    return (out - y).square().sum() / n + (out - y).abs().sum() / y.numel() * math.log(n)


@program
def networks_without_tensors(log: Log) -> Trained:
    def forward(net: Net, n: int, power: float = 1.0) -> Tensor:
        z = torch.randn(n, 4) ** power
        table = net.table(torch.arange(n) % 5)
        return net.head(z + table - z.mean(0)) * net.scale

    net = Net(forward, table=nn.Embedding(5, 4), head=nn.Linear(4, 1), scale=nn.Parameter(torch.tensor(1.0)))
    return train(log, net, lambda x, y: F.mse_loss(net(len(x)), y) + net(n=3, power=2.0).mean())


@trains()
def errors_caught(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    calls = [lambda: net(x)[:, 5], lambda: x @ torch.ones(5, 5), lambda: x[100], x.item, lambda: net(x[:, :3])]
    calls += [lambda: x.view(7, 13), lambda: x + torch.ones(len(x) + 1, 6), lambda: bool(x)]
    calls += [lambda: x.sum(5), lambda: x.nothing, lambda: torch.cat([x, y])]
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
