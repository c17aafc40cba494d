"""Implements the functions that the patch sets of DROID's trainers call, beside those of `ddpshim.robomimic`.

Without a launcher every function here does exactly what the line did that it replaces. DROID's package is also called
robomimic; it is imported inside the functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

import ddpshim.robomimic.calls as adapter
from ddpshim.shares.passes import Enterable, order_of


class Epochs(Enterable):
    """`loader` in epochs of `num_steps` steps; each continues the pass where the previous epoch ended.

    Upstream's trainer does the same by keeping its iterator. On HDF5 data a resumed training gets exactly the samples
    that were left. A stream is not entered midway: it begins anew. `len()` is `num_steps`; other attributes are the
    loader's.
    """

    def __init__(self, loader: Any, num_steps: int) -> None:
        self._loader, self._num_steps = loader, num_steps
        self._next = 0  # the next step, counted from the first epoch
        self._batches: Any = None
        self._order: Optional[dict[str, Any]] = None  # the resumed run's, until its pass begins

    def __len__(self) -> int:
        return self._num_steps

    @property
    def num_steps_of_a_pass(self) -> Optional[int]:
        """The number of steps of the loader; None for a stream."""
        return len(self._loader) if isinstance(self._loader, Enterable) and self._loader.can_enter() else None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        wanted = epoch * self._num_steps + start_step
        if wanted != self._next:
            self._next, self._batches = wanted, None

    def order_state(self) -> Optional[dict[str, Any]]:
        return order_of(self._loader) if isinstance(self._loader, Enterable) else None

    def restore_order(self, state: Optional[dict[str, Any]], is_inside: bool) -> None:
        self._order = state

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            length, order, self._order = self.num_steps_of_a_pass, self._order, None
            if length is not None:
                number, first = divmod(self._next, length)
                if order is not None and number and not first:  # enter at a pass's end: torch's sampler may draw there
                    number, first = number - 1, length
                self._loader.set_epoch(number, first)
                self._loader.restore_order(order, is_inside=first > 0)
            self._batches = iter(self._loader)
        while True:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = iter(self._loader)
                batch = next(self._batches)
            self._next += 1
            yield batch


def run_epoch(*, data_loader: Any, data_loader_iter: Epochs, **options: Any) -> tuple[dict[str, float], Epochs]:
    """Call `ddpshim.robomimic.run_epoch`; return its log, and the iterator to pass to the next call."""
    return adapter.run_epoch(data_loader=data_loader_iter, **options), data_loader_iter
