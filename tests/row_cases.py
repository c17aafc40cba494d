"""Compares a call on row tensors with the same call on whole tensors: results, arguments, generators, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from ddpshim.rows.gradients import plain
from ddpshim.rows.tensor import Rows, divided

Cut = Callable[[torch.Tensor], Optional[int]]


def seed(number: int) -> None:
    """Seed the CPU's generator, without a list of the stack for each GPU library that is not used: a millisecond."""
    torch.default_generator.manual_seed(number)


def flat(value: Any) -> list[Any]:
    return list(tree_flatten(tuple(value) if isinstance(value, (tuple, list)) else value)[0])


def is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_quantized


def order_in_memory(x: torch.Tensor) -> list[int]:
    """Return the dimensions with more than one entry, from the one with the largest stride on."""
    return sorted((i for i in range(x.dim()) if x.shape[i] > 1), key=lambda i: (-x.stride(i), i)) if x.numel() else []


def rounding_of(dtype: torch.dtype) -> float:
    is_exact = dtype in (torch.float64, torch.complex128) or not (dtype.is_floating_point or dtype.is_complex)
    return 1e-9 if is_exact else 2e-2 if dtype in (torch.float16, torch.bfloat16) else 2e-5


def difference(one: Any, other: Any, rounding: float = 0) -> Optional[str]:
    """Return how `other` differs from `one`; None if they are equal, up to `rounding` and that of their type."""
    if isinstance(one, (tuple, list)):
        if not isinstance(other, (tuple, list)) or len(one) != len(other):
            return f"{type(one).__name__} of {len(one)} is {other!r:.80}"
        return next((found for pair in zip(one, other) if (found := difference(*pair, rounding))), None)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.dtype != object:
        one, other = torch.from_numpy(one), torch.from_numpy(other)
    if one is None and isinstance(other, torch.Tensor) and not other.any():
        return None  # a gradient
    if not isinstance(one, torch.Tensor):
        is_same = type(one) is type(other) and (one == other or one != one or not isinstance(one, (int, float, str)))
        return None if is_same else f"{one!r:.80} is {other!r:.80}"
    if not isinstance(other, torch.Tensor) or (one.shape, one.dtype, one.layout) != (
        other.shape,
        other.dtype,
        other.layout,
    ):
        return f"{tuple(one.shape)} {one.dtype} is {getattr(other, 'shape', other)} {getattr(other, 'dtype', '')}"
    if one.is_quantized:
        return None
    one, other = (x.detach().to_dense() if x.layout is not torch.strided else x.detach() for x in (one, other))
    rounding = max(rounding, rounding_of(one.dtype))
    wide = torch.complex128 if one.is_complex() else torch.float64
    if torch.allclose(one.to(wide), other.to(wide), rtol=rounding, atol=rounding, equal_nan=True):
        return None
    return f"values differ by {(one.to(wide) - other.to(wide)).abs().max()}"


def fresh(value: Any, needs_gradients: bool) -> Any:
    """Return `value` with copies of its tensors, in their memory formats; leaves that require gradients if asked."""

    def copied(x: Any) -> Any:
        if not is_dense(x):
            return x
        made = x.detach().clone(memory_format=torch.preserve_format)
        if 0 in x.stride():
            made = torch.empty([1 if not step else n for n, step in zip(x.shape, x.stride())], dtype=x.dtype)
            made = made.copy_(x[tuple(slice(None) if step else slice(0, 1) for step in x.stride())]).expand(x.shape)
        return made.requires_grad_() if needs_gradients and made.dtype is torch.float64 else made

    return tree_map(copied, value)


def _seen(function: Callable[..., Any], given: Any) -> tuple[Any, Optional[Exception]]:
    seed(2)
    try:
        return function(*given[0], **given[1]), None
    except Exception as error:
        return None, error


def problem(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cut: Cut,
    needs_gradients: bool = False,
    keeps_mirrors: bool = False,
    has_random_result: bool = False,
) -> Optional[str]:
    """Return how `function` of row tensors differs from `function` of the wholes; None if it does not (collective).

    Args:
        cut: returns the dimension of a tensor's rows; None for a tensor that stays whole.
        keeps_mirrors: whether the wholes from which rows are cut stay mirrors of them.
        has_random_result: whether results are uninitialised memory, so that only shapes are compared.
    """
    leaves, leaves_of_rows = fresh((args, kwargs), needs_gradients), fresh((args, kwargs), needs_gradients)
    wholes: list[tuple[Any, Any]] = []

    def made(x: Any, divides: bool) -> Any:
        if not is_dense(x):
            return x
        dim = cut(x) if divides else None
        copied = x
        if x.requires_grad:  # leaves cannot be changed in place
            copied = x * 1 if 0 not in x.stride() else x.view_as(x)
        if dim is None:
            return copied
        rows = divided(copied, dim)
        if isinstance(rows, Rows):
            if keeps_mirrors:
                wholes.append((rows, copied))
            else:
                rows.memory.mirrors.clear()
        return rows

    given = tree_map(lambda x: made(x, False), leaves)
    given_rows = tree_map(lambda x: made(x, True), leaves_of_rows)
    if not any(isinstance(x, Rows) for x in flat(given_rows)):
        return None
    wanted, error = _seen(function, given)
    state = torch.get_rng_state()
    found, own_error = _seen(function, given_rows)
    own_state = torch.get_rng_state()
    if own_error is None:
        seen, own_error = _seen(lambda: plain([flat(found), flat(given_rows)]), ((), {}))
    if error is not None:
        return None if own_error is not None else f"is refused by torch ({error!r:.80}), not with rows"
    if own_error is not None:
        return f"raises {own_error!r:.300}"
    if not torch.equal(own_state, state):
        return "another state of the generator"
    for name, one, other, other_seen in (("result", wanted, found, seen[0]), ("arguments", given, given_rows, seen[1])):
        for old, new in zip(flat(one), flat(other)):
            if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) and not has_random_result:
                if (
                    is_dense(old)
                    and is_dense(new)
                    and 0 not in old.stride()
                    and order_in_memory(old) != order_in_memory(new)
                ):
                    return f"{name}: strides {old.stride()} are {new.stride()}"
                if old.requires_grad != new.requires_grad:
                    return f"{name}: requires_grad {old.requires_grad} is {new.requires_grad}"
        if not has_random_result:
            different = difference(flat(one), other_seen)
            if different:
                return f"{name}: {different}"
    for rows, whole in wholes:
        if torch.is_tensor(whole) and difference(whole, plain(rows)):
            return f"mirror: {difference(whole, plain(rows))}"
    return _gradients(leaves, wanted, leaves_of_rows, found) if needs_gradients else None


def _gradients(leaves: Any, wanted: Any, leaves_of_rows: Any, found: Any) -> Optional[str]:
    def needing(value: Any) -> list[Any]:
        return [x for x in flat(value) if isinstance(x, torch.Tensor) and x.requires_grad]

    outputs, outputs_of_rows = needing(wanted), needing(found)
    if not outputs:
        return None
    seed(3)
    seeds = [torch.randn_like(x) if x.layout is torch.strided else None for x in outputs]
    if any(seed is None for seed in seeds):
        return None
    try:
        first = torch.autograd.grad(outputs, needing(leaves), seeds, allow_unused=True)
    except RuntimeError:
        return None
    try:
        second = torch.autograd.grad(
            outputs_of_rows, needing(leaves_of_rows), [s.clone() for s in seeds], allow_unused=True
        )
    except Exception as error:
        return f"its gradient raises {error!r:.300}"
    rounding = max(rounding_of(x.dtype) for x in outputs)
    different = difference(list(first), plain(list(second)), rounding)
    return different and f"gradient: {different}"
