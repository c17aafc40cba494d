"""Starts processes quickly, by forking them from one that has imported torch and robomimic.

`preloaded(tree)` is that process for the robomimic in `tree`; it lives as long as this one. A fork behaves like
`python -m MODULE …` or `python FILE …`, except for the imports: it has its own environment, folder and exit code. If
MODULE is a launcher, torchrun's own agent starts, watches and ends the ranks, which are forked as well.

There are two ways to start a fork: `start` from a test, and from any other program, such as a shell, the `python`,
`torchrun` and `ddpshim` of `shell_environment` (tests/preloaded_python.py).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Optional

from ddpshim.job.group import settle_rounding
from ddpshim.process.launch_env import EXIT_REQUEUE
from tests import simulated_gpus, trainer
from tests.preloaded_commands import IMPORT_S, SOCKET, commands, patience
from tests.ranks import OURS, free_port

ROOT = Path(__file__).parent.parent
START_DEADLINE_S = 240.0  # the first start waits for the imports
DEADLINE_PASSED = 124  # the exit code for processes that had to be killed
TORCHS = ("torch._dynamo", "torch.nn.parallel.distributed", "torch.distributed.launcher.api")
# Packages that robomimic imports: a second of CPU in each process that imports robomimic itself.
FOREIGN = ("h5py", "imageio", "matplotlib.pyplot", "tensorboardX", "torchvision")
ROBOMIMICS = ("robomimic.algo", "robomimic.utils.train_utils")
LAUNCHERS = ("ddpshim", "torch.distributed.run")
SHOW_STACKS = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None  # prints all threads' stacks to stderr
SHOW_STACKS_DEADLINE_S = 10.0
Command = tuple[Sequence[str], dict[str, str]]  # a module or a file of Python with its arguments, and the environment


def environment(tree: Optional[Path] = None) -> dict[str, str]:
    """Return the environment in which Python finds the robomimic in `tree`, without a launcher's variables."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    stubs = [str(p) for p in (ROOT / "tests" / "stubs").iterdir() if importlib.util.find_spec(p.name) is None]
    trees = [] if tree is None else [str(tree), str(tree / "act" / "detr")]
    way = "plain" if tree is None else trainer.way_of(tree)
    unedited = {trainer.UNEDITED: way} if way == "unedited" else {}
    return {**inherited, "PYTHONPATH": os.pathsep.join([*trees, str(ROOT), *stubs]), **unedited}


def as_torchrun_says(num_ranks: int) -> list[dict[str, str]]:
    """Return the variables of each rank on one node."""
    everywhere = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": free_port()}
    ranks = [{**everywhere, "RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    return [{"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}} for own in ranks]


def start_afresh(
    arguments: Sequence[str], environ: dict[str, str], folder: Path, deadline_s: float, is_cold: bool = False
) -> tuple[int, str]:
    """Run `python arguments…` in `folder`; return its exit code (124 if it had to be killed) and its output.

    It has already imported torch and robomimic's packages; with `is_cold`, nothing.
    """
    python = str(sys.executable)
    if not is_cold:
        python, environ = str(commands() / "python"), preloaded().shell_environment(environ)
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [python, *arguments],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(patience(deadline_s))
        except subprocess.TimeoutExpired:
            show_stacks(folder)
            code = DEADLINE_PASSED
        finally:
            kill_all_in(folder)
            process.wait()
    return code, (folder / "output.txt").read_text()


def working_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is `folder` or below it: a job's, even if their parents ended."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
    return found


def kill_all_in(folder: Path) -> None:
    """Kill a job, including its data workers and processes that its launcher left."""
    for pid in working_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def show_stacks(folder: Path) -> None:
    """Make each process of a hanging job print its threads' stacks to its stderr."""
    written: list[Path] = []
    for pid in working_in(folder):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            caught = int(re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[0], 16)
            if SHOW_STACKS is not None and caught >> (SHOW_STACKS - 1) & 1:
                written.append(Path(f"/proc/{pid}/fd/2"))
                os.kill(pid, SHOW_STACKS)
    before, end = -1, time.monotonic() + SHOW_STACKS_DEADLINE_S
    while written and time.monotonic() < end:  # a kill must not cut the stacks off
        time.sleep(0.5)
        now = sum(stderr.stat().st_size for stderr in written if stderr.exists())
        if now == before:
            return
        before = now


class Forked:
    """Running processes, numbered in the order in which they were started."""

    def __init__(self, connection: Connection, pids: Sequence[int], folder: Path) -> None:
        self._connection, self._folder = connection, folder
        self.pids = dict(enumerate(pids))  # of those that run
        self.codes: dict[int, int] = {}  # of those that ended, in the order in which they did

    def see(self, timeout_s: float, ends_others: bool = True) -> None:
        """Wait up to `timeout_s` for one to end; if it failed, send SIGTERM to the others, as torchrun does."""
        if self._connection.poll(timeout_s):
            pid, code = self._connection.recv()
            (number,) = (number for number, held in self.pids.items() if held == pid)
            del self.pids[number]
            self.codes[number] = code
            if ends_others and code not in (0, EXIT_REQUEUE):
                self.send(signal.SIGTERM)

    def send(self, number: int, to: Optional[Sequence[int]] = None) -> None:
        """Send a signal to the processes `to`, or to all."""
        for rank in list(self.pids) if to is None else to:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def wait(self, deadline_s: float, ends_others: bool = True) -> int:
        """Wait for all; return the first exit code other than 0, or 124 if some had to be killed after `deadline_s`."""
        end = time.monotonic() + patience(deadline_s)
        while self.pids and time.monotonic() < end:
            self.see(end - time.monotonic(), ends_others)
        late = bool(self.pids)
        if late:
            show_stacks(self._folder)
        self.kill()
        return DEADLINE_PASSED if late else next((code for code in self.codes.values() if code), 0)

    def kill(self) -> None:
        """Kill them, and all other processes in their folder."""
        kill_all_in(self._folder)
        self.send(signal.SIGKILL)
        while self.pids:
            self.see(START_DEADLINE_S)


class Preloaded:
    """A process that has imported the modules that trainings import."""

    def __init__(self, tree: Optional[Path], on_gpus: bool = False) -> None:
        self._connection, theirs = Pipe()
        # One thread for each rank, as under torchrun: on busy cores threads wait for each other.
        environ = {**environment(tree), "OMP_NUM_THREADS": "1"}
        python = str(sys.executable)
        if on_gpus:
            variables = simulated_gpus.environment(SIMULATED_GPUS_GENERATOR="cpu")
            path = os.pathsep.join([environ["PYTHONPATH"], variables["PYTHONPATH"]])
            environ = {**environ, **variables, "PYTHONPATH": path}
            environ.pop(SOCKET, None)  # simulated GPUs must exist when torch is first imported
        if tree is not None:  # forked from the process without a tree, which has torch
            environ[SOCKET] = preloaded(on_gpus=on_gpus).socket
        if SOCKET in environ:
            python = str(commands() / "python")
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded-")
        self.socket = os.path.join(self._folder.name, "socket")
        listener = socket.socket(socket.AF_UNIX)  # made here, so that early requests wait for the imports
        listener.bind(self.socket)
        listener.listen(64)
        self._output = open(os.path.join(self._folder.name, "output"), "w+")  # noqa: SIM115
        passed, kind = (theirs.fileno(), listener.fileno()), ("robomimic",) if tree else ()
        own = (*passed, time.monotonic(), commands() / "python", *kind)
        self._process = subprocess.Popen(
            # Unbuffered, like torchrun's ranks.
            [python, "-u", "-m", "tests.preloaded", *map(str, own)],
            env=environ,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        listener.close()
        atexit.register(self._leave)

    def start(self, commands: Sequence[Command], folder: Path) -> Forked:
        """Start a process for each of `commands` in `folder`; their output is appended to output.txt there."""
        self._connection.send(([(_as_python(argv), environ) for argv, environ in commands], str(folder), "output.txt"))
        try:
            if not self._connection.poll(patience(START_DEADLINE_S)):
                self._process.kill()  # a late answer would be taken for the next request's
            return Forked(self._connection, self._connection.recv(), folder)
        except (EOFError, ConnectionError) as error:
            self._output.seek(0)
            tail = self._output.read()[-3000:]
            raise RuntimeError(
                f"nothing is forked: the process ended, or took {START_DEADLINE_S:g} s\n{tail}"
            ) from error

    def shell_environment(self, environ: dict[str, str]) -> dict[str, str]:
        """Return `environ`, changed so that `python`, `python3`, `torchrun` and `ddpshim` are forks of this process."""
        path = os.pathsep.join([str(commands()), environ.get("PATH", os.defpath)])
        return {**environ, "PATH": path, SOCKET: self.socket}

    def _leave(self) -> None:
        self._connection.close()
        self._process.wait()
        self._output.close()
        self._folder.cleanup()


@functools.cache
def preloaded(tree: Optional[Path] = None, on_gpus: bool = False) -> Preloaded:
    """Return the process for the robomimic in `tree`, or for torch alone; the first call starts it.

    `on_gpus`: its forks see two simulated GPUs.
    """
    return Preloaded(tree, on_gpus)


def _as_python(argv: Sequence[str]) -> list[str]:
    """Return the arguments of `python` for a module or a file."""
    return [*([] if argv[0].endswith(".py") else ["-m"]), *argv]


@dataclass
class _Request:
    """A request for a new process."""

    argv: list[str]
    environ: dict[str, str]
    folder: str
    output: Optional[str] = None  # a file in its folder for its output
    files: dict[int, int] = field(default_factory=dict)  # descriptors open in it, with their numbers in this process


class _Server:
    """The loop of a process that only forks itself on request."""

    def __init__(self, connection: Connection, listener: Optional[socket.socket] = None) -> None:
        """Requests arrive through `connection` until it is closed, and from any program at the socket `listener`."""
        self._connection, self._listener = connection, listener
        self._running: dict[int, Callable[[int], Any]] = {}  # by process id, a function that reports the exit code
        self._asking: dict[socket.socket, int] = {}  # the process of each client; killed when the client is gone
        self._folders: set[str] = set()

    def serve(self) -> Optional[_Request]:
        """Return, in each fork, the request it was forked for; in the server, None when `connection` is closed."""
        while True:
            waited: list[Any] = [self._connection, *self._asking]
            for ready in wait([*waited, self._listener] if self._listener else waited, 0.01 if self._running else None):
                if ready is self._listener:
                    request = self._accept()
                elif ready is self._connection:
                    try:
                        request = self._answer()
                    except EOFError:
                        self._end()
                        return None
                else:  # the client is gone
                    request = self._hang_up(ready)
                if request is not None:
                    return request
            for pid in [*self._running]:
                # An agent that does not know yet that a rank ended may signal its group, which must still exist.
                keep = os.WNOWAIT if self._listener is None else 0
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | keep)
                if ended is not None:
                    has_left = ended.si_code == os.CLD_EXITED
                    self._running.pop(pid)(ended.si_status if has_left else -ended.si_status)

    def _answer(self) -> Optional[_Request]:
        commands, folder, output = self._connection.recv()
        started = []
        for argv, environ in commands:
            request = _Request(argv, environ, folder, output)
            pid = self._fork(request)
            if not pid:
                return request
            started.append(pid)
        self._connection.send(started)
        for pid in started:
            self._running[pid] = functools.partial(self._tell, pid)
        self._folders.add(folder)
        return None

    def _tell(self, pid: int, code: int) -> None:
        self._connection.send((pid, code))

    def _accept(self) -> Optional[_Request]:
        assert self._listener is not None
        asking, _ = self._listener.accept()
        try:
            size, here, *_ = socket.recv_fds(asking, 8, 250)
            with asking.makefile("rb") as message:
                asked = json.loads(message.read(int.from_bytes(size, "little")))
        except (OSError, ValueError):  # the client was killed while it sent its request
            asking.close()
            return None
        request = _Request(asked["argv"], asked["environ"], asked["folder"], None, dict(zip(asked["files"], here)))
        self._asking[asking] = -1
        pid = self._fork(request)
        if not pid:
            return request
        for number in here:
            os.close(number)
        with contextlib.suppress(OSError):  # the client is gone: the loop will kill the process
            asking.sendall(f"{pid}\n".encode())
        self._asking[asking] = pid
        self._running[pid] = functools.partial(self._tell_asking, asking)
        return None

    def _tell_asking(self, asking: socket.socket, code: int) -> None:
        with contextlib.suppress(OSError):
            asking.sendall(f"{code}\n".encode())
        self._asking.pop(asking, None)
        asking.close()

    def _hang_up(self, asking: socket.socket) -> None:
        pid = self._asking.pop(asking)
        if pid in self._running:
            os.kill(pid, signal.SIGKILL)

    def _fork(self, request: _Request) -> int:
        pid = os.fork()
        if not pid:
            self._connection.close()
            if self._listener is not None:
                self._listener.close()
            for asking in self._asking:
                asking.close()
            _become(request)
        return pid

    def _end(self) -> None:
        """Kill running processes after the last request; an agent's ranks continue, as without this server."""
        if self._listener is not None:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            for folder in self._folders if self._running else ():
                kill_all_in(Path(folder))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(request: _Request) -> None:
    os.setsid()
    inherited, theirs = (
        [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        for environ in (os.environ, request.environ)
    )
    sys.path[1:] = [*theirs, *(path for path in sys.path[1:] if path not in inherited)]
    os.environ.clear()
    os.environ.update(request.environ)
    tempfile.tempdir = None  # cached from another TMPDIR
    if "simulated_gpus_c" in sys.modules and os.environ.get("SIMULATED_GPUS_GENERATOR") == "gpu":
        sys.modules["simulated_gpus_c"].use_host_generator(False)
    os.chdir(request.folder)
    opened = dict(request.files)
    if request.output is not None:
        opened[1] = opened[2] = os.open(request.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Move all descriptors to unused numbers first: a new number may be another descriptor's old one.
    moved = {number: os.dup(file) for number, file in opened.items()}
    while moved and min(moved.values()) <= max(moved):
        moved = {number: os.dup(file) for number, file in moved.items()}
    for number, file in moved.items():
        os.dup2(file, number)
    for file in {*moved.values(), *opened.values()} - {*opened}:
        os.close(file)


class _Ranks:
    """Makes the agent in this process fork its ranks, from a process in this one's current state."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.codes: dict[int, int] = {}

    def start(self, handler: Any, args: Sequence[str], environ: dict[str, str]) -> _Rank:
        """Fork the rank that torch's SubprocessHandler would start with the command `args`."""
        python, unbuffered, *argv = args
        assert (python, unbuffered) == (sys.executable, "-u"), args
        self._connection.send(([(argv, environ)], os.getcwd(), None))
        while True:
            answer = self._connection.recv()
            if isinstance(answer, list):
                return _Rank(self, *answer)
            self.codes.update([answer])

    def see(self, timeout_s: float) -> None:
        if self._connection.poll(timeout_s):
            self.codes.update([self._connection.recv()])


class _Rank:
    """Implements the part of `subprocess.Popen` that torch's agent uses."""

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


def _fork_ranks(python: str, server: str) -> Optional[_Request]:
    """Return None in the agent, and in each of its ranks the request to run.

    The agent's own commands are forks too: `python` asks the process at the address `server`.
    """
    ours, theirs = Pipe()
    if not os.fork():
        ours.close()
        with contextlib.suppress(ConnectionError):  # the agent is gone, and its ranks continue without it
            request = _Server(theirs).serve()
            if request:
                return request
        os._exit(0)
    theirs.close()
    sys.executable, os.environ[SOCKET] = python, server
    # torch calls it to name its events; with thousands of modules that takes an agent seconds.
    inspect.stack = functools.partial(inspect.stack, 0)  # type: ignore[assignment]
    handler: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api").SubprocessHandler
    ranks = _Ranks(ours)
    handler._popen = lambda self, args, environ: ranks.start(self, args, environ)
    return None


def main() -> None:
    connection, listener = Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    for name in TORCHS:
        importlib.import_module(name)
    python, server = sys.argv[4], listener.getsockname()
    measured = Path(server).with_name(f"{IMPORT_S}.part")
    measured.write_text(str(time.monotonic() - float(sys.argv[3])))
    measured.rename(measured.with_suffix(""))
    for name in (*FOREIGN, *OURS):
        with contextlib.suppress(Exception):  # missing, or incompatible with this torch: its users will see the error
            importlib.import_module(name)
    trainer.activate()
    for name in ROBOMIMICS if "robomimic" in sys.argv else ():
        importlib.import_module(name)
    settle_rounding()  # otherwise one plain run in fifty differs from the others in the last digit
    # As in a terminal: without job control, a shell's background processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if SHOW_STACKS is not None:
        faulthandler.register(SHOW_STACKS, 2)
    # So that the collector does not visit imported objects at the end of each process: a second of CPU.
    gc.collect()
    gc.freeze()
    request = _Server(connection, listener).serve()
    if request is not None and request.argv[0] == "-m" and request.argv[1] in LAUNCHERS:
        request = _fork_ranks(python, server) or request
    if request is not None:
        _leave(_run, request.argv)


def _leave(run: Callable[[list[str]], None], argv: list[str]) -> None:
    """Run `argv`, then exit as Python does, but without tearing down thousands of modules: 0.4 s for each fork.

    Threads are joined, exit handlers run, output is flushed. A program that raises ends as usual.
    """
    code = 0
    try:
        run(argv)
    except SystemExit as ended:
        if not (ended.code is None or isinstance(ended.code, int)):
            raise
        code = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)


def _run(argv: list[str]) -> None:
    """Do the same as `python argv…`."""
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        sys.modules["__main__"] = program = ModuleType("__main__")
        exec(compile(argv[1], "<string>", "exec"), program.__dict__)
    else:
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
