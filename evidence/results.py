"""Defines the result of a benchmark with its target, and measures several arms in alternation.

A benchmark is a module here with a function `run(quick)` that returns results; benchmarks.py has their names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

ROOT, PYTHON = Path(__file__).resolve().parent.parent, sys.executable


@dataclass(frozen=True)
class Result:
    """One number; with quartiles it is the median of several measurements."""

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
        """Whether the target is met; None if there is no target."""
        if self.at_most is None and self.at_least is None:
            return None
        below = self.at_most is None or self.value <= self.at_most
        return below and (self.at_least is None or self.value >= self.at_least)


def ran(arguments: Sequence[str], folder: Path, deadline_s: float, variables: Mapping[str, str], code: int = 0) -> str:
    """Run `python arguments...` in `folder`, with one thread, and return its output.

    Raises RuntimeError if it ends with another exit code than `code`.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    both: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environ = {**os.environ, **ours, **variables}
    command = [PYTHON, *arguments]
    ended = subprocess.run(command, cwd=folder, env=environ, text=True, timeout=deadline_s, check=False, **both)
    if ended.returncode != code:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}, not {code}:\n{ended.stdout[-6000:]}")
    return ended.stdout


def measured(arguments: Sequence[str], variables: Mapping[str, str], deadline_s: float) -> dict[str, Any]:
    """Run `python arguments... FILE` in a new folder, with one thread; return what it wrote into FILE as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        ran([*arguments, str(out)], Path(folder), deadline_s, variables)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def alternate(arms: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Call each arm once a round, in every other round backwards; return the measurements by arm and round."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(num_rounds):
        for name in sorted(arms, reverse=number % 2 == 1):
            found[name].append(arms[name]())
    return found


def median_and_quartiles(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median, and the first and third quartile (all three the value itself if there is only one)."""
    if len(values) < 2:
        return values[0], (values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (low, high)


def ratio(measured: Sequence[float], base: Sequence[float], times: float = 1.0) -> tuple[float, tuple[float, float]]:
    """Return median and quartiles of `times * measured / base` by round: other programs slow both alike."""
    return median_and_quartiles([times * a / b for a, b in zip(measured, base)])


def main(run: Callable[[bool], Iterable[Result]], description: str) -> None:
    """Run one benchmark from the command line, and print each result when it is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    for result in run(parser.parse_args().quick):
        print(result, flush=True)
