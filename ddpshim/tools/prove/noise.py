"""Gives a rank its rows of what the one process drew, where the trainer itself draws otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

from ddpshim.job import noise
from ddpshim.job.shares import Share, Sharing


class Placed(Share):
    """A share whose samples are at known places of the one process's batch."""

    places: torch.Tensor
    num_whole: int
    told: Callable[[], None]

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
    """The noise of the one process, for a rank that draws its own."""

    def __init__(self, rank: int, world_size: int, told: Callable[[], None]) -> None:
        self._rank, self._world_size, self._told = rank, world_size, told
        self._sharing: Optional[Sharing] = None
        self._changed = contextlib.ExitStack()

    def begin_batch(self, places: Optional[Sequence[int]], num_whole: int) -> None:
        """From here on this rank draws for samples at `places` of a batch of `num_whole`; None: as it is drawn."""
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
