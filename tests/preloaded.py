"""Processes that are forked from one with torch and robomimic imported, and start in no time.

`preloaded(tree)` is that one process for the robomimic in `tree`; it lives as long as this one. What is forked from it
is `python -m MODULE …` or `python FILE …` in all but the imports: with an environment, a folder and an end of its own.
Where MODULE is a launcher, torchrun's own agent starts the ranks, watches and ends them, and they are forked as well.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import runpy
import signal
import subprocess
import sys
import tempfile
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
LAUNCHERS = ("ddpshim", "torch.distributed.run")
Command = tuple[Sequence[str], dict[str, str]]  # a module or a file of Python with its arguments, and the environment


def environment(tree: Optional[Path] = None) -> dict[str, str]:
    """The environment in which Python finds the robomimic in `tree`, and no launcher."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    stubs = [str(p) for p in (ROOT / "tests" / "stubs").iterdir() if importlib.util.find_spec(p.name) is None]
    trees = [] if tree is None else [str(tree), str(tree / "act" / "detr")]
    hooks = {HOOKS: "1"} if tree is not None and tree.name.endswith("-hooked") else {}
    return {**inherited, "PYTHONPATH": os.pathsep.join([*trees, str(ROOT), *stubs]), **hooks}


def as_torchrun_says(num_ranks: int) -> list[dict[str, str]]:
    """The variables of each rank on one node."""
    everywhere = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": free_port()}
    said = [{**everywhere, "RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    return [{"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in here.items()}} for here in said]


def start_afresh(arguments: Sequence[str], environ: dict[str, str], folder: Path, deadline_s: float) -> tuple[int, str]:
    """The exit code and the output of an interpreter of its own in `folder`; 124 where it had to be killed."""
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            kill_all_in(folder)
            process.wait()
    return code, (folder / "output.txt").read_text()


def working_in(folder: Path) -> list[int]:
    """The processes whose working directory is `folder` or below it: a job's, whoever their parents are by then."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
    return found


def kill_all_in(folder: Path) -> None:
    """End a job, its data workers and what its launcher left included."""
    for pid in working_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Forked:
    """Processes that run; they are known by their place in the order in which they were started."""

    def __init__(self, connection: Connection, pids: Sequence[int], folder: Path) -> None:
        self._connection, self._folder = connection, folder
        self.pids = dict(enumerate(pids))  # of those that run
        self.codes: dict[int, int] = {}  # of those that ended, in the order in which they did

    def see(self, timeout_s: float, ends_others: bool = True) -> None:
        """Wait so long for one of them to end; where it failed the others are told to, as by torchrun."""
        if self._connection.poll(timeout_s):
            pid, code = self._connection.recv()
            (number,) = (number for number, held in self.pids.items() if held == pid)
            del self.pids[number]
            self.codes[number] = code
            if ends_others and code not in (0, EXIT_REQUEUE):
                self.send(signal.SIGTERM)

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
        self.kill()
        return 124 if late else next((code for code in self.codes.values() if code), 0)

    def kill(self) -> None:
        """End them, and whatever else they left in their folder."""
        kill_all_in(self._folder)
        self.send(signal.SIGKILL)
        while self.pids:
            self.see(START_DEADLINE_S)


class Preloaded:
    """A process that has imported what trainings import."""

    def __init__(self, tree: Optional[Path]) -> None:
        self._connection, theirs = Pipe()
        # One thread for each rank, as torchrun has it: on busy cores threads wait for each other.
        environ = {**environment(tree), "OMP_NUM_THREADS": "1"}
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            # Unbuffered, as torchrun has its ranks.
            [sys.executable, "-u", "-m", "tests.preloaded", str(theirs.fileno()), *(["robomimic"] if tree else [])],
            env=environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        atexit.register(self._leave)

    def start(self, commands: Sequence[Command], folder: Path) -> Forked:
        """A process for each of `commands` in `folder`; what they print is appended to output.txt there."""
        self._connection.send(([(list(argv), environ) for argv, environ in commands], str(folder), "output.txt"))
        try:
            if not self._connection.poll(START_DEADLINE_S):
                self._process.kill()  # or its answer would be taken for that to the next question
            return Forked(self._connection, self._connection.recv(), folder)
        except (EOFError, ConnectionError) as error:
            self._output.seek(0)
            said = self._output.read()[-3000:]
            raise RuntimeError(
                f"nothing is forked: the process ended, or took {START_DEADLINE_S:g} s\n{said}"
            ) from error

    def _leave(self) -> None:
        self._connection.close()
        self._process.wait()
        self._output.close()


@functools.cache
def preloaded(tree: Optional[Path] = None) -> Preloaded:
    """The process for the robomimic in `tree`, or for torch alone, which starts when it is first asked for."""
    return Preloaded(tree)


def _serve(connection: Connection, kills: bool) -> Optional[list[str]]:
    """The arguments of what is to be run in this process, which was forked for it; None when nobody asks any more.

    `kills`: what runs then is ended.
    """
    running: list[int] = []
    folder = ""
    while True:
        if connection.poll(0.01 if running else None):
            try:
                commands, folder, output = connection.recv()
            except EOFError:
                if kills and running:
                    kill_all_in(Path(folder))
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                return None
            started = []
            for argv, environ in commands:
                pid = os.fork()
                if not pid:
                    connection.close()
                    _become(environ, folder, output)
                    return list(argv)
                started.append(pid)
            connection.send(started)
            running += started
        for pid in [*running]:
            # An agent that has not read yet that a rank ended may signal its group, which has to be there.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | (0 if kills else os.WNOWAIT))
            if ended is not None:
                running.remove(pid)
                has_left = ended.si_code == os.CLD_EXITED
                connection.send((pid, ended.si_status if has_left else -ended.si_status))


def _become(environ: dict[str, str], folder: str, output: Optional[str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # what was found by another TMPDIR
    os.chdir(folder)
    if output is not None:
        opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(opened, stream)


class _Ranks:
    """Has the agent in this process fork its ranks, from a process that is as this one is now."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.codes: dict[int, int] = {}

    def start(self, handler: Any, args: Sequence[str], environ: dict[str, str]) -> _Rank:
        """What torch's SubprocessHandler starts as the command `args`."""
        python, unbuffered, *argv = args
        assert (python, unbuffered) == (sys.executable, "-u"), args
        self._connection.send(([(argv[argv[0] == "-m" :], environ)], os.getcwd(), None))
        while True:
            answer = self._connection.recv()
            if isinstance(answer, list):
                return _Rank(self, *answer)
            self.codes.update([answer])

    def see(self, timeout_s: float) -> None:
        if self._connection.poll(timeout_s):
            self.codes.update([self._connection.recv()])


class _Rank:
    """What of `subprocess.Popen` torch's agent uses."""

    def __init__(self, ranks: _Ranks, pid: int) -> None:
        self._ranks, self.pid = ranks, pid

    def poll(self) -> Optional[int]:
        if self.pid not in self._ranks.codes:
            self._ranks.see(0)
        return self._ranks.codes.get(self.pid)

    def wait(self, timeout: Optional[float] = None) -> int:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while self.pid not in self._ranks.codes:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self._ranks.see(min(1.0, max(0.0, end - time.monotonic())))
        return self._ranks.codes[self.pid]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _fork_ranks() -> Optional[list[str]]:
    """None in the agent; in each of its ranks what is to be run there."""
    ours, theirs = Pipe()
    if not os.fork():
        ours.close()
        with contextlib.suppress(ConnectionError):  # the agent is gone, and its ranks are left as they would be
            argv = _serve(theirs, kills=False)
            if argv:
                return argv
        os._exit(0)
    theirs.close()
    # torch calls it to name its events, and what it finds in thousands of modules costs an agent seconds.
    inspect.stack = functools.partial(inspect.stack, 0)  # type: ignore[assignment]
    handler: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api").SubprocessHandler
    ranks = _Ranks(ours)
    handler._popen = lambda self, args, environ: ranks.start(self, args, environ)
    return None


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    for name in ("torch._dynamo", "torch.nn.parallel.distributed", "torch.distributed.launcher.api"):
        importlib.import_module(name)
    for name in ("robomimic.algo", "robomimic.utils.train_utils") if "robomimic" in sys.argv else ():
        importlib.import_module(name)
    # As in a terminal: a shell without job control has what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What is imported is not looked through once more at the end of each process: a second of CPU.
    gc.collect()
    gc.freeze()
    argv: Any = _serve(connection, kills=True)
    if argv is None:
        return
    if argv[0] in LAUNCHERS:
        argv = _fork_ranks() or argv
    sys.argv = argv
    if argv[0].endswith(".py"):
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
