"""Losses and metrics as public training code writes them, each in a short program for one process.

`python -m tests.one_process.idioms OUT` (see runner.py). No program knows of ranks; on any number of them each must log
and train as on one. 50 samples in batches of 16: the last has 2 rows, and neither two nor three ranks divide them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from tests.one_process.parts import by_loss, classes, data, loader, mlp, train
from tests.one_process.runner import Log, Programs, Trained, main

PROGRAMS = Programs()
idiom = PROGRAMS.add
trains = functools.partial(by_loss, PROGRAMS)


def binary(n: int = 50, features: int = 6) -> tuple[Tensor, Tensor]:
    """Return inputs (N, features) and 0 or 1 as a float (N,)."""
    x = torch.randn(n, features)
    return x, (x[:, 0] > 0.5).to(x.dtype)


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


def masked(mean_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    PROGRAMS[mean_of.__name__] = functools.partial(trained_by_mean, mean_of)


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_over_item": lambda e, m: (e * m).sum() / m.sum().item(),
    "masked_over_len_of_nonzero": lambda e, m: (e * m).sum() / len(torch.nonzero(m)),
    "masked_over_numpy_sum": lambda e, m: (e * m).sum() / float(np.sum(m.numpy() > 0)),
    "masked_over_python_sum": lambda e, m: (e * m).sum() / sum(int(length) for length in m.sum(-1).tolist()),
    "masked_means_divided": lambda e, m: (e * m).mean() / m.mean(),
    "masked_by_boolean_index": lambda e, m: e[m.bool()].mean() + e[m > 0].sum() / e[m > 0].shape[0],
    "masked_by_flat_nonzero": lambda e, m: e.reshape(-1).index_select(0, m.reshape(-1).nonzero().squeeze(1)).mean(),
    "masked_nanmean": lambda e, m: torch.where(m > 0, e, torch.nan).nanmean(),
    "masked_dot_product": lambda e, m: e.view(-1) @ m.view(-1) / m.sum(),
    "masked_per_sequence_then_mean": lambda e, m: ((e * m).sum(1) / m.sum(1)).mean(),
    "masked_sum_per_sequence_over_batch": lambda e, m: (e * m).sum(dim=1).sum() / e.shape[0],
    # The batch is cut to its own longest sequence.
    "masked_lengths_of_the_batch": lambda e, m: (e * m)[:, : int(m.sum(1).max())].mean(),
    # Relative to numpy's mean, by its weights.
    "masked_numpy_average": lambda e, m: (e * m / m.sum()).sum() / np.average(e.detach().numpy(), weights=m.numpy()),
}
PROGRAMS.update((name, functools.partial(trained_by_mean, mean_of)) for name, mean_of in MASKED.items())


@masked
def masked_by_assignment(e: Tensor, m: Tensor) -> Tensor:
    e = e.clone()
    e[m == 0] = 0.0
    return e.sum() / (m != 0).sum()


@masked
def masked_loop_over_rows(e: Tensor, m: Tensor) -> Tensor:
    losses = []
    for i in range(e.size(0)):
        losses.append(e[i, : int(m[i].sum())].mean())
    return torch.stack(losses).mean()


@masked
def masked_only_if_any(e: Tensor, m: Tensor) -> Tensor:
    late = m[:, 4:] * (e[:, 4:].detach() > 0.5)
    loss = (e * m).sum() / m.sum()
    if late.any():
        loss = loss + (e[:, 4:] * late).sum() / late.sum()
    return loss


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


# Weights and ratios


@trains(batches=lambda: loader(*binary()))
def weights_of_the_batch(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    """Positives count more, by their share of the batch."""
    positives = y.sum()
    weight = (len(y) - positives) / positives.clamp(min=1)
    return F.binary_cross_entropy_with_logits(net(x).squeeze(-1), y, pos_weight=weight)


@trains()
def importance_weights(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    """As in prioritised replay: weights by rank of the error, relative to the largest of the batch."""
    error = (net(x) - y).squeeze(-1)
    weights = (1 + error.detach().abs().argsort().argsort()).to(error.dtype) ** -0.5
    weights = weights / weights.max()
    log((error.abs() + 1e-6).detach().numpy().max())
    return (weights * error.square()).mean()


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


@trains(lambda: mlp(out=3), batches=lambda: loader(*classes()))
def hardest_triplets(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    distances = torch.cdist(net(x), net(x))
    same = y[:, None] == y[None]
    farthest = (distances * same).max(1)[0]
    nearest = (distances + 1e3 * same).min(1)[0]
    return F.relu(farthest - nearest + 0.3).mean()


@trains(lambda: mlp(out=4))
def cross_correlation(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    """As Barlow Twins and VICReg: features are normalised over the batch."""
    one, two = net(x + 0.1 * torch.randn_like(x)), net(x + 0.1 * torch.randn_like(x))
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in (one, two))
    c = a.T @ b / len(x)
    off = c.flatten()[:-1].view(3, 5)[:, 1:].pow(2).sum()
    return (torch.diagonal(c) - 1).pow(2).sum() + 5e-3 * off + F.relu(1 - one.var(dim=0).sqrt()).mean()


@trains(lambda: mlp(out=4), batches=lambda: loader(*classes()))
def mixup(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    share, order = np.random.beta(0.4, 0.4), torch.randperm(x.size(0))
    out = net(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])


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


@idiom
def free_bits_and_annealing(log: Log) -> Trained:
    net, decoder, seen = mlp(out=4), mlp(2, 6), 0

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal seen
        seen += len(x)
        mean, logvar = net(x).chunk(2, dim=1)
        z = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        divergence = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp())
        log(divergence.sum(1).mean().item())
        bits = torch.clamp(divergence.mean(0), min=0.05).sum()
        return F.mse_loss(decoder(z), x, reduction="sum") / x.size(0) + min(1.0, seen / 30) * bits

    return train(log, nn.ModuleList([net, decoder]), loss_of)


# Logs, metrics and what follows from them


@idiom
def tallies_in_tensors(log: Log) -> Trained:
    net, confusion, correct, total = mlp(out=4), torch.zeros(4, 4), torch.zeros(()), 0

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal correct, total
        logits = net(x)
        _, predicted = logits.max(1)
        total += y.size(0)
        correct += predicted.eq(y).sum()
        confusion.add_(torch.bincount(4 * y + predicted, minlength=16).view(4, 4))
        top = logits.topk(2, 1)[1].t().eq(y.view(1, -1).expand(2, -1)).reshape(-1).float().sum(0, keepdim=True)
        log(100.0 * correct / total, top.mul_(100.0 / y.size(0)).item())
        return F.cross_entropy(logits, y)

    trained = train(log, net, loss_of, loader(*classes()))
    overlap = confusion.diag() / (confusion.sum(0) + confusion.sum(1) - confusion.diag()).clamp(min=1)
    log(confusion, overlap.mean().item())
    return trained


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


@idiom
def outliers_left_out(log: Log) -> Trained:
    """Steps with a large gradient, and samples above the median of the batch, are left out."""
    net, skipped = mlp(), 0
    optimizer = SGD(net.parameters(), lr=0.1)
    for x, y in loader(*data(), size=7):
        errors = (net(x) - y).square().flatten()
        kept = errors <= errors.median()
        loss = errors[kept].mean()
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(net.parameters(), 0.5)
        if norm > 1.0:
            skipped += 1
            continue
        optimizer.step()
        log(norm.item(), kept.sum().item())
    log(skipped)
    return [net]


if __name__ == "__main__":
    main(PROGRAMS)
