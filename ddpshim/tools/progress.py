"""Shows the progress of a command on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Callable


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress on a terminal's stderr: after two seconds, erased at the end. Local."""
    due, is_shown = time.monotonic() + 2.0, False

    def show(text: str) -> None:
        nonlocal due, is_shown
        if sys.stderr.isatty() and time.monotonic() >= due:
            due, is_shown = time.monotonic() + 0.2, True
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
