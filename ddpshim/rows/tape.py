"""Writes down the calls on blocks that the rules of a network's call make, and compares a replay with the rules."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ddpshim.model.batchnorm import over_ranks
from ddpshim.process.random_streams import changed
from ddpshim.process.replaced import replaced
from ddpshim.rows import rules
from ddpshim.rows.blocks import Part
from ddpshim.rows.tensor import Rows, leaves, mapped

_T = torch.Tensor
_ABOUT = {
    torch.device,
    *rules.functions(f"{rules.ABOUT} {rules.OF_BLOCK} stride storage_offset untyped_storage _is_view".split()),
    *rules.getters(f"{rules.ATTRIBUTES} {rules.ATTRIBUTES_OF_BLOCK} _base"),
}
_CONSTANTS: tuple[Any, ...] = (int, float, bool, str, complex, type(None), type(...), torch.dtype, torch.device)
_CONSTANTS += (torch.layout, torch.memory_format, torch.Size, Part, torch.distributed.ProcessGroup)


class Refused(Exception):
    """A call that is not captured; the text says why."""


class NoMessages:
    """In place of the number of messages: who would send one is refused."""

    def __add__(self, _: int) -> int:
        raise Refused("it gathers a tensor")


def check_assertion(condition: torch.Tensor, message: str) -> None:
    """Do what `assert condition, message` does of a tensor that all ranks hold whole. Local."""
    if not condition:
        raise AssertionError(message)


class _Variable:
    def __init__(self, name: str) -> None:
        self.name = name


class _Line(NamedTuple):
    results: list[str]
    call: str
    used: dict[str, None]  # names, in order


class Tape(TorchFunctionMode):
    """Writes down the calls on blocks while it is entered."""

    def __init__(self, inputs: list[Any], results: Results) -> None:
        super().__init__()
        self._inputs, self._known = inputs, results
        self._calls: list[tuple[Any, Any, Any, list[str]]] = []
        self._between = set[int]()  # calls that may send a message, or that the host waits for
        self._names = {id(x): f"a{i}" for i, x in reversed([*enumerate(inputs)]) if isinstance(x, _T)}
        self._trained = {f"a{i}" for i, x in enumerate(inputs) if isinstance(x, _T) and x.requires_grad}
        self._kept: list[Any] = []  # alive: an id would be given again
        self._doubt, self._is_paused = "", False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(type(x) is Rows for x in leaves((args, kwargs))):
            if func in _ABOUT:
                return Rows.__torch_function__(func, types, args, kwargs)
            with self:
                return Rows.__torch_function__(func, types, args, kwargs)
        out = func(*args, **kwargs)
        if func not in _ABOUT and not self._is_paused:
            self._write(func, args, kwargs, out)
        return out

    def call(self, function: Callable[..., Any], args: Any) -> Any:
        """Call a function of ddpshim that is one call of the tape, whatever it computes inside."""
        with replaced(self, "_is_paused", True):
            out = (self._known.again if function is over_ranks else function)(*args)
        self._between.add(len(self._calls))
        self._write(function, args, {}, out)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = getattr(func, "__name__", "")
        is_several = isinstance(out, (tuple, list))
        found = list(out) if is_several else [out]
        if found and all(isinstance(x, _T) and x.is_meta for x in found):
            return  # a rule asked for a shape
        returns_none = func in (_T.__setitem__, check_assertion, torch._C._set_grad_enabled)
        if name == "__set__" or not (all(isinstance(x, _T) for x in found) or (returns_none and out is None)):
            self._doubt = self._doubt or f"{name} reads or sets what is no tensor"
        given = mapped(lambda x: self._name(x) if isinstance(x, _T) else x, (args, kwargs))
        number = len(self._calls)
        if func is torch._C._set_grad_enabled:
            self._between.add(number)
        results = [f"v{number}_{place}" for place in range(len(found))] + [""] if is_several else [f"v{number}"]
        for name, x in zip(results, found):
            if isinstance(x, _T):
                self._names.setdefault(id(x), name)
                self._kept.append(x)
                self._trained.update([name] if x.requires_grad else [])
        self._calls.append((func, *given, results))

    def _name(self, x: torch.Tensor) -> _Variable:
        if id(x) not in self._names:
            self._doubt = self._doubt or "a tensor of unknown origin"
        return _Variable(self._names.get(id(x), ""))

    def text(self, outputs: list[torch.Tensor], in_segments: bool) -> tuple[str, dict[str, Any]]:
        """Return the text of a function `run` of the inputs' blocks, and its globals. Raises Refused.

        In segments: what is between two calls of which a static graph can have none is a function: `segment0` ...
        """
        results = [self._name(x).name for x in outputs]
        if self._doubt:
            raise Refused(self._doubt)
        # Results from which others are computed: the program may ask for their gradients.
        inner = {x.name for call in self._calls for x in leaves(call[1:3]) if type(x) is _Variable} & {*results}
        known: dict[str, Any] = {}
        groups: list[list[_Line]] = [[]]
        for number, (func, args, kwargs, made) in enumerate(self._calls):
            known[f"f{number}"] = func
            given = [*(_text(x, known) for x in args), *(f"{key}={_text(x, known)}" for key, x in kwargs.items())]
            used = dict.fromkeys(x.name for x in leaves((args, kwargs)) if type(x) is _Variable)
            groups[-1].append(_Line(made, f"f{number}({', '.join(given)})", used))
            if in_segments and number in self._between:
                groups += [[groups[-1].pop()], []]
            elif in_segments and inner & {*made}:
                groups += [[], []]
        text, lines = "", groups[0]
        if in_segments:
            lines = []
            for number, group in enumerate(groups):
                if number % 2 or not group:
                    lines += group
                    continue
                name, own = f"segment{number // 2}", {one for line in group for one in line.results}
                later = {one for other in groups[number + 1 :] for line in other for one in line.used} | {*results}
                needed = [one for line in group for one in line.results if one in later]
                used = dict.fromkeys(one for line in group for one in line.used if one not in own)
                inputs, given = [*used], [*used]
                for one in used.keys() & self._trained:
                    group, aliases = _by_use(group, one)
                    place = inputs.index(one)
                    inputs[place : place + 1], given[place : place + 1] = aliases, [one] * len(aliases)
                text += _function(name, inputs, group, needed)
                lines.append(_Line([*needed, ""] if needed else [], f"{name}({', '.join(given)})", used))
        return text + _function("run", [f"a{i}" for i in range(len(self._inputs))], lines, results), known


def _by_use(lines: list[_Line], name: str) -> tuple[list[_Line], list[str]]:
    """Return lines with another name for each use of a tensor; and these names, the last first for autograd. Local.

    Then each use has a gradient of its own, and they are added up in the order in which autograd does without graphs.
    """
    found, made, token = list[str](), list[_Line](), re.compile(rf"\b{name}\b")
    for number, line in enumerate(lines):
        own = [f"{name}u{number}p{place}" for place in range(len(token.findall(line.call)))]
        left = iter(own)
        found += reversed(own)
        used = {one: None for one in line.used if one != name}
        made.append(_Line(line.results, token.sub(lambda _: next(left), line.call), used))  # noqa: B023
    return made, found


def _function(name: str, inputs: list[str], lines: list[_Line], results: list[str]) -> str:
    """Return the text of a function, in which what is not used any more is freed. Local."""
    last: dict[str, int] = {}  # the line where a result is used last
    for number, line in enumerate(lines):
        last.update({name: number for name in (*line.results, *line.used) if name[:1] == "v" and name not in results})
    text = f"def {name}({', '.join(inputs)}):\n"
    for number, line in enumerate(lines):
        freed = [name for name, place in last.items() if place == number]
        targets = f"{', '.join(line.results)} = " if line.results else ""
        text += f"    {targets}{line.call}" + f"; del {', '.join(freed)}" * bool(freed) + "\n"
    return f"{text}    return [{', '.join(results)}]\n"


def _text(value: Any, known: dict[str, Any]) -> str:
    """Return an argument as Python's text; what has none is put into `known`. Raises Refused."""
    if type(value) is _Variable:
        return value.name
    if type(value) is tuple or type(value) is list:
        inner = ", ".join(_text(x, known) for x in value)
        return f"[{inner}]" if type(value) is list else f"({inner}{',' if len(value) == 1 else ''})"
    if type(value) is slice:
        return f"slice({', '.join(_text(x, known) for x in (value.start, value.stop, value.step))})"
    if not isinstance(value, _CONSTANTS):
        raise Refused(f"an argument of type {type(value).__name__}")
    known[f"k{len(known)}"] = value
    return f"k{len(known) - 1}"


class Results:
    """Keeps what BatchNorm returns, for a run that must not send its messages again."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any]] = []

    def call(self, function: Callable[..., Any], args: Any) -> Any:
        out = function(*args)
        if function is over_ranks:
            self._calls.append((args, out, [None if x is None else x.clone() for x in args[1:3]]))
            return out.clone()  # both runs may write into it: ReLU in place
        return out

    def again(self, x: Any, mean: Any, variance: Any, *others: Any) -> Any:
        (given, _, _, *others_given), out, statistics = self._calls.pop(0)
        pairs = zip((x, *others), (given, *others_given))
        if not all(are_equal(*pair) if isinstance(pair[0], _T) else pair[0] == pair[1] for pair in pairs):
            raise Refused("a message of the replay differs from that of the rules")
        with torch.no_grad():
            for changed, value in zip((mean, variance), statistics):
                if changed is not None:
                    changed.copy_(value)
        return out.clone()


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits in the same layout. Local."""
    if (one.shape, one.dtype, one.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    of_both = [x.detach().resolve_conj().resolve_neg().contiguous().view(-1) for x in (one, other)]
    return torch.equal(*(x.view(torch.uint8) if x.numel() else x for x in of_both))


def check_as_python(
    name: str, found: list[torch.Tensor], out: Any, given: list[Any], drawn: dict[str, Any], by_python: dict[str, Any]
) -> None:
    """Raise Refused unless the tensors in `out`, which the program's Python has returned, are `found`. Local.

    They must be equal bit by bit, and computed by the same functions of autograd; and the states of the random
    generators must be equal. `given` is what Python may have returned as it was, and `name` is for the text.
    """
    if changed(by_python, drawn):
        raise Refused(f"its {name} uses other random numbers than its Python")
    known = {id(x) for x in given}
    seen = [x.block if type(x) is Rows else x for x in _tensors_in(out) if id(x) not in known]
    if not seen or not all(any(are_equal(x, y) and _have_equal_graphs(x, y) for y in found) for x in seen):
        raise Refused(f"its {name} differs from its Python")


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested containers and objects."""
    found = []
    for x in leaves(value):
        if isinstance(x, _T):
            found.append(x)
        elif hasattr(x, "__dict__") and not isinstance(x, (type, torch.nn.Module)):
            found += [y for y in leaves([*vars(x).values()]) if isinstance(y, _T)]
    return found


def generator(device: torch.device) -> torch.Generator:
    """Return the one from which torch's functions draw on a device. Local."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def modes(device: torch.device) -> Any:
    """Return the modes of torch on which a graph's result depends, apart from its inputs. Local."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return kind, dtype, torch.is_grad_enabled(), torch.get_default_dtype()


@contextlib.contextmanager
def in_modes(modes: Any) -> Iterator[None]:
    """Within this block, torch is in the modes that `modes` has returned. Local."""
    kind, dtype, has_graph, default = modes
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(default)
        undo.enter_context(torch.set_grad_enabled(has_graph))
        undo.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
        yield


def nodes_below(node: Any) -> set[Any]:
    """Return the nodes of autograd from which `node` is computed. Local."""
    left, seen = [before for before, _ in node.next_functions], set[Any]()
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.add(one)
            left += [before for before, _ in one.next_functions]
    return seen


def _have_equal_graphs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the same functions compute two tensors from the same leaves, so that gradients are equal too. Local."""
    left, seen = [(one.grad_fn, other.grad_fn)], set()
    while left:
        a, b = left.pop()
        if a is b or (a, b) in seen:
            continue
        if a is None or b is None or type(a) is not type(b) or len(a.next_functions) != len(b.next_functions):
            return False
        if getattr(a, "variable", None) is not getattr(b, "variable", None):
            return False
        seen.add((a, b))
        left += [(x[0], y[0]) for x, y in zip(a.next_functions, b.next_functions)]
    return one.requires_grad == other.requires_grad
