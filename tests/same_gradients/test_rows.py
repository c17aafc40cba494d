"""Each rule of row tensors equals the whole: results, arguments, generators and gradients, on 2 and 3 ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Callable
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import ddpshim
from ddpshim.rows import blocks, calls, gradients, rules
from ddpshim.rows.tensor import RULES, Rows, divided
from tests import row_cases, row_walk
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

T = torch.Tensor
D = torch.float64


class In:
    """A tensor with its dimension of rows; None for one that stays whole."""

    def __init__(self, tensor: T, rows: Any) -> None:
        self.tensor, self.rows = tensor, rows


def x(*shape: int, rows: Any = 0, dtype: torch.dtype = D, positive: bool = False) -> In:
    if dtype is torch.bool:
        return In(torch.rand(shape) > 0.5, rows)
    if dtype is torch.int64:
        return In(torch.randint(1, 5, shape), rows)
    made = torch.randn(shape, dtype=dtype)
    return In(made.abs() + 0.1 if positive else made, rows)


def w(*shape: int, **kwargs: Any) -> In:
    return x(*shape, rows=None, **kwargs)


def classes(*shape: int, num: int = 5, rows: Any = 0) -> In:
    return In(torch.randint(0, num, shape), rows)


def like(given: In, change: Callable[[T], T], rows: Any) -> In:
    """Return a view in another memory format."""
    return In(change(given.tensor), rows)


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    return function, args, kwargs


Calls = Iterator[tuple[Any, Any, Any]]


def broadcasting(n: int) -> Calls:
    for function in (torch.add, torch.maximum, torch.lt, T.__rsub__):
        pairs = [(x(n, 4), x(n, 4)), (x(n, 4), w(n, 4)), (w(n, 4), x(n, 4)), (x(n, 4), w(4)), (x(n, 4), w(1, 4))]
        pairs += [(x(n, 4), w(n, 1)), (x(n, 4), w()), (x(n, 4), w(3, n, 4)), (w(n), x(3, n, rows=1))]
        # As many columns as rows.
        pairs += [(x(n, n), w(n)), (x(n, n, rows=1), w(n)), (x(n, n, rows=1), w(n, 1)), (x(n, 4), w(n, n, 4))]
        pairs += [(x(n, 1), w(n)), (x(n, n), x(n, n, rows=1)), (x(n), x(n, n)), (x(1, n, rows=1), x(n, 1, rows=0))]
        pairs += [(x(3, n, 2, rows=1), x(n, 2)), (x(n, 4, dtype=torch.float32), w(n, 4))]
        pairs += [(x(n, 4, dtype=torch.int64), x(n, 4)), (like(x(4, n), T.t, 0), x(n, 4))]
        pairs += [(like(x(size, columns), lambda t: t.expand(n, 4), 0), w(n, 4)) for size, columns in ((n, 1), (1, 4))]
        yield from (call(function, *pair) for pair in pairs)
    for function in (T.add_, T.mul_, T.__isub__, T.copy_, T.clamp_min_):
        pairs = [(x(n, 4), w(n, 4)), (x(n, 4), x(n, 4)), (x(n, n), w(n)), (x(n, n), x(n, rows=0))]
        pairs += [(w(n, n), x(n, rows=0)), (like(x(4, n), T.t, 0), w(n, 4))]
        yield from (call(function, *pair) for pair in pairs)
    yield call(torch.where, x(n, 4, dtype=torch.bool), x(n, 4), 0.0)
    yield call(torch.where, w(n, 1, dtype=torch.bool), x(n, 4), w(4))
    yield call(lambda c, a, b: torch.where(condition=c, input=a, other=b), x(n, 4, dtype=torch.bool), x(n, 4), x(n, 4))
    yield call(torch.where, x(n, 4, dtype=torch.bool))
    yield call(torch.lerp, x(n, 4), x(n, 4), w(n, 1))
    yield call(torch.addcmul, x(n, 4), x(n, 4), w(n, 1), value=2)
    yield call(torch.clamp, x(n, 4), min=w(4), max=w(n, 1))
    yield call(torch.add, x(n, 4), w(n, 4), alpha=2)
    yield call(lambda a, b: torch.add(input=a, other=b), x(n, 4), w(n, 4))
    yield call(lambda a: torch.relu(input=a), x(n, 4))
    yield call(lambda a: torch.special.polygamma(n=1, input=a), x(n, 4, positive=True))
    yield call(T.masked_fill, x(n, 4), w(n, 1, dtype=torch.bool), 1.0)
    yield call(T.masked_fill_, x(n, 4), x(n, 4, dtype=torch.bool), 1.0)
    yield call(lambda a: (a == None, a != None, a in [1, "a"][1:]), x(n, 4))  # noqa: E711
    yield call(T.__ipow__, x(n, 4), None)
    yield call(lambda a: ((a * 2).detach_(), a.detach().detach_()), x(n, 4))
    yield call(T.type, x(n, 4))
    yield call(T.type, x(n, 4), torch.float32)
    yield call(T.to, x(n, 4), w(3, dtype=torch.float32))
    yield call(T.to, w(3, dtype=torch.float32), x(n, 4))
    yield call(T.type_as, x(n, 4), w(5, 5, dtype=torch.float32))
    yield call(T.to, x(n, 4), dtype=torch.float32, copy=True)
    yield call(torch.complex, x(n, 4), x(n, 4))
    yield call(lambda a: (a.real, a.imag.mul_(2), a.conj() * 1, a.abs()), x(n, 4, dtype=torch.complex128))


def reductions(n: int) -> Calls:
    for function in (torch.sum, T.mean, torch.logsumexp, torch.std, torch.median, torch.argmax):
        for dim in (0, 1, 2, -1, -2):
            yield call(function, x(n, 4, 3), dim)
            yield call(function, x(4, n, 3, rows=1), dim, keepdim=True)
            yield call(function, x(4, 3, n, rows=2), dim=dim)
        yield call(function, x(n, 4, 3), axis=0)
        yield call(function, x(n, 4, 3), axis=1, keepdims=True)
    for function in (torch.sum, torch.mean, torch.amax, torch.var, torch.norm, torch.count_nonzero, torch.linalg.norm):
        for dims in ((1, 2), (0, 1), [-1], (0,)):
            yield call(function, x(n, 4, 3), dim=dims)
    over = F.softmax, torch.log_softmax, torch.cumsum, torch.cummax, torch.sort, torch.argsort, F.softmin, F.glu
    for function in over:
        for dim in (0, 1, -1):
            yield call(function, x(n + n % 2, 4), dim=dim)
            yield call(function, x(2, n + n % 2, 4, rows=1), dim=dim)
    yield call(torch.sort, x(n, 4), axis=0)
    yield call(T.sort, x(4, n, rows=1), descending=True)
    yield call(torch.topk, x(4, n, rows=1), 2)
    yield call(torch.topk, x(4, n, rows=1), 2, dim=0)
    for function in (T.max, T.min):
        yield call(function, x(n, 4))
        yield call(function, x(n, 4), 0)
        yield call(function, x(n, 4), dim=1, keepdim=True)
        yield call(function, x(n, 4), w(4))
        yield call(function, x(n, 4), other=x(n, 4))
    for function in (torch.all, torch.any, T.all, T.any):
        for given in (x(n, 4, dtype=torch.bool), x(n, 4), w(n, 4, dtype=torch.bool)):
            yield call(function, In(given.tensor, 0))
            yield call(function, In(given.tensor * 0, 0))
            yield call(function, In(given.tensor, 0), 0)
            yield call(function, In(given.tensor, 0), dim=1)
    yield call(torch.quantile, x(n, 4), 0.3, 1)
    yield call(torch.quantile, x(n, 4), w(3, positive=True).tensor.clamp(max=1), 1)
    yield call(torch.norm, x(n, 4), 1, 1)
    yield call(torch.flip, x(n, 4), (0, 1))
    yield call(T.flip, x(2, n, 4, rows=1), 0, 2)
    yield call(T.flip, x(n, 4), dims=(0,))
    yield call(T.count_nonzero, x(n, 4), 1, 0)
    yield call(T.var, x(n, 4, 3), 1, 2)
    yield call(torch.roll, x(n, 4), 1)
    yield call(torch.roll, x(n, 4), 1, 1)
    yield call(torch.roll, x(n, 4), (1, 2), (0, 1))
    yield call(torch.diff, x(n, 4))
    yield call(torch.diff, x(n, 4), dim=0)
    yield call(torch.diff, x(n, 4), prepend=w(n, 1))
    yield call(torch.fft.rfft, x(n, 4), dim=1)
    yield call(torch.fft.fft, x(n, 4), dim=0)
    yield call(torch.fft.fft2, x(n, 4, 4))
    for function in (torch.fft.fftn, torch.fft.ifftn, torch.fft.rfftn, torch.fft.irfftn):
        yield call(function, x(n, 4, 4))
        yield call(function, x(n, 4, 4), dim=(1, 2))
    yield call(torch.nanquantile, x(n, 4), 0.3, dim=1)
    yield call(torch.aminmax, x(n, 4), dim=1)
    yield call(torch.aminmax, x(n, 4), dim=0)
    yield call(lambda t: torch.linalg.cholesky(t @ t.mT + torch.eye(4, dtype=D)), x(n, 4, 4))
    for function in (torch.linalg.det, torch.linalg.inv, torch.linalg.svdvals, torch.slogdet, torch.triu, T.tril):
        yield call(function, x(n, 4, 4))
        yield call(function, x(2, n, 4, 4, rows=1))
        yield call(function, x(n, n, rows=0))
        yield call(function, x(n, n, rows=1))
    yield call(F.cosine_similarity, x(n, 4), w(n, 4))
    yield call(F.cosine_similarity, x(n, 1, 3), w(1, n, 3), -1)
    yield call(F.cosine_similarity, x(n, 4), w(n, 4), dim=0)
    yield call(F.pairwise_distance, x(n, 4), w(n, 4), keepdim=True)
    yield call(F.pairwise_distance, x(n), w(n))
    yield call(torch.linalg.cross, x(n, 3), w(1, 3))
    yield call(torch.linalg.cross, x(n, 4, 3), w(n, 1, 3), dim=-1)
    yield call(torch.cross, x(3, n, rows=1), w(3, n))
    yield call(torch.linalg.vecdot, x(2, n, 3, rows=1), w(n, 3))
    yield call(F.normalize, x(n, 4), dim=0)
    yield call(torch.view_as_complex, x(n, 4, 2))
    yield call(torch.view_as_real, x(n, 4, dtype=torch.complex128))


def shapes(n: int) -> Calls:
    targets = [(n * 3, 4), (n, 12), (-1,), (n, 2, 6), (3, -1), (n, -1, 2), (4, 3, n), (2, -1), (n, 1, 12), (1, n, 12)]
    for shape in targets:
        yield call(T.reshape, x(n, 3, 4), shape)
        yield call(T.view, x(n, 3, 4), *shape)
        yield call(T.reshape, x(3, n, 4, rows=1), shape)
        yield call(T.reshape, x(3, 4, n, rows=2), *shape)
        yield call(T.reshape, like(x(4, n, 3), lambda t: t.permute(1, 2, 0), 0), shape)
    for shape in ((n, 3, 4), (3, n, 4), (n * 3, 4), (-1,), (3 * n * 4, 1)):
        yield call(lambda t, s: t.flatten(0, 1).mul(2).reshape(s), x(3, n, 4, rows=1), shape)
    yield call(T.reshape, x(2 * n, 4), (2, n, 4))
    yield call(T.reshape, x(n, 0), (0, n))
    yield call(T.reshape, x(0, n, 4, rows=1), (n, 0, 4))
    yield call(torch.reshape, x(n, 4), shape=(-1, 2))
    yield call(torch.flatten, x(n, 3, 4), 1)
    yield call(T.flatten, x(3, n, 4, rows=1), end_dim=1)
    yield call(T.unflatten, x(n, 12), 1, (3, -1))
    yield call(T.unflatten, x(n * 3, 2), 0, (3, n))
    yield call(torch.unflatten, x(n, 12), dim=-1, sizes=(3, 4))
    yield call(torch.ravel, x(n, 4))
    yield call(T.view_as, x(n, 4), w(n, 2, 2))
    yield call(T.view, x(n, 4), torch.int64)
    for rows in range(3):
        shape = [2, 3, 4]
        shape[rows] = n
        for function in (
            lambda t: t.transpose(0, 2),
            lambda t: t.permute(2, 0, 1),
            lambda t: t.movedim(0, -1),
            lambda t: torch.movedim(t, source=(0, 1), destination=(1, 2)),
            lambda t: t.unsqueeze(1).unsqueeze(-1).squeeze(),
            lambda t: t.mT,
            lambda t: t.unsqueeze(0).expand(5, -1, -1, -1) * 1,
            lambda t: t.repeat(1, 2, 3),
            lambda t: t.repeat(2, 1, 1, 1),
            lambda t: t.tile(2),
            lambda t: t.repeat_interleave(2, dim=rows),  # noqa: B023
            lambda t: t.repeat_interleave(3, 1),
            lambda t: t.repeat_interleave(2),
            lambda t: t.repeat(2, 1, 2).reshape(-1),
            lambda t: t.repeat_interleave(2, 0).reshape(t.shape[0], -1),
            lambda t: torch.broadcast_tensors(t, t[..., :1], t[:1]),
            lambda t: t[:, :, None].expand_as(t[:, :, None]),
            lambda t: (t.narrow(1, 0, 2), t.select(2, 1), t.unbind(1), t.chunk(2, 2), t.split(2, 0)),
            lambda t: (torch.split(t, [1, t.shape[1] - 1], dim=1), torch.tensor_split(t, 2, dim=-1)),
            lambda t: t.chunk(2, axis=1),
            lambda t: torch.index_select(t, 1, torch.tensor([1, 0, 1])),
            lambda t: t.unfold(1, 2, 1),
            lambda t: torch.cat([t, t * 2], 1),
            lambda t: torch.cat(tensors=[t, torch.ones(t.shape, dtype=D)], dim=0),
            lambda t: torch.cat([t, torch.ones(t.shape, dtype=D)], axis=2),
            lambda t: torch.stack([t, torch.ones(t.shape, dtype=D)], 1),
            lambda t: torch.stack([t, t], -1),
            lambda t: (torch.vstack([t, t]), torch.hstack([t, t])),
        ):
            yield call(function, x(*shape, rows=rows))
    yield call(torch.stack, [x(n, 4), w(n, 4)], 5)
    yield call(torch.concat, [x(n, 4), w(n, 3)], 1)
    yield call(torch.concatenate, [x(n, 4), w(n, 3)], dim=-1)
    yield call(torch.split_with_sizes, x(n, 4), [1, 3], 1)
    yield call(torch.split_with_sizes, x(n, 4), [1, n - 1], 0)
    yield call(torch.cat, [x(n, 4), w(0)], 1)


def indices(n: int) -> Calls:
    picks: list[Any] = [
        *(0, -1, slice(None), slice(1, 3), slice(None, None, 2), None, ..., [1, 0], torch.tensor([1, 0, 1]), True),
        *((slice(None), 1), (slice(None), slice(1, 3)), (..., 0), (slice(None), None, 1), (slice(0, n), 2)),
        *((slice(None), [0, 1]), (slice(None), torch.tensor([[1, 0]])), (..., torch.tensor([1])), (1, ..., 0)),
        *((slice(None), torch.tensor([True, False, True])), (slice(None), 0, torch.tensor([1, 0]))),
        *((slice(None), [0, 1], [1, 0]), (slice(None), torch.tensor(1)), (slice(None), slice(None), torch.tensor([1]))),
        *((slice(None), 0, None, [1, 0]), (slice(None), torch.rand(3, 4) > 0.5), (0, slice(None), [1])),
        *((..., None), torch.rand(n) > 0.5, slice(0, n - 1), (slice(n, None), 1)),
        *((slice(None), slice(None, None, 2), 1), (slice(0, 2 * n), 1), (slice(-n, None), 1)),
    ]
    for pick in picks:
        yield call(lambda t, i=pick: t[i], x(n, 3, 4))
        yield call(lambda t, i=pick: t[i], x(3, 4, n, rows=2))
        for value in (2.0, w(), w(1), w(4)):
            yield call(_set, x(n, 3, 4), pick, value)
    yield call(_set, x(n, 3, 4), (slice(None), 1), w(n, 4))
    yield call(_set, x(n, 3, 4), (slice(None), 1), x(n, 4))
    yield call(_set, x(n, 3, 4), (slice(None), 1), w(1, n, 4))
    yield call(_set, x(n, n, 4), (slice(None), 1), w(n, 4))
    yield call(_set, x(n, n, 4), slice(None), x(n, 4))
    yield call(_set, w(n, 3, 4), (slice(None), 1), x(n, 4))
    yield call(_set, x(n, 3), x(n, 3, dtype=torch.bool), 1.0)
    yield call(torch.gather, x(n, 4), 1, classes(n, 2, num=4))
    yield call(torch.gather, x(n, 4), 1, classes(n, 2, num=4, rows=None))
    yield call(torch.gather, x(n, 4), 0, classes(n, 4, num=n))
    yield call(torch.gather, x(n, 4), 1, classes(2, 4, num=4, rows=None))
    yield call(torch.take_along_dim, x(n, 4), classes(n, 1, num=4), dim=1)
    yield call(torch.take_along_dim, x(n, 4), classes(1, 2, num=4, rows=None), 1)
    for scatter in (torch.scatter, T.scatter_, torch.scatter_add, T.scatter_add_):
        yield call(scatter, x(n, 4), 1, classes(n, 1, num=4), x(n, 4))
        yield call(scatter, x(n, 4), 1, classes(n, 1, num=4, rows=None), w(n, 4))
        yield call(scatter, x(n, n), 0, classes(n, n, num=1), x(n, n))
    yield call(torch.scatter, x(n, 4), 1, classes(n, 1, num=4), value=1.0)
    yield call(torch.scatter_reduce, x(n, 4), 1, classes(n, 4, num=4), x(n, 4), "sum")
    yield call(torch.scatter_reduce, x(n, 4), 0, classes(n, 4, num=n), x(n, 4), reduce="sum", include_self=False)
    yield call(lambda i: torch.zeros(len(i), 5, dtype=D).scatter_(1, i.unsqueeze(1), 1.0), classes(n))
    whole, places = w(n + 2, 4), In(torch.randperm(n + 2)[:n], 0)  # rows only as source or as expanded index
    for change in (
        lambda t, i, a: t.clone().scatter_add_(0, i[:, None].expand(-1, 4), a),
        lambda t, i, a: t.clone().scatter_(0, i[:, None].expand(-1, 4), a),
        lambda t, i, a: t.clone().scatter_reduce_(0, i[:, None].expand(-1, 4), a, "amax"),
        lambda t, i, a: t.clone().index_add_(0, i, a[:, :1].expand(-1, 4), alpha=2),
        lambda t, i, a: t.clone().index_reduce_(0, i, a, "mean"),
        lambda t, i, a: t.clone().index_copy_(0, i, a).index_fill_(0, i[:2], 3.0),
        lambda t, i, a: t.clone().index_put_((i,), a[:, :1].expand(-1, 4), accumulate=True),
        lambda t, i, a: t.clone().put_(i[:, None].expand(-1, 4), a, accumulate=True),
        lambda t, i, a: t.clone().masked_scatter_(t > 0, a[:, :1].expand(-1, 8)),
        lambda t, i, a: torch.add(a.detach(), 1, out=torch.empty(0, dtype=D)),
        lambda t, i, a: torch.index_select(t.detach(), 0, i, out=a.detach().clone()),
    ):
        yield call(change, whole, places, x(n, 4))
    yield call(_write_by_rows, whole, places, x(n, 4))
    yield call(F.one_hot, classes(n), 6)
    yield call(F.one_hot, classes(n))
    yield call(F.one_hot, classes(n, 3, num=4), num_classes=5)


def _set(t: Any, index: Any, value: Any) -> Any:
    t[index] = value
    return t * 1


def products(n: int) -> Calls:
    for product in (torch.matmul, T.__matmul__, T.__rmatmul__):
        pairs = [(x(n, 4), w(4, 4)), (x(n, 4), w(4)), (w(4, 4), x(4, n, rows=1)), (x(n, 4), x(4, n, rows=1))]
        pairs += [(x(n, n), w(n, n)), (x(n, n, rows=1), w(n, n)), (x(n), w(n, n)), (w(n, n), x(n))]
        pairs += [(w(n), x(n)), (x(n), w(n)), (x(n, 4, 4), w(n, 4, 4)), (x(n, 4, 4), w(4, 4))]
        pairs += [(x(n, 4, 4), x(n, 4, 4)), (x(n, 4, 4), w(4)), (w(4), x(n, 4, 4)), (x(n, 4, 4), w(1, 4, 4))]
        pairs += [(x(n, 4, 4), w(3, 1, 4, 4)), (x(n, 1, 4, 4), w(3, 4, 4)), (w(4, 4), x(n, 4, 3))]
        pairs += [(x(4, n, 4, rows=1), w(4, 4)), (w(4, 4), x(3, 4, n, rows=2))]
        yield from (call(product, *pair) for pair in pairs)
    yield call(torch.mv, x(n, 4), w(4))
    yield call(torch.bmm, x(n, 4, 4), mat2=w(n, 4, 4))
    yield call(F.linear, x(n, 4), w(5, 4), w(5))
    yield call(F.linear, x(n, 3, 4), w(5, 4), bias=w(5))
    yield call(F.linear, x(3, n, rows=1), w(5, n), w(5))
    yield call(torch.addmm, w(n, 5), x(n, 4), w(4, 5), beta=2)
    yield call(torch.addmm, x(n, 5), x(n, 4), w(4, 5))
    yield call(torch.addmm, w(n), x(n, 4), w(4, n))
    yield call(torch.baddbmm, w(n, 4, 4), x(n, 4, 4), w(n, 4, 4))
    yield call(F.bilinear, x(n, 3), w(n, 4), w(5, 3, 4), w(5))
    yield call(torch.cdist, x(n, 4), w(6, 4))
    yield call(torch.cdist, x(n, 4), w(3, 6, 4))
    yield call(torch.cdist, x(n, 5, 4), w(n, 6, 4))
    yield call(lambda a, b: torch.cdist(x1=a, x2=b), x(n, 4), w(6, 4))
    equations = ["bi,ij->bj", "bi,ij->jb", "bi,bi->b", "bi,ij->j", "ib,ij->bj", "bi,bj->bij", "bi,ij", "...i,ij->...j"]
    for equation in equations:
        rows = int(equation.startswith("ib"))
        first = x(3, n, rows=1) if rows else x(n, 3)
        yield call(torch.einsum, equation, first, w(n, 3) if ",b" in equation else w(3, 3))
    yield call(torch.einsum, "bhqd,bhkd->bhqk", x(n, 2, 3, 4), x(n, 2, 3, 4))
    yield call(torch.einsum, "...ij,...j->...i", x(n, 4, 3), w(3))
    yield call(torch.einsum, "...ij,...j->...i", x(n, 4, 3), x(n, 3))
    yield call(torch.einsum, "...ij,...jk->...ik", x(2, n, 4, 3, rows=1), w(n, 3, 4))
    yield call(torch.einsum, "...ij,...jk->ik...", x(n, 4, 3), w(2, 1, 3, 4))
    yield call(torch.einsum, "...i->i", x(n, 3))
    yield call(torch.einsum, "bi,bi->b", x(n, 3), w(1, 3))
    yield call(torch.einsum, "bi,jb->ij", x(n, 3), w(4, n))
    for mask in (None, w(3, 3, dtype=torch.bool), w(n, 1, 3, 3), w(n, 1, 3, 3, dtype=torch.bool)):
        if mask is not None and mask.tensor.dtype is torch.bool:
            mask = In(mask.tensor | torch.eye(3, dtype=torch.bool), None)
        yield call(F.scaled_dot_product_attention, x(n, 2, 3, 4), x(n, 2, 3, 4), w(n, 2, 3, 4), mask)
    yield call(F.scaled_dot_product_attention, x(n, 2, 3, 4), x(n, 2, 3, 4), x(n, 2, 3, 4), is_causal=True)
    yield call(F.scaled_dot_product_attention, x(2, n, 3, 4, rows=1), w(2, n, 3, 4), w(2, n, 3, 4))
    yield call(F.scaled_dot_product_attention, x(2, 3, n, 4, rows=2), x(2, 3, n, 4, rows=2), x(2, 3, n, 4, rows=2))
    yield call(F.scaled_dot_product_attention, x(n, 2, 3, 4), x(n, 2, 3, 4), w(n, 2, 3, 4), dropout_p=0.5)
    for options in ({"is_causal": True}, {"attn_mask": w(3, 3)}, {"attn_mask": w(n, 1, 1, 3), "scale": 0.3}):
        yield call(F.scaled_dot_product_attention, *(x(n, 2, 3, 4) for _ in range(3)), dropout_p=0.5, **options)


def in_layers(n: int) -> Calls:
    channels_last = like(x(n, 4, 6, 6), lambda t: t.contiguous(memory_format=torch.channels_last), 0)
    for images in (x(n, 4, 6, 6), channels_last, x(4, n, 6, 6, rows=1)):
        if images.rows == 0:
            yield call(F.conv2d, images, w(4, 4, 3, 3), w(4), padding=1)
            yield call(F.conv_transpose2d, images, w(4, 2, 3, 3), stride=2)
            yield call(F.group_norm, images, 2, w(4), w(4))
            yield call(F.batch_norm, images, w(4), w(4, positive=True), None, None, False)
            yield call(F.instance_norm, images)
            yield call(lambda t: F.batch_norm(t, None, None, training=True), images)
            yield call(_batch_norm, images)
            yield call(F.pixel_shuffle, images, 2)
            yield call(F.unfold, images, 3)
        else:
            yield call(F.conv2d, images, w(4, n, 3, 3), w(4), padding=1)
        yield call(F.max_pool2d, images, 2)
        yield call(F.max_pool2d, images, 2, return_indices=True)
        yield call(F.avg_pool2d, images, 3, stride=2)
        yield call(F.adaptive_avg_pool2d, images, 1)
        yield call(F.interpolate, images, scale_factor=2)
        yield call(F.interpolate, images, size=(5, 5), mode="bilinear", align_corners=False)
        yield call(F.pad, images, (1, 1, 2, 2), mode="reflect")
        yield call(F.pad, images, (0, 0, 0, 0, 1, 1))
        yield call(F.pad, images, (0, 0, 0, 0, 0, 0, 1, 1))
        yield call(F.layer_norm, images, (6, 6), w(6, 6))
        yield call(F.layer_norm, images, images.tensor.shape[1:])
        yield call(F.dropout, images, 0.3)
        yield call(F.dropout, images, 0.3, False)
        yield call(F.dropout2d, images, 0.3)
        yield call(F.alpha_dropout, images, 0.3, True)
        yield call(torch.randn_like, images)
        yield call(T.uniform_, images)
        yield call(T.bernoulli_, images, 0.4)
        yield call(lambda t: (torch.rand_like(t), t.is_contiguous(), t.new_zeros(3), torch.zeros_like(t)), images)
    yield call(F.conv1d, x(n, 4, 6), w(3, 4, 3))
    yield call(F.conv1d, x(n, 6), w(3, n, 3))  # no batch
    yield call(F.conv3d, x(n, 2, 4, 4, 4), w(3, 2, 2, 2, 2))
    yield call(lambda t, k: F.conv2d(t.flatten(0, 1), k), x(3, n, 4, 5, 5, rows=1), w(4, 4, 3, 3))
    yield call(lambda t: _batch_norm(t.flatten(0, 1)), x(3, n, 4, 5, rows=1))
    yield call(lambda t: F.group_norm(t.flatten(0, 1), 2), x(3, n, 4, 5, rows=1))
    yield call(lambda t: F.dropout(t.flatten(0, 1), 0.5), x(3, n, 4, rows=1))
    yield call(lambda t: F.dropout(t.transpose(0, 1), 0.5), x(3, n, 4, rows=1))
    yield call(lambda t: torch.randn_like(t.transpose(0, 1)), x(n, 4))
    yield call(lambda t: torch.randn_like(t[:, 1:]), x(n, 4))
    yield call(lambda t: F.dropout(t, 0.5, inplace=True), x(n, 4))
    yield call(F.max_pool1d, x(n, 4, 6), 2)
    volumes = x(n, 2, 4, 4, 4)
    for function in (F.max_pool3d, F.avg_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d):
        yield call(function, volumes, 2)
    yield call(F.max_pool3d, volumes, 2, return_indices=True)
    yield call(F.adaptive_max_pool2d, x(n, 2, 4, 4), 2, return_indices=True)
    yield call(F.conv_transpose1d, x(n, 4, 6), w(4, 3, 3))
    yield call(F.conv_transpose3d, volumes, w(2, 3, 2, 2, 2))
    for mode in ("nearest", "nearest-exact", "trilinear"):
        yield call(F.interpolate, volumes, scale_factor=2, mode=mode)
    yield call(torch._C._nn.reflection_pad2d, x(n, 2, 4, 4), (1, 1, 1, 1))
    yield call(torch._C._nn.replication_pad2d, x(n, 2, 4, 4), (1, 1, 1, 1))
    yield call(torch.grid_sampler_2d, x(n, 2, 5, 5), x(n, 3, 3, 2), 0, 0, False)
    yield call(torch.grid_sampler_3d, volumes, x(n, 3, 3, 3, 3), 0, 0, False)
    yield call(F.channel_shuffle, x(n, 4, 2, 2), 2)
    yield call(F.pixel_unshuffle, x(n, 4, 2, 2), 2)
    if hasattr(F, "rms_norm"):
        yield call(F.rms_norm, x(n, 4), (4,), w(4))
        yield call(F.rms_norm, x(n, 4), (n, 4))
    yield call(lambda t: (t.new_full((2,), 1.0), t.new_empty_strided((2,), (1,)).shape), x(n, 4))
    yield call(lambda t: (t.ndimension(), t.nelement(), torch.is_tensor(t), len(t), t.size(0), t.stride()), x(n, 4))
    yield call(F.fold, x(n, 12, 4), (4, 4), (2, 2), stride=2)
    yield call(F.prelu, x(4, n, 3, rows=1), w(n))
    yield call(F.rrelu, x(n, 4), training=True)
    yield call(F.grid_sample, x(n, 2, 5, 5), x(n, 3, 3, 2), align_corners=False)
    yield call(F.grid_sample, w(n, 2, 5, 5), x(n, 3, 3, 2), align_corners=False)
    yield call(torch.bucketize, x(n, 4), torch.linspace(-1, 1, 5, dtype=D))
    yield call(F.embedding, classes(n, 3), w(5, 4), padding_idx=1)
    yield call(F.embedding, classes(4, rows=None), x(n, 4))
    yield call(F.embedding_bag, classes(n, 3), w(5, 4))
    layers: Any = {"num_layers": 2, "bidirectional": True}
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        yield call(_recurrent(kind, batch_first=True, **layers), x(n, 3, 4))
        yield call(_recurrent(kind, **layers), x(3, n, 4, rows=1))
        yield call(_recurrent(kind, **layers), x(n, 3, 4))
        yield call(_recurrent(getattr(torch.nn, f"{kind.__name__}Cell")), x(n, 4))
    yield call(_recurrent(torch.nn.RNN, nonlinearity="relu", batch_first=True, **layers), x(n, 3, 4))
    yield call(_recurrent(torch.nn.RNNCell, nonlinearity="relu"), x(n, 4))
    for reduction in ("none", "mean", "sum"):
        logits = F.binary_cross_entropy_with_logits
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, logits):
            yield call(loss, x(n, 4), w(n, 4), reduction=reduction)
            yield call(loss, x(n, 4), x(n, 4), reduction=reduction)
        yield call(F.cross_entropy, x(n, 5), classes(n), reduction=reduction)
        yield call(F.cross_entropy, x(n, 5, 3), classes(n, 3, rows=None), w(5, positive=True), reduction=reduction)
        yield call(F.cross_entropy, x(n, 5), w(n, 5, positive=True), reduction=reduction, label_smoothing=0.1)
        yield call(F.nll_loss, w(n, 5), classes(n), reduction=reduction)
        yield call(F.cross_entropy, x(n), w(n, positive=True), reduction=reduction)
    yield call(F.mse_loss, x(n, 1), w(n, 1), reduction="none")
    yield call(lambda a: F.binary_cross_entropy(a.sigmoid(), torch.ones(a.shape, dtype=D), reduction="none"), x(n, 4))


def _batch_norm(t: Any) -> Any:
    mean, var = torch.zeros(4, dtype=D), torch.ones(4, dtype=D)
    return F.batch_norm(t, mean, var, training=True), mean, var


def _recurrent(kind: Any, **options: Any) -> Callable[..., Any]:
    def run(t: Any) -> Any:
        row_cases.seed(0)
        return kind(4, 3, dtype=D, **options)(t)

    return run


def _loss(x: T, y: T) -> T:
    return F.mse_loss(F.gelu(x), y) + F.softmax(x, dim=-1).square().mean()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted_before = torch.jit.script(_loss)


def _other_loss(x: T, y: T) -> T:
    return F.smooth_l1_loss(F.layer_norm(x, [4]), y.cumsum(0)) + torch.einsum("ij,kj->ik", x, y).std()


class _Scaled:
    """A class that TorchScript compiles."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def of(self, x: T) -> T:
        return F.elu(x) * self.factor - x.max()

    def change(self, x: T) -> T:
        return x.mul_(self.factor)


def scripts(n: int) -> Calls:
    """TorchScript, whose operations are not seen: compiled before and after row tensors are there."""

    class Module(torch.jit.ScriptModule):
        @torch.jit.script_method  # type: ignore[untyped-decorator]
        def forward(self, x: T) -> T:
            return F.relu(x) - x.mean(0)

    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Softmax(0)).double()
    for function in (_scripted_before, torch.jit.script(_other_loss)):
        yield call(function, x(n, 4), x(n, 4))
        yield call(function, w(n, 4), x(n, 4))
    for module in (torch.jit.script(net), torch.jit.trace(net, torch.randn(5, 4, dtype=D)), Module()):
        yield call(module, x(n, 4))
        yield call(module.forward, x(n, 4))
    yield call(torch.jit.trace(lambda a: F.gelu(a) / a.sum(), torch.randn(2, 4, dtype=D)), x(n, 4))
    torch.jit.script(_Scaled)
    scaled = torch.jit.script(_Scaled(2.0))
    yield call(lambda a: (scaled.of(a), scaled.change(a * 1)), x(n, 4))


def aliases(n: int) -> Calls:
    """Programs that write into one of several tensors that share memory."""

    def write(t: Any, view: Any, changes_view: bool) -> Any:
        other = view(t)
        (other if changes_view else t).mul_(3)
        after = other + 1, t + 1
        (t if changes_view else other).add_(1)
        return (*after, other * 2, t * 2)

    views: list[Any] = [
        *(lambda t: t[1:3], lambda t: t[:, 1], lambda t: t.view(-1), lambda t: t.t(), lambda t: t[0], lambda t: t[::2]),
        *(lambda t: t.detach(), lambda t: t.unsqueeze(0), lambda t: t.narrow(0, 1, 2), lambda t: t.chunk(2)[1]),
        *(lambda t: t.view(-1)[3:5], lambda t: t[1:3][:, 1], lambda t: t.t()[1], lambda t: t.diagonal()),
        *(lambda t: t.contiguous(), lambda t: t.reshape(-1), lambda t: t.t().reshape(-1), lambda t: t.to(D)),
        lambda t: t.data,
        *(lambda t: t.unbind(1)[2], lambda t: t.expand(2, *t.shape)[1], lambda t: t.flatten(), lambda t: t.clone()),
        *(lambda t: t.as_strided((2, 2), (1, 2)), lambda t: t.unfold(1, 2, 1)[..., 0], lambda t: t.view(-1, 2).t()),
    ]
    for view in views:
        for changes_view in (False, True):
            yield call(write, x(n, 4), view, changes_view)
            yield call(write, x(4, n, rows=1), view, changes_view)
    yield call(_write_the_original, w(n, 4), x(n, 1))
    yield call(lambda t: (t.numpy().__setitem__((0, 0), 5.0), t * 1), x(n, 4))
    yield call(lambda t: (t.add_(1).mul_(t), t.zero_(), t.fill_(3)), x(n, 4))


def _write_by_rows(whole: Any, places: Any, values: Any) -> Any:
    other = whole.clone()
    other[places] += values
    first = other * 1
    other[places[:, None].expand(-1, 2), places[:1]] = values[:, :1].expand(-1, 2)
    other[1:3] = values[0]
    return first, other


def _write_the_original(original: Any, other: Any) -> Any:
    """Use rows of a tensor that the program changes."""
    rows = divided(original) if isinstance(other, Rows) else original
    view = rows[:, 1:]
    original.add_(other.detach().sum())
    first = rows * 2
    rows.mul_(3)
    second = original * 1
    original[0] = 7
    view.sub_(1)
    return first, second, rows * 1, view * 1, original * 1


FAMILIES = {f.__name__: f for f in (broadcasting, reductions, shapes, indices, products, in_layers, scripts, aliases)}


def _problem(function: Any, args: Any, kwargs: Any, **options: Any) -> Any:
    """Compare a call whose tensors are In."""
    rows: list[Any] = []

    def opened(value: Any) -> Any:
        if isinstance(value, In):
            rows.append(value.rows)
            return value.tensor
        if isinstance(value, list) and any(isinstance(one, In) for one in value):
            return [opened(one) for one in value]
        if isinstance(value, tuple):
            return tuple(opened(one) for one in value)
        if isinstance(value, T):
            rows.append(None)
        return value

    args = tuple(opened(value) for value in args)
    kwargs = {name: opened(value) for name, value in kwargs.items()}
    dims = iter(rows)
    return row_cases.problem(function, args, kwargs, lambda _: next(dims), **options)


def problems_of(name: str, num_rows: int) -> list[str]:
    """Return the problems of a family of calls; each call has gradients on 2 ranks and mirrors on 3, or the reverse."""
    warnings.simplefilter("ignore")
    row_cases.seed(0)
    found, num = [], 0
    with calls.installed():
        for function, args, kwargs in FAMILIES[name](num_rows):
            num += 1
            texts = [x.tensor.shape if isinstance(x, In) else x for x in (*args, *kwargs.items())]
            keeps_mirrors = (num + ddpshim.world().world_size) % 2 == 0
            options = {"keeps_mirrors": keeps_mirrors, "needs_gradients": not keeps_mirrors}
            differs = _problem(function, args, kwargs, **options)
            if differs:
                found.append(f"{num} {getattr(function, '__name__', function)} {texts} {options}: {differs}")
    return found


def _all_families(num_rows: int) -> dict[str, list[str]]:
    return {name: found for name in FAMILIES if (found := problems_of(name, num_rows))}


def _every_function(num_rows: int) -> tuple[dict[str, list[str]], dict[str, str], set[str]]:
    """Return problems of the families, and of torch's functions; and names of those whose rule is not used."""
    warnings.simplefilter("ignore")
    used = set()

    def noting(function: Any, rule: Any) -> Any:
        def noted(*args: Any) -> Any:
            out = rule(*args)
            if out is not NotImplemented:
                used.add(function)
            return out

        return noted

    functions = row_walk.all_functions()
    with calls.installed(), mock.patch.dict(RULES, {f: noting(f, rule) for f, rule in RULES.items()}):
        found = row_walk.problems_of(functions, num_rows)
        problems = _all_families(num_rows)
    names = {_short(functions[function]) for function in used}
    return problems, found, {_short(name) for name in map(functions.__getitem__, RULES)} - names


def _short(name: str) -> str:
    """Return the name without its owner: `torch.add`, `torch.Tensor.add` and `torch.Tensor.__add__` are `add`."""
    return name.removesuffix(".__get__").rpartition(".")[2].strip("_")


def test_rules_equal_the_whole_on_three_ranks() -> None:
    assert run_ranks(_all_families, 3, 10, timeout_s=120) == [{}] * 3


# Functions with a rule that no call here uses, and why.
UNUSED = {
    **dict.fromkeys(("backward", "retain_grad"), "tested with gradients"),
    **dict.fromkeys(("hash", "is_tensor", "ndimension", "nelement"), "torch answers itself, or of no tensor"),
    "cuda": "needs a GPU",
}
# Operators, for which this torch calls the functions that they stand for.
OPERATORS = {name.strip("_") for name in (rules.ELEMENTWISE + rules.IN_PLACE).split() if name.startswith("__")}


def test_every_function_of_torch() -> None:
    """What has no rule is computed on the whole, by one way; what has one is computed on rows here."""
    for problems, found, unused in run_ranks(_every_function, 2, 7, timeout_s=240):
        assert problems == {}
        assert found == {}
        assert unused - set(UNUSED) - OPERATORS == set()


def _sum_of_ranks() -> list[float]:
    return blocks.added_up(torch.ones(3, 2, dtype=torch.bfloat16).t()).flatten().tolist()


def test_a_sum_over_ranks_in_any_layout() -> None:
    assert run_ranks(_sum_of_ranks, 2) == [[2.0] * 6] * 2


def test_a_functions_apply_may_be_a_method_of_c() -> None:
    """As that of torch 2.14, which has no `__func__`."""
    ours = type("Ours", (dict,), {"__module__": "ddpshim.model.some"})
    stand_in = gradients.apply_of_rows(vars(dict)["fromkeys"])
    assert stand_in.__get__(None, ours)("ab", 1) == {"a": 1, "b": 1}
