"""Counts the passes over a loader, and finds the samplers that another one wraps."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any


class EpochCounter:
    """The epoch and first step of the current pass, or those set for the next one. Local, equal on all ranks."""

    def __init__(self) -> None:
        self.current = 0
        self.start_step = 0
        self._is_set = True

    def set(self, epoch: int, start_step: int = 0) -> None:
        """Make the next pass use `epoch`, from `start_step` on, and later passes the following epochs, from step 0."""
        self.current, self.start_step = operator.index(epoch), operator.index(start_step)
        self._is_set = True

    def advance(self) -> int:
        """Begin a pass and return its epoch."""
        if not self._is_set:
            self.current += 1
            self.start_step = 0
        self._is_set = False
        return self.current


def layers(sampler: Any) -> Iterator[Any]:
    """Yield `sampler` and the samplers that it wraps in an attribute `sampler`, as a BatchSampler does."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        sampler = getattr(sampler, "sampler", None)
