"""Defines a numbered batch of indices, and finds out whether a block of code has drawn random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddpshim.process.random_streams import global_states, is_same_state


class Numbered(list[Any]):
    """A rank's indices of one step, with the numbers of epoch and step; they are also sent to data workers.

    Attributes:
        whole: the indices of all ranks; empty if they are not known.
        rows: the positions of this rank's indices in `whole`.
        before: batches that the same worker fetched earlier in the pass, before the pass was interrupted.
    """

    def __init__(self, indices: Iterable[Any], epoch: int, step: int) -> None:
        super().__init__(indices)
        self.epoch, self.step = epoch, step
        self.whole: list[Any] = []
        self.rows: Sequence[int] = ()
        self.before: list[Sequence[Any]] = []


def has_drawn(before: dict[str, Any]) -> bool:
    """Whether a generator's state is not that of `before`, an earlier `global_states()`."""
    now = global_states()
    return any(name in before and not is_same_state(before[name], state) for name, state in now.items())
