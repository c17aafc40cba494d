"""Replaces `python` in the tests' shells: it requests from tests/preloaded.py a fork that has already imported torch.

The fork has this process's arguments, environment, folder and open files; this process forwards signals to it and
returns its exit code. Only the standard library is imported here, without site-packages, which takes milliseconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def main(argv: list[str]) -> None:
    asked = list(argv)
    while asked[:1] in (["-u"], ["-B"]):  # the fork is unbuffered, and has its bytecode
        asked.pop(0)
    where = os.environ.get("PRELOADED_SOCKET")
    if where is None or not asked or (asked[0].startswith("-") and asked[0] not in ("-m", "-c")):
        os.execv(sys.executable, [sys.executable, *argv])
    numbers = {getattr(signal, name) for name in PASSED_ON}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until the fork's process id is known
    files = [file for file in map(int, os.listdir("/dev/fd")) if _is_inherited(file)]
    answers = ask(where, asked, dict(os.environ), os.getcwd(), dict(zip(files, files)))
    pid = int(answers.readline())

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in numbers:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    code = int(answers.readline() or 255)  # nothing, if the server was killed
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def ask(where: str, argv: list[str], environ: dict[str, str], folder: str, files: dict[int, int]) -> io.TextIOWrapper:
    """Ask the process at `where` for a fork; return what its process id can be read from, and later its exit code.

    `files`: descriptors of this process, by their numbers in the fork.
    """
    request = {"argv": argv, "environ": environ, "folder": folder, "files": [*files]}
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(where)
        socket.send_fds(server, [len(message).to_bytes(8, "little")], [*files.values()])
        server.sendall(message)
        return server.makefile("r")


def _is_inherited(file: int) -> bool:
    with contextlib.suppress(OSError):  # the descriptor with which /dev/fd was listed is closed by now
        return os.get_inheritable(file)
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
