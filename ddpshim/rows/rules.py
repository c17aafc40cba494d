"""Rules of elementwise operations, of questions about a tensor, and of random draws.

A rule computes on blocks what is row-wise by definition: no entry of a row's result depends on another row. It returns
NotImplemented where that does not hold, and the operation is then computed on the whole. Together with `dimensions` and
`layers` this is the closed list; tests/same_gradients/test_rows.py compares each rule with the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch.nn import functional as F

from ddpshim.process.job import current
from ddpshim.rows import blocks
from ddpshim.rows.arriving import arrived
from ddpshim.rows.blocks import Part, same
from ddpshim.rows.tensor import RULES, Counts, Rows, RowsMemory, cut, is_reduced, mapped, shares_memory

T = torch.Tensor
_NAMESPACES = (torch, T, torch._C._nn, torch._C._VariableFunctions, torch.special, torch.linalg, torch.fft, F)

Rule = Callable[[Any, Any, Any], Any]  # gets the function, its arguments, and those by name
OfRows = Callable[[Any, Rows, Any, Any], Any]  # gets the first argument apart

# With broadcasting.
ELEMENTWISE = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp
clamp_max clamp_min clip complex conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp
exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac gelu greater greater_equal gt ge hardshrink
hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf isreal
ldexp leaky_relu lerp less less_equal le lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num ne neg
negative nextafter not_equal polar positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu
sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh threshold true_divide
trunc xlogy where entr erfcx expit gammainc gammaincc gammaln i0e i1 i1e log_ndtr ndtr ndtri psi xlog1py zeta
bessel_j0 bessel_j1
__and__ __or__ __xor__ __rand__ __ror__ __rxor__ __invert__ __lshift__ __rshift__ __eq__ __ne__ __lt__ __le__ __gt__
__ge__ __add__ __radd__ __mul__ __rmul__ __sub__ __rsub__ __div__ __rdiv__ __truediv__ __rtruediv__ __floordiv__
__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__
"""
MOVES = """
clone contiguous float double half bfloat16 int long short char byte bool cfloat cdouble detach cpu cuda
zeros_like ones_like full_like conj resolve_conj resolve_neg
"""
# Those that change their first argument, as far as torch has them: `add_`, `__iadd__`.
IN_PLACE = "copy_ zero_ fill_ __irshift__ " + " ".join(
    f"__i{name[2:]}" if name.startswith("__") else f"{name}_" for name in ELEMENTWISE.split()
)
ABOUT = """
size dim ndimension numel nelement element_size is_floating_point is_complex get_device __len__ __hash__ is_tensor
is_signed
"""
ATTRIBUTES = (
    "shape dtype device layout ndim is_cuda is_cpu is_sparse is_quantized is_meta is_nested itemsize nbytes names"
)
OF_BLOCK = "is_contiguous is_inference is_conj is_neg"
ATTRIBUTES_OF_BLOCK = "requires_grad grad_fn is_leaf retains_grad output_nr _version"


class Mixed(Exception):
    """Raised where tensors do not have their rows in one place: the operation is computed on the whole."""


def functions(names: Iterable[str]) -> list[Any]:
    """Return torch's functions and methods of these names, in all of its namespaces that this torch has. Local."""
    found = (getattr(place, name, None) for name in names for place in _NAMESPACES)
    return [function for function in found if callable(function)]


def getters(names: str) -> list[Any]:
    """Return the getters of these attributes of tensors that this torch has. Local."""
    return [getattr(T, name).__get__ for name in names.split() if hasattr(T, name)]


MOVING: set[Any] = set()  # functions that only look at rows, move them, or draw for the whole: `pieces` leaves them


def rule(*given: Any, moves: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for functions; a text has names for `functions`. `moves`: they belong to MOVING. Local."""

    def add(made: Rule) -> Rule:
        for one in given:
            for function in functions(one.split()) if isinstance(one, str) else [one]:
                RULES[function] = made
                (MOVING.add if moves else MOVING.discard)(function)
        return made

    return add


def made(block: Any, of: Rows, dim: Optional[int] = None, part: Optional[Part] = None) -> Any:
    """Return a new row tensor of `block`, or `of` itself if the operation returned it; of several, each. Local."""
    if not isinstance(block, T):
        return type(block)([made(one, of, dim, part) for one in block])
    if block is of.block:
        return of
    memory = of.memory if shares_memory(block, of.block) else None
    return row_tensor(block, block.dim() - (of.dimension if dim is None else dim), part or of.part, memory)


def row_tensor(block: torch.Tensor, place: int, part: Part, memory: Optional[RowsMemory] = None) -> Rows:
    """Return a new row tensor, whose rows are at `place` from the last dimension. Local."""
    current().part(Counts).on_rows += 1
    return Rows(block, block.dim() - place, part, memory)


def place_of(values: Iterable[Any]) -> tuple[Part, int]:
    """Return the part, and the place from the last dimension, of the rows in `values`; raises Mixed if not one."""
    found: Optional[tuple[Part, int]] = None
    for value in values:
        kind = type(value)
        if kind is Rows:
            if value.memory.mirrors:
                value.memory.pull()
            here = value.place
            if found is not None and found is not here and found != here:
                raise Mixed
            found = here
        elif (kind is list or kind is tuple) and any(type(inner) is Rows for inner in value):
            here = place_of(value)
            if found is not None and found != here:
                raise Mixed
            found = here
    if found is None:
        raise Mixed
    return found


def meeting(value: Any, part: Part, place: int) -> Any:
    """Return the part of `value` that broadcasts against blocks whose rows are at `place` from the last dimension.

    A whole tensor with all rows there is cut; one without that dimension, or with size 1 there, is used as it is.
    Raises Mixed otherwise.
    """
    kind = type(value)
    if kind is Rows:
        return value.block
    if kind is int or kind is float:
        return value
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        dim = value.dim() - place
        if dim >= 0 and value.shape[dim] != 1:
            if value.shape[dim] != part.size or value.layout is not torch.strided:
                raise Mixed
            return cut(value, dim, part)
        return used_by_rows(value)
    if kind is list or kind is tuple:
        return kind([meeting(inner, part, place) for inner in value])
    return used_by_rows(value)


def met(func: Any, args: Any, kwargs: Any, part: Part, place: int) -> Any:
    """Return `func` of the parts of its arguments that meet blocks whose rows are at `place`. Raises Mixed."""
    given = [meeting(value, part, place) for value in args]
    return func(*given, **{name: meeting(value, part, place) for name, value in kwargs.items()} if kwargs else {})


def used_by_rows(value: Any) -> Any:
    """Return a whole value for use with blocks: a tensor's gradient becomes the sum over ranks. Local.

    Except for what is computed from parameters, whose gradients a wrapper reduces. Raises Mixed for a row tensor, a
    class of the program, and outside a piece of the option `exact`.
    """
    if isinstance(value, T):
        if type(value) is not T and type(value) is not torch.nn.Parameter and type(arrived(value)) is not T:
            raise Mixed
        if value.requires_grad and torch.is_grad_enabled() and not is_reduced(value):
            state = current().part(blocks.State)
            if state.is_exact and not state.is_in_piece:
                raise Mixed  # its gradient would be added up by rank, not by piece
            return value if state.is_in_piece or state.ranks.size == 1 else state.call(same, value)
        return value
    if type(value) is list or type(value) is tuple:
        return type(value)([used_by_rows(inner) for inner in value])
    return value


def argument(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
    """Return an argument that may be given by place or by name. Local."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def whole_if_mixed(inner: Rule) -> Rule:
    """Return the rule `inner`, whose first argument is never given by name; NotImplemented if it raises Mixed. Local.

    And NotImplemented for results in tensors that are given, and for results that are new leaves.
    """

    def checked(func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs:
            if kwargs.get("out") is not None or kwargs.get("requires_grad"):
                return NotImplemented
            kwargs = {_OF_NUMPY.get(name, name): value for name, value in kwargs.items()}
            if not args and "input" in kwargs:
                args = (kwargs.pop("input"),)
            if not args and "tensors" not in kwargs:
                return NotImplemented
        try:
            return inner(func, args, kwargs)
        except Mixed:
            return NotImplemented

    return checked


_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # torch takes these too


def rule_if_alike(*given: Any, moves: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule as `rule` does, by `whole_if_mixed`. Local."""
    return lambda inner: rule(*given, moves=moves)(whole_if_mixed(inner))


def rule_of_rows(*given: Any, moves: bool = False) -> Callable[[OfRows], Rule]:
    """Register a rule of functions of a row tensor, which is their first argument: it gets that apart. Local."""

    def register(inner: OfRows) -> Rule:
        @rule_if_alike(*given, moves=moves)
        def checked(func: Any, args: Any, kwargs: Any) -> Any:
            if not args or type(args[0]) is not Rows:
                return NotImplemented
            args[0].memory.pull()
            return inner(func, args[0], args[1:], kwargs)

        return checked

    return register


def row_wise(*given: Any, where: Callable[[Rows, Any, Any], bool] = lambda *_: True, moves: bool = False) -> None:
    """Register functions that compute each row of their first argument by itself, from all other arguments. Local.

    `where`: whether they do so for a row tensor, the other arguments, and those by name.
    """

    @rule_of_rows(*given, moves=moves)
    def computed(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
        if not where(rows, others, kwargs):
            return NotImplemented
        named = {name: used_by_rows(value) for name, value in kwargs.items()}
        return made(func(rows.block, *map(used_by_rows, others), **named), rows)


@whole_if_mixed
def elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    part, place = place_of((*args, *kwargs.values()) if kwargs else args)
    block = func(args[0].block) if len(args) == 1 and not kwargs else met(func, args, kwargs, part, place)
    if block is NotImplemented:
        return NotImplemented  # Python asks the other operand: x == None
    if type(args[0]) is Rows:
        return made(block, args[0], block.dim() - place)
    return row_tensor(block, place, part)


rule(ELEMENTWISE)(elementwise)
rule(MOVES, *getters("real imag data"), moves=True)(elementwise)


@rule(torch.where, T.where)
def _where(func: Any, args: Any, kwargs: Any) -> Any:
    return elementwise(func, args, kwargs) if len(args) == 3 else NotImplemented  # of one: the places of True


@rule_if_alike("to type type_as", moves=True)
def _as_type(func: Any, args: Any, kwargs: Any) -> Any:
    """Of another tensor, only type and device are used."""
    rows = args[0]
    if type(rows) is Rows:
        rows.memory.pull()
    args, kwargs = mapped(lambda x: x.block if type(x) is Rows else x, (args, kwargs))
    out = func(*args, **kwargs)
    return made(out, rows) if type(rows) is Rows and isinstance(out, T) else out


@rule_if_alike(IN_PLACE)
def in_place(func: Any, args: Any, kwargs: Any) -> Any:
    part, place = place_of((*args, *kwargs.values()) if kwargs else args)
    rows = args[0] if args else None
    if type(rows) is not Rows or place != rows.place[1]:
        return NotImplemented
    if met(func, args, kwargs, part, place) is NotImplemented:
        return NotImplemented
    current().part(Counts).on_rows += 1
    rows.memory.wrote()
    return rows


@rule(ABOUT, *getters(ATTRIBUTES), moves=True)
def _about(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule_if_alike(OF_BLOCK, *getters(ATTRIBUTES_OF_BLOCK), moves=True)
def _of_block(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].block, *args[1:], **kwargs)


@rule("stride", moves=True)
def _stride(func: Any, args: Any, kwargs: Any) -> Any:
    return func(template(args[0], "meta"), *args[1:], **kwargs)


def template(rows: Rows, device: Any = None) -> torch.Tensor:
    """Return a whole tensor without values in the memory layout that it has in one process. Local."""
    num, of_rows = rows.block.shape[rows.dimension], rows.block.stride(rows.dimension)
    strides = [stride * rows.part.size // num if stride > of_rows else stride for stride in rows.block.stride()]
    return torch.empty_strided(rows.shape, strides, dtype=rows.dtype, device=device or rows.device)


@rule("new_zeros new_ones new_full new_empty new_tensor new_empty_strided", moves=True)
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    if type(args[0]) is not Rows or any(isinstance(value, Rows) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    return func(args[0].block.detach(), *args[1:], **kwargs)


# Random draws are those of one process: for the whole, on every rank.
@rule("randn_like rand_like randint_like", moves=True)
def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    return func(template(args[0]), *args[1:], **kwargs) if args and type(args[0]) is Rows else NotImplemented


@rule("detach_", moves=True)
def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0]
    rows.block, rows.cached = rows.block.detach(), None  # torch refuses `detach_` of views, which blocks may be
    return rows


@rule("empty_like", moves=True)
def _empty(func: Any, args: Any, kwargs: Any) -> Any:
    if not args or kwargs.get("requires_grad"):
        return NotImplemented
    return made(func(args[0].block, *args[1:], **kwargs), args[0])


@rule_of_rows("normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_ bernoulli_", moves=True)
def _drawn_in_place(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    if any(isinstance(value, T) for value in (*others, *kwargs.values())):
        return NotImplemented
    with torch.no_grad():
        drawn = func(template(rows), *others, **kwargs)
    rows.block.copy_(blocks.own(drawn, rows.dimension, rows.part))
    rows.memory.wrote()
    return rows


@rule_of_rows(torch.dropout, torch.feature_dropout, torch.dropout_, moves=True)
def _dropout(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    p, trains = argument(others, kwargs, 0, "p"), argument(others, kwargs, 1, "train")
    is_of_features = func is torch.feature_dropout and (rows.dimension or rows.part.outer > 1)
    if rows.block.is_complex() or (trains and p and (is_of_features or not 0 < p < 1)):
        return NotImplemented
    if not trains or not p:
        return made(func(rows.block, *others, **kwargs), rows)
    mask = _mask(func, rows, p)
    if func is not torch.dropout_:
        return made(rows.block * mask, rows)
    rows.block.mul_(mask)
    rows.memory.wrote()
    return rows


_ALIGNED_NUM = 16  # a kernel that loads several numbers at once begins at a multiple of at most as many


def offset_of_whole(rows: Rows) -> int:
    """Return the place in memory of the whole's first number in one process, modulo _ALIGNED_NUM. Local."""
    block = rows.block
    of_rows, num, first = max(1, block.stride(rows.dimension)), block.shape[rows.dimension], int(block.storage_offset())
    if of_rows == max(block.stride()):
        return first % of_rows % _ALIGNED_NUM  # the block may also be a part of the whole
    outer, rest = divmod(first, num * of_rows)
    return (outer * rows.part.size * of_rows + rest) % _ALIGNED_NUM


def _mask(func: Any, rows: Rows, p: float) -> torch.Tensor:
    """Return this rank's block of what dropout multiplies the whole by. Local."""
    is_dense = func is torch.dropout_ or (func is torch.dropout and rows.device.type == "cpu")
    draw = functools.partial(_zeros_and_ones if is_dense else _of_kernel, func, rows, p)
    made = current().part(blocks.State).mask(draw, rows)
    return made / (1 - p) if is_dense else made


def _zeros_and_ones(func: Any, rows: Rows, p: float) -> torch.Tensor:
    """Return the zeros and ones that torch draws for the whole on a CPU, and in place: as for a dense tensor. Local."""
    layout = _dense(rows.sizes, template(rows, "meta").stride())
    return torch.empty_strided(*layout, dtype=rows.dtype, device=rows.device).bernoulli_(1 - p)


def _of_kernel(func: Any, rows: Rows, p: float) -> torch.Tensor:
    """Return `func` of ones: a GPU's kernel draws by the strides and the address that its argument has. Local."""
    whole, first = template(rows, "meta"), offset_of_whole(rows)
    size = first + 1 + sum((num - 1) * stride for num, stride in zip(whole.shape, whole.stride()))
    made: torch.Tensor = func(rows.block.new_ones(size).as_strided(whole.shape, whole.stride(), first), p, True)
    return made


@functools.lru_cache(maxsize=1024)
def _dense(shape: Any, strides: Any) -> Any:
    """Return (shape, strides) of what `empty_like` makes of such a tensor. Local."""
    with torch._C.DisableTorchFunction():
        return shape, torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
