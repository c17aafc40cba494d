"""Prints ddpshim's messages, one line each on stderr, and formats counts, sizes and ranks for them."""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Sequence

from ddpshim.errors import DdpShimError
from ddpshim.process.job import current
from ddpshim.process.users_line import is_users

_has_open_line = False  # `copy_to_screen` has left a line unfinished


def say(text: str, *, directly: bool = False) -> None:
    """Print "ddpshim: `text`" on stderr, in a new line; `directly`: on the original one, if it was replaced. Local."""
    global _has_open_line
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
    end_of_line, _has_open_line = "\n" * (_has_open_line or bool(bars)), False
    stream = (sys.__stderr__ or sys.stderr) if directly else sys.stderr
    print(f"{end_of_line}ddpshim: {text}", file=stream, flush=True)


def copy_to_screen(output: bytes) -> None:
    """Write what a rank wrote to stdout, byte for byte, so that progress bars still move. Local."""
    global _has_open_line
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()
    _has_open_line = not output.endswith(b"\n")


@functools.cache
def say_once(text: str) -> None:
    """Print `text` as `say` does, but only once in this process. Local."""
    say(text)


def say_on_main(text: str) -> None:
    """Print `text` once in this job, on the main rank. Local."""
    world = current().world
    if world is None or world.is_main:
        say_once(text)


def described(error: BaseException) -> str:
    """ "ValueError: too large (train.py, line 12, in step)": an error, and where it was raised. Local.

    For other ranks, which do not have the traceback. Errors of ddpshim explain themselves and have no place.
    """
    kind, where = type(error).__name__, "" if isinstance(error, DdpShimError) else place(error)
    text = str(error).strip()
    return (f"{kind}: {text}" if text else kind) + (f" ({where})" if where else "")


def place(error: BaseException) -> str:
    """ "train.py, line 12, in step": the program's line that raised `error`; its source if that has no text. Local."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    if "\nOriginal Traceback " in str(error):  # of a data worker, as text
        told = re.findall(r'  File "(.+)", line (\d+), in (.+)', str(error))
        frames += [traceback.FrameSummary(file, int(line), name) for file, line, name in told]
    if not frames:
        return ""
    last = next((frame for frame in reversed(frames) if is_users(frame.filename)), frames[-1])
    source = "" if str(error) or not last.line else f": {last.line}"
    return f"{last.filename}, line {last.lineno}, in {last.name}{source}"


def count(number: int, noun: str, ending: str = "s") -> str:
    """ "1 rank", "2 ranks"; `ending` makes the plural."""
    return f"{number} {noun}{ending * (number != 1)}"


def ranks_called(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def size(num_bytes: float) -> str:
    """ "3.2 GB", "820.0 MB"."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= least:
            return f"{num_bytes / least:.1f} {unit}"
    return f"{num_bytes:.0f} B"
