"""Gradients of row tensors as the program sees them: backward, autograd.grad, hooks, functions of its own.

Inside blocks a gradient is W times a rank's share (`blocks`); here it becomes the whole's gradient, or its rows.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from typing import Any, Callable, Optional

import torch
from torch.utils import checkpoint as torch_checkpoint

from ddpshim.errors import SyncError
from ddpshim.job import news
from ddpshim.model import guard
from ddpshim.model.backward import Passes
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from ddpshim.process.users_line import users_line
from ddpshim.rows import arriving, blocks
from ddpshim.rows.arriving import arrived
from ddpshim.rows.blocks import Mean
from ddpshim.rows.rules import T, argument, rule
from ddpshim.rows.tensor import Counts, Rows, cut, gathered, is_reduced, mapped, on_whole, parameters_of, whole

_OURS = "ddpshim"


def plain(value: Any) -> Any:
    """Return `value` with the wholes of row tensors (collective)."""
    return mapped(lambda one: whole(one) if isinstance(one, Rows) else one, value)


def _listed(value: Any) -> list[Any]:
    return [value] if value is None or isinstance(value, T) else [*value]


def _inputs(value: Any) -> list[Any]:
    """Return tensors for which gradients are asked; a loss under way among them arrives first."""
    return [arrived(one) for one in _listed(value)]


def _seeds(tensors: Any, gradients: Any) -> tuple[list[Any], list[Any]]:
    """Return tensors, and their gradients, from which a backward pass can begin on this rank."""
    given, seeds = _listed(tensors), _listed(gradients)
    seeds = [*map(arrived, seeds), *[None] * (len(given) - len(seeds))]
    for i, (tensor, seed) in enumerate(zip(given, seeds)):
        if isinstance(tensor, Rows) and seed is None:
            given[i] = whole(tensor)
        elif isinstance(tensor, Rows):
            given[i], seeds[i] = tensor.block, _own_of(seed, tensor) * blocks.factor()
        elif isinstance(seed, Rows):
            seeds[i] = whole(seed)
    return given, seeds


def _own_of(gradient: Any, rows: Rows) -> Any:
    """Return this rank's rows of a gradient of `rows`."""
    if isinstance(gradient, Rows) and (gradient.dimension, gradient.part) == (rows.dimension, rows.part):
        return gradient.block
    return cut(plain(gradient), rows.dimension, rows.part)


def _backward_of_rows(
    original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **kwargs: Any
) -> None:
    """torch.autograd.backward"""
    if current().part(Counts).is_in_lock_step() and not guard.compares_passes():
        news.settle()
    given, seeds = _seeds(tensors, grad_tensors)
    if inputs is not None:
        inputs = [one.block if isinstance(one, Rows) else one for one in _inputs(inputs)]
    original(given, seeds, *args, inputs=inputs, **kwargs)
    if argument(args, kwargs, 1, "create_graph"):  # gradients are means over ranks, of which their graphs know nothing
        for p in current().part(guard.GuardState).owned:
            if p.grad is not None and p.grad.requires_grad:
                p.grad.register_hook(blocks.same)


def _grad(original: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad, which also averages gradients of parameters (collective)."""
    of = _inputs(inputs)
    if kwargs.get("is_grads_batched") and any(isinstance(one, Rows) for one in (*_listed(outputs), *of)):
        del kwargs["is_grads_batched"]
        every = zip(*(seed.unbind() for seed in _listed(plain(grad_outputs))))
        found = [_grad(original, outputs, inputs, seeds, *args, **{**kwargs, "retain_graph": True}) for seeds in every]
        return tuple(None if of_one[0] is None else torch.stack(plain(of_one)) for of_one in zip(*found))
    of = [one if not isinstance(one, Rows) else _source(one) for one in of]
    given, seeds = _seeds(outputs, grad_outputs)
    found = original(given, [one.block if isinstance(one, Rows) else one for one in of], seeds, *args, **kwargs)
    arriving.land()
    return tuple(one if one is None else _as_seen(one, of[i]) for i, one in enumerate(found))


def _as_seen(gradient: torch.Tensor, tensor: Any) -> Any:
    """Return the gradient of `tensor` in one process."""
    if isinstance(tensor, Rows):
        factor = 1 if tensor.block.is_leaf else blocks.factor()
        return Rows(gradient / factor, tensor.dimension, tensor.part)
    return Mean.apply(gradient) if is_reduced(tensor) else gradient  # type: ignore[no-untyped-call]


rule(T.backward, moves=True)(arriving.backward)


def _mirror(rows: Rows) -> Any:
    """Return the mirror that is the tensor whose rows these are; None if it is no tensor of the program."""
    return next((one for one in rows.memory.mirrors if one.block is rows.block and one.dim == rows.dimension), None)


def _source(rows: Rows) -> Any:
    """Return the whole from which a row tensor was cut, if it has a gradient; else the row tensor. Local."""
    mirror = _mirror(rows)
    return mirror.whole if mirror is not None and mirror.is_source and mirror.whole.requires_grad else rows


@rule(T.requires_grad_, T.requires_grad.__set__, moves=True)  # type: ignore[attr-defined]
def _require(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    requires, mirror = argument(args, kwargs, 1, "requires_grad", True), _mirror(rows)
    if mirror is not None:
        mirror.whole.requires_grad_(requires)
        mirror.is_source = True
        with torch.enable_grad():
            rows.block = mirror.block = cut(mirror.whole, rows.dimension, rows.part)
    elif requires and rows.block.is_leaf and not rows.block.requires_grad:
        rows.block.requires_grad_()
        factor = blocks.factor()
        rows.block.register_hook(lambda gradient: gradient / factor)
    else:
        rows.block.requires_grad_(requires)
    rows.cached = None
    return rows if func is T.requires_grad_ else None


@rule(T.retain_grad, moves=True)
def _retain(func: Any, args: Any, kwargs: Any) -> Any:
    source = _source(args[0])
    if isinstance(source, Rows):
        func(source.block)  # not the stand-in: a block's gradient is no mean over ranks
    else:
        source.retain_grad()


@rule(T.grad.__get__, moves=True)  # type: ignore[union-attr]
def _gradient(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    source = _source(rows)
    if source is not rows:
        return source.grad
    own = rows.block.grad
    if own is None:
        return None
    # Not kept: autograd adds to the gradient of a leaf in place.
    return Rows(own if rows.block.is_leaf else own / blocks.factor(), rows.dimension, rows.part)


@rule(T.grad.__set__, T.grad.__delete__, moves=True)  # type: ignore[union-attr]
def _set_gradient(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    if not isinstance(rows, Rows):
        return NotImplemented
    value = args[1] if len(args) > 1 else None
    source = _source(rows)
    if source is not rows:
        source.grad = plain(value)
    else:
        rows.block.grad = None if value is None else _own_of(value, rows)


@rule(T.data.__set__, moves=True)  # type: ignore[attr-defined]
def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    rows, value = args
    if not isinstance(rows, Rows):
        return NotImplemented
    if rows.shape != value.shape:
        raise SyncError(f"{users_line()}: x.data = y of another shape, for a sharded batch. Use x = y")
    rows.block.data = _own_of(value, rows).detach()
    rows.memory.wrote()


def _register_hook(original: Any, self: Any, hook: Callable[[Any], Any]) -> Any:
    """Tensor.register_hook: the hook gets the whole's gradient, or the average."""
    if _asks_itself():
        return original(self, hook)
    self = _source(self) if isinstance(self, Rows) else self
    if isinstance(self, Rows):
        return self.block.register_hook(_of_whole(hook, self))
    return original(self, _averaged(self, hook) if parameters_of(self) else hook)


def _averaged(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a hook of `tensor` that gives `hook` the mean over ranks, if a wrapper reduces its gradient later."""
    parameters = [*map(weakref.ref, parameters_of(tensor))]

    def averaged(gradient: Optional[torch.Tensor]) -> Any:
        known = [parameter() for parameter in parameters]
        is_one_of_ranks = gradient is not None and all(one is not None and is_reduced(one) for one in known)
        return plain(hook(Mean.apply(gradient) if is_one_of_ranks else gradient))  # type: ignore[no-untyped-call]

    return averaged


def _retain_grad(original: Any, self: Any) -> None:
    """Tensor.retain_grad: what is retained is the whole's gradient."""
    if isinstance(self, Rows):
        _retain(original, (self,), {})
    else:
        if not self.is_leaf and not self.retains_grad and parameters_of(self):
            self.register_hook(_averaged(self, lambda gradient: gradient))
        original(self)


def _asks_itself() -> bool:
    """Whether ddpshim calls the stand-in that calls this. Local."""
    return str(sys._getframe(3).f_globals.get("__name__")).partition(".")[0] == _OURS


def _of_whole(hook: Callable[[Any], Any], rows: Rows) -> Callable[[Any], Any]:
    dim, part = rows.dimension, rows.part
    factor = 1 if rows.block.is_leaf else blocks.factor()

    def called(gradient: Optional[torch.Tensor]) -> Any:
        changed = hook(None if gradient is None else gathered(gradient, dim, part) / factor)
        return None if changed is None else cut(plain(changed), dim, part) * factor

    return called


def _register_post_hook(original: Any, self: Any, hook: Callable[[Any], Any]) -> Any:
    """Tensor.register_post_accumulate_grad_hook: the hook is called after the reduction."""
    if _asks_itself():
        return original(self, hook)

    def later(parameter: torch.Tensor) -> None:
        if not is_reduced(parameter):
            hook(parameter)
            return
        current().part(Passes).once_after.append(functools.partial(hook, parameter))

    return original(self, later)


def _refuse_rows(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(x, Rows) for x in tensors):
        raise SyncError(
            f"{users_line()}: {original.__name__} of a sharded batch: the hook would get local "
            "gradients. Use x.register_hook(...) for each tensor."
        )
    return original(tensors, *args, **kwargs)


# Functions of the program.
_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def apply_of_rows(original: Any) -> Any:
    """Return the stand-in for autograd.Function.apply: the function gets wholes, and its results are wholes."""

    def inner(cls: Any, *args: Any, **kwargs: Any) -> Any:  # from torch 2.14 on a method of C, without __func__
        return original.__get__(None, cls)(*args, **kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == _OURS:
            return inner(cls, *args, **kwargs)
        arriving.land()
        return on_whole(functools.partial(inner, _on_wholes(cls)), args, kwargs)

    return classmethod(apply)


def _on_wholes(cls: Any) -> Any:
    made = _made.get(cls)
    if made is None:
        base: Any = torch.autograd.Function
        methods = ("forward", "backward", "vjp", "jvp")
        names = [name for name in methods if getattr(cls, name) is not getattr(base, name)]
        in_wholes: Any = lambda function, *args, **kwargs: plain(function(*args, **kwargs))  # noqa: E731
        parts = {name: staticmethod(stand_in(getattr(cls, name), in_wholes)) for name in names}
        made = _made[cls] = type(cls)(cls.__name__, (cls,), {**parts, "__module__": cls.__module__})
        _made[made] = made
    return made


def _checkpoint(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """The reentrant checkpoint, by torch's other one: the gradients are the same, and rows stay rows."""
    if any(isinstance(one, T) and one.requires_grad for one in args) and torch.is_grad_enabled():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
    with torch.no_grad():
        return function(*args)


def _saved(_: Any, *args: Any) -> Any:
    """Return what stands for the node in which torch up to 2.12 saves the arguments of a checkpoint: rows stay rows."""
    node = types.SimpleNamespace(saved_tensors=(), get_args=lambda _: args)
    return types.SimpleNamespace(grad_fn=node if torch.is_grad_enabled() else None)


def stand_in(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `instead` with `original` first. Local."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    return called


def install(undo: contextlib.ExitStack) -> None:
    """Make torch's functions of gradients know row tensors, until `undo` is closed. Local."""
    for owner, name, instead in (
        (torch.autograd, "backward", _backward_of_rows),
        (torch.autograd, "grad", _grad),
        (T, "register_hook", _register_hook),
        (T, "retain_grad", _retain_grad),
        (T, "register_post_accumulate_grad_hook", _register_post_hook),
        (torch.autograd.graph, "register_multi_grad_hook", _refuse_rows),
    ):
        undo.enter_context(replaced(owner, name, stand_in(getattr(owner, name), instead)))
    of_functions = apply_of_rows(vars(torch.autograd.Function)["apply"])
    undo.enter_context(replaced(torch.autograd.Function, "apply", of_functions))
    undo.enter_context(replaced(torch_checkpoint.CheckpointFunction, "apply", staticmethod(_checkpoint)))
    if hasattr(torch_checkpoint, "_NoopSaveInputs"):
        undo.enter_context(replaced(torch_checkpoint._NoopSaveInputs, "apply", staticmethod(_saved)))
    current().part(Passes).at_end.append(arriving.land)
