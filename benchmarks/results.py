"""What a benchmark found, beside its target; and measuring two things in alternation.

A benchmark is a module here with `run(quick) -> list[Result]`; `python -m benchmarks` finds it by that.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional


@dataclass(frozen=True)
class Result:
    """One number, the median of several measurements where it has quartiles."""

    benchmark: str  # its module
    what: str  # "CPU time of a step, 5M parameters"
    value: float
    unit: str  # "x raw DDP" for a ratio, else "ms", "MB", ...
    quartiles: Optional[tuple[float, float]] = None
    at_most: Optional[float] = None  # the target, if there is one
    at_least: Optional[float] = None
    note: str = ""

    @property
    def holds(self) -> Optional[bool]:
        """Whether the target is met; None where there is none."""
        if self.at_most is None and self.at_least is None:
            return None
        below = self.at_most is None or self.value <= self.at_most
        return below and (self.at_least is None or self.value >= self.at_least)


def alternate(arms: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """What each arm measured in each round; every other round goes through the arms backwards."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(num_rounds):
        for name in sorted(arms, reverse=number % 2 == 1):
            found[name].append(arms[name]())
    return found


def median_and_quartiles(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median, and the first and third quartile (all the value itself where there is one)."""
    if len(values) < 2:
        return values[0], (values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (low, high)


def ratio(measured: Sequence[float], base: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median and quartiles of `measured` over `base`, round by round: what slows the machine slows both."""
    return median_and_quartiles([a / b for a, b in zip(measured, base)])
