"""Layers and losses, and kinds of numbers and of tensors."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.one_process.hostile.parts import (
    Net,
    computes,
    fit,
    images,
    logged_change,
    program,
    sequences,
    trains,
)
from tests.one_process.parts import classes, data, loader, mlp, steps, train
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
        h = net.group(h) + net.instance(h) + net.layer(h)
        h = h + F.local_response_norm(h, 2) + F.instance_norm(h[:, :2]).repeat(1, 2, 1, 1)
        h = h + F.layer_norm(h, h.shape[1:]) + F.normalize(h) + F.normalize(h.flatten(1), dim=1).view_as(h)
        h = h + F.layer_norm(h.transpose(0, 1), (h.shape[0], 4, 4)).transpose(0, 1)  # over the batch
        h = h + F.group_norm(h.transpose(0, 1), 2).transpose(0, 1) + F.rms_norm(h, (4,))
        return net.head(h.amax((2, 3)).tanh())

    net = Net(forward, conv=nn.Conv2d(4, 4, 3, padding=1), head=nn.Linear(4, 1), layer=nn.LayerNorm([4, 4, 4]))
    net.group, net.instance = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, track_running_stats=True)
    return fit(log, net, loader(*images()), lr=0.05)


@program
def convolutions_of_all_kinds(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x).relu() + net.b(F.avg_pool2d(x, 2))
        h = F.pixel_shuffle(h, 2) if h.shape[1] % 4 == 0 else h
        h = F.interpolate(h, size=(4, 4), mode="bilinear", align_corners=False) + F.interpolate(h, scale_factor=0.5)
        h = F.max_pool2d(F.pad(h, (1, 1, 1, 1), mode="reflect"), 3, 1) + F.adaptive_max_pool2d(h, 4)
        pooled, places = F.max_pool2d(h, 2, return_indices=True)
        h = h + F.max_unpool2d(pooled, places, 2) + F.lp_pool2d(h.abs() + 1, 2, 3, 1).mean()
        h = h.flatten(1) + net.c(h.flatten(2)).flatten(1) + F.conv2d(x[:, :1], x[:1, :1]).flatten(1)
        return net.head((0.1 * h).tanh())

    net = Net(forward, a=nn.Conv2d(4, 4, 3, padding="same", groups=2), b=nn.ConvTranspose2d(4, 4, 2, 2))
    net.c, net.head = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(16, 1)
    return fit(log, net, loader(*images()), lr=0.05)


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
        known = y.clamp(min=0)
        a = F.cross_entropy(out, y) + F.cross_entropy(out, y, weight) + F.nll_loss(torch.log_softmax(out, 1), y, weight)
        a = a + F.cross_entropy(out, y, reduction="sum") / len(y)
        b = F.cross_entropy(out, known, weight, label_smoothing=0.1, ignore_index=2)
        c = F.cross_entropy(out, F.one_hot(known, 4).to(out.dtype), weight) + F.cross_entropy(out[0], known[0])
        each = F.cross_entropy(out, y, weight, reduction="none")
        pixels = F.cross_entropy(out.view(-1, 2, 2), (y[:, None] > 0).long().repeat(1, 2))
        log(a, b, c, each, pixels)
        return a + b + c + each.topk(2).values.mean() + pixels

    return train(log, net, loss_of, loader(*classes()), lr=0.05)


@trains(lambda: mlp(out=3))
def losses_of_all_kinds(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
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
        first = F.embedding(ids[:, 0], net.table.weight, max_norm=2.0, scale_grad_by_freq=True)
        padded = net.table(ids).mean(1) + first
        return net.head(net.bilinear(bags, padded) + F.bilinear(bags, weighted, net.bilinear.weight)).tanh()

    net = Net(forward, bag=nn.EmbeddingBag(9, 4, mode="mean"), table=nn.Embedding(9, 4, padding_idx=0))
    net.bilinear, net.head = nn.Bilinear(4, 4, 3), nn.Linear(3, 1)
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


@logged_change
def spectra_and_solvers(log: Log, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=1)
    a = torch.fft.irfft(spectrum * 0.5, n=6, dim=1) + torch.fft.fft(x, dim=0).real + torch.fft.fft2(x).imag * 0.1
    gram = x.T @ x / len(x) + torch.eye(6)
    b = torch.linalg.solve(gram, x.T).T + torch.linalg.cholesky(gram)[0] + x @ torch.linalg.inv(gram)
    singular = torch.linalg.svdvals(x)
    each = torch.linalg.solve(x[:, :, None] * x[:, None] + torch.eye(6), x[..., None])[..., 0]
    log(singular, torch.linalg.det(gram), torch.linalg.matrix_norm(x), torch.logdet(gram))
    return x + 0.1 * (a + b + each) + 0.01 * singular.sum()


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
def mixed_kinds_of_numbers(log: Log) -> Trained:
    net = mlp()

    def loss_of(x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        wide, half = x.double(), x.half()
        mixed = ids * 0.5 + wide + half + (x > 0) + ids / 2 + ids // 2
        mixed = mixed + torch.tensor(2) * np.float64(0.5) + np.float32(0.1) * x
        mask = (ids > 3) | (x < 0) & ~(x == 0)
        log(mask.sum(), mask.to(x.dtype).mean(0), (-ids).sum(), ids.sum(), ids.max(0).values)
        kinds = [mixed, ids + True, ids.float().mean(), half.sum(), ids.max()]
        log(*[str(kind.dtype) for kind in kinds], str(torch.result_type(x, ids)))
        return F.mse_loss(net(mixed.to(x.dtype).type_as(x)) * mask.any(1, keepdim=True), y.to(x))

    x, y = data()
    return train(log, net, loss_of, loader(x, torch.randint(9, (50, 1)), y))


@trains(lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)))
def autocast_to_bfloat16(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
        log(out.dtype == torch.bfloat16, (x @ x.T).dtype == torch.bfloat16, (out + x[:, :1]).dtype == x.dtype)
    return F.mse_loss(out.to(y.dtype), y)


@program
def networks_in_other_precisions(log: Log) -> Trained:
    double, narrow = mlp().double(), mlp().bfloat16()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b = double(x.double()), narrow(x.bfloat16())
        log(str(a.dtype), str(b.dtype))
        return F.mse_loss(a, y.double()) + F.mse_loss(b.to(y), y)

    train(log, nn.ModuleList([double, narrow]), loss_of)
    return [double, narrow.to(torch.float32)]


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
        log(type(total).__name__, type(named + y).__name__, (counted * x).sum().as_subclass(Tensor))
        loss = F.mse_loss(net(named * 0.5).as_subclass(Tensor), y) + total.as_subclass(Tensor).mean()
        return loss + net(counted.as_subclass(Tensor)).mean()

    Counted.calls.clear()
    out = train(log, net, loss_of)
    log(Counted.calls.count("mul"))
    return out
