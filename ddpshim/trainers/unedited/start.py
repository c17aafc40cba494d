"""Defines `Start`, how this rank was started, and starts it again. Imports no torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable, NoReturn


@dataclass(frozen=True)
class Start:
    """How this rank was started, so that it can be restarted."""

    argv: Sequence[str]
    joins: bool = False  # whether its file calls a function that makes a process group
    at_failure: list[Callable[[Exception], None]] = field(default_factory=list)  # called if the program fails
    folder: str = field(default_factory=os.getcwd)
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    time: float = field(default_factory=time.time)
    process: int = field(default_factory=os.getpid)


def start_again(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a rank that runs the program `argv`, with the options of this Python. Local."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    options = ["-u", *["-O"] * sys.flags.optimize, *(f"-W{option}" for option in sys.warnoptions)]
    os.execve(sys.executable, [sys.executable, *options, "-m", "ddpshim.launch.rank", *argv], environ)
