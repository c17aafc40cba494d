"""Gives tests the fixture `same_experiment`, which runs `python -m ddpshim check` on a program. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest


@pytest.fixture
def same_experiment(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return a function that fails unless a program is the same experiment on ranks as in one process.

    `same_experiment("train.py", "--epochs", "1", nproc=2)`: the program, or "-m" and a module, and its arguments. It
    runs in the current folder if it is there, else in pytest's rootdir. `nproc`, `steps`, `one`, `timeout` and
    `own_ddp` are options of `python -m ddpshim check`, whose defaults they have.
    """

    def same_experiment(program: str, *arguments: str, **options: Any) -> None:
        __tracebackhide__ = True
        logs = tmp_path_factory.mktemp("same_experiment")
        command = [sys.executable, "-m", "ddpshim", "check", f"--log-dir={logs}"]
        for name, value in {"nproc": 2, **options}.items():  # given, as the program may have an argument of this name
            option = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                command += [option] * value
            elif value is not None:
                command.append(f"{option}={value}")
        file = Path(arguments[0].partition(".")[0] if program == "-m" else program)
        is_here = file.exists() or file.with_suffix(".py").exists()
        paths = [*map(str, pytestconfig.getini("pythonpath")), os.environ.get("PYTHONPATH", "")]
        with subprocess.Popen(
            [*command, program, *arguments],
            cwd=None if is_here else pytestconfig.rootpath,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as check:
            try:
                answer, said = check.communicate()
            except BaseException:  # Ctrl-C, or a test's own deadline
                check.send_signal(signal.SIGINT)  # so that it ends the ranks and removes their files
                raise
        if check.returncode:
            page = logs / "check.md"
            pytest.fail((answer or said) + (f"page:  {page}" if page.exists() else ""), pytrace=False)

    return same_experiment
