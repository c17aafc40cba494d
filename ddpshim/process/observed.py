"""Tells parts of this package what the program does in a step and which modules it holds, and the recorder the rest."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any, Callable, Optional

from ddpshim.process.job import current
from ddpshim.process.replaced import replaced

Call = Callable[..., Any]
PARTS = ("data_wait", "message_wait", "compute", "optimizer")  # of the time of a step
_records: Any = None


def record_to(records: Any) -> None:
    """Pass `note` to `records` (`ddpshim.observe.records`) from now on; None stops recording. Local."""
    global _records
    _records = records


def note(kind: str, **values: Any) -> None:
    """Record an event, if this run is recorded; after one of the kind "end" no more. Local."""
    if _records is not None:
        _records.note(kind, **values)


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
        until.enter_context(replaced(torch.autograd, "backward", called(torch.autograd.backward, before=backward)))
    if before_batch or batch or around_batch:
        batches = torch.utils.data.dataloader._BaseDataLoaderIter
        making = called(batches.__next__, before_batch, batch, around_batch or contextlib.nullcontext)
        until.enter_context(replaced(batches, "__next__", making))


def called(
    original: Call, before: Optional[Call] = None, after: Optional[Call] = None, context: Call = contextlib.nullcontext
) -> Call:
    """Return `original` with calls around it: `before` gets its first argument, `after` also its result. Local."""

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        subject = args[0] if args else kwargs["tensors"]
        with context(subject):
            if before is not None:
                before(subject)
            result = original(*args, **kwargs)
            if after is not None:
                after(subject, result)
            return result

    return stand_in


class Progress:
    """This rank's progress in its job."""

    num_passes = 0  # backward passes whose gradients were reduced
    num_collectives = 0  # of `World`
    batch: Optional[tuple[int, int]] = None  # epoch and step of the last batch from `make_loader`
    is_reducing = False  # the host is in a backward pass: it computes, or waits for other ranks
    waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # for other ranks' messages
    _event: Any = None

    def end_pass(self, is_on_gpu: bool) -> None:
        """Record that a backward pass is over, at least for the host. Local."""
        self.is_reducing = False
        self.num_passes += 1
        if is_on_gpu:
            import torch

            self._event = self._event or torch.cuda.Event()
            self._event.record()

    def waits_on_gpu(self) -> bool:
        """Return whether the GPU still computes gradients of the last backward pass. Local; safe in any thread."""
        with contextlib.suppress(RuntimeError):
            return self._event is not None and not self._event.query()
        return False


def num_collectives() -> Optional[int]:
    """Return how many collectives the default process group has made; None if unknown."""
    import torch.distributed as dist

    try:
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, ValueError):
        return None


class StepClock:
    """A clock that stands still while this rank does what is no part of a step: it saves, or plays episodes."""

    _stood_still = 0.0
    _since: Optional[float] = None

    def now(self) -> float:
        """Return seconds. Local."""
        return (time.perf_counter() if self._since is None else self._since) - self._stood_still

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still in this block. Local; blocks may be nested."""
        outer, self._since = self._since, self._since or time.perf_counter()
        try:
            yield
        finally:
            if outer is None:
                self._stood_still += time.perf_counter() - self._since
            self._since = outer


def outside_steps() -> contextlib.AbstractContextManager[None]:
    """Return a context whose time counts to no step. Local."""
    return current().part(StepClock).stopped()


def live_modules() -> list[Any]:
    """Return every torch.nn.Module whose __init__ has run. Local."""
    from torch.nn import Module

    return [module for module in live(Module) if "_modules" in module.__dict__]


def live(kind: type) -> list[Any]:
    """Return every object of a class or its subclasses, in an order that differs between ranks. Local.

    A tuple that another thread is building (torch's pinning thread, say) is among all objects, and that thread gets
    a SystemError if it goes on while a list of them exists (bpo-15108). So one call of C makes the list, searches it
    and empties it: no thread runs in between.
    """
    lists, each = list[list[Any]](), itertools.chain.from_iterable
    fill: Any = filter(None, map(lists.append, map(gc.get_objects, [None])))
    empty: Any = filter(None, map(list.clear, [lists]))
    are_found = map(issubclass, map(type, each(lists)), itertools.repeat(kind))
    # The last item ends `are_found`, which would keep the list.
    return list(itertools.compress(itertools.chain(fill, each(lists), empty, [None]), are_found))
