"""Numbers that carry the rows they are for, so that sums over batches, and their quotients, are those of one process.

`running += loss.item() * x.size(0)`: x has this rank's rows, `loss.item()` is the mean over the rows of all ranks. So
their product is multiplied by all rows instead. `running / seen`, where the program counted `seen += x.size(0)`, is
divided by all rows, and `running / len(data)` by what it says. Each class is a float or an int in all other respects.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

import torch

from ddpshim.job.job import current
from ddpshim.trainers.unedited.products import Sources

_Number = Union[int, float]
_CLOSE = 1e-3  # `seen + 1e-8` counts as `seen`
_MOST_DEPTH = 8  # of what is saved


class Rows(NamedTuple):
    """How many rows a number is for."""

    own: int  # as this rank's program counts them
    whole: int  # of all ranks

    def __add__(self, other: Any) -> Rows:
        return Rows(self.own + other.own, self.whole + other.whole)

    def __sub__(self, other: Any) -> Rows:
        return Rows(self.own - other.own, self.whole - other.whole)


class _Carries:
    """A number with its rows."""

    rows: Rows
    todays: _Number  # for tensors: what this rank's rows give

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(_plain(self)), (_plain(self),)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A loss may be divided by it: ddpshim expects that gradients depend on a rank's own rows.
        own = [each.todays if isinstance(each, _Carries) else each for each in args]
        return func(*own, **{name: getattr(each, "todays", each) for name, each in (kwargs or {}).items()})

    def __add__(self, other: Any) -> Any:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _sum(self, other, -1)

    def __mul__(self, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        number: Any = self
        return _carrying(_plain(number) * _plain(other), self.rows, self.todays * _plain(other), self)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        number: Any = self
        excess = _plain(other) - self.rows.own
        if isinstance(other, _Carries) or abs(excess) > _CLOSE or self.rows.own == self.rows.whole:
            return _plain(number) / _plain(other)
        if current().part(Sources).is_a_length(sys._getframe(1)):
            return _plain(number) / _plain(other)
        return _plain(number) / (self.rows.whole + excess)


class Total(_Carries, float):
    """A sum over rows, or a product of one with a number."""

    def __new__(cls, value: float, rows: Rows, todays: _Number) -> Total:
        self = super().__new__(cls, value)
        self.rows, self.todays = rows, todays
        return self


class Count(_Carries, int):
    """A count over rows."""

    def __new__(cls, value: int, rows: Rows, todays: _Number) -> Count:
        self = super().__new__(cls, value)
        self.rows, self.todays = rows, todays
        return self


class FloatCount(_Carries, float):
    """A count over rows that shows as an int. In 100.0 * count, Python asks a class of float first, but none of int."""

    def __new__(cls, value: int, rows: Rows, todays: _Number) -> FloatCount:
        self = super().__new__(cls, value)
        self.rows, self.todays = rows, todays
        return self

    def __repr__(self) -> str:
        return repr(int(self))

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)

    def __index__(self) -> int:
        return int(self)


class Mean(float):
    """A mean over the rows of a batch. Times this rank's number of rows, it is the total of all rows."""

    rows: Rows

    def __new__(cls, value: float, rows: Rows) -> Mean:
        self = super().__new__(cls, value)
        self.rows = rows
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (float(self),)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, _Carries) or not _is_number(other):
            return NotImplemented if not _is_number(other) else other * float(self)
        if type(other) is int and other == self.rows.own:
            return Total(float(self) * self.rows.whole, self.rows, float(self) * other)
        return Mean(float(self) * other, self.rows)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return Mean(float(self) / _plain(other), self.rows) if _is_number(other) else NotImplemented


class Tally:
    """What a number that is read is used for.

    `counts_as`: the class of a sum over the rows of `tensors`; None if the number is multiplied by rows.
    """

    def __init__(self, rows: Rows, counts_as: Optional[type] = None, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.rows, self.counts_as, self.tensors = rows, counts_as, tensors
        self.holds = False  # whether all ranks use it so

    def carrying(self, value: _Number, own: Callable[[], _Number]) -> Any:
        """Return `value`, the number of all ranks, with its rows; `own` returns this rank's."""
        if not self.holds:
            return value
        if self.counts_as is None:
            return Mean(value, self.rows)
        if self.counts_as is float and isinstance(value, int):
            return FloatCount(value, self.rows, own())
        return _carrying(value, self.rows, own())


def without_rows(value: Any, depth: int = _MOST_DEPTH) -> Any:
    """Return `value` with plain numbers, also in dicts, lists and tuples: torch.load refuses other classes. Local."""
    if isinstance(value, (_Carries, Mean)):
        return _plain(value)
    if type(value) not in (dict, list, tuple) or not depth:
        return value
    parts = [*value.values()] if type(value) is dict else [*value]
    plain = [without_rows(part, depth - 1) for part in parts]
    if all(new is old for new, old in zip(plain, parts)):
        return value
    return dict(zip(value, plain)) if type(value) is dict else type(value)(plain)


def _sum(one: Any, other: Any, sign: int) -> Any:
    if not _is_number(other):
        return NotImplemented
    rows, todays = one.rows, getattr(other, "todays", _plain(other))
    if isinstance(other, _Carries):
        rows = rows + other.rows if sign > 0 else rows - other.rows
    return _carrying(_plain(one) + sign * _plain(other), rows, one.todays + sign * todays, one, other)


def _carrying(value: _Number, rows: Rows, todays: _Number, *of: Any) -> _Carries:
    if isinstance(value, float):
        return Total(value, rows, todays)
    is_float = any(isinstance(each, FloatCount) for each in of)
    return FloatCount(value, rows, todays) if is_float else Count(value, rows, todays)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _plain(value: Any) -> Any:
    """Return `value` without what it carries."""
    return float(value) if isinstance(value, float) and not isinstance(value, FloatCount) else int(value)
