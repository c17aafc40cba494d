"""Keeps two states of the global generators in one process: that of all ranks, and this rank's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

import torch

from ddpshim.job.random_streams import derive_seed, rank_states, restore_rank_states, seed_everything


class TwoStreams:
    """The global generators (the GPU's as well) in two states: "shared", alike on all ranks, and "own", this rank's.

    The process begins in the shared one, and whoever seeds while it is in use seeds both: its own is derived from the
    rank and from the seed that torch has in the shared one. Local.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._used, self._is_closed = "shared", False
        self._states: dict[str, dict[str, Any]] = {}
        self._base: Optional[int] = None  # what its own was derived from

    def use(self, name: str) -> None:
        """Draw from the stream `name` from here on; the other one stays where it is."""
        if name == self._used or self._is_closed:
            return
        base = torch.initial_seed()
        self._states[self._used] = rank_states(self._device)
        self._used = name
        if name == "own" and base != self._base:
            self._base = base
            seed_everything(derive_seed(base, "rank", self._rank))
            return
        restore_rank_states(self._states[name], self._device)

    @contextlib.contextmanager
    def used(self, name: str) -> Iterator[None]:
        """Draw from the stream `name` until the block is left."""
        before = self._used
        self.use(name)
        try:
            yield
        finally:
            self.use(before)

    def close(self) -> None:
        """Stay in the stream that is in use: iterators that are never finished come here when the process ends."""
        self._is_closed = True

    def shared_seed(self) -> int:
        """The seed that torch has in the shared stream."""
        return torch.initial_seed() if self._used == "shared" or self._base is None else self._base
