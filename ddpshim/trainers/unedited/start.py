"""Runs a program as `python` would, and starts a rank again. Imports no torch."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Callable, NoReturn


@dataclass
class Start:
    """How this rank was started, so that it can be restarted.

    Attributes:
        take_back: restores the replaced names and removes the files that the program has made.
    """

    argv: Sequence[str]
    joins: bool = False  # whether its file calls a function that makes a process group
    at_failure: Callable[[Exception], None] = lambda error: None  # called if the program fails
    take_back: Callable[[], None] = lambda: None
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


def run_as_main(argv: Sequence[str]) -> None:
    """Run `script.py ARGS` or `-m package.module ARGS` in this process as `python` would."""
    is_module = argv[0] == "-m"
    name, *arguments = argv[is_module:]
    sys.argv = [name, *arguments]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):  # python -P (3.11) puts no folder there
        sys.path[0] = os.path.dirname(os.path.abspath(name))
    if name.endswith((".pyc", ".pyz", ".zip")):
        runpy.run_path(os.path.abspath(name), run_name="__main__")
    else:
        _run_file(name)


def _run_file(path: str) -> None:
    """Run a file as `python path` does: `__file__` is absolute and sys.argv[0] is as given; runpy makes them equal."""
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__loader__ = SourceFileLoader("__main__", main.__file__)
    sys.modules["__main__"] = main
    exec(main.__loader__.source_to_code(main.__loader__.get_data(main.__file__), main.__file__), vars(main))
