"""Commands and deadlines for a process of tests/preloaded.py; imports no torch."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

SOCKET = "PRELOADED_SOCKET"  # a variable with the address of that process; without it, programs start as usual
_ARGUMENTS = {"python": "", "python3": "", "torchrun": "-m torch.distributed.run", "ddpshim": "-m ddpshim"}


# The time to import torch on an idle machine; the tests' deadlines are many times as long.
_QUIET_IMPORT_S = 4.0
IMPORT_S = "import_s"  # a file beside the socket with that process's import time in seconds


def patience(deadline_s: float) -> float:
    """Return the deadline for this machine under its current load.

    It is longer by the same factor as importing torch was, or as processes want to run for each core now.
    """
    file = Path(os.environ.get(SOCKET, "")).with_name(IMPORT_S) if SOCKET in os.environ else None
    measured_s = float(file.read_text()) if file is not None and file.exists() else 0.0
    return deadline_s * max(1.0, measured_s / _QUIET_IMPORT_S, min(4.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def python(
    *words: str, environ: Optional[dict[str, str]] = None, deadline_s: float = 240, code: int = 0, **how: Any
) -> str:
    """Run `python words…`, by default with this repository's modules; return its output if it ends with `code`."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)} if environ is None else environ
    ran = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=patience(deadline_s), **how
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


@functools.cache
def commands() -> Path:
    """Return a folder for PATH with `python` and others, which fork that process; removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="preloaded-commands-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    client = Path(__file__).with_name("preloaded_python.py")
    ask = f"exec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(client))}"
    for name, first in _ARGUMENTS.items():
        (folder / name).write_text(f'#!/bin/sh\n{ask} {first} "$@"\n')
        (folder / name).chmod(0o755)
    return folder
