"""Explains errors of a port or a name of shared memory that another rank has taken."""

from __future__ import annotations

import errno
import traceback
from typing import Optional

from ddpshim import variables


def explain_taken(error: Optional[BaseException]) -> None:
    """Say in an error of a taken port or name of shared memory that every rank opens it. Local."""
    while error is not None:
        opened = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
        is_memory = isinstance(error, FileExistsError) and opened == ["multiprocessing.shared_memory"]
        if isinstance(error, OSError) and (is_memory or error.errno == errno.EADDRINUSE):
            error.strerror = (
                f"{error.strerror}: every rank runs this line, and another rank (or program) of this machine has "
                f"opened the same port or name. Open it only if os.environ.get('{variables.RANK}', '0') is '0', or "
                "leave the choice to the system: port 0, shared memory without a name"
            )
        error = error.__cause__ or error.__context__
