"""Losses and metrics as public training code writes them, each in a short program for one process.

`python -m tests.one_process.idioms OUT` (see runner.py). No program knows of ranks; on any number of them each must log
and train as on one. 50 samples in batches of 16: the last has 2 rows, and neither two nor three ranks divide them.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.one_process.parts import by_loss, classes, data, loader, mlp, train
from tests.one_process.runner import Log, Programs, Trained, main

PROGRAMS = Programs()
idiom = PROGRAMS.add
trains = functools.partial(by_loss, PROGRAMS)


def sequences(n: int = 50, length: int = 7, features: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (N, T, features), targets (N, T, 1) and a mask (N, T), 1 for each sequence's first steps."""
    x = torch.randn(n, length, features)
    mask = torch.arange(length) < torch.randint(1, length + 1, (n, 1))
    return x, x.cumsum(1)[..., :1].tanh(), mask.to(x.dtype)


def tokens(n: int = 50, length: int = 8, words: int = 10, padding: int = -100) -> tuple[Tensor, Tensor]:
    """Return tokens (N, T) and the next tokens (N, T), `padding` after each sequence's end."""
    text = (torch.arange(length + 1) * torch.randint(1, 4, (n, 1)) + torch.randint(words, (n, 1))) % words
    end = torch.randint(1, length + 1, (n, 1))
    return text[:, :-1], text[:, 1:].masked_fill(torch.arange(length) >= end, padding)


def language_model(words: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(words, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, words))


# Masked means


def trained_by_mean(mean_of: Callable[[Tensor, Tensor], Tensor], log: Log) -> Trained:
    """Train by the loss `mean_of(errors (B, T), mask (B, T))`."""
    net = mlp(3)

    def loss_of(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return mean_of((net(x) - y).square().squeeze(-1), mask)

    return train(log, net, loss_of, loader(*sequences()))


def masked_by_assignment(e: Tensor, m: Tensor) -> Tensor:
    e = e.clone()
    e[m == 0] = 0.0
    return e.sum() / (m != 0).sum()


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_over_item": lambda e, m: (e * m).sum() / m.sum().item(),
    "masked_over_len_of_nonzero": lambda e, m: (e * m).sum() / len(torch.nonzero(m)),
    "masked_by_boolean_index": lambda e, m: e[m.bool()].mean() + e[m > 0].sum() / e[m > 0].shape[0],
    "masked_by_flat_nonzero": lambda e, m: e.reshape(-1).index_select(0, m.reshape(-1).nonzero().squeeze(1)).mean(),
    "masked_nanmean": lambda e, m: torch.where(m > 0, e, torch.nan).nanmean(),
    "masked_dot_product": lambda e, m: e.view(-1) @ m.view(-1) / m.sum(),
    # The batch is cut to its own longest sequence.
    "masked_lengths_of_the_batch": lambda e, m: (e * m)[:, : int(m.sum(1).max())].mean(),
    # Relative to numpy's mean, by its weights.
    "masked_numpy_average": lambda e, m: (e * m / m.sum()).sum() / np.average(e.detach().numpy(), weights=m.numpy()),
    "masked_by_assignment": masked_by_assignment,
}
PROGRAMS.update((name, functools.partial(trained_by_mean, mean_of)) for name, mean_of in MASKED.items())


# Tokens, counts and labels that are ignored


@trains(language_model, batches=lambda: loader(*tokens()))
def ignore_index(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).transpose(1, 2), y, ignore_index=-100)


@trains(language_model, batches=lambda: loader(*tokens()))
def masked_words_predicted(net: Any, log: Log, x: Tensor, _: Tensor) -> Tensor:
    """A sixth of the words is drawn and hidden; the loss is over these alone."""
    hidden = torch.bernoulli(torch.full(x.shape, 0.15)).bool()
    hidden[0, 0] = True
    labels, inputs = x.masked_fill(~hidden, -100), x.masked_fill(hidden, 0)
    log(hidden.sum().item())
    return F.cross_entropy(net(inputs)[hidden], labels[hidden])


@idiom
def items_counted_before_accumulation(log: Log) -> Trained:
    """The labels of all batches of an update are counted first; each loss is divided by that count."""
    net = language_model()
    optimizer, batches = SGD(net.parameters(), lr=0.1), list(loader(*tokens()))
    for i in range(0, len(batches), 2):
        group = batches[i : i + 2]
        count = sum((y != -100).sum() for _, y in group)
        total = torch.tensor(0.0)
        for x, y in group:
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        log(total.item(), int(count))
    return [net]


# Weights


@idiom
def advantage_weighted(log: Log) -> Trained:
    net, value = mlp(), mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        advantage = y - value(x).detach()
        weights = torch.softmax(advantage.flatten() / 0.5, 0) * len(x)
        return (weights.clamp(max=20) * (net(x) - y).square().flatten()).mean() + F.mse_loss(value(x), y)

    return train(log, net, loss_of)


# Samples that meet each other


@trains(lambda: mlp(out=4))
def info_nce(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    one = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=-1)
    two = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=-1)
    return F.cross_entropy(one @ two.T / 0.1, torch.arange(len(x)))


@trains(lambda: mlp(out=4), batches=lambda: loader(*classes()))
def supervised_contrast(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(net(x), dim=1)
    others = ~torch.eye(len(x), dtype=torch.bool)
    logits = (z @ z.T / 0.5).masked_fill(~others, -1e9)
    same = (y.unsqueeze(0) == y.unsqueeze(1)) & others
    found = same.any(1)
    log(int(found.sum()))
    per_sample = (logits.log_softmax(1) * same).sum(1)[found] / same.sum(1)[found]
    return -per_sample.sum() / found.sum().clamp(min=1)


@trains(lambda: mlp(out=4))
def cross_correlation(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    """As Barlow Twins and VICReg: features are normalised over the batch."""
    one, two = net(x + 0.1 * torch.randn_like(x)), net(x + 0.1 * torch.randn_like(x))
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in (one, two))
    c = a.T @ b / len(x)
    off = c.flatten()[:-1].view(3, 5)[:, 1:].pow(2).sum()
    return (torch.diagonal(c) - 1).pow(2).sum() + 5e-3 * off + F.relu(1 - one.var(dim=0).sqrt()).mean()


@trains()
def gradient_penalty(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    inner = (x + torch.rand(len(x), 1) * torch.randn_like(x)).requires_grad_(True)
    (slope,) = torch.autograd.grad(net(inner).sum(), inner, create_graph=True)
    return net(x).mean() + 10 * (slope.norm(2, dim=1) - 1).pow(2).mean()


# Codebooks and normalisers


@idiom
def codebook(log: Log) -> Trained:
    """As a VQ-VAE: the codes follow the mean of what is assigned to them; perplexity over the batch is logged."""
    encoder, decoder = mlp(out=4), mlp(4, 6)
    codes, counts = torch.randn(8, 4), torch.ones(8)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        z = encoder(x)
        chosen = torch.cdist(z.detach(), codes).argmin(1)
        one_hot = F.one_hot(chosen, 8).to(z.dtype)
        counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
        codes.mul_(0.9).add_(0.1 * (one_hot.T @ z.detach()) / counts.clamp(min=0.1).unsqueeze(1))
        used = one_hot.mean(0)
        log(torch.exp(-(used * torch.log(used + 1e-10)).sum()), chosen.unique().numel())
        q = codes[chosen]
        return F.mse_loss(decoder(z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q)

    return [*train(log, nn.ModuleList([encoder, decoder]), loss_of), codes, counts]


@idiom
def running_normaliser(log: Log) -> Trained:
    """Chan's update of mean and variance with each batch, in numpy."""
    net, mean, variance, count = mlp(), np.zeros(6), np.ones(6), 1e-4

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal mean, variance, count
        theirs, num = x.numpy(), x.shape[0]
        delta, total = theirs.mean(0) - mean, count + num
        squares = variance * count + theirs.var(0) * num + delta**2 * count * num / total
        mean, variance, count = mean + delta * num / total, squares / total, total
        log(mean, variance)
        return F.mse_loss(net((x - torch.as_tensor(mean).to(x)) / torch.as_tensor(variance).to(x).sqrt()), y)

    return train(log, net, loss_of)


@idiom
def normalised_advantages(log: Log) -> Trained:
    """A clipped policy gradient, which stops at a large divergence."""
    net, x = mlp(out=3), torch.randn(48, 6)
    actions, advantages = torch.randint(3, (48,)), torch.randn(48)
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=net(x)).log_prob(actions)
    optimizer = SGD(net.parameters(), lr=0.5)
    for _ in range(4):
        order = np.random.permutation(48)
        for start in range(0, 48, 16):
            rows = order[start : start + 16]
            policy = torch.distributions.Categorical(logits=net(x[rows]))
            ratio = (policy.log_prob(actions[rows]) - old[rows]).exp()
            a = advantages[rows]
            a = (a - a.mean()) / (a.std() + 1e-8)
            loss = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                divergence = ((ratio - 1) - ratio.log()).mean()
                log(loss.item(), ((ratio - 1).abs() > 0.2).float().mean().item())
        log(divergence)
        if divergence > 0.02:
            break
    return [net]


# Logs, metrics and what follows from them


def _to_script(loss: Tensor) -> Tensor:
    return loss * 2 + loss.sqrt()


@idiom
def losses_that_torch_reads_itself(log: Log) -> Trained:
    """Copies, seeds, arguments that are numbers, scripted, compiled and mapped functions, passes without gradients."""
    net = mlp()
    optimizer, compiled = SGD(net.parameters(), 0.05), torch.compile(lambda loss: loss * 2 + 1, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(_to_script)
    for x, y in loader(*data()):
        rows = F.mse_loss(net(x), y, reduction="none")
        loss, doubled = rows.mean(), 2 * rows
        most = doubled.sum()
        with torch.no_grad():
            doubled.zero_()  # after its sum was asked for
            half = loss * 0.5
        log(torch.add(torch.ones(2), torch.ones(2), alpha=half), F.mse_loss(net(x), y).detach().numpy())
        copied = torch.tensor(F.l1_loss(net(x), y))
        mapped = torch.vmap(functools.partial(torch.mul, F.l1_loss(net(x), y)))(torch.arange(3.0))
        seeded = torch.autograd.grad(net[0].weight.pow(2).sum(), net[0].weight, grad_outputs=F.l1_loss(net(x), y))[0]
        optimizer.zero_grad()
        with torch.no_grad():
            loss.backward(retain_graph=True)
        compiled(scripted(F.l1_loss(net(x), y))).backward()
        torch.autograd.backward([0.01 * most, net[2].bias.sum()], [None, F.l1_loss(net(x), y)])
        optimizer.step()
        log(loss, copied, mapped, seeded.sum(), most)
    return [net]


class _OfParameters(nn.Module):
    """Adds what is computed from parameters alone: repeated tokens, positions, a normalized weight, a sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place, self.both = (
            nn.Parameter(torch.randn(1, 4)),
            nn.Embedding(3, 4),
            nn.Parameter(torch.ones(4)),
        )
        self.weight, self.time, self.frozen = nn.Parameter(torch.randn(4, 6)), nn.Embedding(5, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.last = nn.utils.spectral_norm(nn.Linear(4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        token = self.token.expand(len(x), -1) + self.both
        places = self.place(torch.arange(3)).mean(0) * self.both
        times = self.time(torch.arange(2).repeat(len(x), 1)).sum(1)
        noise = self.frozen(torch.randn(len(x), 4))
        hidden = F.linear(x, F.normalize(self.weight)) + torch.cat([token[:, :2], token[:, 2:]], 1) * places + times
        return self.last((hidden + 0.1 * noise).tanh()), token


@idiom
def computed_from_parameters(log: Log) -> Trained:
    """Its gradients are hooked, kept, asked for, clipped by a hook, and differentiated."""
    net, seen = _OfParameters(), list[float]()
    optimizer = SGD(net.parameters(), 0.05)
    for step, (x, y) in enumerate(loader(*data())):
        out, token = net(x)
        loss = F.mse_loss(out, y)
        if step == 1:
            token.register_hook(lambda gradient: seen.append(gradient.norm().item()))
            token.retain_grad()
        if step == 2:
            token.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        if step == 3:
            (of_token,) = torch.autograd.grad(loss, token, create_graph=True)
            loss = loss + 100 * of_token.square().sum()
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            seen.append(token.grad.sum().item())
        optimizer.step()
        log(loss, *seen)
    return [net]


@idiom
def numbers_before_and_after_a_pass(log: Log) -> Trained:
    """What is computed from losses in linear and other ways, written into, hooked, and read now or later."""
    net, scale, hooked, kept = mlp(), torch.tensor(4.0), [], torch.zeros(())
    optimizer = SGD(net.parameters(), 0.05)
    for step, (x, y) in enumerate(loader(*data())):
        out = net(x)
        square, absolute, size = F.mse_loss(out, y), (out - y).abs().mean(), out.square().sum()
        seen = square.detach()
        total = sum([square, 0.5 * absolute, 1e-3 * size / len(x)])
        total += absolute / 3 - 1
        alias = total
        total.mul_(2)
        kept += absolute.detach() * (size > 0)
        if step == 1:
            total = total * (1 + seen) + absolute**2
        if step == 2:
            total.register_hook(lambda gradient: hooked.append(gradient.item()))
            total = torch.stack([total, size.mean(), -absolute]).sum() + net[0].weight.norm()
        optimizer.zero_grad()
        (total * scale).backward(retain_graph=step == 0)
        if step == 0:
            (total / scale).backward(torch.tensor(0.5))
        for p in net.parameters():
            p.grad /= scale
        optimizer.step()
        seen.add_(1)
        with torch.no_grad():
            again = F.mse_loss(net(x), y) - square
        with torch.inference_mode():
            inside = 2 * F.l1_loss(net(x), y) + absolute
        log(
            inside.item(),
            square.item(),
            f"{absolute:.5f}",
            float(alias),
            seen.tolist(),
            again < 1,
            math.sqrt(size),
            total.requires_grad,
        )
    log(hooked, kept, torch.autograd.grad(F.l1_loss(net(x), y), net[0].bias)[0].tolist())
    return [net]


@idiom
def scores_of_a_validation_set(log: Log) -> Trained:
    """R squared, RMSE and the area under a curve, from predictions that were collected in lists."""
    net, (x, y) = mlp(), data()
    trained = train(log, net, lambda x, y: F.mse_loss(net(x), y), loader(x, y))
    predictions, truths, squares = [], [], 0.0
    with torch.no_grad():
        for inputs, targets in loader(x, y, shuffle=False):
            out = net(inputs)
            squares += torch.sum((out - targets) ** 2).item()
            predictions.append(out.cpu().numpy())
            truths.extend(targets.flatten().tolist())
    found, truth = np.concatenate(predictions).ravel(), np.array(truths)
    positive = truth > 0
    order = found.argsort().argsort() + 1
    area = (order[positive].sum() - positive.sum() * (positive.sum() + 1) / 2) / (positive.sum() * (~positive).sum())
    log(1 - squares / ((truth - truth.mean()) ** 2).sum(), math.sqrt(squares / len(truth)), area)
    return trained


if __name__ == "__main__":
    main(PROGRAMS)
