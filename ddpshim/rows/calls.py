"""Where batches become row tensors: at the first network that gets them; and what computes on wholes only.

Which tensor is divided is a question of speed: a row tensor is the whole to every operation.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.autograd import forward_ad

from ddpshim import variables
from ddpshim.model.wrapper import Transparent, is_compiling
from ddpshim.process.devices import moved
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from ddpshim.rows import arriving, blocks, dimensions, gradients, layers  # noqa: F401 (they register their rules)
from ddpshim.rows.arriving import on_arrived
from ddpshim.rows.rules import T
from ddpshim.rows.tensor import Counts, Rows, divided, end_rows, is_plain, leaves, mapped, on_whole, write_back

# By DDPSHIM_ROWS: the multiplications of a call that is divided. A smaller one takes less time than to divide it.
_LEAST_WORK = {"auto": 1 << 20, "all": 0, "off": math.inf}
# By the option `capture`: the operations on rows of a module's calls before one is captured, which takes a second.
_LEAST_OPERATIONS = {"auto": 30_000, "force": 0, "off": math.inf}

_FEWEST_OPERATIONS = 4  # of a call: to know that nothing has changed takes as long as the rules of some

is_tracing = False  # `capture` calls a network, and Dynamo sees all calls inside, which look at this


class Known:
    """What is known of a module whose calls may be divided."""

    def __init__(self, module: nn.Module) -> None:
        known = (p for p in module.parameters() if not isinstance(p, nn.UninitializedParameter))
        self.num_parameters = sum(p.numel() for p in known)  # their entries, at the first call
        self.num_operations = 0  # of its calls, that were computed
        self.regions: dict[Any, Any] = {}  # `capture.CapturedCalls` by what makes calls alike
        self.refused = ""  # why no call of it is captured, so that its children's may be


class Calls:
    """The calls of networks in a job."""

    def __init__(self) -> None:
        self.rows: Optional[tuple[int, int]] = None  # the dimension and number of those on which a network computes now
        self.is_off = False  # nothing is divided now: inside torch.func, torch.jit and torch.compile
        self.counting: Optional[Known] = None  # the module whose call runs, and may be captured as a whole
        self.dim = 0  # of the rows
        self.original: Any = None  # torch's nn.Module.__call__, while it is replaced
        # Called before torch.func, torch.jit or torch.compile computes, inside which no call is seen.
        self.before_wholes: Callable[[], None] = lambda: None
        world = current().world  # on one rank, graphs need rows of any call
        auto = "all" if world is not None and world.world_size == 1 and world.options.graphs == "on" else "auto"
        choice = os.environ.get(variables.ROWS, "").strip().lower() or auto
        self.least_work = _LEAST_WORK[choice]  # multiplications of a call that is divided
        # Of a module, before its calls are captured; -1: from the first one on, as all rows may not fit.
        self.least_operations = _LEAST_OPERATIONS["off" if world is None else world.options.capture]
        if world is not None and (world.options.graphs == "on" or world.options.rows_at_once):
            self.least_operations = -1 if world.options.rows_at_once else 0
        self._known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()

    def known(self, module: nn.Module) -> Known:
        found = self._known.get(module)
        if found is None:
            found = self._known[module] = Known(module)
        return found


def with_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for nn.Module.__call__."""
    call_on_wholes = on_wholes(call)

    @functools.wraps(call)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_tracing:
            return _traced(call, module, args, kwargs)
        if is_compiling() or current().part(Calls).is_off:
            return call(module, *args, **kwargs)
        if computes_wholes(module):
            return call_on_wholes(module, *args, **kwargs)
        given, calls = leaves((args, kwargs)), current().part(Calls)
        found = _dimension_and_size(module, given)
        inside = found or next(((x.dimension, x.sizes[x.dimension]) for x in given if type(x) is Rows), None)
        if inside is None:
            return call(module, *args, **kwargs)
        copies: list[Any] = []
        before, calls.rows = calls.rows, inside
        try:
            if found is None:
                return _of_rows(call, module, args, kwargs)
            if calls.counting is not None and len(_tensors(given)) > len(_tensors((*args, *kwargs.values()))):
                calls.counting.refused = "a module inside shards a tensor of its own"  # in a container
            shared = _shared(given, *found)
            args, kwargs = mapped(lambda x: shared.get(id(x), x), (args, kwargs), copies)
            return _of_rows(call, module, args, kwargs)
        finally:
            calls.rows = before
            write_back(copies)

    return called


def _shared(given: Iterable[Any], dim: int, num: int) -> dict[int, Any]:
    """Return row tensors in place of plain ones, by the id of these: a tensor that is given twice stays one. Local."""
    found = {id(x): x for x in given if _has_rows(x, dim, num)}
    return {key: divided(x, dim) for key, x in found.items()}


def met_by_rows(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what a network gets, divided where one is a row tensor: a call in graphs, as Dynamo sees none. Local."""
    found = _dimension_and_size(None, given)
    shared = {} if found is None else _shared(given, *found)
    return tuple(shared.get(id(x), x) for x in given)


def _tensors(given: Iterable[Any]) -> list[torch.Tensor]:
    return [x for x in given if isinstance(x, T)]


def _traced(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a network for Dynamo."""
    given = _tensors((*args, *kwargs.values()))
    if given:
        met = list(met_by_rows(*given))
        args = [met.pop(0) if isinstance(x, T) else x for x in args]
        kwargs = {name: met.pop(0) if isinstance(x, T) else x for name, x in kwargs.items()}
    return call(module, *args, **kwargs)


def _of_rows(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what the call of a module with row tensors returns, by the rules or by what was captured of them."""
    calls = current().part(Calls)
    if calls.counting or calls.least_operations == math.inf or isinstance(module, (Transparent, nn.DataParallel)):
        return call(module, *args, **kwargs)
    known, counts = calls.known(module), current().part(Counts)
    if known.refused:
        return call(module, *args, **kwargs)
    before, calls.counting = counts.on_rows, known
    try:
        if known.num_operations > calls.least_operations:
            from ddpshim.rows import capture

            return capture.captured(known, call, module, args, kwargs)
        return call(module, *args, **kwargs)
    finally:
        calls.counting = None
        num = counts.on_rows - before
        known.num_operations += num
        if known.refused:
            counts.refused.setdefault(type(module).__name__, known.refused)
        elif num < _FEWEST_OPERATIONS and not known.regions and not current().part(blocks.State).has_graphs:
            known.refused = "it is small"


def computes_wholes(module: nn.Module) -> bool:
    """Whether the module's operations are not seen one by one: it is compiled or scripted. Local."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or "_orig_mod" in module.__dict__.get("_modules", ())
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _has_rows(x: Any, dim: int, num: int) -> bool:
    """Whether `x` is a plain tensor with `num` entries in dimension `dim`. Local."""
    return is_plain(x) and x.dim() > dim and bool(x.shape[dim] == num)


def _dimension_and_size(module: Optional[nn.Module], given: Sequence[Any]) -> Optional[tuple[int, int]]:
    """Return along which dimension, of which size, plain tensors among a call's arguments become row tensors. Local.

    With a row tensor: those that have as many rows. Otherwise the first one decides, if this is the outermost call. In
    an inner one, those of several dimensions that have the rows of the outer one: times of samples, masks, noise. (One
    of one dimension may be the positions that a transformer embeds.)
    """
    calls = current().part(Calls)
    for x in given:
        if isinstance(x, Rows):
            dim, num = x.dimension, x.shape[x.dimension]
            is_met = any(_has_rows(y, dim, num) for y in given)
            return (dim, num) if is_met and x.part == blocks.part_of(num) else None
    if forward_ad._current_level >= 0 or not current().part(Counts).is_in_lock_step():
        return None
    if calls.rows is not None:
        met = [x for x in given if _has_rows(x, *calls.rows)]
        is_met = any(x.dim() > calls.rows[0] + 1 for x in met) and not any(x.requires_grad for x in met)
        return calls.rows if is_met and blocks.part_of(calls.rows[1]) else None
    if module is None:
        return None
    first = next((x.shape[calls.dim] for x in given if is_plain(x) and x.dim() > calls.dim), None)
    if first is None or blocks.part_of(first) is None:
        return None
    return (calls.dim, first) if first * calls.known(module).num_parameters >= calls.least_work else None


@contextlib.contextmanager
def nothing_divided() -> Iterator[None]:
    """Within this block no network's arguments are divided, and torch.compile sees torch's own modules. Local."""
    calls = current().part(Calls)
    # What another thread changes here, this one would see at some time, which differs between ranks.
    if calls.is_off or calls.original is None or not current().part(Counts).is_in_own_thread():
        yield
        return
    with replaced(calls, "is_off", True), replaced(nn.Module, "__call__", calls.original):
        yield


def on_wholes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, whose operations are not seen, with wholes, of which nothing is divided inside.

    It is collective if it gets row tensors.
    """

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return function(*args, **kwargs)
        arriving.land()
        calls = current().part(Calls)
        if calls.counting is not None:
            calls.counting.refused = "something inside is compiled"
        if not calls.is_off and current().part(Counts).is_in_lock_step():
            calls.before_wholes()
        with nothing_divided():
            return on_whole(function, args, kwargs)

    return computed


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for a function that returns a function: torch.vmap, torch.func.grad, torch.compile."""

    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        with nothing_divided():
            found = original(*args, **kwargs)
        if isinstance(found, nn.Module) or not callable(found) or isinstance(found, type):
            return found  # a module's call is seen anyway
        if not args or not callable(args[0]):  # with options only: a decorator
            return lambda function: made(function, **kwargs)
        return on_wholes(found)

    return made


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """torch's DataParallel, whose module computes on rows of dimension `dim`, on this rank's device."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        world = current().world
        device = torch.device("cpu") if world is None else world.device
        super().__init__(module, [device.index] if device.type == "cuda" else None, dim=dim)
        self.dim = dim  # torch sets it on GPUs only

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.device_ids:
            device = torch.device("cuda", self.device_ids[0])
            inputs, kwargs = moved(inputs, device), moved(kwargs, device)
        calls = current().part(Calls)
        with replaced(calls, "dim", self.dim), replaced(calls, "rows", None):
            return self.module(*inputs, **kwargs)


# A model that was saved whole is then unpickled as torch's class, also without ddpshim.
DataParallel.__module__, DataParallel.__qualname__ = nn.DataParallel.__module__, "DataParallel"


def _bodies_of(original: Callable[..., bool]) -> Callable[..., bool]:
    """Return the stand-in for torch's has_torch_function in functions that Python wrote: Rows go into their bodies."""

    def has_function(*args: Any) -> bool:
        if not original(*args):
            return False
        given = args[0] if len(args) == 1 and type(args[0]) in (tuple, list) else args
        kinds = {type(x) for x in given if isinstance(x, T)}
        is_other = not kinds <= {Rows, T, nn.Parameter}
        return is_other or (torch._C._is_torch_function_mode_enabled() and current().part(blocks.State).tape is None)

    return has_function


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within this block, networks compute on rows where their arguments can be divided."""
    with contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            undo.enter_context(replaced(owner, name, value))

        undo.callback(end_rows)
        gradients.install(undo)
        # It keeps torch's nn.Module.__call__ when it is imported, which the first wrapper does anyway.
        importlib.import_module("torch._dynamo")
        calls = current().part(Calls)
        calls.original = nn.Module.__call__
        undo.callback(setattr, calls, "original", None)
        put(nn.Module, "__call__", with_rows(nn.Module.__call__))
        for module in (nn, nn.parallel, sys.modules["torch.nn.parallel.data_parallel"]):
            put(module, "DataParallel", DataParallel)
        known_to_script = torch.jit._builtins._get_builtin_table()  # by identity: it cannot compile the stand-ins
        for module in (nn.functional, sys.modules["torch.functional"]):
            for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
                if hasattr(module, name):
                    stand_in = _bodies_of(getattr(module, name))
                    put(module, name, stand_in)
                    known_to_script[id(stand_in)] = "aten::has_torch_function"
                    undo.callback(known_to_script.pop, id(stand_in))
        copied = on_arrived(torch.tensor)
        put(torch, "tensor", copied)
        known_to_script[id(copied)] = "aten::tensor"
        undo.callback(known_to_script.pop, id(copied))
        put(torch, "compile", _making(torch.compile))
        for name in ("trace", "trace_module", "_get_trace_graph"):
            put(torch.jit, name, on_wholes(getattr(torch.jit, name)))
        for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod):  # what they compute is not seen
            put(kind, "__call__", on_wholes(kind.__call__))
        for name in ("grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "vmap", "linearize"):
            for owner in (torch.func, sys.modules.get("torch._functorch.apis")):
                if owner is not None and hasattr(owner, name):
                    makes = name not in ("vjp", "jvp", "linearize")
                    put(owner, name, (_making if makes else on_wholes)(getattr(owner, name)))
        put(torch, "vmap", _making(torch.vmap))
        yield
