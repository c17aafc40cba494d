"""Replaces functions of other packages for all modules that hold them, and restores them.

A function keeps its identity; only its code is exchanged. So `from package import function` may run before or after.
Imports nothing but the standard library.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Callable

from ddpshim.errors import HookError

_swapped: dict[str, Swap] = {}
_running: set[str] = set()
_at_stand_aside: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Swap:
    """One replaced function: a copy of the original, and the `stand_in(original, *args, **kwargs)` that callers get.

    `callers(names)`: whether a calling module with these globals gets the stand-in; others get the original.
    """

    function: FunctionType
    original: FunctionType
    stand_in: Callable[..., Any]
    callers: Callable[[dict[str, Any]], bool]


def refuse_unknown(name: str, function: Any, required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise HookError if `function` is not a plain function with these parameters. Local."""
    if not isinstance(function, FunctionType) or function.__closure__:
        raise HookError(
            f"{name} is {function!r}, not a plain function: something else has replaced it, so ddpshim cannot hook "
            "it. Import ddpshim.auto before whatever replaces it."
        )
    found, required = list(inspect.signature(function).parameters), list(required)
    news = [f"{p!r} is new to them" for p in found if p not in {*required, *optional}]
    news += [f"{p!r} is missing" for p in required if p not in found]
    if news:
        raise HookError(
            f"{name}({', '.join(found)}) in {function.__code__.co_filename} is not the function that the hooks know "
            f"({'; '.join(news)}); it may now do something else, and only a part of the trainer would be "
            "distributed. Apply a patch set if there is one for it (python -m ddpshim patch status), or leave the "
            "trainer as it is with DDPSHIM_HOOKS=off."
        )


def swap(
    name: str,
    function: FunctionType,
    stand_in: Callable[..., Any],
    callers: Callable[[dict[str, Any]], bool],
) -> None:
    """Make calls of `function` from `callers` run `stand_in`; once per `name`, its full name. Local."""
    if name in _swapped:
        return
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__, original.__qualname__ = function.__kwdefaults__, function.__qualname__
    signature = inspect.signature(function)
    _swapped[name] = Swap(function, original, stand_in, callers)
    function.__code__ = _passed_on(name, function.__name__)
    function.__defaults__ = function.__kwdefaults__ = None
    function.__signature__ = signature  # type: ignore[attr-defined]


def swap_back() -> None:
    """Restore all swapped functions. Local."""
    while _swapped:
        _, made = _swapped.popitem()
        made.function.__code__ = made.original.__code__
        made.function.__defaults__ = made.original.__defaults__
        made.function.__kwdefaults__ = made.original.__kwdefaults__
        del made.function.__signature__  # type: ignore[attr-defined]


def called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the stand-in of the swapped function `name`, or the original. Local."""
    made = _swapped[name]
    caller = sys._getframe(2)  # frame 1 is the swapped function, frame 2 its caller
    # A stand-in may call the function by its name, perhaps through another package's wrapper: run the original.
    if name in _running or not made.callers(caller.f_globals):
        return made.original(*args, **kwargs)
    _running.add(name)
    try:
        return made.stand_in(made.original, *args, **kwargs)
    finally:
        _running.discard(name)


def stand_aside() -> None:
    """Restore all swapped functions, because the program itself does their work. Local."""
    while _at_stand_aside:
        _at_stand_aside.pop()()


def at_stand_aside(give_back: Callable[[], None]) -> None:
    """Make `stand_aside` call `give_back` once. Local."""
    _at_stand_aside.append(give_back)


def _passed_on(name: str, short_name: str) -> CodeType:
    source = (
        f"def {short_name}(*args, **kwargs):\n"
        "    from ddpshim.trainers.swapping import called\n"
        f"    return called({name!r}, args, kwargs)\n"
    )
    module = compile(source, f"<ddpshim: {name}>", "exec")
    return next(part for part in module.co_consts if isinstance(part, CodeType))
