"""Processes that are forked from one with torch and robomimic imported, and start in no time.

`preloaded(tree)` is that one process for the robomimic in `tree`; it lives as long as this one. What is forked from it
is `python -m MODULE …` or `python FILE …` in all but the imports: with an environment, a folder and an end of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Optional

from ddpshim.launch import EXIT_REQUEUE
from tests.ranks import free_port

ROOT = Path(__file__).parent.parent
HOOKS = "OBSERVED_HOOKS"  # set where the package is unpatched and ddpshim.auto is to be imported
START_DEADLINE_S = 240.0  # the first start waits for the imports


def environment(tree: Path) -> dict[str, str]:
    """The environment in which Python finds the robomimic in `tree`, and no launcher."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    stubs = [str(p) for p in (ROOT / "tests" / "stubs").iterdir() if importlib.util.find_spec(p.name) is None]
    hooks = {HOOKS: "1"} if tree.name.endswith("-hooked") else {}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "act" / "detr"), str(ROOT), *stubs]),
        **hooks,
    }


def as_torchrun_says(num_ranks: int) -> list[dict[str, str]]:
    """The variables of each rank on one node."""
    everywhere = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": free_port()}
    said = [{**everywhere, "RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    return [{"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in here.items()}} for here in said]


class Forked:
    """Processes that run; they are known by their place in the order in which they were started."""

    def __init__(self, connection: Connection, pids: Sequence[int]) -> None:
        self._connection = connection
        self.pids = dict(enumerate(pids))  # of those that run
        self.codes: dict[int, int] = {}  # of those that ended, in the order in which they did

    def see(self, timeout_s: float) -> None:
        """Wait so long for one of them to end."""
        if self._connection.poll(timeout_s):
            pid, code = self._connection.recv()
            (number,) = (number for number, held in self.pids.items() if held == pid)
            del self.pids[number]
            self.codes[number] = code
            if code not in (0, EXIT_REQUEUE):
                self.send(signal.SIGTERM)  # as torchrun does

    def send(self, number: int, to: Optional[Sequence[int]] = None) -> None:
        """A signal to these, or to all."""
        for rank in list(self.pids) if to is None else to:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def wait(self, deadline_s: float) -> int:
        """The first exit code that is not 0; 124 where some had to be killed after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while self.pids and time.monotonic() < end:
            self.see(end - time.monotonic())
        late = bool(self.pids)
        self.send(signal.SIGKILL)
        while self.pids:
            self.see(START_DEADLINE_S)
        return 124 if late else next((code for code in self.codes.values() if code), 0)


class Preloaded:
    """A process that has imported what trainings import."""

    def __init__(self, tree: Path) -> None:
        self._connection, theirs = Pipe()
        # One thread for each rank, as torchrun has it: on busy cores threads wait for each other.
        environ = {**environment(tree), "OMP_NUM_THREADS": "1"}
        self._output = tree / "preloaded.txt"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        atexit.register(self._leave)

    def start(self, argv: Sequence[str], environs: Sequence[dict[str, str]], folder: Path) -> Forked:
        """A process for each of `environs` in `folder`; what they print is appended to output.txt there.

        `argv`: the name of a module or a file of Python, and its arguments.
        """
        self._connection.send((list(argv), list(environs), str(folder)))
        try:
            if not self._connection.poll(START_DEADLINE_S):
                self._process.kill()  # or its answer would be taken for that to the next question
            return Forked(self._connection, self._connection.recv())
        except (EOFError, ConnectionError) as error:
            said = self._output.read_text()[-3000:]
            raise RuntimeError(
                f"nothing is forked: the process ended, or took {START_DEADLINE_S:g} s\n{said}"
            ) from error

    def _leave(self) -> None:
        self._connection.close()
        self._process.wait()


@functools.cache
def preloaded(tree: Path) -> Preloaded:
    """The process for the robomimic in `tree`, which starts when it is first asked for."""
    return Preloaded(tree)


def _serve(connection: Connection) -> Optional[list[str]]:
    """The arguments of what is to be run in this process, which was forked for it; None when all is done."""
    while True:
        try:
            argv, environs, folder = connection.recv()
        except EOFError:
            return None
        running = []
        for environ in environs:
            pid = os.fork()
            if not pid:
                connection.close()
                _become(environ, folder)
                return list(argv)
            running.append(pid)
        connection.send(running)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                running.remove(pid)
                connection.send((pid, os.waitstatus_to_exitcode(status)))
            elif connection.poll(0.01):  # it says nothing now: it is gone
                for left in running:
                    os.kill(left, signal.SIGKILL)
                return None


def _become(environ: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)


def main() -> None:
    for name in ("robomimic.algo", "robomimic.utils.train_utils", "torch._dynamo"):
        importlib.import_module(name)
    argv: Any = _serve(Connection(int(sys.argv[1])))
    if argv:
        sys.argv = argv
        if argv[0].endswith(".py"):
            runpy.run_path(argv[0], run_name="__main__")
        else:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
