"""Recognises an evaluation loop by its code: the pass began in training mode, but gradients are off inside the loop."""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Iterable, Mapping
from types import FrameType, FunctionType, MethodType
from typing import Any, Optional

import torch

from ddpshim.trainers.unedited.places import is_not_the_programs

_WITHOUT_GRADIENTS = {"no_grad", "inference_mode"}
_TRAINS = {"backward", "step", "zero_grad", "minimize"}
_MAX_DEPTH = 6
_UNKNOWN = object()
_VALUES = {name for kind in (torch.Tensor, dict, list, str, set, float) for name in dir(kind)}


def evaluates(frame: Optional[FrameType]) -> bool:
    """Whether the loop that begins in `frame` turns gradients off, and reaches nothing that trains. Local.

    Decided from the names in the bytecode of the loop and of the functions that it calls; False if a call cannot be
    followed. A wrong True costs only speed: the pass is complete on every rank, with the result of one process.
    """
    if frame is None:
        return False
    body = _body(frame)
    names = _Names()
    names.read(body, {**frame.f_globals, **frame.f_locals}, 0)
    return bool(names.found & _WITHOUT_GRADIENTS) and not names.found & _TRAINS and not names.lost


def _body(frame: FrameType) -> list[dis.Instruction]:
    """Return the instructions of the `for` loop that begins on the current line of `frame`; empty if none does."""
    instructions = [*dis.get_instructions(frame.f_code)]
    line = None
    for instruction in instructions:
        starts: Any = getattr(instruction, "line_number", instruction.starts_line)  # line_number: Python 3.13 and later
        line = line if starts is None else starts
        if instruction.opname == "FOR_ITER" and instruction.offset >= frame.f_lasti:
            if line != frame.f_lineno:
                return []
            end = instruction.argval
            return [inner for inner in instructions if instruction.offset < inner.offset < end]
    return []


class _Names:
    """The names that code uses (`found`), and at its first level the methods of unknown objects (`lost`)."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.lost: set[str] = set()
        self._seen: set[Any] = set()

    def read(self, instructions: Iterable[dis.Instruction], known: Mapping[str, Any], depth: int) -> None:
        value: Any = _UNKNOWN
        for instruction in instructions:
            kind, name = instruction.opname, instruction.argval
            if kind.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL")):
                name = name[-1] if isinstance(name, tuple) else name
                value = known.get(name, _UNKNOWN)
                self.found.add(name)
            elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
                self.found.add(name)
                value = _attribute(value, name)
                if value is _UNKNOWN and depth == 0 and name not in _VALUES:
                    self.lost.add(name)
            elif kind not in ("CACHE", "PUSH_NULL", "NOP", "RESUME"):
                value = _UNKNOWN
                continue
            self._follow(value, depth)

    def _follow(self, value: Any, depth: int) -> None:
        function = getattr(value, "__func__", value) if isinstance(value, MethodType) else value
        if not isinstance(function, FunctionType) or depth == _MAX_DEPTH or function.__code__ in self._seen:
            return
        self._seen.add(function.__code__)
        inside = inspect.unwrap(function)
        if not isinstance(inside, FunctionType) or is_not_the_programs(inside.__code__.co_filename):
            return
        self._seen.add(inside.__code__)
        bound = {inside.__code__.co_varnames[0]: value.__self__} if isinstance(value, MethodType) else {}
        self.read(dis.get_instructions(inside), {**inside.__globals__, **bound}, depth + 1)
        if inside is not function:
            self.found.update(_of_closure(function))


def _of_closure(function: FunctionType) -> set[str]:
    """Return the class names of the objects in a decorator's closure; for `@torch.no_grad()`, `no_grad`."""
    found = set()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is still empty
            value = cell.cell_contents
            found.add(type(getattr(value, "__self__", value)).__name__)
    return found


def _attribute(value: Any, name: str) -> Any:
    """Return `value.name` without running its code; methods are bound."""
    if value is _UNKNOWN:
        return _UNKNOWN
    if isinstance(value, torch.nn.Module) and name in value._modules:
        return value._modules[name]
    found = inspect.getattr_static(value, name, _UNKNOWN)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, FunctionType) and not inspect.ismodule(value) and name not in getattr(value, "__dict__", {}):
        return MethodType(found, value)
    return found
