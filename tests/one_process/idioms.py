"""Losses and metrics as public training code writes them, each in a short program for one process.

`python tests/one_process/idioms.py OUT` (see runner.py). No program knows of ranks; on any number of them each must log
and train as on one. 50 samples in batches of 16: the last has 2 rows, and neither two nor three ranks divide them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Callable, Optional

import numpy as np
import torch
import torch.nn.functional as F
from runner import Log, Programs, Trained, main
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

IDIOMS: Programs = {}


def idiom(function: Callable[[Log], Trained]) -> Callable[[Log], Trained]:
    IDIOMS[function.__name__] = function
    return function


def data(n: int = 50, features: int = 6) -> tuple[Tensor, Tensor]:
    """Return inputs (N, features) and targets (N, 1)."""
    x = torch.randn(n, features)
    return x, x[:, :2].sum(1, keepdim=True).sin()


def classes(n: int = 50, features: int = 6) -> tuple[Tensor, Tensor]:
    """Return inputs (N, features) and one of four unequally frequent classes (N,)."""
    x = torch.randn(n, features)
    return x, (x[:, 0] > 0.3).long() + 2 * (x[:, 1] > 0.8).long()


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


def masks(n: int = 50, size: int = 6) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, size, size) and what is to be segmented in them, 0 or 1 (N, 1, size, size)."""
    x = torch.randn(n, 1, size, size)
    return x, (F.avg_pool2d(x, 3, 1, 1) > 0.3).to(x.dtype)


def loader(*tensors: Tensor, size: int = 16, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), size, **{"shuffle": True, **options})


def mlp(features: int = 6, out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, out))


def convnet(channels: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, channels, 3, padding=1))


def language_model(words: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(words, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, words))


def fit(log: Log, net: nn.Module, loss_of: Callable[..., Tensor], batches: Optional[Iterable[Any]] = None) -> Trained:
    """Train `net` for one pass by the loss `loss_of(*batch)`; log each loss."""
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.5)
    for batch in loader(*data()) if batches is None else batches:
        loss = loss_of(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss.item())
    return [net]


# Masked means


def masked(log: Log, mean_of: Callable[[Tensor, Tensor], Tensor]) -> Trained:
    """Train by the loss `mean_of(errors (B, T), mask (B, T))`."""
    net = mlp(3)

    def loss_of(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return mean_of((net(x) - y).square().squeeze(-1), mask)

    return fit(log, net, loss_of, loader(*sequences()))


@idiom
def masked_over_sum(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum() / m.sum())


@idiom
def masked_over_item(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum() / m.sum().item())


@idiom
def masked_over_int(log: Log) -> Trained:
    return masked(log, lambda e, m: torch.sum(e * m) / int(m.sum()))


@idiom
def masked_over_clamped(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum() / m.sum().clamp(min=1))


@idiom
def masked_over_max_of_one(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum() / max(1, m.sum()))


@idiom
def masked_over_sum_and_epsilon(log: Log) -> Trained:
    return masked(log, lambda e, m: torch.sum(e * m) / (torch.sum(m) + 1e-8))


@idiom
def masked_over_len_of_nonzero(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum() / len(torch.nonzero(m)))


@idiom
def masked_over_count_nonzero(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum() / torch.count_nonzero(m))


@idiom
def masked_over_numpy_sum(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum() / float(np.sum(m.numpy() > 0)))


@idiom
def masked_over_python_sum(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum() / sum(int(length) for length in m.sum(-1).tolist()))


@idiom
def masked_means_divided(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).mean() / m.mean())


@idiom
def masked_by_boolean_index(log: Log) -> Trained:
    return masked(log, lambda e, m: e[m.bool()].mean())


@idiom
def masked_by_index_and_shape(log: Log) -> Trained:
    def mean_of(e: Tensor, m: Tensor) -> Tensor:
        valid = e[m > 0]
        return valid.sum() / valid.shape[0]

    return masked(log, mean_of)


@idiom
def masked_select(log: Log) -> Trained:
    return masked(log, lambda e, m: e.masked_select(m == 1).mean())


@idiom
def masked_by_flat_nonzero(log: Log) -> Trained:
    def mean_of(e: Tensor, m: Tensor) -> Tensor:
        places = m.reshape(-1).nonzero(as_tuple=False).squeeze(1)
        return e.reshape(-1).index_select(0, places).mean()

    return masked(log, mean_of)


@idiom
def masked_nanmean(log: Log) -> Trained:
    return masked(log, lambda e, m: torch.where(m > 0, e, torch.nan).nanmean())


@idiom
def masked_by_assignment(log: Log) -> Trained:
    def mean_of(e: Tensor, m: Tensor) -> Tensor:
        e = e.clone()
        e[m == 0] = 0.0
        return e.sum() / (m != 0).sum()

    return masked(log, mean_of)


@idiom
def masked_fill(log: Log) -> Trained:
    return masked(log, lambda e, m: e.masked_fill(~m.bool(), 0).sum().div(m.sum()))


@idiom
def masked_dot_product(log: Log) -> Trained:
    return masked(log, lambda e, m: e.view(-1) @ m.view(-1) / m.sum())


@idiom
def masked_einsum(log: Log) -> Trained:
    return masked(log, lambda e, m: torch.einsum("bt,bt->", e, m) / torch.einsum("bt->", m))


@idiom
def masked_per_sequence_then_mean(log: Log) -> Trained:
    return masked(log, lambda e, m: ((e * m).sum(1) / m.sum(1)).mean())


@idiom
def masked_sum_per_sequence_over_batch(log: Log) -> Trained:
    return masked(log, lambda e, m: (e * m).sum(dim=1).sum() / e.shape[0])


@idiom
def masked_per_step_then_mean(log: Log) -> Trained:
    return masked(log, lambda e, m: ((e * m).sum(0) / m.sum(0).clamp_min(1)).mean())


@idiom
def masked_loop_over_rows(log: Log) -> Trained:
    def mean_of(e: Tensor, m: Tensor) -> Tensor:
        losses = []
        for i in range(e.size(0)):
            losses.append(e[i, : int(m[i].sum())].mean())
        return torch.stack(losses).mean()

    return masked(log, mean_of)


@idiom
def masked_zip_over_rows(log: Log) -> Trained:
    def mean_of(e: Tensor, m: Tensor) -> Tensor:
        total, count = 0, 0
        for row, valid in zip(e, m):
            total = total + (row * valid).sum()
            count += int(valid.sum())
        return total / count

    return masked(log, mean_of)


@idiom
def masked_only_if_any(log: Log) -> Trained:
    def mean_of(e: Tensor, m: Tensor) -> Tensor:
        late = m[:, 4:] * (e[:, 4:].detach() > 0.5)
        loss = (e * m).sum() / m.sum()
        if late.any():
            loss = loss + (e[:, 4:] * late).sum() / late.sum()
        return loss

    return masked(log, mean_of)


@idiom
def masked_numpy_average(log: Log) -> Trained:
    """The mean that is logged is numpy's, by its weights."""

    def mean_of(e: Tensor, m: Tensor) -> Tensor:
        log(np.average(e.detach().numpy(), weights=m.numpy()))
        return (e * (m / m.sum())).sum()

    return masked(log, mean_of)


@idiom
def masked_lengths_of_the_batch(log: Log) -> Trained:
    """The batch is cut to its own longest sequence before the mean."""

    def mean_of(e: Tensor, m: Tensor) -> Tensor:
        longest = int(m.sum(1).max())
        log(longest)
        return (e * m)[:, :longest].mean()

    return masked(log, mean_of)


# Tokens, counts and labels that are ignored


@idiom
def ignore_index(log: Log) -> Trained:
    net = language_model()
    return fit(log, net, lambda x, y: F.cross_entropy(net(x).transpose(1, 2), y, ignore_index=-100), loader(*tokens()))


@idiom
def ignore_index_of_padding(log: Log) -> Trained:
    net, criterion = language_model(), nn.CrossEntropyLoss(ignore_index=0)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits = net(x)
        return criterion(logits.view(-1, logits.size(-1)), y.view(-1))

    return fit(log, net, loss_of, loader(*tokens(padding=0)))


@idiom
def summed_over_valid_tokens(log: Log) -> Trained:
    net = language_model()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
        return loss / (y != -100).sum()

    return fit(log, net, loss_of, loader(*tokens()))


@idiom
def nll_of_gathered_words(log: Log) -> Trained:
    net = language_model()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        valid = y.ne(-100)
        words = net(x).log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(words * valid).sum() / valid.sum()

    return fit(log, net, loss_of, loader(*tokens()))


@idiom
def masked_words_predicted(log: Log) -> Trained:
    """A sixth of the words is drawn and hidden; the loss is over these alone."""
    net = language_model()

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        hidden = torch.bernoulli(torch.full(x.shape, 0.15)).bool()
        hidden[0, 0] = True
        labels, inputs = x.masked_fill(~hidden, -100), x.masked_fill(hidden, 0)
        log(hidden.sum().item())
        return F.cross_entropy(net(inputs)[hidden], labels[hidden])

    return fit(log, net, loss_of, loader(*tokens()))


@idiom
def perplexity_of_a_corpus(log: Log) -> Trained:
    net, (x, y) = language_model(), tokens()
    trained = fit(log, net, lambda x, y: F.cross_entropy(net(x).flatten(0, 1), y.flatten()), loader(x, y))
    nll, count = 0.0, 0
    with torch.no_grad():
        for inputs, labels in loader(x, y, shuffle=False):
            nll += F.cross_entropy(net(inputs).flatten(0, 1), labels.flatten(), reduction="sum").item()
            count += (labels >= 0).sum().item()
    log(math.exp(nll / count), nll / count / math.log(2), count)
    return trained


@idiom
def learning_rate_by_tokens(log: Log) -> Trained:
    """Warm-up and cosine decay follow the tokens that were seen."""
    net, seen, final = language_model(), 0, 900
    optimizer = AdamW(net.parameters(), lr=1e-2)
    for _ in range(3):
        for x, y in loader(*tokens()):
            loss = F.cross_entropy(net(x).view(-1, 10), y.view(-1), ignore_index=-100)
            net.zero_grad()
            loss.backward()
            clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            seen += (y >= 0).sum()
            if seen < 100:
                factor = float(seen) / 100
            else:
                factor = max(0.1, 0.5 * (1 + math.cos(math.pi * float(seen - 100) / (final - 100))))
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * factor
            log(loss.item(), 1e-2 * factor)
    log(seen)
    return [net]


@idiom
def learning_rate_by_samples(log: Log) -> Trained:
    net, seen = mlp(), 0
    optimizer = SGD(net.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda _: 1 / (1 + seen / 20))
    for x, y in loader(*data()):
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += x.shape[0]
        scheduler.step()
        log(loss.item(), seen, scheduler.get_last_lr()[0])
    return [net]


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


@idiom
def tokens_of_an_unpadded_batch(log: Log) -> Trained:
    """The valid rows are packed into one long list before the network sees them."""
    net = mlp(3)

    def loss_of(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        valid = mask.flatten().bool()
        return F.smooth_l1_loss(net(x.flatten(0, 1)[valid]), y.flatten(0, 1)[valid])

    return fit(log, net, loss_of, loader(*sequences()))


@idiom
def actions_reshaped_and_selected(log: Log) -> Trained:
    """Actions (B, T, A) become rows (B * T, A), of which those under the attention mask count."""
    net = nn.GRU(3, 1, batch_first=True)

    def loss_of(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        predicted = net(x)[0]
        size = predicted.shape[2]
        predicted = predicted.reshape(-1, size)[mask.reshape(-1) > 0]
        return torch.mean((predicted - y.reshape(-1, size)[mask.reshape(-1) > 0]) ** 2)

    return fit(log, net, loss_of, loader(*sequences()))


@idiom
def summed_over_the_dataset(log: Log) -> Trained:
    net, batches, total = mlp(), loader(*data()), 0.0
    optimizer = SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        total = 0.0
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            total += loss.item()
        log(total / len(batches.dataset), total / len(batches))
    return [net]


@idiom
def divided_by_rows(log: Log) -> Trained:
    net = mlp()
    return fit(log, net, lambda x, y: ((net(x) - y) ** 2).sum() / x.shape[0] + ((net(x) - y).abs()).sum() / len(x) / 9)


@idiom
def divided_by_the_intended_batch_size(log: Log) -> Trained:
    net, batch_size = mlp(), 16
    return fit(log, net, lambda x, y: (net(x) - y).square().sum() / batch_size, loader(*data(), size=batch_size))


if __name__ == "__main__":
    main(IDIOMS)
