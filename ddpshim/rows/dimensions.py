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
    Rule,
    T,
    argument,
    elementwise,
    getters,
    made,
    meeting,
    place_of,
    rule,
    whole_if_mixed,
)
from ddpshim.rows.tensor import Counts, Rows

# Names, place of the argument with the dimensions, its name, and what is taken if it is not given.
_REMOVING = """
sum mean nansum nanmean prod amax amin logsumexp std var median nanmedian mode argmax argmin aminmax any all max min
std_mean var_mean count_nonzero
"""
_KEEPING = "softmax log_softmax cumsum cumprod cummax cummin logcumsumexp"
# All of their results keep the dimensions before the last two.
_OF_MATRICES = """
triu tril det inv inverse logdet slogdet cholesky qr svd svdvals eigh eigvalsh matrix_exp matrix_power
"""
_OF_TWO = "cosine_similarity cross vecdot"


def dims_of(value: Any, num: int) -> set[int]:
    """Return dimensions as non-negative numbers. Local. Raises Mixed if they are not given as numbers."""
    given = [value] if isinstance(value, int) else value
    if isinstance(value, bool) or not isinstance(given, (list, tuple)) or not given:
        raise Mixed
    if not all(isinstance(dim, int) and -num <= dim < num for dim in given):
        raise Mixed
    return {dim % num for dim in given}


def _over(position: int, keeps: bool, name: str = "dim", default: Any = None) -> Rule:
    """Return the rule of functions that compute over dimensions, which they keep (softmax) or remove (sum)."""

    @whole_if_mixed
    def over(func: Any, args: Any, kwargs: Any) -> Any:
        rows = args[0] if args else None
        others = (*args[1:], *kwargs.values())
        if type(rows) is not Rows or any(isinstance(value, T) for value in others):
            return NotImplemented
        given = argument(args, kwargs, position, name, default)
        if position == 1 and len(args) > 2 and all(type(one) is int for one in args[1:]):
            given = args[1:]  # x.flip(0, 1)
        dims = dims_of(given, rows.dim())
        if rows.dimension in dims:
            return NotImplemented
        rows.memory.pull()
        out = func(rows.block, *args[1:], **kwargs)
        is_one = isinstance(out, T)
        first = out if is_one else out[0]
        is_kept = keeps or first.dim() == rows.dim()
        dim = rows.dimension if is_kept else rows.dimension - sum(one < rows.dimension for one in dims)
        return made(out, rows, dim) if is_one else type(out)([made(one, rows, dim) for one in out])

    return over


rule(_REMOVING)(_over(1, False))
rule(_KEEPING)(_over(1, True))
rule("sort argsort")(_over(1, True, default=-1))
rule("topk")(_over(2, True, default=-1))
rule("norm vector_norm quantile nanquantile")(_over(2, False))
rule("diff fft ifft rfft irfft hfft ihfft")(_over(2, True, default=-1))
rule("fft2 ifft2 rfft2 irfft2")(_over(2, True, default=(-2, -1)))
rule("fftn ifftn rfftn irfftn")(_over(2, True))
rule("flip")(_over(1, True, "dims"))
rule("fftshift ifftshift")(_over(1, True))
rule(torch._C._nn.glu)(_over(1, True, default=-1))
rule("roll")(_over(2, True, "dims"))


@rule(_OF_MATRICES)
@whole_if_mixed
def _of_matrices(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    if type(rows) is not Rows or rows.dim() - rows.dimension <= 2:
        return NotImplemented
    rows.memory.pull()
    out = func(rows.block, *args[1:], **kwargs)
    return made(out, rows) if isinstance(out, T) else type(out)([made(one, rows) for one in out])


@rule(_OF_TWO)
@whole_if_mixed
def _of_two(func: Any, args: Any, kwargs: Any) -> Any:
    """Two tensors that broadcast, over a dimension that remains if it is `cross`."""
    part, place = place_of((*args, *kwargs.values()))
    one, other = args[0], argument(args, kwargs, 1, "x2", kwargs.get("other", kwargs.get("y")))
    num = max(one.dim(), other.dim())
    default = 1 if func.__name__ == "cosine_similarity" else None if func in (torch.cross, T.cross) else -1
    (dim,) = dims_of(argument(args, kwargs, 2, "dim", default), num)
    if dim == num - place:
        raise Mixed
    named = {name: meeting(value, part, place) for name, value in kwargs.items()}
    block = func(*(meeting(x, part, place) for x in args), **named)
    of = one if type(one) is Rows else other
    return made(block, of, num - place - (block.dim() < num and dim < num - place))


@rule("pairwise_distance")
@whole_if_mixed
def _pairwise(func: Any, args: Any, kwargs: Any) -> Any:
    part, place = place_of((*args, *kwargs.values()))
    if place < 2 or len(args) < 2:
        raise Mixed
    block = func(*(meeting(x, part, place) for x in args), **kwargs)
    num = max(x.dim() for x in args[:2])
    return made(block, next(x for x in args if type(x) is Rows), num - place)


@rule("view_as_complex view_as_real", moves=True)
@whole_if_mixed
def _complex(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    if type(rows) is not Rows or (func is torch.view_as_complex and rows.dimension == rows.dim() - 1):
        return NotImplemented
    rows.memory.pull()
    return made(func(rows.block), rows)


@rule("max min")
def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    is_of_two = isinstance(args[1] if len(args) > 1 else kwargs.get("other"), T)
    return (elementwise if is_of_two else _over(1, False))(func, args, kwargs)


@rule("all any _is_all_true _is_any_true", moves=True)
def _decision(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0] if args else None
    if type(rows) is not Rows or len(args) > 1 or kwargs:
        return _over(1, False)(func, args, kwargs)
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
    inside = [*shape]
    inside[dim] = new.outer * blocks.num_own(new)
    return inside, dim, new


def _sizes(values: Any) -> list[int]:
    given = values[0] if len(values) == 1 and isinstance(values[0], (list, tuple)) else values
    if not all(isinstance(size, int) for size in given):
        raise Mixed
    return [*given]


def _filled_in(shape: list[int], numel: int) -> list[int]:
    """Return `shape` with its -1 replaced. Raises Mixed if torch would raise an error."""
    unknown = [i for i, size in enumerate(shape) if size == -1]
    rest = math.prod(size for size in shape if size != -1)
    if len(unknown) > 1 or (unknown and (not rest or numel % rest)):
        raise Mixed
    return [numel // rest if size == -1 else size for size in shape]


@rule("view reshape view_as reshape_as flatten unflatten ravel", moves=True)
@whole_if_mixed
def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    rows, name = args[0], func.__name__
    if type(rows) is not Rows:
        return NotImplemented
    rows.memory.pull()
    others = args[1:]
    if name == "view" and len(others) == 1 and isinstance(others[0], torch.dtype):
        return NotImplemented
    if name in ("view_as", "reshape_as"):
        shape = [*argument(args, kwargs, 1, "other").shape]
    elif name in ("view", "reshape"):
        shape = _filled_in(_sizes(others or (kwargs.get("shape", kwargs.get("size")),)), rows.numel())
    elif name == "ravel":
        shape = [rows.numel()]
    elif name == "flatten":
        first, last = (
            argument(args, kwargs, i, key, default) % rows.dim()
            for i, key, default in ((1, "start_dim", 0), (2, "end_dim", -1))
        )
        if set(kwargs) - {"start_dim", "end_dim"} or first > last:
            raise Mixed
        shape = [*rows.shape[:first], math.prod(rows.shape[first : last + 1]), *rows.shape[last + 1 :]]
    else:
        dim = argument(args, kwargs, 1, "dim")
        if not isinstance(dim, int) or not -rows.dim() <= dim < rows.dim():
            raise Mixed
        sizes = _filled_in(_sizes(args[2:] or (kwargs.get("sizes"),)), rows.shape[dim])
        shape = [*rows.shape[: dim % rows.dim()], *sizes, *rows.shape[dim % rows.dim() + 1 :]]
    inside, dim, part = divided_shape(rows, shape)
    try:
        block = rows.block.view(inside) if name in ("view", "view_as") else rows.block.reshape(inside)
    except RuntimeError:  # a cut has gaps in memory that the whole does not have
        return NotImplemented
    return made(block, rows, dim, part)


@rule(
    "transpose swapaxes swapdims t permute movedim moveaxis unsqueeze squeeze adjoint",
    *getters("T mT H mH"),
    moves=True,
)
@whole_if_mixed
def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Move dimensions: torch itself shows on a tensor without values where that of the rows goes."""
    rows = args[0]
    if type(rows) is not Rows:
        return NotImplemented
    rows.memory.pull()
    shape = [3 if dim == rows.dimension else 1 if size == 1 else 2 for dim, size in enumerate(rows.shape)]
    with torch.no_grad():
        moved = func(torch.empty(shape, device="meta"), *args[1:], **kwargs).shape
    return made(func(rows.block, *args[1:], **kwargs), rows, moved.index(3))


@rule("expand expand_as broadcast_to", moves=True)
@whole_if_mixed
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    if type(rows) is not Rows or kwargs:
        return NotImplemented
    rows.memory.pull()
    shape = [*args[1].shape] if func.__name__ == "expand_as" else _sizes(args[1:])
    dim = len(shape) - rows.dim() + rows.dimension
    if dim < 0 or shape[dim] not in (-1, rows.part.size):
        raise Mixed
    shape[dim] = rows.block.shape[rows.dimension]
    return made(rows.block.expand(shape), rows, dim)


@rule("repeat tile")
@whole_if_mixed
def _repeat(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    if type(rows) is not Rows or kwargs:
        return NotImplemented
    rows.memory.pull()
    times = _sizes(args[1:])
    if func.__name__ == "tile":
        times = [1] * (rows.dim() - len(times)) + times
    dim = len(times) - rows.dim() + rows.dimension
    if dim < rows.dimension or times[dim] < 1:
        raise Mixed
    return made(rows.block.repeat(times), rows, dim, Part(rows.part.outer * times[dim], rows.part.cuts))


@rule("repeat_interleave")
@whole_if_mixed
def _repeat_each(func: Any, args: Any, kwargs: Any) -> Any:
    rows, times = args[0], argument(args, kwargs, 1, "repeats")
    if type(rows) is not Rows or not isinstance(times, int) or times < 1 or kwargs.get("output_size") is not None:
        return NotImplemented
    (dim,) = dims_of(argument(args, kwargs, 2, "dim"), rows.dim())
    rows.memory.pull()
    part = rows.part
    if dim == rows.dimension:
        part = Part(part.outer, tuple(one * times for one in part.cuts))
    return made(func(rows.block, *args[1:], **kwargs), rows, None, part)


@rule(torch._C._VariableFunctions.broadcast_tensors, moves=True)  # type: ignore[attr-defined]
@whole_if_mixed
def _broadcast(func: Any, args: Any, kwargs: Any) -> Any:
    given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    place_of(given)
    if all(value.shape == given[0].shape for value in given):
        return tuple(given)
    shape = torch.broadcast_shapes(*(value.shape for value in given))
    return tuple(value.expand(shape) for value in given)


# Parts along other dimensions.
def _parting(position: int, removes: bool = False, name: str = "dim", default: Any = None) -> Rule:
    @whole_if_mixed
    def parting(func: Any, args: Any, kwargs: Any) -> Any:
        rows = args[0] if args else None
        if type(rows) is not Rows or any(isinstance(value, Rows) for value in (*args[1:], *kwargs.values())):
            return NotImplemented
        (dim,) = dims_of(argument(args, kwargs, position, name, default), rows.dim())
        if dim == rows.dimension:
            return NotImplemented
        rows.memory.pull()
        out, after = func(rows.block, *args[1:], **kwargs), rows.dimension - (removes and dim < rows.dimension)
        return made(out, rows, after) if isinstance(out, T) else type(out)([made(one, rows, after) for one in out])

    return parting


rule("narrow index_select", moves=True)(_parting(1))
rule("select", moves=True)(_parting(1, True))
rule("unbind", moves=True)(_parting(1, True, default=0))
rule("chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split", moves=True)(_parting(2, default=0))
rule(T.unfold, moves=True)(_parting(1, name="dimension"))


@rule("cat concat concatenate stack", moves=True)
@whole_if_mixed
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
def _index(rows: Rows, index: Any) -> tuple[Any, int]:
    """Return (index, dimension of the rows after it), for the block. Raises Mixed if it selects rows."""
    given = [*index] if isinstance(index, tuple) else [index]
    used = [_num_dims(one) for one in given]
    if sum(one is Ellipsis for one in given) > 1 or sum(isinstance(one, (T, list)) for one in given) > 1:
        raise Mixed
    if Ellipsis not in [one for one in given if not isinstance(one, (T, list))]:
        given.append(Ellipsis)
        used.append(0)
    at = after = 0
    found = None
    for one, num in zip(given, used):
        num = rows.dim() - sum(used) if one is Ellipsis else num
        if at <= rows.dimension < at + num:
            if isinstance(one, slice):
                if one.indices(rows.part.size) != (0, rows.part.size, 1):
                    raise Mixed
            elif one is not Ellipsis:
                raise Mixed
            found = after + rows.dimension - at
        at += num
        if one is None:
            after += 1
        elif isinstance(one, (T, list)):
            is_mask = isinstance(one, T) and one.dtype in (torch.bool, torch.uint8)
            after += 1 if is_mask or isinstance(one, list) else one.dim()
        elif not isinstance(one, int):
            after += num
    if found is None:
        raise Mixed
    return tuple(given), found


def _num_dims(one: Any) -> int:
    """Return how many dimensions this part of an index uses. Raises Mixed if it is of no known kind."""
    if one is None or one is Ellipsis:
        return 0
    if isinstance(one, (bool, Rows)):
        raise Mixed
    if isinstance(one, T):
        is_mask = one.dtype in (torch.bool, torch.uint8)
        if type(one) is not T or (is_mask and not one.dim()):
            raise Mixed
        return one.dim() if is_mask else 1
    if isinstance(one, list):
        if not one or not all(isinstance(number, int) and not isinstance(number, bool) for number in one):
            raise Mixed
        return 1
    if isinstance(one, (int, slice)):
        if isinstance(one, slice) and not all(x is None or isinstance(x, int) for x in (one.start, one.stop, one.step)):
            raise Mixed
        return 1
    raise Mixed


@rule(T.__getitem__, moves=True)
@whole_if_mixed
def _get(func: Any, args: Any, kwargs: Any) -> Any:
    rows, index = args
    if type(rows) is not Rows:
        return NotImplemented
    rows.memory.pull()
    inside, dim = _index(rows, index)
    return made(rows.block[inside], rows, dim)


@rule(T.__setitem__, moves=True)
@whole_if_mixed
def _set(func: Any, args: Any, kwargs: Any) -> Any:
    rows, index, value = args
    if type(rows) is not Rows:
        return NotImplemented
    rows.memory.pull()
    inside, dim = _index(rows, index)
    if isinstance(value, T):
        place = rows.block[inside].dim() - dim
        if type(value) is Rows and place_of([value]) != (rows.part, place):
            raise Mixed
        value = meeting(value, rows.part, place)
    elif not isinstance(value, (bool, int, float, complex)):
        raise Mixed
    rows.block[inside] = value
    rows.memory.wrote()
    return None


def _has_all_rows(value: Any, rows: Rows) -> bool:
    """Whether a tensor of as many dimensions has all rows in the same one, or it is a number."""
    if not isinstance(value, T):
        return True
    if value.dim() != rows.dim() or value.shape[rows.dimension] != rows.part.size:
        return False
    return type(value) is not Rows or (value.dimension, value.part) == (rows.dimension, rows.part)


@rule("gather scatter scatter_add scatter_reduce take_along_dim")
@whole_if_mixed
def _by_index(func: Any, args: Any, kwargs: Any) -> Any:
    """Along another dimension, if all tensors have all rows."""
    rows = args[0] if args else None
    if type(rows) is not Rows or not all(_has_all_rows(value, rows) for value in (*args, *kwargs.values())):
        return NotImplemented
    (dim,) = dims_of(argument(args, kwargs, 2 if func.__name__ == "take_along_dim" else 1, "dim"), rows.dim())
    part, place = place_of((*args, *kwargs.values()))
    if dim == rows.dimension:
        return NotImplemented
    given = [meeting(value, part, place) for value in args]
    return made(func(*given, **{name: meeting(value, part, place) for name, value in kwargs.items()}), rows)


@rule("scatter_ scatter_add_", moves=True)
@whole_if_mixed
def _by_index_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    if type(rows) is not Rows or not all(_has_all_rows(value, rows) for value in (*args, *kwargs.values())):
        return NotImplemented
    (dim,) = dims_of(argument(args, kwargs, 1, "dim"), rows.dim())
    part, place = place_of((*args, *kwargs.values()))
    if dim == rows.dimension:
        return NotImplemented
    func(*(meeting(x, part, place) for x in args), **{name: meeting(x, part, place) for name, x in kwargs.items()})
    rows.memory.wrote()
    return rows


@rule("one_hot", moves=True)
@whole_if_mixed
def _one_hot(func: Any, args: Any, kwargs: Any) -> Any:
    rows, num = args[0], argument(args, kwargs, 1, "num_classes", -1)
    if type(rows) is not Rows or not isinstance(num, int) or num < 1:
        return NotImplemented  # else the largest class of all rows
    rows.memory.pull()
    return made(func(rows.block, num), rows)
