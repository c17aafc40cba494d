"""Copies what a rank prints into a file of its own."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable


def copy_to(folder: str, rank: int) -> Callable[[], None]:
    """Have what Python prints from here on also written to `folder`/rank_N.log; what takes that back. Local.

    The file is continued where it exists. What libraries in C print is not in it. Nothing is taken back while an
    exception is on its way out.
    """
    os.makedirs(folder, exist_ok=True)
    # Line by line: a process that is killed leaves what it printed.
    file = open(os.path.join(folder, f"rank_{rank}.log"), "a", buffering=1)  # noqa: SIM115 - for as long as the world
    before = sys.stdout, sys.stderr
    ours = _Both(sys.stdout, file), _Both(sys.stderr, file)
    sys.stdout, sys.stderr = ours

    def restore() -> None:
        if sys.exc_info()[1] is not None:
            return  # the traceback is still to come
        # Somebody else's stream (a trainer's logger) may be in front by now, and holds ours.
        if sys.stdout is ours[0]:
            sys.stdout = before[0]
        if sys.stderr is ours[1]:
            sys.stderr = before[1]
        for stream in ours:
            stream.forget()
        file.close()

    return restore


class _Both:
    """A stream that is also written down; everything else is the stream's own."""

    def __init__(self, stream: Any, file: Any) -> None:
        self._stream, self._files = stream, [file]

    def write(self, text: str) -> int:
        for file in self._files:
            file.write(text)
        return int(self._stream.write(text))

    def forget(self) -> None:
        self._files.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
