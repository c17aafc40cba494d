"""Runs the user's program as one rank of `python -m ddpshim run`, unedited, after opening its log.

Imports no torch: the program decides what is imported, and in which order.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Optional

from ddpshim import variables
from ddpshim.job.peer_errors import lost_a_peer
from ddpshim.job.rank_log import redirect_output
from ddpshim.job.say import say
from ddpshim.trainers import import_hook


class Failure(NamedTuple):
    """An exception that has left a rank's program."""

    moment: float
    exit_code: int
    lost_a_peer: bool  # it only says that another rank is gone


def main(argv: Sequence[str]) -> None:
    """Run `script.py ARGS` or `-m package.module ARGS` as `python` would, as the rank that torchrun made of this."""
    if os.getpgrp() != os.getpid():
        # torch 2.1 leaves ranks in the terminal's group: Ctrl-C would reach them directly and through `run`.
        os.setsid()
    redirect_output()
    # Nothing of the program has been imported yet.
    kind, audit = os.environ.get(variables.CONVERT), os.environ.get(variables.AUDIT)
    if audit:
        from ddpshim.tools.audit import recording

        with recording.recorded(audit):
            _run_program(argv)
    elif not kind:
        import_hook.activate()
        _run_program(argv)
    else:
        from ddpshim.trainers.dataparallel.convert import converted  # it imports torch

        with converted(kind):
            _run_program(argv)


def failures(run_dir: str) -> dict[int, Failure]:
    """The Failure of each rank whose program an exception has left."""
    return {int(file.suffix[1:]): Failure(*json.loads(file.read_text())) for file in Path(run_dir).glob("failed.*")}


def forget_failures(run_dir: str) -> None:
    """Have `failures` know of none, as of ranks that are about to be restarted: some may never come to say so."""
    for file in Path(run_dir).glob("failed.*"):
        file.unlink()


def _run_program(argv: Sequence[str]) -> None:
    is_module = argv[0] == "-m"
    program, *arguments = argv[is_module:]
    sys.argv = [program, *arguments]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on: nothing was put there
                sys.path[0] = os.path.dirname(os.path.abspath(program))
            module = import_hook.program_in(program)
            if module is None:
                runpy.run_path(program, run_name="__main__")
            else:  # so that it can be patched in memory
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code:
            _write_down(error, error.code if isinstance(error.code, int) else 1)
        raise
    except Exception as error:
        _write_down(error, 1)
        error.__traceback__ = _without_our_frames(error.__traceback__)
        if sys.excepthook is sys.__excepthook__:
            say(f"rank {os.environ['RANK']} failed:")
            traceback.print_exception(type(error), error, error.__traceback__)  # with lines that no file has, too
        else:  # set by `ddpshim.setup`: it names the first failing rank
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _write_down(error: BaseException, exit_code: int) -> None:
    # torch's agent goes by the end of the process, in whole seconds: ranks that fail because of this one may end
    # earlier, and then the agent ends this one, perhaps while it writes.
    partial = _note().with_name(f"partial.{os.environ['RANK']}")
    partial.write_text(json.dumps(Failure(time.time(), exit_code, lost_a_peer(error))))
    partial.replace(_note())


def _note() -> Path:
    return Path(os.environ[variables.RUN_DIR], f"failed.{os.environ['RANK']}")


def _without_our_frames(trace: Optional[TracebackType]) -> Optional[TracebackType]:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
