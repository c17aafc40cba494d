"""Runs the user's program as one rank of `python -m ddpshim run` or of `ddpshim slurm`, unedited.

Imports no torch: the program decides what is imported, in which order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Optional

from ddpshim import variables
from ddpshim.failures import unsynced_check
from ddpshim.job import shared_pdb
from ddpshim.process.replaced import after_import
from ddpshim.process.say import say
from ddpshim.trainers.unedited import program


def main(argv: Sequence[str]) -> None:
    """Run `script.py ARGS` or `-m package.module ARGS` as `python` would, in a rank that a launcher started."""
    if "RANK" in os.environ and os.getpgrp() != os.getpid():
        # torch 2.1 leaves ranks in the terminal's group: Ctrl-C would reach them directly and through `run`.
        os.setsid()
    sys.modules["ddpshim.launch.rank"] = sys.modules["__main__"]  # for `import ddpshim.auto`
    if (folder := os.environ.get(variables.RANK_LOGS)) is not None:
        # Descriptors, for output of libraries, workers and a crashing interpreter.
        rank = os.environ.get("RANK") or os.environ[variables.RANK]
        file = os.open(os.path.join(folder, f"rank_{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    with contextlib.ExitStack() as until:
        # Nothing of the program has been imported yet.
        if certificate := os.environ.get(variables.CERTIFY):
            from ddpshim.tools.certifying import Certifier

            until.enter_context(Certifier(Path(certificate)))
        elif proof := os.environ.get(variables.CHECK):
            from ddpshim.tools.watching import RankRecorder

            until.enter_context(RankRecorder(Path(proof)))
        else:
            unsynced_check.watch()
        shared_pdb.share(until)
        patched = program.patched(argv)  # which joins by itself
        start = until.enter_context(program.distributed(argv)) if patched is None else None
        if start is None:
            after_import("hydra.core.utils", _one_output_folder)
        else:  # a warning of DDP, which the program does not use
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        _run_program(patched or argv, start)


def _one_output_folder() -> None:
    """Make hydra's `${now:...}` the time at which `run` began: ranks that start in different seconds share a folder."""
    began = os.path.join(os.environ.get(variables.RUN_DIR, ""), program.BEGAN)
    if os.path.exists(began):
        moment = datetime.fromtimestamp(os.stat(began).st_mtime)
        sys.modules["hydra.core.utils"].datetime = type("datetime", (datetime,), {"now": lambda: moment})  # type: ignore[attr-defined]


def _run_program(argv: Sequence[str], start: Optional[program.Start]) -> None:
    try:
        program.run_as_main(argv)
    except SystemExit as error:
        if error.code:
            from ddpshim.failures import failure_notes

            failure_notes.write(error, error.code if isinstance(error.code, int) else 1)
        raise
    except (Exception, KeyboardInterrupt) as error:
        from ddpshim.failures import failure_notes

        if start is not None and isinstance(error, Exception):
            start.at_failure(error)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        failure_notes.write(error, code)
        if sys.excepthook is sys.__excepthook__:
            what = "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
            say(f"rank {rank} {what}:\n{failure_notes.traceback_of(error).rstrip()}")
        else:  # set by `ddpshim.setup`: it names the first failing rank
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
