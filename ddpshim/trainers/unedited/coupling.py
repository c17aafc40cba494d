"""Finds by computation whether a loss couples the samples of a batch, as negatives from the batch do.

If a loss is a mean over samples, rows of two batches A and B can be exchanged without changing the sum of the two
losses. Here B is A with its rows in another order, and two more batches have some rows of A and the others of B. While
a program computes on A, each torch operation that depends on the batch is also computed on the other three. Random
draws and results of collectives are the same for all four.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ddpshim.errors import SyncError

_NUM = 3  # batches beside the program's own: B, and two with rows of both
_EACH = 256  # operations after which storages of freed tensors are dropped
_WITHOUT_VALUES = ("aten::empty", "aten::new_empty")  # followed only once something is written to the result
# The number of rows that these select depends on values. All four batches then take the rows that the program's own
# selects. After any other operation whose result has another shape (a packed sequence), nothing is followed.
_SELECTING = ("aten::nonzero", "aten::index.Tensor", "aten::masked_select")
_OF_ROUNDING = 64.0  # tolerance, in units of the loss's precision
_OF_THE_ROWS = 1e-3  # tolerance, as a fraction of the differences between the four losses


class _NotFollowed(Exception):
    """A tensor is a part of a storage that is not followed."""


class Shadows:
    """Computes a program's tensors for three other batches while the program computes on one. Local.

    Kept by storage, so that views and in-place writes are followed. A tensor that is not followed has the same values
    for all batches.
    """

    def __init__(self) -> None:
        self._mode: Any = None  # a dispatch mode: torch calls `_called` for each operation
        self._is_on = self._is_aside = False
        self._of: dict[int, tuple[StorageWeakRef, list[torch.UntypedStorage]]] = {}
        self._num_seen = 0

    def begin(self, batch: Any, num_rows: int, number: int) -> None:
        """Follow what is computed from `batch`, if all its tensors have `num_rows` rows.

        `number`: the batch's number, which seeds the choice of exchanged rows.
        """
        tensors = list(_tensors_in(batch))
        if num_rows < 2 or not tensors or any(not _is_plain(x) or x.shape[:1] != (num_rows,) for x in tensors):
            return
        with self.aside():
            try:
                for tensor in tensors:
                    if not self._has(tensor):
                        self._keep(tensor, [tensor.detach()[order] for order in _orders(num_rows, number)])
            except (RuntimeError, _NotFollowed):  # no memory, or a batch that is a view of something larger
                self._of.clear()
        if self._of and not self._is_on:
            self._is_on = True
            self._mode = self._mode or _mode(self._called)
            self._mode.__enter__()

    def end(self) -> None:
        """Stop following."""
        self._of.clear()
        if self._is_innermost():
            self._is_on = False
            self._mode.__exit__(None, None, None)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within this block, follow no operation."""
        is_innermost = self._is_innermost()
        before, self._is_aside = self._is_aside, True
        if is_innermost:
            self._mode.__exit__(None, None, None)
        try:
            yield
        finally:
            self._is_aside = before
            if is_innermost:
                self._mode.__enter__()

    def _is_innermost(self) -> bool:
        """Whether the program has entered no dispatch mode since `begin`."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        return self._is_on and _get_current_dispatch_mode() is self._mode

    def differs(self, number: Any) -> bool:
        """Whether the number in this tensor differs for any of the other batches."""
        return self._follows(number) and any(float(other) != float(number) for other in self._others(number))

    def excess(self, loss: Any) -> Optional[tuple[float, float]]:
        """Return (loss of A + loss of B, sum of the other two) if they differ by more than rounding; else None."""
        if not self._follows(loss):
            return None
        own, other, one, two = values = [float(x.detach().double()) for x in (loss, *self._others(loss))]
        difference = abs(own + other - one - two)
        spread = max(values) - min(values)
        rounding = torch.finfo(loss.dtype).eps * max(map(abs, values)) if loss.is_floating_point() else 0.0
        is_more = math.isfinite(difference) and difference > max(_OF_ROUNDING * rounding, _OF_THE_ROWS * spread)
        return (own + other, one + two) if is_more else None

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` for the program and return its result; compute it for the other batches if it depends on them."""
        given = [] if self._is_aside or not self._of else _plain_tensors_in((args, kwargs))
        if not isinstance(func, torch._ops.OpOverload) or not any(map(self._has, given)):
            return func(*args, **kwargs)
        if func.name().startswith(_WITHOUT_VALUES):
            return func(*args, **kwargs)
        if func.namespace.strip("_").startswith("c10d"):  # the result of a collective is the same for all batches
            for tensor in given:
                self._of.pop(tensor.untyped_storage()._cdata, None)
            return func(*args, **kwargs)
        self._num_seen += 1
        if self._num_seen % _EACH == 0:
            self._of = {key: kept for key, kept in self._of.items() if not kept[0].expired()}
        written = _written(func, args, kwargs)
        try:
            before = _random_state(given)
            for tensor in written:
                if not self._has(tensor):
                    self._keep_written(tensor)
        except RuntimeError:  # out of memory, or a CUDA graph is being captured
            self._of.clear()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        made = _plain_tensors_in(result)
        if made and (written or not all(map(self._has, made))):  # else the result is a number or a view
            with contextlib.suppress(Exception):  # must not fail the program, which has its result
                is_drawn = not torch.equal(before, _random_state(given))
                if not is_drawn and self._follow(func, args, kwargs, made):
                    return result
                if is_drawn or func.name() in _SELECTING:
                    self._take_over(written)
                    return result
            self._of.clear()
        return result

    def _take_over(self, written: list[torch.Tensor]) -> None:
        """Give these tensors the program's values for all batches."""
        for tensor in written:
            for other in self._others(tensor):
                other.copy_(tensor)

    def _follow(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> bool:
        """Compute `func` for the other batches; return False if it fails or the results have other shapes."""
        found = []
        for number in range(_NUM):

            def other(x: Any, number: int = number) -> Any:
                if not _is_plain(x):
                    return x
                # BatchNorm writes to its running statistics although its schema does not declare it.
                return self._other(x, number) if self._has(x) else x.clone() if "batch_norm" in func.name() else x

            changed, named = _each(other, args), _each(other, kwargs)
            try:
                found.append(_plain_tensors_in(func(*changed, **named)))
            except torch.cuda.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, IndexError):
                return False
        if any(x.shape != tensor.shape for results in found for x, tensor in zip(results, made)):
            return False
        for place, tensor in enumerate(made):
            if not self._has(tensor):
                self._keep(tensor, [results[place] for results in found])
        return True

    def _follows(self, tensor: Any) -> bool:
        return bool(self._of) and _is_plain(tensor) and tensor.numel() == 1 and self._has(tensor)

    def _has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._of

    def _keep(self, tensor: torch.Tensor, others: list[torch.Tensor]) -> None:
        """Follow `tensor`; `others` are its values for the three other batches."""
        if tensor.storage_offset():
            raise _NotFollowed("a part of a storage that is not followed")
        storage = tensor.untyped_storage()
        laid_out = [_laid_out_as(tensor, other).untyped_storage() for other in others]
        self._of[storage._cdata] = StorageWeakRef(storage), laid_out

    def _keep_written(self, tensor: torch.Tensor) -> None:
        """Follow `tensor`, to which the program writes; so far it was the same for all batches."""
        storage = tensor.untyped_storage()
        self._of[storage._cdata] = StorageWeakRef(storage), [storage.clone() for _ in range(_NUM)]

    def _other(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        storage = self._of[tensor.untyped_storage()._cdata][1][number]
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _others(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [self._other(tensor, number) for number in range(_NUM)]


def refuse(found: str, place: str, num_ranks: int) -> None:
    """Raise SyncError: the loss at `place` couples samples. `found`: how this was found."""
    raise SyncError(
        f"{place}: the loss couples the samples of a batch: {found}. (Negatives, batch statistics and normalisation "
        f"do that.) Each rank would compute it over 1/{num_ranks} of the batch, unlike one process. Train in one "
        "process, or compute that loss with ddpshim.whole_batch (`python -m ddpshim docs MIGRATION`). "
        "DDPSHIM_GUARD=0 trains on such a loss anyway."
    )


def _mode(called: Callable[[Any, Any, Any], Any]) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        supports_higher_order_operators = True  # `_called` gets these too, and does not follow them

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return called(func, args, kwargs or {})

    return Mode()  # type: ignore[no-untyped-call]


def _each(change: Callable[[Any], Any], given: Any) -> Any:
    """Return `given` with `change` applied to each value, also inside lists, tuples and dicts."""
    if isinstance(given, dict):
        return {key: _each(change, part) for key, part in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(_each(change, part) for part in given)
    return change(given)


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(part)


def _orders(num_rows: int, number: int) -> list[list[int]]:
    """Return the row numbers of A that make up B, and those of the two mixed batches."""
    own = [*range(num_rows)]
    other = own[1:] + own[:1]
    draw = random.Random(number)
    picked = [draw.random() < 0.5 for _ in own]
    if len({*picked}) == 1:
        picked[0] = not picked[0]
    one = [o if p else b for o, b, p in zip(own, other, picked)]
    two = [b if p else o for o, b, p in zip(own, other, picked)]
    return [other, one, two]


def _laid_out_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `other` with the strides of `tensor`, in a separate storage."""
    num_bytes = tensor.untyped_storage().nbytes()
    is_alone = not other.storage_offset() and other.untyped_storage().nbytes() == num_bytes
    if other.stride() == tensor.stride() and is_alone:
        return other
    made = torch.zeros(num_bytes // tensor.element_size(), dtype=tensor.dtype, device=tensor.device)
    made.as_strided(tensor.size(), tensor.stride()).copy_(other)
    return made


def _is_plain(x: Any) -> bool:
    return type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta


def _plain_tensors_in(given: Any) -> list[torch.Tensor]:
    return [x for x in _tensors_in(given) if _is_plain(x)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that this call writes to in place."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.name in kwargs else args[place] if place < len(args) else None
            found += _plain_tensors_in(value)
    return found


def _random_state(tensors: list[torch.Tensor]) -> torch.Tensor:
    on_gpu = next((x.device for x in tensors if x.is_cuda), None)
    return torch.get_rng_state() if on_gpu is None else torch.cuda.get_rng_state(on_gpu)
