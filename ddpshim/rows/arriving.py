"""Defines `Arriving`, a number of all ranks' rows whose message is under way, as a loss before its backward pass.

A backward pass begins without the value of its loss. So a mean or a sum of row tensors has its graph at once, and its
value when somebody looks: `land` waits for the messages, and computes what the program has computed from them since,
by the same functions in the same order. A number that has arrived is an ordinary tensor, of torch's class.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ddpshim.model.wrapper import is_compiling
from ddpshim.process.job import current

_T = torch.Tensor
_MOST = 64  # numbers under way
_IN_PLACE = {_T.add_, _T.sub_, _T.mul_, _T.div_}  # also those of operators: loss += penalty
_MULTIPLYING = {_T.mul, torch.mul, _T.div, torch.div, _T.mul_, _T.div_}
# The gradients of these need no value of a number that is under way, if the others are constants.
_LINEAR = _IN_PLACE | _MULTIPLYING | {_T.add, torch.add, _T.sub, torch.sub, _T.__rsub__, _T.neg, torch.neg}
_NAMES = "shape dtype device layout ndim requires_grad grad_fn is_leaf is_cuda is_sparse is_nested"
_ABOUT = {_T.size, _T.dim, _T.numel, _T.is_floating_point, *(getattr(_T, name).__get__ for name in _NAMES.split())}


class Arriving(torch.Tensor):
    """A number that has its graph, and is NaN until it arrives."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _T.backward:
            return backward(func, args, kwargs)
        if func in (torch.autograd.backward, torch.autograd.grad):  # which torch's own ask for the value of a loss
            return inspect.unwrap(func)(_roots(args[0]), *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT:
                return func(*args, **kwargs)
            if func in _LINEAR and not kwargs and _is_linear(func, args):
                return _computed(func, args)
        land()
        return func(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:  # torch does not pass it on
        land()
        return self.as_subclass(cls)


def _roots(losses: Any) -> list[_T]:
    """Return tensors from which a backward pass can begin without the values of `losses`. Local."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        return [x.view(()) if type(x) is Arriving else x for x in ([losses] if isinstance(losses, _T) else losses)]


# Programs and loggers look at it.
Arriving.__name__, Arriving.__qualname__, Arriving.__module__ = _T.__name__, _T.__qualname__, _T.__module__


class _Arrivals:
    """The numbers of a job that are under way."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []  # what makes their values, in order
        self.numbers: list[weakref.ref[_T]] = []
        self.lock = threading.RLock()  # a thread of the program may read a loss, too


def begin(function: Callable[..., Any], whole: _T, waits: list[Callable[[], Any]]) -> Any:
    """Return the number `function(whole)`; `waits` make the values of `whole`, when they are called in order. Local."""
    arrivals = current().part(_Arrivals)
    with arrivals.lock:
        if len(arrivals.numbers) >= _MOST:
            land()
        arrivals.steps += waits
        if whole.device.type == "cuda":
            _compute(arrivals)  # only the GPU waits
        return _computed(function, (whole,))


def _computed(func: Callable[..., Any], args: Any) -> Any:
    """Return what `func` returns, whose value comes when those of `args` have come. Local."""
    arrivals = current().part(_Arrivals)
    with arrivals.lock:
        number = func(*args)
        # Without their graphs, which the program may drop. Constants may be written into.
        known = [x if not isinstance(x, _T) else x.data if x.requires_grad else x.clone() for x in args]
        value = number.data

        def compute() -> None:
            made = func(*known)
            if func not in _IN_PLACE:
                value.copy_(made)

        if number.device.type != "cuda":
            value.fill_(math.nan)
            arrivals.steps.append(compute)
        if func not in _IN_PLACE:
            number.__class__ = Arriving
            arrivals.numbers.append(weakref.ref(number))
    return number


def _compute(arrivals: _Arrivals) -> None:
    while arrivals.steps:
        arrivals.steps[0]()
        del arrivals.steps[0]


def land() -> None:
    """Wait for all numbers that are under way, whose messages all ranks have sent: they are ordinary tensors then."""
    arrivals = current().part(_Arrivals)
    if not arrivals.numbers:
        return
    with arrivals.lock, torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        _compute(arrivals)
        for made in arrivals.numbers:
            number = made()
            if number is not None:
                number.__class__ = _T
        arrivals.numbers.clear()


def arrived(value: Any) -> Any:
    """Return `value`, which is no number under way any more."""
    if type(value) is Arriving:
        land()
    return value


def on_arrived(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which reads the value of a tensor without asking its class, with numbers that have arrived."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            land()
        return function(*args, **kwargs)

    return called


def _is_linear(func: Any, args: Any) -> bool:
    """Whether the gradients of `func` need no value of a number that is under way, for these arguments. Local.

    Without gradients a result could be an argument that torch reads itself: torch.add(x, y, alpha=number).
    """
    constants = [x for x in args if type(x) is not Arriving]
    if not all(type(x) in (int, float) or (type(x) is _T and not x.dim() and not x.requires_grad) for x in constants):
        return False
    is_first = type(args[0]) is Arriving
    if not torch.is_grad_enabled() or (func in _MULTIPLYING and len(constants) != 1):
        return False
    return is_first or not (func in _IN_PLACE or func in (_T.div, torch.div))


def backward(func: Any, args: Any, kwargs: Any) -> None:
    """Tensor.backward"""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:])), **kwargs}
    torch.autograd.backward(args[0], given.pop("gradient", None), **given)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=land)  # a child has no connection
