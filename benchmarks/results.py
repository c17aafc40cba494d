"""What a benchmark found, beside its target; and measuring two things in alternation.

A benchmark is a module here with `run(quick) -> list[Result]`; `python -m benchmarks` finds it by that.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
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

    def __str__(self) -> str:
        text = f"{self.what}: {self.value:.4g} {self.unit}"
        if self.quartiles is not None:
            text += " ({:.4g} to {:.4g})".format(*self.quartiles)
        if self.holds is not None:
            target = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
            text += f", target {target}: {'holds' if self.holds else 'DOES NOT HOLD'}"
        return f"{text} [{self.note}]" if self.note else text

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


def ratio(measured: Sequence[float], base: Sequence[float], times: float = 1.0) -> tuple[float, tuple[float, float]]:
    """Median and quartiles of `times * measured / base`, round by round: what slows the machine slows both."""
    return median_and_quartiles([times * a / b for a, b in zip(measured, base)])


def main(run: Callable[[bool], Iterable[Result]], description: str) -> None:
    """The command line of one benchmark: run it and print its results as they come."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    for result in run(parser.parse_args().quick):
        print(result, flush=True)
