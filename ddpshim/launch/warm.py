"""Restarts ranks within a second, by forking them from a process that has already imported torch and ddpshim.

`run` has such a process on each node if it may restart ranks. It is not used for the first start, before it is ready,
if TensorFlow is installed (which may have to be imported before torch), or with a torch that starts ranks differently.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from ddpshim.process.replaced import replaced

_BEGIN_AFTER_S = 5.0  # the first ranks import the same modules on the same cores
_MODULES = (
    *("torch", "torch._dynamo", "torch.nn.parallel.distributed", "torch.distributed.nn.functional"),
    *("ddpshim.checkpoint.resume", "ddpshim.data.loader", "ddpshim.job.group", "ddpshim.model.parallel"),
)
_RANK = ("-u", "-m", "ddpshim.launch.rank")
_SELF = ("-u", "-m", "ddpshim.launch.warm")
_POPEN_IN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_START_S = 10.0


class Warm:
    """`run`'s handle of the process from which ranks are forked."""

    def __init__(self) -> None:
        self._socket: Optional[socket.socket] = None
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._lines = b""
        self._ready = False
        self._begun = False
        self._ranks: dict[int, Forked] = {}
        self._timer: Optional[threading.Timer] = None

    def popen(self, args: Sequence[str], env: dict[str, str], **options: Any) -> Any:
        """Start a rank, as `subprocess.Popen` does for torch's agent."""
        if not self._begun:
            self._begun = True
            self._timer = threading.Timer(_BEGIN_AFTER_S, self._begin, [env])
            self._timer.daemon = True
            self._timer.start()
        is_plain = not options.get("stdout") and not options.get("stderr") and tuple(args[1:4]) == _RANK
        if is_plain and self._is_ready():
            with contextlib.suppress(OSError, TimeoutError):
                return self._fork(args, env)
        return subprocess.Popen(args=args, env=env, **options)

    def end(self) -> None:
        """End the process; no more ranks are started. Local."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.kill()  # it may still be importing
            self._process.wait()

    def _begin(self, env: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, *_SELF, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], start_new_session=True)
        self._socket = ours

    def _is_ready(self) -> bool:
        if self._socket is not None:
            self.read()
        return self._ready

    def _fork(self, args: Sequence[str], env: dict[str, str]) -> Forked:
        assert self._socket is not None
        self._socket.sendall(json.dumps([args[4:], env, os.getcwd()]).encode() + b"\n")
        before, end = set(self._ranks), time.monotonic() + _START_S
        while not (new := set(self._ranks) - before):
            if not self._ready or time.monotonic() > end:
                raise TimeoutError
            self.read(0.1)
        (pid,) = new
        return self._ranks[pid]

    def read(self, wait_s: float = 0.0) -> None:
        """Read the process's messages: that it is ready, which rank it forked, which rank ended."""
        assert self._socket is not None
        while select.select([self._socket], [], [], wait_s)[0]:
            wait_s = 0.0
            received = self._socket.recv(1 << 16)
            if not received:  # the process has ended, and nobody else learns how its ranks end
                self._ready = False
                for rank in self._ranks.values():
                    rank.lost()
                return
            *lines, self._lines = (self._lines + received).split(b"\n")
            for what, pid, code in map(json.loads, lines):
                if what == "ready":
                    self._ready = True
                elif what == "forked":
                    self._ranks[pid] = Forked(self, pid)
                else:
                    self._ranks[pid].returncode = code


class Forked:
    """A forked rank, with the part of `subprocess.Popen` that torch's agent uses."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm, self.pid = warm, pid
        self.returncode: Optional[int] = None

    def poll(self) -> Optional[int]:
        if self.returncode is None:
            self._warm.read()
        return self.returncode

    def wait(self, timeout: Optional[float] = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            self._warm.read(0.05)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def lost(self) -> None:
        """Kill it: the process that would report its end is gone."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.returncode = -signal.SIGKILL


@contextlib.contextmanager
def restarts() -> Iterator[None]:
    """Within the block, torch's agent restarts ranks by forking a process that has done their imports, if possible."""
    starts = None
    with contextlib.suppress(ImportError):  # before torch 2.3
        starts = importlib.import_module(_POPEN_IN)
    if not hasattr(os, "fork") or not hasattr(starts, "Popen") or importlib.util.find_spec("tensorflow"):
        yield
        return
    warm = Warm()
    with replaced(starts, "Popen", warm.popen):
        try:
            yield
        finally:
            warm.end()


def serve(connection: socket.socket) -> list[str]:
    """Fork a rank for each line received; returns only in the forked ranks, with the arguments of the rank."""
    for module in _MODULES:
        importlib.import_module(module)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _say(connection, "ready", 0, 0)
    buffered = b""
    while True:
        ready = select.select([connection.fileno(), reader], [], [])[0]
        if reader in ready:
            os.read(reader, 1 << 12)
            _tell_ended(connection)
        if connection.fileno() in ready:
            received = connection.recv(1 << 16)
            if not received:
                os._exit(0)
            *lines, buffered = (buffered + received).split(b"\n")
            for arguments, environ, folder in map(json.loads, lines):
                is_begun, begins = os.pipe()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # OpenBLAS restarts its threads
                    pid = os.fork()
                if pid == 0:
                    os.setsid()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    connection.close()
                    os.write(begins, b".")
                    for fd in (reader, writer, is_begun, begins):
                        os.close(fd)
                    _become(environ, folder)
                    return list(arguments)
                os.read(is_begun, 1)  # its process group exists, so it can be signalled
                os.close(is_begun)
                os.close(begins)
                _say(connection, "forked", pid, 0)


def _become(environ: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    if "numpy" in sys.modules:  # Python reseeds its own generator after a fork
        sys.modules["numpy"].random.seed()


def _tell_ended(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            _say(connection, "ended", pid, code)


def _say(connection: socket.socket, what: str, pid: int, code: int) -> None:
    connection.sendall(json.dumps([what, pid, code]).encode() + b"\n")


if __name__ == "__main__":
    from ddpshim.launch import rank

    rank.main(serve(socket.socket(fileno=int(sys.argv[1]))))
