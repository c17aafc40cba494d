"""Programs that change something between two calls of a network, each of which one process sees at once.

`python -m tests.one_process.changing OUT` (see runner.py). A capture that outlives a change is silently wrong. Each
program makes 12 steps with batches of 16, 16, 16 and 2 rows, and changes something before some of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any, Callable, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.one_process.parts import data, loader
from tests.one_process.runner import Log, Programs, Trained, main

PROGRAMS = Programs()
SCALE = 1.0


class Net(nn.Module):
    """Two layers with dropout; `extra` computes something of its own in the middle."""

    def __init__(self, extra: Optional[Callable[[Net, Tensor], Tensor]] = None) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.drop, self.extra, self.scale, self.kept = nn.Dropout(0.2), extra, 1.0, None
        self.settings = {"factors": [1.0, 2.0]}
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        y = self.drop(torch.tanh(self.first(x))) * self.scale + self.shift
        if self.extra is not None:
            y = self.extra(self, y, *more, **named).to(y.dtype)
        return self.last(torch.relu(self.second(y)) + y)


Change = Callable[[Net, int, torch.optim.Optimizer], Any]


def trained(
    log: Log, change: Change = lambda *_: None, extra: Any = None, call: Any = lambda net, x, step: net(x)
) -> Trained:
    net = Net(extra)
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    batches = [batch for _ in range(3) for batch in loader(*data())]
    for step, (x, y) in enumerate(batches):
        change(net, step, optimizer)
        loss = F.mse_loss(call(net, x, step), y)
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
        log(loss.item())
    log(torch.rand(2))
    return [net]


def program(name: str, *how: Any, **named: Any) -> None:
    """Register the program that trains in this way; see `trained`."""
    PROGRAMS[name] = lambda log: trained(log, *how, **named)


def at(name: str, *steps: int, change: Callable[[Net], Any]) -> None:
    """Register a program in which the change happens before these steps only."""
    program(name, lambda net, step, _: change(net) if step in steps else None)


# The network's own.
program("attribute", lambda net, step, _: setattr(net, "scale", (1.0, 3.0, 0.5)[step // 4]))
program("training_and_evaluation", lambda net, step, _: net.train(step % 3 > 0))
program(
    "list_grows",
    lambda net, step, _: net.settings["factors"].append(1.5),
    lambda net, y: y * len(net.settings["factors"]),
)
program("buffer_anew", lambda net, step, _: setattr(net, "shift", torch.full((8,), step / 10)))


at("layer_wrapped", 3, 7, change=lambda net: setattr(net, "drop", nn.Sequential(net.drop, nn.Dropout(0.5))))
at("layer_drawn_late", 5, change=lambda net: setattr(net, "drop", nn.Sequential(net.drop, nn.LazyLinear(8))))


class _Doubled(nn.Softplus):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


_OF_DOUBLED = _Doubled.forward


@PROGRAMS.add
def methods_patched(log: Log) -> Trained:
    def change(net: Net, step: int, _: Any) -> None:
        net.drop = net.drop if step else _Doubled()
        _Doubled.forward = _OF_DOUBLED if step % 6 < 3 else lambda self, x: x * 3

    return trained(log, change)


@PROGRAMS.add
def functions_patched(log: Log) -> Trained:
    sin = torch.sin

    def change(net: Net, step: int, _: Any) -> None:
        F.softsign = torch.sin if step % 4 < 2 else torch.cos
        torch.sin = sin if step < 6 else torch.tanh

    try:
        return trained(log, change, lambda net, y: F.softsign(y) + torch.sin(y))
    finally:
        torch.sin = sin


@PROGRAMS.add
def code_replaced(log: Log) -> Trained:
    def inner(y: Tensor) -> Tensor:
        return y * 2

    def other(y: Tensor) -> Tensor:
        return y * 3

    def change(net: Net, step: int, _: Any) -> None:
        if step == 5:
            inner.__code__ = other.__code__

    return trained(log, change, lambda net, y: inner(y))


at("hook_added", 4, change=lambda net: net.second.register_forward_hook(lambda module, given, out: out * 1.5))
at(
    *("hook_of_gradients", 4),
    change=lambda net: net.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,)),
)


@PROGRAMS.add
def hook_of_all(log: Log) -> Trained:
    add = nn.modules.module.register_module_forward_hook
    with contextlib.ExitStack() as added:

        def change(net: Net, step: int, _: Any) -> None:
            if step == 4:
                added.callback(add(lambda module, given, out: out * 1.1).remove)

        return trained(log, change)


at("all_frozen_but_the_last", 4, change=lambda net: net.requires_grad_(False).last.requires_grad_(True))


def _set_data(net: Net) -> None:
    for p in net.parameters():
        p.data = p.data.clone() * 0.5


def _share_weights(net: Net) -> None:
    net.second.weight = net.second.weight.requires_grad_(True)
    net.first.bias = net.second.bias


at("weights_by_data", 5, change=_set_data)
at("weights_shared", 5, change=_share_weights)
program(
    "another_type",
    extra=lambda net, y, mask: y * mask,
    call=lambda net, x, step: net(x, (x[:, :1] > 0).to([torch.bool, torch.float32, torch.float64][step % 3])),
)


# What is not the network's.
def set_global(net: Net, step: int, _: Any) -> None:
    global SCALE
    SCALE = 1.0 + step // 4


program("a_global", set_global, lambda net, y: y * SCALE)


def _by_default(net: Net, y: Tensor, by: float = 1.0) -> Tensor:
    return y * by


def _by_keyword(net: Net, y: Tensor, *, by: float = 1.0) -> Tensor:
    return y * by


def _by_name(net: Net, y: Tensor) -> Tensor:
    return y * len(_by_default.__name__) + _by_default(net, y)


program("a_default", lambda net, step, _: setattr(_by_default, "__defaults__", (1.0 + step // 4,)), _by_default)
program("a_keyword", lambda net, step, _: _by_keyword.__kwdefaults__.update(by=1.0 + step // 4), _by_keyword)
program("a_name", lambda net, step, _: setattr(_by_default, "__name__", "by" * (1 + step // 4)), _by_name)
program(
    "a_variable",
    lambda net, step, _: os.environ.__setitem__("POWER_OF_NET", str(1 + step // 4)),
    lambda net, y: y * float(os.environ["POWER_OF_NET"]),
)
program("a_clock", extra=lambda net, y: y * (2.0 if time.time() > 1e9 else 1.0) + 0 * (time.perf_counter() > 0))
program("pythons_draws", extra=lambda net, y: y * random.random())
program("numpys_draws", extra=lambda net, y: y * float(np.random.rand()))
program("unused_draws", extra=lambda net, y: (torch.randn_like(y), torch.rand(3), y)[-1])
program("seeds_inside", extra=lambda net, y: (torch.manual_seed(5), y + torch.rand(8))[1])


def _state(name: str, switch: Callable[[bool], Any], is_on: bool = True) -> None:
    def switched(log: Log) -> Trained:
        try:
            return trained(log, lambda net, step, _: switch(step % 4 < 2))
        finally:
            switch(is_on)

    PROGRAMS[name] = switched


_state("gradients_off", torch.set_grad_enabled)
_state("deterministic", lambda on: torch.use_deterministic_algorithms(on), False)
_BEFORE = torch.get_default_dtype()
program(
    "default_type",
    lambda net, step, _: torch.set_default_dtype(torch.float64 if step % 4 == 1 else _BEFORE),
    lambda net, y: y + torch.linspace(0, 1, 8).to(y.dtype),
)


def _with(context: Callable[[int], Any]) -> Any:
    def call(net: Net, x: Tensor, step: int) -> Any:
        with context(step):
            return net(x).float() if torch.get_default_dtype() is torch.float32 else net(x)

    return call


program("autocast", call=_with(lambda step: torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 1)))
program("inference", call=_with(lambda step: torch.inference_mode(step % 3 == 0)))


@torch.no_grad()
def _without(y: Tensor) -> Tensor:
    return y.sin() * torch.rand_like(y)


program("no_grad_inside", extra=lambda net, y: y + _without(y))


# What a call gets, returns and keeps.
program("twice", call=lambda net, x, step: net(net(x).expand(-1, 6).contiguous() + x))
program(
    "a_dictionary_of_its_own",
    extra=lambda net, y, given: given.__setitem__("y", y) or y * given["scale"],
    call=lambda net, x, step: (lambda given: net(x, given) + given["y"].mean(1, keepdim=True))({"scale": 2.0}),
)
program(
    "a_dictionary_that_it_normalises",
    extra=lambda net, y, given: given.__setitem__("x", given["x"] * 2) or y * given["x"].mean(1, keepdim=True),
    call=lambda net, x, step: (lambda given: net(x, given) + given["x"].mean(1, keepdim=True))({"x": x + 1}),
)


def _keeps_mean(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        net.shift.lerp_(y.detach().mean(0), 0.1)
    return y


program("keeps_a_mean", extra=_keeps_mean)


def _carried(net: Net, x: Tensor, step: int) -> Tensor:
    if step == 0:
        net.lstm = nn.LSTM(6, 8, batch_first=True)
        net.kept = None
    out, state = net.lstm(x[:, None], net.kept if net.kept and net.kept[0].shape[1] == len(x) else None)
    net.kept = tuple(one.detach() for one in state)
    return net(x) + out[:, 0, :1]


program("state_carried_over", call=_carried)
program(
    "writes_into_its_argument", extra=lambda net, y: y.mul_(2), call=lambda net, x, step: net(x.add_(0.1)) + x[:, :1]
)


def _norm(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 0:
        net.norm = nn.BatchNorm1d(8)
        optimizer.add_param_group({"params": net.norm.parameters()})


# Each of the two runs that prove a capture must get BatchNorm's result as it was before it is written to.
program("relu_in_place_after_batchnorm", _norm, lambda net, y: F.relu(net.norm(y), inplace=True))

if __name__ == "__main__":
    main(PROGRAMS)
