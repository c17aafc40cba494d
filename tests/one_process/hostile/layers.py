"""Layers and losses, and kinds of numbers and of tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.one_process.hostile.parts import Net, fit, images, program, sequences, trains
from tests.one_process.parts import data, loader, mlp, steps, train
from tests.one_process.runner import Log, Trained


@program
def batch_norms(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.two(net.conv(x)).relu()
        h = net.one(h.flatten(1)) + F.batch_norm(h.flatten(1), None, None, training=True)
        return net.head(net.cumulative(h) + net.plain(h))

    net = Net(forward, conv=nn.Conv2d(4, 4, 3), two=nn.BatchNorm2d(4, momentum=0.3), head=nn.Linear(16, 1))
    net.one, net.cumulative = nn.BatchNorm1d(16, affine=False), nn.BatchNorm1d(16, momentum=None)
    net.plain = nn.BatchNorm1d(16, track_running_stats=False)

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
def sparse_tensors(log: Log) -> Trained:
    net, w = mlp(), nn.Parameter(torch.randn(6, 6))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        n, sparse = len(x), (x * (x > 0.5)).to_sparse()
        graph = torch.sparse_coo_tensor(torch.stack([torch.arange(n), torch.randperm(n)]), torch.ones(n), (n, n))
        log(sparse.coalesce().indices()[:, :3], x.to_sparse_csr().values().sum(), sparse.is_sparse, x.is_sparse)
        h = torch.sparse.mm(sparse, w) + torch.sparse.mm(graph, x) + (sparse.to_dense() @ w)
        return F.mse_loss(net(h), y) + torch.sparse.sum(sparse) * 0

    log(*steps(SGD([*net.parameters(), w], 0.1), loss_of))
    return [net, w]


@trains(lambda: nn.Linear(3, 1), batches=lambda: loader(*sequences()))
def nested_tensors(net: Any, log: Log, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    nested = torch.nested.as_nested_tensor([row[:n] for row, n in zip(x, lengths)])
    out = torch.nested.to_padded_tensor(net(nested), 0.0, (len(x), 5, 1))
    mask = torch.arange(5) < lengths[:, None]
    return ((out - y).square()[..., 0] * mask).sum() / mask.sum()


@trains()
def tensors_without_data(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    shape = copy.deepcopy(net).to("meta")(x.to("meta")).shape
    empty = torch.empty_like(x, device="meta")
    log(shape, empty.shape, empty.is_meta, x.is_meta, x.device.type, x.layout == torch.strided, x.get_device())
    return F.mse_loss(net(x), y) + net(torch.zeros(empty.shape)).mean()
