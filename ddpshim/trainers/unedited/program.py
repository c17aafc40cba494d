"""Decides whether to distribute an unedited program, and joins the job when it imports torch. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable, NoReturn, Optional

from ddpshim import adapters, variables
from ddpshim.errors import LaunchError, OptionsError
from ddpshim.options import FLAGS
from ddpshim.process.after_import import after_import
from ddpshim.process.launch_env import read_launch_env
from ddpshim.process.say import say
from ddpshim.trainers.unedited.sources import Sources
from ddpshim.variables import PREFIX


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


def patched(argv: Sequence[str]) -> Optional[Sequence[str]]:
    """Return `argv` so that it runs the module that a patch set changes, which is patched in memory from now on. Local.

    Returns None for other programs, and for all with DDPSHIM_UNEDITED=on or off.
    """
    is_module = argv[0] == "-m"
    names = argv[1].split(".") if is_module else os.path.realpath(argv[0]).split(os.sep)
    if not is_launched() or _wanted() != "auto" or adapters.packages().keys().isdisjoint(names):
        return None
    from ddpshim.trainers.patching import in_memory

    module, rest = (argv[1], argv[2:]) if is_module else (in_memory.module_of(argv[0]), argv[1:])
    if module is None or (_is_exact() and adapters.function(module.partition(".")[0], "batch_size") is None):
        return None  # the set's calls may not know programs that hold whole batches
    return ["-m", module, *rest] if in_memory.patch_program(module) else None


def holds_whole_batches(argv: Sequence[str]) -> bool:
    """Whether the patched program `argv` ("-m", module, ...) must hold whole batches: its ranks get no equal shares.

    So it is with the option `exact`, and if the ranks do not divide the batch. Local.
    """
    if _is_exact():
        return True
    asked = adapters.function(argv[1].partition(".")[0], "batch_size")
    size, num_ranks = None if asked is None else asked(argv[2:]), read_launch_env(os.environ).world_size
    if size is None or size % num_ranks == 0 or FLAGS.get(_option("PER_RANK_BATCH")):
        return False
    if read_launch_env(os.environ).rank == 0:
        say(
            f"{num_ranks} ranks do not divide the batch of {size}: each holds the whole batch and computes its rows. A "
            "number of ranks that divides it is faster for small networks"
        )
    return True


def _is_exact() -> bool:
    return _option("EXACT") not in ("", "none", "null")


def _option(name: str) -> str:
    return os.environ.get(f"{PREFIX}{name}", "").strip().lower()


@contextlib.contextmanager
def distributed(argv: Sequence[str]) -> Iterator[Optional[Start]]:
    """Within this block, the program `argv` is distributed, unless it distributes itself; yields None if it is not.

    If so, collective: the job is joined at once, so that files are written once; when the program imports torch, if its
    files import isaacgym, which refuses to be imported after torch, or if they never import torch and ask for a rank.
    """
    if not is_launched() or _wanted() == "off":
        yield None
        return
    sources = Sources(module_file(argv[1]) if argv[0] == "-m" else argv[0])
    if sources.own_way is not None and _wanted() != "on":
        if not sources.by_ddpshim and read_launch_env(os.environ).rank == 0:
            say(
                f"{sources.own_way}: taken for a program that distributes itself, and left alone. Its batch size is "
                "then often that of each rank: another experiment than one process (`python -m ddpshim docs "
                "other_codebases`). DDPSHIM_UNEDITED=on distributes it as a program for one process; off leaves it "
                "alone without this line"
            )
        yield None
        return
    start = Start(argv, sources.joins)
    with contextlib.ExitStack() as until:

        def begin() -> None:
            if os.getpid() == start.process:
                from ddpshim.trainers.unedited.joining import joined

                until.enter_context(joined(start))

        after_import("torch", begin)
        asks_for_rank = sources.asks_for_rank and "torch" not in sources.packages
        if not asks_for_rank and "isaacgym" not in sources.packages:
            importlib.import_module("torch")
        yield start


def is_launched() -> bool:
    """Whether this process is a rank of a job. Local."""
    try:
        return read_launch_env(os.environ).is_launched
    except LaunchError:
        return False  # `setup` raises this error if the program calls it


def _wanted() -> str:
    choice = os.environ.get(variables.UNEDITED, "auto").strip().lower()
    if choice not in ("on", "off", "auto"):
        raise OptionsError(
            f"{variables.UNEDITED}={choice!r}: whether to distribute the program is unclear. Use on or off."
        )
    return choice


def module_file(name: str) -> Optional[str]:
    """Return the file that `python -m name` runs, found without importing any of it; None if there is none. Local."""
    with contextlib.suppress(ValueError, ImportError):
        first, *rest = name.split(".")
        spec = importlib.util.find_spec(first)
        for part in [*rest, "__main__"]:
            inside = spec.submodule_search_locations if spec is not None else None
            if inside is None and part == "__main__":  # no package
                break
            # By the last part: by the full name, a folder without __init__.py needs its parent imported.
            spec = None if inside is None else importlib.machinery.PathFinder.find_spec(part, inside)
        return None if spec is None else spec.origin
    return None


def start_again(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a rank that runs the program `argv`, with the options of this Python. Local."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    options = ["-u", *["-O"] * sys.flags.optimize, *(f"-W{option}" for option in sys.warnoptions)]
    os.execve(sys.executable, [sys.executable, *options, "-m", "ddpshim.launch.rank", *argv], environ)
