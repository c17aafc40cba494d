"""How the programs are found, and what many of them share."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.one_process.parts import by_loss, train
from tests.one_process.runner import Log, Programs, Trained

PROGRAMS = Programs()
program = PROGRAMS.add
trains = functools.partial(by_loss, PROGRAMS)


class Net(nn.Module):
    """A network of `parts` whose forward is `function(self, ...)`."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def sequences(n: int = 50, length: int = 5, features: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences (N, T, features), targets (N, T, 1) and lengths (N,)."""
    x = torch.randn(n, length, features)
    return x, x.cumsum(1)[..., :1].tanh(), torch.randint(1, length + 1, (n,))


def images(n: int = 50, channels: int = 4, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return images (N, channels, size, size) and targets (N, 1)."""
    x = torch.randn(n, channels, size, size)
    return x, x.mean((1, 2, 3))[:, None]


def fit(log: Log, net: nn.Module, batches: Optional[Iterable[Any]] = None, lr: float = 0.1) -> Trained:
    """Train `net` by SGD to predict the last tensor of each batch from the others."""
    return train(log, net, lambda *batch: F.mse_loss(net(*batch[:-1]), batch[-1]), batches, lr)


def changed(log: Log, change: Callable[[Tensor], Tensor]) -> Trained:
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

    return train(log, net, loss_of)


def change(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Register the program that trains with `function`."""
    PROGRAMS[function.__name__] = lambda log: changed(log, function)
    return function


def logged_change(function: Callable[[Log, Tensor], Tensor]) -> None:
    """Register the program that trains with `function`, which also gets the log."""
    PROGRAMS[function.__name__] = lambda log: changed(log, functools.partial(function, log))


def computes(
    parts: Callable[[], dict[str, Any]], batches: Callable[[], Optional[Iterable[Any]]] = lambda: None, lr: float = 0.1
) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that registers the program which fits a network of `parts`, whose forward is the function.

    The network has the program's log as `net.log`.
    """

    def add(forward: Callable[..., Any]) -> None:
        PROGRAMS[forward.__name__] = lambda log: fit(log, Net(forward, log=log, **parts()), batches(), lr)

    return add
