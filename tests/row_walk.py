"""Calls every overridable function of torch with guessed arguments, on row tensors and on wholes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch.overrides import get_overridable_functions, resolve_name

from ddpshim.errors import SyncError
from ddpshim.rows.tensor import RULES
from tests import row_cases

# Not called, and why.
SKIPPED = {
    **dict.fromkeys(("data_ptr", "const_data_ptr", "mutable_data_ptr", "_cdata", "__hash__"), "an address"),
    **dict.fromkeys(("storage", "untyped_storage", "_storage", "_typed_storage"), "an address"),
    **dict.fromkeys(("swapaxes_", "swapdims_", "transpose_", "t_"), "a square keeps its layout; else refused"),
    "set_": "ddpshim does not see that it gives a tensor another memory",
    "data.__set__": "refused without a line if the shapes differ",
    **dict.fromkeys(("lobpcg",), "iterates for minutes"),
    **dict.fromkeys(("__reduce_ex__", "__reduce__", "__dlpack__", "storage_type"), "not comparable"),
}


def all_functions() -> dict[Any, str]:
    """Return all overridable functions of this torch, and all that have a rule, with their names."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for functions in get_overridable_functions().values():
            found.update({function: resolve_name(function) for function in functions})
    for function in RULES:
        found.setdefault(function, None)
    return {function: name or _name_of(function) for function, name in found.items()}


def _name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    prefix = getattr(owner, "__name__", type(owner).__name__) + "." if owner is not None else ""
    return prefix + str(getattr(function, "__name__", function))


def guesses(n: int) -> Iterator[tuple[Any, ...]]:
    """Return arguments; tensors of `n` rows are divided. Chosen so that 1,300 of 1,500 functions accept some."""
    row_cases.seed(0)
    mask, index = torch.rand(n, 4) > 0.5, torch.randint(0, 4, (n, 4))

    def three(*shape: int) -> Iterator[list[torch.Tensor]]:
        yield [torch.rand(shape, dtype=torch.float64) for _ in range(3)]
        yield [torch.randint(1, 4, shape) for _ in range(3)]
        yield [torch.randn(shape, dtype=torch.complex128) for _ in range(3)]
        yield [torch.rand(shape) > 0.5 for _ in range(3)]

    for shape in ((n, 4, 4), (n, 4, 4, 4)):
        for x, y, z in three(*shape):
            yield from ((x,), (x, 1), (x, y), (x, y, z), (x, 1, 0, 2))
            if x.dtype is torch.float64:
                yield from ((x, 0), (x, 2, 1), (x, 1, True), ([x, y],), (x, shape), (x, x[0, 0, 0]), (x, x[:1]))
                yield from ((x, 0.5, 1), (x, 1, (2, 2)))
    for x, y, z in three(n, 4):
        wide = torch.ones(4, 4, dtype=x.dtype)
        yield from ((x,), (x, 1), (x, y), (x, y, z), (x, 0), (x, (0, 1)), (x, (n, 4)), (x, 0.5), (1, x), (x, 1, 1))
        yield from ((x, mask, y), (x, mask, 1.0), (x, mask), (x, (2, 2)), ([x, y],), (x, y, wide[0]), (x, 0, index))
        yield from ((x, wide[0]), (x, wide), (wide, index), (wide[0], x, wide), (x, 1, index[:, :2]), (x, 1, index[0]))
        yield from ((x, 1, index[:, :2], y), (x, 1, index[0], y), (x, 1, index[0], 1.0))


def problems_of(functions: dict[Any, str], n: int) -> dict[str, str]:
    """Return problems by the function's name (collective)."""
    found: dict[str, str] = {}
    every = list(guesses(n))

    def cut(x: torch.Tensor) -> Optional[int]:
        return 0 if x.dim() and x.shape[0] == n else None

    for function, name in functions.items():
        if name in SKIPPED or name.replace(".__get__", "").rpartition(".")[2] in SKIPPED:
            continue
        num, most = 0, 2 if function in RULES else 1  # all that have no rule go one way
        for args in every:
            if num == most:
                break
            try:
                row_cases.seed(2)
                function(*row_cases.fresh(args, False))
            except Exception:
                continue
            num += 1
            differs = row_cases.problem(function, args, {}, cut, False, False, "empty" in name)
            if differs and SyncError.__name__ not in differs:
                found.setdefault(name, f"{[getattr(x, 'shape', x) for x in args]}: {differs}")
    return found
