"""Tells parts of this package what the program does in a step: it gets a batch, starts a backward pass, steps."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any, Callable, Optional

from ddpshim.process.job import current
from ddpshim.process.replaced import replaced

Call = Callable[..., Any]


def observe(
    until: contextlib.ExitStack,
    *,
    before_batch: Optional[Call] = None,
    batch: Optional[Call] = None,
    around_batch: Optional[Call] = None,
    backward: Optional[Call] = None,
    before_step: Optional[Call] = None,
    after_step: Optional[Call] = None,
) -> None:
    """Call functions, in this process and its forked children, until `until` is closed. Local.

    Of several observers of batches and passes the latest is called first; of steps the first one is.

    Args:
        before_batch, batch: called with a loader's iterator before it makes a batch; with it and that batch.
        around_batch: returns the context in which the iterator that it is called with makes a batch, or ends.
        backward: called with the losses (a tensor or a sequence) before each backward pass, nested ones too.
        before_step, after_step: called with an optimizer, its step's args, and kwargs (`before_step` may replace them).
    """
    import torch
    from torch.optim import optimizer

    if before_step is not None:
        until.callback(optimizer.register_optimizer_step_pre_hook(before_step).remove)
    if after_step is not None:
        until.callback(optimizer.register_optimizer_step_post_hook(after_step).remove)
    if backward is not None:
        until.enter_context(replaced(torch.autograd, "backward", _first(backward, torch.autograd.backward)))
    for changed, call in ((_first, before_batch), (_then, batch), (_in, around_batch)):
        if call is not None:
            batches_of_any = torch.utils.data.dataloader._BaseDataLoaderIter
            until.enter_context(replaced(batches_of_any, "__next__", changed(call, batches_of_any.__next__)))


def _first(call: Call, original: Call) -> Call:
    @functools.wraps(original)
    def called(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        call(tensors)
        return original(tensors, *args, **kwargs)

    return called


def _then(call: Call, original: Call) -> Call:
    @functools.wraps(original)
    def called(batches: Any) -> Any:
        batch = original(batches)
        call(batches, batch)
        return batch

    return called


def _in(context: Call, original: Call) -> Call:
    @functools.wraps(original)
    def called(batches: Any) -> Any:
        with context(batches):
            return original(batches)

    return called


class StepClock:
    """A clock that stands still while this rank does what is no part of a step: it saves, or plays episodes."""

    def __init__(self) -> None:
        self._stood_still = 0.0
        self._since: Optional[float] = None

    def now(self) -> float:
        """Return seconds. Local."""
        return (time.perf_counter() if self._since is None else self._since) - self._stood_still

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still in this block. Local; blocks may be nested."""
        if self._since is not None:
            yield
            return
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._stood_still += time.perf_counter() - self._since
            self._since = None


def outside_steps() -> contextlib.AbstractContextManager[None]:
    """Return a context whose time counts to no step. Local."""
    return current().part(StepClock).stopped()
