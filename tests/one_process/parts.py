"""Data, networks and a training loop, which the programs share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.one_process.runner import Log, Programs, Trained


def data(features: int = 6, n: int = 50) -> tuple[Tensor, Tensor]:
    """Return inputs (N, features) and targets (N, 1)."""
    x = torch.randn(n, features)
    return x, x[:, :2].sum(1, keepdim=True).sin()


def classes(features: int = 6, n: int = 50) -> tuple[Tensor, Tensor]:
    """Return inputs (N, features) and one of four unequally frequent classes (N,)."""
    x = torch.randn(n, features)
    return x, (x[:, 0] > 0.3).long() + 2 * (x[:, 1] > 0.8).long()


def loader(*tensors: Tensor, size: int = 16, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), size, **{"shuffle": True, **options})


def mlp(features: int = 6, out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, out))


def below(x: Tensor, most: float) -> Tensor:
    assert (x < most).all(), "too large"  # pytest would rewrite it in a file of tests
    return x


def steps(
    optimizer: Optimizer, loss_of: Callable[..., Tensor], batches: Optional[Iterable[Any]] = None
) -> Iterator[Tensor]:
    """Step by the loss `loss_of(*batch)` of each batch; yield the loss after the step."""
    for batch in loader(*data()) if batches is None else batches:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        yield loss


def train(
    log: Log, net: nn.Module, loss_of: Callable[..., Tensor], batches: Optional[Iterable[Any]] = None, lr: float = 0.1
) -> Trained:
    """Train `net` by SGD for one pass over `batches`; log each loss."""
    for loss in steps(SGD(net.parameters(), lr), loss_of, batches):
        log(loss.item())
    return [net]


def by_loss(
    programs: Programs,
    make: Callable[[], Any] = mlp,
    batches: Callable[[], Optional[Iterable[Any]]] = lambda: None,
    lr: float = 0.1,
) -> Callable[[Callable[..., Tensor]], None]:
    """Return a decorator that registers the program which trains a network by `loss_of(net, log, *batch)`."""

    def add(loss_of: Callable[..., Tensor]) -> None:
        def program(log: Log) -> Trained:
            net = make()
            return train(log, net, functools.partial(loss_of, net, log), batches(), lr)

        programs[loss_of.__name__] = program

    return add
