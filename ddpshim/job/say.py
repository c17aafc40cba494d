"""Prints what ddpshim says to the user, one line on stderr, and writes numbers of things as they are read."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence


def say(text: str, *, directly: bool = False) -> None:
    """Print "ddpshim: `text`" on stderr; `directly`: on the process's own, past what replaced it. Local."""
    stream = (sys.__stderr__ or sys.stderr) if directly else sys.stderr
    print(f"ddpshim: {text}", file=stream, flush=True)


@functools.cache
def say_once(text: str) -> None:
    """`say`, the first time in this process. Local."""
    say(text)


def count(number: int, noun: str, ending: str = "s") -> str:
    """ "1 rank", "2 ranks"; the `ending` is of the plural."""
    return f"{number} {noun}{ending * (number != 1)}"


def ranks_called(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def size(num_bytes: float) -> str:
    """With a unit: "3.2 GB", "820.0 MB"."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= least:
            return f"{num_bytes / least:.1f} {unit}"
    return f"{num_bytes:.0f} B"
