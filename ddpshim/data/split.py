"""Computes one rank's positions in an order of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ddpshim.data.sampler import Indices


@dataclass(frozen=True)
class Split:
    """One rank's positions in an order of samples, computed for any step.

    Step t uses positions [t*B, (t+1)*B) of the order, and rank r takes every W-th of them, from the r-th on
    (B: global batch, W: ranks; W divides B). With `drop_last` only whole global batches are used; without, the
    last one is filled up to a multiple of W from the start of the order, as in torch's DistributedSampler.
    Local.

    10 samples, 2 ranks, unshuffled: rank 0 sees 0 2 4 6 8, rank 1 sees 1 3 5 7 9.

    >>> split = Split(global_batch_size=4, rank=1, world_size=2, drop_last=False)
    >>> [split.take(range(9), step) for step in range(split.num_steps(9))]
    [[1, 3], [5, 7], [0]]
    """

    global_batch_size: int
    rank: int
    world_size: int
    drop_last: bool

    def num_steps(self, num_samples: int) -> int:
        """Return the number of global batches in `num_samples`, equal on every rank."""
        rounding = 0 if self.drop_last else self.global_batch_size - 1
        return (num_samples + rounding) // self.global_batch_size

    def num_samples_per_rank(self, num_samples: int) -> int:
        """Return how many samples each rank sees in one pass, repeats for the last batch included."""
        if self.drop_last:
            return self.num_steps(num_samples) * self.global_batch_size // self.world_size
        return -(-num_samples // self.world_size)

    def positions(self, step: int, num_samples: int, num_steps: int = 1) -> range:
        """Return this rank's positions from step `step` on; one at or past `num_samples` wraps to the start."""
        start = step * self.global_batch_size
        padded = num_samples if self.drop_last else -(-num_samples // self.world_size) * self.world_size
        return range(start + self.rank, min(start + num_steps * self.global_batch_size, padded), self.world_size)

    def take(self, order: Indices, step: int, num_steps: int = 1) -> list[Any]:
        """Return this rank's indices of `num_steps` steps of `order`, from `step` on."""
        where = self.positions(step, len(order), num_steps)
        inside = order[where.start : where.stop : where.step]
        taken = inside.tolist() if isinstance(inside, torch.Tensor) else list(inside)
        for position in where[len(taken) :]:
            index = order[position % len(order)]
            taken.append(index.item() if isinstance(index, torch.Tensor) else index)
        return taken

    def batches(self, order: Indices, start_step: int = 0) -> Iterator[list[Any]]:
        """Yield this rank's indices of each step of `order`, from `start_step` on.

        The first step is computed alone, because the program waits for it; then many at once, which is cheaper.
        """
        from ddpshim.data.permutation import NUM_AT_ONCE

        batch_size = self.global_batch_size // self.world_size
        left, at_once = range(start_step, self.num_steps(len(order))), 1
        while left:
            taken = self.take(order, left[0], len(left[:at_once]))
            yield from (taken[start : start + batch_size] for start in range(0, len(taken), batch_size))
            left, at_once = left[at_once:], max(1, NUM_AT_ONCE // batch_size)
