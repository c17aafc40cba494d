"""Starts a single rank and waits for it, without torch's agent, which takes seconds to import.

The rank has the variables that torchrun would set. The agent would serve a store and restart ranks; a single rank needs
neither.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from ddpshim.failures.port import stay_on_this_machine
from ddpshim.launch.signals import Passing

_NUMBERS = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "ROLE_RANK": 0}
_SIZES = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": 1}
_RESTARTS = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}


class End(NamedTuple):
    """How a rank failed, with the names of torch's `ProcessFailure`."""

    exitcode: int
    timestamp: int


def run(program: Sequence[str], grace_s: float) -> tuple[dict[int, End], list[int]]:
    """Run `program` as one rank; return its failure, if it failed, and the signals that this process received."""
    stay_on_this_machine()
    ranks: list[subprocess.Popen[bytes]] = []
    passing = Passing(lambda: [rank.pid for rank in ranks if rank.returncode is None], grace_s)
    passing.begin()
    try:
        command = [sys.executable, "-u", "-m", "ddpshim.launch.rank", *program]
        ranks.append(subprocess.Popen(command, env={**os.environ, **variables_of_one()}, start_new_session=True))
        passing.catch_up()
        code = _ended(ranks[0])
    finally:
        passing.end()
    return {0: End(code, int(time.time()))} if code else {}, passing.received


def _ended(rank: subprocess.Popen[bytes]) -> int:
    """Wait until the rank has ended, and return its exit code; signals are handled meanwhile."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Not `Popen.wait`: a signal that the system gives to another thread does not wake it.
    previous_fd = signal.set_wakeup_fd(writer)
    previous_handler = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        while (code := rank.poll()) is None:
            select.select([reader], [], [])
            os.read(reader, 1 << 12)
        return code
    finally:
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGCHLD, previous_handler)
        os.close(reader)
        os.close(writer)


def variables_of_one() -> dict[str, str]:
    """Return the launcher's variables of a job of one rank, with a free port. Local."""
    with socket.socket() as free:  # a program may make its own process group; ddpshim's needs no port
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        **{name: str(number) for name, number in {**_NUMBERS, **_SIZES, **_RESTARTS}.items()},
        **{"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_RUN_ID": secrets.token_hex(8), "TORCHELASTIC_USE_AGENT_STORE": "False"},
    }
