"""Starts processes quickly, by forking them from one that has imported torch and robomimic.

`preloaded(tree)` is that process for the robomimic in `tree`; it lives as long as this one. A fork behaves like
`python -m MODULE …` or `python FILE …`, except for the imports: it has its own environment, folder and exit code. If
MODULE is a launcher, torchrun's own agent starts, watches and ends the ranks, which are forks as well.

A test starts forks by `start`; any other program, such as a shell, by the `python`, `torchrun` and `ddpshim` of
`shell_environment`. Both ask as tests/preloaded_python.py does.
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
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Optional, TextIO, cast

from ddpshim.job.group import settle_rounding
from ddpshim.process.launch_env import EXIT_REQUEUE
from tests import simulated_gpus, trainer
from tests.preloaded_commands import IMPORT_S, SOCKET, commands, patience
from tests.preloaded_python import ask
from tests.ranks import OURS, free_port

ROOT = Path(__file__).parent.parent
FORGETS = "PRELOADED_FORGETS"  # a variable: a package whose modules a fork has not imported yet
START_DEADLINE_S = 240.0  # the first start waits for the imports
DEADLINE_PASSED = 124  # the exit code for processes that had to be killed
TORCHS = ("torch._dynamo", "torch.nn.parallel.distributed", "torch.distributed.launcher.api")
# Packages that robomimic imports: a second of CPU in each process that imports robomimic itself.
FOREIGN = ("h5py", "imageio", "matplotlib.pyplot", "tensorboardX", "torchvision")
ROBOMIMICS = ("robomimic.algo", "robomimic.utils.train_utils")
LAUNCHERS = ("ddpshim", "torch.distributed.run")
SHOW_STACKS = signal.SIGRTMIN + 9  # prints all threads' stacks to stderr
SHOW_STACKS_S = 3.0
Command = tuple[Sequence[str], dict[str, str]]  # a module or a file of Python, or `-c`, with arguments; the environment


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

    It has already imported torch and robomimic's packages, and so have its children; with `is_cold`, nothing.
    """
    (folder / "output.txt").unlink(missing_ok=True)
    made = preloaded()
    if is_cold:
        arguments = ["-c", "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *arguments]
    else:
        environ = made.shell_environment(environ)
    code = made.start([(arguments, environ)], folder).wait(deadline_s)
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
    for pid in working_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def show_stacks(folder: Path) -> None:
    """Make each process of a hanging job print its threads' stacks to its stderr."""
    for pid in working_in(folder):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            caught = int(re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[0], 16)
            if caught >> (SHOW_STACKS - 1) & 1:
                os.kill(pid, SHOW_STACKS)
    time.sleep(SHOW_STACKS_S)  # a kill must not cut the stacks off


class Forked:
    """Running processes, numbered in the order in which they were started."""

    def __init__(self, answers: Sequence[TextIO], folder: Path) -> None:
        self._numbers, self._folder = {answer: number for number, answer in enumerate(answers)}, folder
        self.pids = {number: int(answer.readline()) for answer, number in self._numbers.items()}  # of those that run
        self.codes: dict[int, int] = {}  # of those that ended, in the order in which they did

    def see(self, timeout_s: float, ends_others: bool = True) -> None:
        """Wait up to `timeout_s` for one to end; if it failed, send SIGTERM to the others, as torchrun does."""
        ended = cast("list[TextIO]", wait([*self._numbers], timeout_s))
        if ended:
            number = self._numbers.pop(ended[0])
            self.codes[number] = code = int(ended[0].readline() or DEADLINE_PASSED)  # nothing, if the server was killed
            ended[0].close()
            del self.pids[number]
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
        try:
            with (folder / "output.txt").open("a") as output:
                files = {1: output.fileno(), 2: output.fileno()}
                return Forked(
                    [ask(self.socket, _as_python(argv), env, str(folder), files) for argv, env in commands], folder
                )
        except (OSError, ValueError) as error:
            self._output.seek(0)
            raise RuntimeError(f"nothing is forked: the process ended\n{self._output.read()[-3000:]}") from error

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
    return [*([] if argv[0].endswith(".py") or argv[0].startswith("-") else ["-m"]), *argv]


def _serve(connection: Connection, listener: socket.socket) -> Optional[dict[str, Any]]:
    """Fork this process for each request at `listener`, until `connection` is closed; return a fork's request in it."""
    clients: dict[socket.socket, int] = {}  # with the process of each; killed when the client is gone
    ended, wake = socket.socketpair()  # readable if a process has ended
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        waited: list[Any] = [connection, listener, ended, *clients]
        for ready in wait(waited):
            if ready is ended:
                ended.recv(1000)
                continue
            if ready is connection:
                for pid in clients.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            client: Any = listener.accept()[0] if ready is listener else ready
            request = _read(client) if ready is listener else None
            if request is None:  # the client is gone, maybe while it sent its request
                if client in clients:
                    os.kill(clients[client], signal.SIGKILL)
                    os.waitpid(clients.pop(client), 0)
                client.close()
                continue
            clients[client] = os.fork()
            if not clients[client]:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for opened in (connection, listener, ended, wake, *clients):
                    opened.close()
                _become(request)
                return request
            for file in request["files"].values():
                os.close(file)
            with contextlib.suppress(OSError):  # the client is gone: the loop will kill the process
                client.sendall(f"{clients[client]}\n".encode())
        for client, pid in [*clients.items()]:
            number, status = os.waitpid(pid, os.WNOHANG)
            if number:
                del clients[client]
                with contextlib.suppress(OSError):
                    client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                client.close()


def _read(client: socket.socket) -> Optional[dict[str, Any]]:
    """Return the request of a client, with descriptors of this process by their numbers in the fork."""
    with contextlib.suppress(OSError, ValueError):
        size, here, *_ = socket.recv_fds(client, 8, 250)
        with client.makefile("rb") as message:
            request: dict[str, Any] = json.loads(message.read(int.from_bytes(size, "little")))
        return {**request, "files": dict(zip(request["files"], here))}
    return None


def _become(request: dict[str, Any]) -> None:
    os.setsid()
    inherited, theirs = (
        [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        for environ in (os.environ, request["environ"])
    )
    sys.path[1:] = [*theirs, *(path for path in sys.path[1:] if path not in inherited)]
    os.environ.clear()
    os.environ.update(request["environ"])
    for name in [n for n in sys.modules if n.partition(".")[0] == os.environ.get(FORGETS)]:
        del sys.modules[name]
    tempfile.tempdir = None  # cached from another TMPDIR
    if "simulated_gpus_c" in sys.modules and os.environ.get("SIMULATED_GPUS_GENERATOR") == "gpu":
        sys.modules["simulated_gpus_c"].use_host_generator(False)
    os.chdir(request["folder"])
    # Move all descriptors to unused numbers first: a new number may be another descriptor's old one.
    files = request["files"]
    moved = {number: os.dup(file) for number, file in files.items()}
    while moved and min(moved.values()) <= max(moved):
        moved = {number: os.dup(file) for number, file in moved.items()}
    for number, file in moved.items():
        os.dup2(file, number)
    for file in {*moved.values(), *files.values()} - {*files}:
        os.close(file)


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
    faulthandler.register(SHOW_STACKS, 2)
    # So that the collector does not visit imported objects at the end of each process: a second of CPU.
    gc.collect()
    gc.freeze()
    for made in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        made.atexit = False  # that each fork takes torch's libraries apart at its end: 0.04 s of CPU
    request = _serve(connection, listener)
    if request is None:
        return
    argv = request["argv"]
    if argv[0] == "-m" and argv[1] in LAUNCHERS:  # the ranks of its agent are forks, too
        sys.executable, os.environ[SOCKET] = python, server
        # torch calls it to name its events; with thousands of modules that takes an agent seconds.
        inspect.stack = functools.partial(inspect.stack, 0)  # type: ignore[assignment]
    _leave(_run, argv)


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
