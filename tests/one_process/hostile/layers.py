"""Layers and losses, and kinds of numbers and of tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.one_process.hostile.parts import (
    Net,
    computes,
    fit,
    images,
    program,
    sequences,
    trains,
)
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
def convolution_over_the_batch(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        over = net.conv(x.t()[None])[0].t()  # the batch is time
        unbatched = net.image(x.view(1, len(x), 6))[0]
        return net.head(x + over + unbatched + net.pool(x.t()).t() + F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t())

    net = Net(forward, conv=nn.Conv1d(6, 6, 3, padding=1), image=nn.Conv2d(1, 1, 3, padding=1))
    net.head, net.pool = nn.Linear(6, 1), nn.MaxPool1d(3, 1, 1)
    return fit(log, net)


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


@computes(
    lambda: {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "head": nn.Linear(8, 1)},
    batches=lambda: loader(*sequences(features=8)[:2], size=10),
)
def attention_of_all_kinds(net: Net, x: Tensor) -> Tensor:
    a, w = net.attention(x, x, x, key_padding_mask=x[..., 0] > 1.5, need_weights=True)
    turned = x.transpose(0, 1)
    b, _ = net.attention(turned[:, :, :], turned, turned)  # the batch as the length: another meaning
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    c = F.scaled_dot_product_attention(q, q[:1].expand_as(q), q, attn_mask=w[:, None]).transpose(1, 2).flatten(2)
    d = F.scaled_dot_product_attention(turned, turned, turned, is_causal=True)
    return net.head(a + b.transpose(0, 1) + c + d.transpose(0, 1))


@program
def complex_numbers(log: Log) -> Trained:
    net = nn.Linear(6, 6)
    w = nn.Parameter(torch.randn(6, 6, dtype=torch.promote_types(torch.get_default_dtype(), torch.complex64)) / 3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        z = torch.complex(net(x), x.flip(1)) @ w
        z = z * torch.exp(1j * x) + torch.polar(x.abs(), x)
        log(z[0], z.is_conj(), torch.is_complex(z), z.sum())
        return (z.abs().mean(1, keepdim=True) - y).abs().mean() + (z.real * z.conj().imag).mean() + z.mH.H.real.mean()

    log(*steps(SGD([*net.parameters(), w], 0.1), loss_of))
    return [net, w]


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
