"""Programs whose networks are computed on some rows at once (`python -m tests.one_process.in_pieces OUT`)."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.one_process.hostile.parts import Net
from tests.one_process.runner import Log, Program, Programs, Trained, main

PROGRAMS = Programs()
SIZES = (23, 16, 7)  # of batches: no rank, and no option, divides all of them


def trains(
    forward: Callable[..., Any], loss_of: Any = None, width: int = 6, **parts: Callable[[], nn.Module]
) -> Program:
    """Return the program that trains a network of `parts` on batches of SIZES, and logs what it draws afterwards."""

    def program(log: Log) -> Trained:
        net = Net(forward, **{name: make() for name, make in parts.items()})
        net.log, net.seen = log, []  # type: ignore[assignment]
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        for size in SIZES:
            x, y = torch.randn(size, width), torch.randn(size, 1)
            loss = F.mse_loss(net(x), y) if loss_of is None else loss_of(net, x, y)
            optimizer.zero_grad()
            loss.backward()
            log(loss, len(net.seen), [0 if p.grad is None else p.grad.norm().item() for p in net.parameters()])
            optimizer.step()
        log(torch.rand(3), *(x.sum(0) for x in net.seen[-2:] if isinstance(x, Tensor)))
        return [net]

    return program


def add(**settings: Any) -> Callable[[Callable[..., Any]], None]:
    """Register the program that trains with this function as forward."""

    def register(forward: Callable[..., Any]) -> None:
        PROGRAMS[forward.__name__] = trains(forward, **settings)

    return register


def linear(*sizes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(m for i, o in zip(sizes, sizes[1:]) for m in (nn.Linear(i, o), nn.Tanh())))


TWO: dict[str, Any] = {"body": linear(6, 8, 8), "head": lambda: nn.Linear(8, 1)}


@add(body=lambda: nn.Conv1d(1, 4, 3, padding=1), head=lambda: nn.Linear(24, 1))
def dropouts(net: Any, x: Tensor) -> Tensor:
    h = F.dropout1d(net.body(F.dropout(x, 0.2)[:, None]), 0.3)
    h = h + torch.randn_like(h) * 0.1 + torch.rand(h.shape)
    q = h.view(len(x), 4, 6)
    h = h + F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
    return net.head(F.dropout(h.flatten(1), 0.5, inplace=True))  # type: ignore[no-any-return]


@add(**TWO)
def keeps_and_counts(net: Any, x: Tensor) -> Tensor:
    h = net.body(x)
    net.seen.append(h)
    net.kept = h.detach()
    return net.head(h * (1 + 0.1 * len(net.seen)))  # type: ignore[no-any-return]


@add(loss_of=lambda net, x, y: F.mse_loss(net(x), y) + net.seen[-1].square().mean() + (net(x * 2) - y).mean(), **TWO)
def twice_with_features(net: Any, x: Tensor) -> Tensor:
    net.seen.append(net.body(F.dropout(x, 0.1)))
    return net.head(net.seen[-1])  # type: ignore[no-any-return]


def _accumulated(net: Any, x: Tensor, y: Tensor) -> Tensor:
    for part, of in zip(x.split(5), y.split(5)):
        F.mse_loss(net(part), of).backward(retain_graph=True)
    out = net(x)
    F.l1_loss(out, y).backward(retain_graph=True)
    return F.mse_loss(out, y) + out.square().mean()


@add(loss_of=_accumulated, **TWO)
def accumulates_and_retains(net: Any, x: Tensor) -> Tensor:
    return net.head(net.body(x))  # type: ignore[no-any-return]


def _penalised(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + (slope.norm(dim=1) - 1).square().mean()


@add(loss_of=_penalised, **TWO)
def gradient_penalty(net: Any, x: Tensor) -> Tensor:
    return net.head(net.body(x))  # type: ignore[no-any-return]


def _of_inputs(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x)
    shifted = torch.randn(6, requires_grad=True)
    loss = F.mse_loss(net(x.detach() + 0.1 * slope.sign() + shifted), y)
    (of_shift,) = torch.autograd.grad(loss, shifted, retain_graph=True)
    net.log(slope.sum(0), of_shift)
    return loss


@add(loss_of=_of_inputs, **TWO)
def gradients_of_inputs(net: Any, x: Tensor) -> Tensor:
    return net.head(net.body(x))  # type: ignore[no-any-return]


def _of_a_copy(net: Any, x: Tensor, y: Tensor) -> Tensor:
    if not hasattr(net, "copies"):
        net.copies = [copy.deepcopy(net).requires_grad_(False)]
    (ema,) = net.copies
    with torch.no_grad():
        for mine, theirs in zip(ema.parameters(), net.parameters()):
            mine.lerp_(theirs, 0.1)
        target = ema(x)
    with torch.inference_mode():
        net.log(net.eval()(x).mean(), target.sum())
    return F.mse_loss(net.train()(x), 0.5 * y + 0.5 * target)


@add(loss_of=_of_a_copy, **TWO)
def targets_of_a_copy(net: Any, x: Tensor) -> Tensor:
    return net.head(F.dropout(net.body(x), 0.3, net.training))  # type: ignore[no-any-return]


@add(frozen=linear(6, 8), **{**TWO, "body": linear(8, 8)})
def frozen_and_without(net: Any, x: Tensor) -> Tensor:
    net.frozen.requires_grad_(False)
    with torch.no_grad():
        shift = net.body(net.frozen(x))
    return net.head(net.body(net.frozen(x)) - shift.tanh())  # type: ignore[no-any-return]


@add(loss_of=lambda net, x, y: (out := net(batch={"x": x, "y": [y]}))["loss"] + out["others"][0].mean(), **TWO)
def dictionaries(net: Any, batch: dict[str, Any]) -> dict[str, Any]:
    h = net.body(batch["x"])
    batch["h"] = h
    return {"loss": F.mse_loss(net.head(h), batch["y"][0]), "others": (h, None, "text"), "again": h}


@add(**TWO)
def couples_rows(net: Any, x: Tensor) -> Tensor:
    h = net.body(x)
    h = h - h.mean(0)
    net.log(h.abs().max().item())
    weights = (h @ h.t()).softmax(-1)
    return net.head(net.body(weights @ x) + h)  # type: ignore[no-any-return]


@add(
    body=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)), head=lambda: nn.Linear(8, 1)
)
def batchnorm(net: Any, x: Tensor) -> Tensor:
    return net.head(net.body(x))  # type: ignore[no-any-return]


@add(**TWO)
def writes_in_place(net: Any, x: Tensor) -> Tensor:
    h = net.body(x)
    h = h.clone().add_(0.1)
    h[:, 0] = x[:, 1]
    h[:, 1:3].mul_(2)
    h.masked_fill_(h > 0.5, 0.5)
    h.data.clamp_(max=0.4)
    a, b = h.chunk(2, -1)
    return net.head(torch.cat([b, a.clone().add_(b)], -1))  # type: ignore[no-any-return]


@add(
    **{**TWO, "body": lambda: parametrizations.weight_norm(nn.Linear(6, 8))},
    head2=lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    places=lambda: nn.Embedding(8, 8),
)
def computed_weights(net: Any, x: Tensor) -> Tensor:
    h = net.body(x) + net.places(torch.arange(8)).mean(0) + net.places((x[:, 0] > 0).long())
    return net.head(net.head2(h.tanh()) @ net.places.weight)  # type: ignore[no-any-return]


@add(cells=lambda: nn.LSTM(2, 8), head=lambda: nn.Linear(8, 1), layer=lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1))
def sequences_by_time(net: Any, x: Tensor) -> Tensor:
    h, _ = net.cells(x.view(len(x), 3, 2).transpose(0, 1))
    return net.head(net.layer(h)[-1])  # type: ignore[no-any-return]


@add(middle=lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()), **TWO)
def checkpoints(net: Any, x: Tensor) -> Tensor:
    h = checkpoint(net.middle, net.body(x), use_reentrant=False)
    return net.head(checkpoint(lambda a: net.middle(a) - a.mean(0), h, use_reentrant=False))  # type: ignore[no-any-return]


@add(**TWO)
def hooks(net: Any, x: Tensor) -> Tensor:
    if not net.seen:
        net.body[0].register_forward_hook(lambda module, args, out: out * 1.5)
        net.body.register_full_backward_hook(lambda module, to, of: net.log(of[0].norm()))
        net.head.weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    net.seen.append(0)
    h = net.body(x)
    h.register_hook(lambda gradient: gradient * 0.5)
    return net.head(h)  # type: ignore[no-any-return]


@add(**TWO)
def buffers_change(net: Any, x: Tensor) -> Tensor:
    if not hasattr(net, "scale"):
        net.register_buffer("scale", torch.ones(8))
    h = net.body(x) + net.scale
    net.scale.data.mul_(1.1)
    return net.head(h.sin() - net.scale)  # type: ignore[no-any-return]


@add(body=lambda: nn.Linear(2, 8), head=lambda: nn.Linear(8, 1), deep=lambda: nn.Linear(8, 8))
def time_flattened(net: Any, x: Tensor) -> Any:
    h = net.body(x.view(-1, 3, 2).reshape(-1, 2)).relu()
    h = net.deep(F.dropout(h, 0.2)).view(len(x), 3, 8)
    h = h + h.repeat_interleave(2, 0).view(len(x), 2, 3, 8).mean(1) + h.repeat(2, 1, 1)[: len(x)]
    big = h.repeat(3, 1, 1)
    big = net.deep(big).view(3, len(x), 3, 8).sum(0)
    return net.head((h + big).mean(1))


@add(**TWO)
def reentrant(net: Any, x: Tensor) -> Any:
    return net.head(checkpoint(lambda a: net.body(F.dropout(a, 0.3)), x.requires_grad_(), use_reentrant=True))


def _partly(net: Any, x: Tensor, y: Tensor) -> Any:
    a, b = net(x)
    g = torch.autograd.grad(a.sum(), net.body[0].weight, retain_graph=True)[0]
    net.log(g.norm())
    _, d = net(x + 1)
    return F.mse_loss(b, y) + g.square().sum().detach() + d.mean() * 0


@add(loss_of=_partly, **TWO)
def partly_used(net: Any, x: Tensor) -> Any:
    h = net.body(x)
    return h, net.head(h)


@add(emb=lambda: nn.Embedding(9, 8), bag=lambda: nn.EmbeddingBag(9, 8), **TWO)
def indices(net: Any, x: Tensor) -> Any:
    i = (x.abs() * 2).long().clamp(max=8)
    h = net.emb(i).mean(1) + net.bag(i)
    v, j = h.topk(3, 1)
    return net.head(torch.zeros_like(h).scatter_add(1, j, v) + h.gather(1, j.repeat(1, 3)[:, :8]) + net.body(x))


@add(gru=lambda: nn.GRU(2, 8, batch_first=True), head=lambda: nn.Linear(8, 1))
def packed(net: Any, x: Tensor) -> Any:
    lengths = (x[:, 0].abs() + 1).long().clamp(1, 3).cpu()
    p = nn.utils.rnn.pack_padded_sequence(x.view(-1, 3, 2), lengths, batch_first=True, enforce_sorted=False)
    out, _ = nn.utils.rnn.pad_packed_sequence(net.gru(p)[0], batch_first=True)
    return net.head(out.sum(1))


@add(**TWO)
def masks_by_batch(net: Any, x: Tensor) -> Any:
    mask = torch.ones(len(x), dtype=torch.bool)
    mask[::2] = False
    h = net.body(x).masked_fill(mask[:, None], 0.5)
    h = h * torch.linspace(0, 1, len(x))[:, None]
    return net.head(h + torch.arange(len(x)).float()[:, None] * 0.01 + torch.eye(len(x))[:, :1])


def _of_a_critic(net: Any, x: Tensor, y: Tensor) -> Tensor:
    net.head.requires_grad_(False)
    loss = net(x).square().mean()
    net.head.requires_grad_(True)
    return loss


@add(loss_of=_of_a_critic, **TWO)
def unfrozen_before_backward(net: Any, x: Tensor) -> Tensor:
    return net.head(net.body(x))  # type: ignore[no-any-return]


@add(**TWO)
def counts_by_an_iterator(net: Any, x: Tensor) -> Tensor:
    if not hasattr(net, "numbers"):
        net.numbers = itertools.count(1)
    return net.head(net.body(x) * next(net.numbers))  # type: ignore[no-any-return]


@functools.cache
def _drawn(width: int) -> Tensor:
    return torch.randn(width)


@add(**TWO)
def draws_once(net: Any, x: Tensor) -> Tensor:
    return net.head(net.body(x) + _drawn(8))  # type: ignore[no-any-return]


def _of_one_head(net: Any, x: Tensor, y: Tensor) -> Tensor:
    if not net.seen:
        net.seen.append(net.other.weight.register_hook(lambda gradient: gradient.clamp(-1, 1)))
    return F.mse_loss(net(x)[0], y)


@add(loss_of=_of_one_head, other=lambda: nn.Linear(8, 2), **TWO)
def hook_of_an_unused_head(net: Any, x: Tensor) -> Any:
    h = net.body(x)
    return net.head(h), net.other(h)


if __name__ == "__main__":
    main(PROGRAMS)
