"""Computes confidence intervals of a success rate, or of a mean, over episodes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Callable

_NUM_HALVINGS = 60
_NUM_PIECES = 400  # for Simpson's rule, which needs an even number


def exact(successes: int, episodes: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval. Local.

    The number of episodes must not depend on their outcomes: an interval that is checked after every episode, until it
    gives the wanted answer, is wrong far more often than in 5% of cases.

    >>> [round(end, 4) for end in exact(18, 20)]
    [0.683, 0.9877]
    """
    if not (0 <= successes <= episodes and 0 < confidence < 1):
        raise ValueError(
            f"{successes} successes in {episodes} episodes at a confidence of {confidence}: there is no such "
            "interval. Give a confidence between 0 and 1, and no more successes than episodes."
        )

    def at_least(rate: float, k: int) -> float:
        return math.fsum(math.exp(chance(rate, i)) for i in range(k, episodes + 1))

    def chance(rate: float, k: int) -> float:
        ways = math.lgamma(episodes + 1) - math.lgamma(k + 1) - math.lgamma(episodes - k + 1)
        return ways + k * math.log(rate) + (episodes - k) * math.log1p(-rate)

    def rate_at(k: int, probability: float) -> float:
        return _crossing(0.0, 1.0, lambda rate: at_least(rate, k) > probability)

    tail = (1 - confidence) / 2
    lower = 0.0 if successes == 0 else rate_at(successes, tail)
    upper = 1.0 if successes == episodes else rate_at(successes + 1, 1 - tail)
    return lower, upper


def of_mean(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's t interval for the true mean of samples; `values` has at least two. Local.

    >>> [round(end, 3) for end in of_mean([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    mean, freedom = statistics.fmean(values), len(values) - 1
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) * 2 / math.sqrt(math.pi)

    def is_enough(angle: float) -> bool:
        """Whether |t| < sqrt(freedom) * tan(angle) has a probability above `confidence` (Simpson's rule)."""
        width = angle / _NUM_PIECES
        weights = (1 if i in (0, _NUM_PIECES) else 2 + 2 * (i % 2) for i in range(_NUM_PIECES + 1))
        area = math.fsum(w * math.cos(i * width) ** (freedom - 1) for i, w in enumerate(weights)) * width / 3
        return scale * area > confidence

    t = math.sqrt(freedom) * math.tan(_crossing(0.0, math.pi / 2, is_enough))
    reach = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean - reach, mean + reach


def _crossing(low: float, high: float, is_above: Callable[[float], bool]) -> float:
    """Return where `is_above` changes from False to True, by bisection."""
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return low
