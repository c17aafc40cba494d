"""Runs the user's program as the one process of a proof: `python -m` this file, FOLDER RUN PROGRAM [ARGS]."""

from __future__ import annotations

import os
import runpy
import sys

from ddpshim.tools.check.watching import watched


def main() -> None:
    """Run `script.py ARGS` or `-m package.module ARGS` as `python` would, and record it."""
    folder, run, *argv = sys.argv[1:]
    is_module = argv[0] == "-m"
    program, *arguments = argv[is_module:]
    sys.argv = [program, *arguments]
    with watched(folder, run):
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
            runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
