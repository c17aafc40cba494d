"""What there is to know of a process of tests/preloaded.py without importing torch: its commands, and its patience."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

SOCKET = "PRELOADED_SOCKET"  # the variable that says where that process listens; without it they are as ever
_ARGUMENTS = {"python": "", "python3": "", "torchrun": "-m torch.distributed.run", "ddpshim": "-m ddpshim"}


# What importing torch takes a quiet machine: the deadlines of the tests are many times as long.
_QUIET_IMPORT_S = 4.0
IMPORT_S = "import_s"  # a file beside the socket: how long it took that process


def patience(deadline_s: float) -> float:
    """A deadline for this machine as it is now: as many times longer as importing torch takes longer than elsewhere."""
    file = Path(os.environ.get(SOCKET, "")).with_name(IMPORT_S) if SOCKET in os.environ else None
    measured_s = float(file.read_text()) if file is not None and file.exists() else 0.0
    return deadline_s * max(1.0, measured_s / _QUIET_IMPORT_S)


@functools.cache
def commands() -> Path:
    """A folder for PATH with `python` and others, which are forked from that process; it lives as long as this one."""
    folder = Path(tempfile.mkdtemp(prefix="preloaded-commands-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    client = Path(__file__).with_name("preloaded_python.py")
    ask = f"exec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(client))}"
    for name, first in _ARGUMENTS.items():
        (folder / name).write_text(f'#!/bin/sh\n{ask} {first} "$@"\n')
        (folder / name).chmod(0o755)
    return folder
