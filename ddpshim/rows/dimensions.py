"""Rules of operations over other dimensions than that of the rows: reductions, shapes, indices, joining, parting."""

from __future__ import annotations

import math
from typing import Any

import torch

from ddpshim.process.job import current
from ddpshim.rows import blocks
from ddpshim.rows.blocks import LEAST_ROWS, Part
from ddpshim.rows.rules import (
    Mixed,
    OfRows,
    T,
    argument,
    elementwise,
    getters,
    made,
    meeting,
    met,
    place_of,
    row_wise,
    rule,
    rule_if_alike,
    rule_of_rows,
)
from ddpshim.rows.tensor import Counts, Rows, total

_REMOVING = """
sum mean nansum nanmean prod amax amin logsumexp std var median nanmedian mode argmax argmin aminmax any all max min
std_mean var_mean count_nonzero
"""
# All of their results keep the dimensions before the last two.
_OF_MATRICES = """
triu tril det inv inverse logdet slogdet cholesky qr svd svdvals eigh eigvalsh matrix_exp matrix_power
"""


def dims_of(value: Any, num: int) -> set[int]:
    """Return dimensions as non-negative numbers. Local. Raises Mixed if they are not given as numbers."""
    given = [value] if isinstance(value, int) else value
    if isinstance(value, bool) or not isinstance(given, (list, tuple)) or not given:
        raise Mixed
    if not all(isinstance(dim, int) and -num <= dim < num for dim in given):
        raise Mixed
    return {dim % num for dim in given}


def _has_tensors(others: Any, kwargs: Any) -> bool:
    return any(isinstance(value, T) for value in (*others, *kwargs.values()))


def _elsewhere(position: int, name: str = "dim", default: Any = None) -> Any:
    """Return whether functions compute over other dimensions, given at `position` after the first argument. Local."""

    def is_elsewhere(rows: Rows, others: Any, kwargs: Any) -> bool:
        given = argument(others, kwargs, position, name, default)
        if (position, name) == (0, "dims") and len(others) > 1 and all(type(one) is int for one in others):
            given = others  # x.flip(0, 1)
        return rows.dimension not in dims_of(given, rows.dim())

    return is_elsewhere


row_wise("softmax log_softmax cumsum cumprod cummax cummin logcumsumexp fftshift ifftshift", where=_elsewhere(0))
row_wise("sort argsort", torch._C._nn.glu, where=_elsewhere(0, default=-1))
row_wise("topk fft ifft rfft irfft hfft ihfft", where=_elsewhere(1, default=-1))
row_wise("diff", where=lambda *given: not _has_tensors(*given[1:]) and _elsewhere(1, default=-1)(*given))
row_wise("fft2 ifft2 rfft2 irfft2", where=_elsewhere(1, default=(-2, -1)))
row_wise("fftn ifftn rfftn irfftn", where=_elsewhere(1))
row_wise("flip", where=_elsewhere(0, "dims"))
row_wise("roll", where=_elsewhere(1, "dims"))
row_wise("narrow index_select", where=_elsewhere(0), moves=True)
row_wise(T.unfold, where=_elsewhere(0, "dimension"), moves=True)
row_wise(
    "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split", where=_elsewhere(1, default=0), moves=True
)
row_wise(_OF_MATRICES, where=lambda rows, *_: rows.dim() - rows.dimension > 2)
row_wise("view_as_complex", where=lambda rows, *_: rows.dimension < rows.dim() - 1, moves=True)
row_wise("view_as_real", moves=True)


# Without a number of classes: as many as the largest class of all rows says.
row_wise("one_hot", where=lambda _, others, kwargs: argument(others, kwargs, 0, "num_classes", -1) > 0, moves=True)


def _removing(position: int, default: Any = None, takes_numbers: bool = True) -> OfRows:
    """Return the rule of functions over dimensions, given at `position` after the first, that they remove or keep.

    `takes_numbers`: whether all other arguments are dimensions if they are numbers: x.count_nonzero(0, 1).
    """

    def over(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
        if _has_tensors(others, kwargs):
            return NotImplemented
        is_listed = takes_numbers and len(others) > 1 and all(type(one) is int for one in others)
        dims = dims_of(others if is_listed else argument(others, kwargs, position, "dim", default), rows.dim())
        if rows.dimension in dims:
            return NotImplemented
        out = func(rows.block, *others, **kwargs)
        is_kept = (out if isinstance(out, T) else next(iter(out), rows)).dim() == rows.dim()
        return made(out, rows, rows.dimension - (0 if is_kept else sum(one < rows.dimension for one in dims)))

    return over


_REDUCING = rule_of_rows(_REMOVING)(_removing(0))
rule_of_rows("norm vector_norm quantile nanquantile")(_removing(1, takes_numbers=False))
rule_of_rows("select", moves=True)(_removing(0, takes_numbers=False))
rule_of_rows("unbind", moves=True)(_removing(0, default=0))


@rule("mean sum")
def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or type(args[0]) is not Rows or current().part(blocks.State).is_in_piece:
        return _REDUCING(func, args, kwargs)
    return total(args[0], func, func.__name__)


@rule_if_alike("cosine_similarity cross vecdot")
def _of_two(func: Any, args: Any, kwargs: Any) -> Any:
    """Two tensors that broadcast, over a dimension that remains if it is `cross`."""
    part, place = place_of((*args, *kwargs.values()))
    one, other = args[0], argument(args, kwargs, 1, "x2", kwargs.get("other", kwargs.get("y")))
    num = max(one.dim(), other.dim())
    default = 1 if func.__name__ == "cosine_similarity" else None if func in (torch.cross, T.cross) else -1
    (dim,) = dims_of(argument(args, kwargs, 2, "dim", default), num)
    if dim == num - place:
        raise Mixed
    block = met(func, args, kwargs, part, place)
    return made(block, one if type(one) is Rows else other, num - place - (block.dim() < num and dim < num - place))


@rule("max min")
def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    is_of_two = isinstance(args[1] if len(args) > 1 else kwargs.get("other"), T)
    return (elementwise if is_of_two else _REDUCING)(func, args, kwargs)


@rule("all any _is_all_true _is_any_true", moves=True)
def _decision(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0] if args else None
    if type(rows) is not Rows or len(args) > 1 or kwargs:
        return _REDUCING(func, args, kwargs)
    if not current().part(Counts).is_in_lock_step():
        return NotImplemented  # which says so
    rows.memory.pull()
    is_any = "any" in func.__name__
    found = func(rows.block.detach())
    number = blocks.added_up((found if is_any else ~found.bool()).to(torch.int32))
    return (number > 0 if is_any else number == 0).to(found.dtype)


# Shapes.
def divided_shape(rows: Rows, shape: list[int]) -> tuple[list[int], int, Part]:
    """Return the shape of the block after a reshape to `shape`, the dimension of its rows, and their part.

    In the order of memory, `step` entries follow each row. The new dimension of the rows is the one that contains the
    upper end of the rows' range. Raises Mixed if its entries are not whole rows, or not equal parts of rows.
    """
    part, old = rows.part, rows.shape
    step = math.prod(old[rows.dimension + 1 :])
    end = step * part.num_rows
    below = math.prod(shape)
    if not below or below != rows.numel():
        raise Mixed
    for dim, size in enumerate(shape):  # noqa: B007
        above, below = below, below // size
        if below < end <= above:
            break
    if above % end:
        raise Mixed
    if step % below == 0:
        cuts = tuple(one * (step // below) for one in part.cuts)
    elif below % step == 0 and not any(one % (below // step) for one in part.cuts):
        cuts = tuple(one // (below // step) for one in part.cuts)
    else:
        raise Mixed
    if min(after - before for before, after in zip(cuts, cuts[1:])) < LEAST_ROWS:
        raise Mixed
    new = Part(above // end, cuts)
    first, after_last = new.bounds(*blocks.ranks())
    inside = [*shape]
    inside[dim] = new.outer * (after_last - first)
    return inside, dim, new


def _shape_after(func: Any, shape: Any, others: Any, kwargs: Any) -> list[int]:
    """Return the shape that torch itself gives to a tensor of `shape` without values. Local."""

    def empty(x: Any) -> Any:
        return torch.empty(x.shape, device="meta") if isinstance(x, T) else x

    named = {name: empty(x) for name, x in kwargs.items()}
    return [*func(torch.empty(shape, device="meta"), *map(empty, others), **named).shape]


@rule_of_rows("view reshape view_as reshape_as flatten unflatten ravel", moves=True)
def _reshape(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    name, given = func.__name__, (*others, *kwargs.values())
    unknown = (torch.dtype,) if name in ("view_as", "reshape_as") else (torch.dtype, T)
    if any(isinstance(x, unknown) for x in given):
        return NotImplemented  # a view as another type, or sizes that are read
    inside, dim, part = divided_shape(rows, _shape_after(func, rows.shape, others, kwargs))
    try:
        block = rows.block.view(inside) if name in ("view", "view_as") else rows.block.reshape(inside)
    except RuntimeError:  # a cut has gaps in memory that the whole does not have
        return NotImplemented
    return made(block, rows, dim, part)


@rule_of_rows(
    "transpose swapaxes swapdims t permute movedim moveaxis unsqueeze squeeze adjoint",
    *getters("T mT H mH"),
    moves=True,
)
def _moved(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    shape = [3 if dim == rows.dimension else 1 if size == 1 else 2 for dim, size in enumerate(rows.shape)]
    dim = _shape_after(func, shape, others, kwargs).index(3)
    return made(func(rows.block, *others, **kwargs), rows, dim)


@rule_of_rows("expand expand_as broadcast_to", moves=True)
def _expand(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    shape = _shape_after(func, rows.shape, others, kwargs)
    dim = len(shape) - rows.dim() + rows.dimension
    shape[dim] = rows.block.shape[rows.dimension]
    return made(rows.block.expand(shape), rows, dim)


@rule_of_rows("repeat tile")
def _repeat(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    times = [*(others[0] if isinstance(others[0], (list, tuple)) else others)] if others else []
    if not times or not all(isinstance(one, int) for one in times):
        return NotImplemented
    if func.__name__ == "tile":
        times = [1] * (rows.dim() - len(times)) + times
    dim = len(times) - rows.dim() + rows.dimension
    if dim < rows.dimension or times[dim] < 1:
        raise Mixed
    return made(rows.block.repeat(times), rows, dim, Part(rows.part.outer * times[dim], rows.part.cuts))


@rule_of_rows("repeat_interleave")
def _repeat_each(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    times, part = argument(others, kwargs, 0, "repeats"), rows.part
    if not isinstance(times, int) or times < 1 or kwargs.get("output_size") is not None:
        return NotImplemented
    (dim,) = dims_of(argument(others, kwargs, 1, "dim"), rows.dim())
    if dim == rows.dimension:
        part = Part(part.outer, tuple(one * times for one in part.cuts))
    return made(func(rows.block, *others, **kwargs), rows, None, part)


@rule_if_alike(torch._C._VariableFunctions.broadcast_tensors, moves=True)  # type: ignore[attr-defined]
def _broadcast(func: Any, args: Any, kwargs: Any) -> Any:
    given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    place_of(given)
    if all(value.shape == given[0].shape for value in given):
        return tuple(given)
    shape = torch.broadcast_shapes(*(value.shape for value in given))
    return tuple(value.expand(shape) for value in given)


@rule_if_alike("cat concat concatenate stack", moves=True)
def _joined(func: Any, args: Any, kwargs: Any) -> Any:
    given, dim = argument(args, kwargs, 0, "tensors"), argument(args, kwargs, 1, "dim", 0)
    part, place = place_of([given])
    num = given[0].dim()
    if any(value.dim() != num for value in given) or not isinstance(dim, int):
        raise Mixed
    row, is_stack = num - place, func is torch.stack
    (dim,) = dims_of(dim, num + is_stack)
    if dim == row and not is_stack:
        raise Mixed
    block = func([meeting(value, part, place) for value in given], dim)
    return made(block, next(value for value in given if type(value) is Rows), row + (is_stack and dim <= row))


# Indices.
_STRIDE = 7919  # of the rows in a view that shows where an index leaves them


def _index(rows: Rows, index: Any) -> int:
    """Return the dimension of the rows after indexing. Raises Mixed if the index selects rows, or is not known."""
    basic, num_others = list[Any](), 0
    for one in index if isinstance(index, tuple) else (index,):
        is_slice = isinstance(one, slice) and {type(one.start), type(one.stop), type(one.step)} <= {int, type(None)}
        if one is None or one is Ellipsis or type(one) is int or is_slice:
            basic.append(one)
            continue
        num_others += 1
        num_used, num_made = 1, 1  # dimensions
        if type(one) is T and one.dtype in (torch.bool, torch.uint8):
            num_used = one.dim()
        elif type(one) is T:
            num_made = one.dim()
        elif not isinstance(one, list) or not all(type(number) is int for number in one):
            raise Mixed
        if not num_used or num_others > 1 or (isinstance(one, list) and not one):
            raise Mixed
        basic += [0] * num_used + [None] * num_made
    strides = [_STRIDE if dim == rows.dimension else 0 for dim in range(rows.dim())]
    try:
        view = torch.empty_strided(rows.shape, strides, device="meta")[tuple(basic)]
    except IndexError:
        raise Mixed from None  # torch says what is wrong
    found = [dim for dim, stride in enumerate(view.stride()) if stride == _STRIDE]
    if not found or view.shape[found[0]] != rows.part.size:
        raise Mixed
    return found[0]


@rule_of_rows(T.__getitem__, moves=True)
def _get(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    dim = _index(rows, *others)
    return made(func(rows.block, *others), rows, dim)


@rule_of_rows(T.__setitem__, moves=True)
def _set(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    index, value = others
    dim = _index(rows, index)
    if isinstance(value, T):
        place = rows.block[index].dim() - dim
        if type(value) is Rows and place_of([value]) != (rows.part, place):
            raise Mixed
        value = meeting(value, rows.part, place)
    elif not isinstance(value, (bool, int, float, complex)):
        raise Mixed
    rows.block[index] = value
    rows.memory.wrote()
    return None


def _has_all_rows(value: Any, rows: Rows) -> bool:
    """Whether a tensor of as many dimensions has all rows in the same one, or it is a number."""
    if not isinstance(value, T):
        return True
    if value.dim() != rows.dim() or value.shape[rows.dimension] != rows.part.size:
        return False
    return type(value) is not Rows or (value.dimension, value.part) == (rows.dimension, rows.part)


def _along(position: int) -> OfRows:
    """Return the rule of functions by an index along another dimension, if all tensors have all rows."""
    is_elsewhere = _elsewhere(position)

    def along(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
        given = (*others, *kwargs.values())
        if not is_elsewhere(rows, others, kwargs) or not all(_has_all_rows(value, rows) for value in given):
            return NotImplemented
        return made(met(func, (rows, *others), kwargs, *place_of((rows, *given))), rows)

    return along


_BY_INDEX = rule_of_rows("gather scatter scatter_add scatter_reduce")(_along(0))
rule_of_rows("take_along_dim")(_along(1))


@rule("scatter_ scatter_add_", moves=True)
def _by_index_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    out = _BY_INDEX(func, args, kwargs)
    if out is not NotImplemented:
        out.memory.wrote()
    return out
