"""Gives a rank its rows of the one process's noise, although the trainer's ranks draw their own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

from ddpshim.job import noise
from ddpshim.job.shares import Share, Sharing


class Placed(Share):
    """A share whose samples have known places in the one process's batch."""

    places: torch.Tensor  # (num_rows,)
    num_whole: int  # samples of the one process's batch
    told: Callable[[], None]  # called at each draw

    def whole(self, shape: Sequence[int], where: tuple[int, ...]) -> list[int]:
        return [size // self.num_rows * self.num_whole if i == where[0] else size for i, size in enumerate(shape)]

    def rows(self, drawn: Any, where: tuple[int, ...]) -> Any:
        self.told()
        dimension, num_each = where
        places = self.places if isinstance(drawn, torch.Tensor) else self.places.numpy()
        if num_each == 1:
            return drawn[(slice(None),) * dimension + (places,)]
        return drawn.reshape((-1, num_each, *drawn.shape[1:]))[places].reshape((-1, *drawn.shape[1:]))

    def among_others(self, own: torch.Tensor, where: tuple[int, ...]) -> torch.Tensor:
        whole = own.new_ones(self.whole(own.shape, where))
        dimension, num_each = where
        if num_each == 1:
            whole[(slice(None),) * dimension + (self.places,)] = own
        else:
            parts = whole.view(-1, num_each, *own.shape[1:])
            parts[self.places] = own.reshape(-1, num_each, *own.shape[1:])
        return whole


class Imposed:
    """Replaces a rank's own noise by its rows of the one process's noise."""

    def __init__(self, rank: int, world_size: int, told: Callable[[], None]) -> None:
        self._rank, self._world_size, self._told = rank, world_size, told
        self._sharing: Optional[Sharing] = None
        self._changed = contextlib.ExitStack()

    def begin_batch(self, places: Optional[Sequence[int]], num_whole: int) -> None:
        """Draw for the samples at `places` of a batch of `num_whole` from now on; with None, leave draws unchanged."""
        if self._sharing is None:
            self._sharing = Sharing()
            self._changed.enter_context(noise.names_replaced(self._sharing))
        if places is None:
            self._sharing.share = None
            return
        placed = Placed(self._rank, self._world_size, len(places))
        placed.places, placed.num_whole, placed.told = torch.tensor(places), num_whole, self._told
        self._sharing.share = placed

    def close(self) -> None:
        self._changed.close()
