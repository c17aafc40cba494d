"""Runs a program with simulated GPUs: `python -m tests.simulated_gpus PROGRAM.py ARGS`, or `-m MODULE ARGS`."""

from __future__ import annotations

import os
import sys

from tests import simulated_gpus

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"{__doc__}")
    try:
        variables = simulated_gpus.environment(int(os.environ.get(simulated_gpus.NUM, "2")))
    except RuntimeError as error:
        sys.exit(str(error))
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **variables})
