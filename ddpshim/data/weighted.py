"""Computes weighted draws with replacement, from any number of categories, starting at any position."""

from __future__ import annotations

import ctypes
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from ddpshim.data.permutation import NUM_AT_ONCE, Computed, Permutation
from ddpshim.errors import DataError
from ddpshim.job.seeds import derive_seed

_ROW = 16  # weights that are searched together; only the sum of a row is kept in double precision
_NUM_SEARCHED = 2**13  # at once: their rows as float64 take 1 MB
_BITS = 53


class Weights:
    """A copy of the current weights that can be searched; 4.5 bytes for each. Local.

    They are scaled by a power of two and rounded up to whole numbers with a sum below 2**53. Such sums are exact in
    float64 in any order of addition, so the draws are equal on all machines. The first 24 bits of each weight are kept.

    Args:
        weights: (N,), float64, on the CPU.

    Raises:
        DataError: one is negative, infinite or not a number, or none is positive.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        lowest, largest = (float(one) for one in weights.aminmax()) if len(weights) else (0.0, 0.0)
        if not (lowest >= 0 and 0 < largest < math.inf):
            raise DataError(
                f"The sampler has {len(weights)} weights, from {lowest} to {largest}; samples cannot be drawn by "
                "them. Make them finite and non-negative, with at least one positive."
            )
        self._rows = torch.zeros(-(-len(weights) // _ROW), _ROW, device="cpu")
        exponent = 51 - math.frexp(largest)[1] - len(weights).bit_length()
        # Filled twice, because the first sum shows how large the scale may be.
        exponent += 52 - math.frexp(self._fill(weights, exponent))[1]
        self._total = self._fill(weights, exponent)

    def _fill(self, weights: torch.Tensor, exponent: int) -> float:
        """Store `weights` times 2**exponent, and their running sum at the start of each row; return the sum."""
        scale, flat = 2.0 ** min(exponent, 1023), self._rows.view(-1)
        # Both allocated once: repeated allocations would fragment the heap, and take more memory than the weights.
        scaled = torch.empty(min(NUM_AT_ONCE, len(weights)), dtype=torch.float64, device="cpu")
        self._starts = torch.zeros(len(self._rows) + 1, dtype=torch.float64, device="cpu")
        for start in range(0, len(weights), NUM_AT_ONCE):
            some = weights[start : start + NUM_AT_ONCE]
            torch.mul(some, scale, out=scaled[: len(some)])
            flat[start : start + len(some)] = scaled[: len(some)].ceil_()
            rows = self._rows[start // _ROW : (start + NUM_AT_ONCE) // _ROW]
            torch.sum(rows, 1, dtype=torch.float64, out=self._starts[1 + start // _ROW :][: len(rows)])
        self._starts.cumsum_(0)
        return float(self._starts[-1])

    def find(self, fractions: torch.Tensor) -> torch.Tensor:
        """Return the indices where the running sum of weights passes `fractions` of the total ([0, 1), float64)."""
        return torch.cat([self._find(some) for some in fractions.split(_NUM_SEARCHED)])

    def _find(self, fractions: torch.Tensor) -> torch.Tensor:
        sought = fractions * self._total
        row = torch.searchsorted(self._starts, sought, right=True) - 1
        inside = self._rows.index_select(0, row).double().cumsum_(1)
        left_over = (sought - self._starts.index_select(0, row)).unsqueeze_(1)
        return row * _ROW + torch.searchsorted(inside, left_over, right=True).squeeze_(1)


class WeightedDraws(Computed):
    """The draws of one pass. The value at a position depends on `key`, the position and the weights alone.

    >>> WeightedDraws(Weights(torch.tensor([1, 2, 3.0])), 10**12, key=1)[10**11 : 10**11 + 8].tolist()
    [2, 1, 1, 1, 2, 0, 2, 0]
    """

    def __init__(self, weights: Weights, num_draws: int, key: int) -> None:
        self._weights = weights
        self._num_draws = num_draws
        self._numbers = Permutation(2**_BITS, key)

    def __len__(self) -> int:
        return self._num_draws

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the values at `positions`, which are int64 on the CPU and all in range."""
        return self._weights.find(self._numbers.at(positions).double().mul_(2.0**-_BITS))


def fingerprint(weights: torch.Tensor) -> str:
    """Return a hash of `weights` (contiguous, on the CPU), to detect changes. Local."""
    size = weights.numel() * weights.element_size()
    # Reads the bytes in place: no copy, and no numpy, which torch would need to give access to them.
    return hashlib.blake2b((ctypes.c_char * size).from_address(weights.data_ptr()), digest_size=16).hexdigest()


@dataclass(eq=False)
class WeightedOrder:
    """Draws for each (seed, epoch) by the weights of a WeightedRandomSampler, with replacement.

    torch would make all draws on one rank before the first step, from at most 2**24 categories. The weights are read
    when a pass begins, and are used for all of it. If ranks have different weights, the main rank's are used.

    Args:
        sampler: see `draws_by_weight`.
        seed: equal on all ranks.
        gather, run_on_main: the methods of `World`. None: each rank uses its own weights.
    """

    sampler: Any
    seed: int
    gather: Optional[Callable[[Any], list[Any]]] = None
    run_on_main: Optional[Callable[[Callable[[], Any]], Any]] = None
    _made: tuple[str, Optional[Weights]] = field(default=("", None), init=False)

    def __len__(self) -> int:
        return len(self.sampler)

    def draw(self, epoch: int) -> WeightedDraws:
        """Return the order of `epoch`. Collective, unless the draw is local.

        Raises:
            DataError: the weights are invalid; on every rank.
        """
        weights = torch.as_tensor(self.sampler.weights, dtype=torch.float64, device="cpu").detach().contiguous()
        found = fingerprint(weights)
        if self.gather is not None and self.run_on_main is not None:
            mains, *others = self.gather(found)
            if any(other != mains for other in others):
                found, weights = mains, self.run_on_main(lambda: weights)
        known, made = self._made
        if made is None or known != found:
            self._made = "", None  # frees the old weights before the new ones are made
            made = Weights(weights)
            self._made = found, made
        return WeightedDraws(made, len(self), derive_seed(self.seed, "draw", epoch))
