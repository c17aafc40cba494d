"""What `run` does with ranks: starts a single one, passes signals on to them, and finds the one that failed first."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

from ddpshim import variables
from ddpshim.failures.failure_notes import Note, meaning_of
from ddpshim.failures.rendezvous import stay_on_this_machine
from ddpshim.process.launch_env import EXIT_REQUEUE
from ddpshim.process.say import say

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_LOOK_EVERY_S = 0.02
_NUM_LINES_SHOWN = 20
_NUM_LINES_OF_WATCHDOG = 200  # nccl's watchdog prints stacks after its message


class End(NamedTuple):
    """How a rank failed, with the names of torch's `ProcessFailure`."""

    exitcode: int
    timestamp: int


class Passing:
    """Passes each signal on once to the ranks in `pids`, but not to their data workers, which would die.

    Ranks that take too long to stop are killed.

    Attributes:
        received: the signals received so far, a list that grows.
    """

    def __init__(self, pids: Callable[[], list[int]], grace_s: float) -> None:
        self._pids, self._grace_s = pids, grace_s
        self.received: list[int] = []
        self._too_early: list[int] = []  # received before the ranks started
        self._before = {signum: signal.getsignal(signum) for signum in (getattr(signal, name) for name in _SIGNALS)}

    def begin(self) -> None:
        """Install the signal handlers. Local."""
        for signum, handler in self._before.items():
            # Under nohup, SIGHUP stays ignored: another handler would end the job at the logout.
            signal.signal(signum, signal.SIG_IGN if handler == signal.SIG_IGN else self._pass_on)

    def catch_up(self) -> None:
        """Send the signals received before the ranks started, now that they run. Local."""
        for signum in self._too_early:
            self._send(signum)

    def end(self) -> None:
        """Restore the previous signal handlers. Local."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _pass_on(self, signum: int, frame: Optional[FrameType]) -> None:
        name = signal.Signals(signum).name
        if signum in self.received:
            if signum == signal.SIGINT:
                self._send(signal.SIGKILL)
            return
        self.received.append(signum)
        asks_to_end = signum not in (signal.SIGUSR1, signal.SIGUSR2)  # ranks decide what these mean
        deadline = f", which have {self._grace_s:g} s to stop" if asks_to_end else ""
        say(f"{name}, passed on to the ranks{deadline}")
        if self._pids():
            self._send(signum)
        else:  # the ranks are still being started
            self._too_early.append(signum)
        if asks_to_end:
            timer = threading.Timer(self._grace_s, self._give_up, [name])
            timer.daemon = True
            timer.start()

    def _give_up(self, name: str) -> None:
        say(f"ranks still ran {self._grace_s:g} s after {name}, and were killed")
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


@contextlib.contextmanager
def passed_on_by_agent(grace_s: float) -> Iterator[list[int]]:
    """Within the block, signals go to the ranks, and torch's agent keeps watching them until they end.

    Yields the signals received so far, a list that grows.

    Without this, the agent ends in a traceback at SIGTERM, kills ranks after half a minute, and drops their exit codes;
    at SIGUSR1 it dies and leaves them running.
    """
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    agents_start = PContext.start
    running: list[PContext] = []  # the ranks of each start; the last are the current ones
    passing = Passing(lambda: list(running[-1].pids().values()), grace_s)

    def start(context: PContext) -> None:
        if running:  # the agent is about to restart the ranks
            ended = running[-1].wait(0)
            failures = ended.failures if ended is not None else {}
            if passing.received or any(failure.exitcode == EXIT_REQUEUE for failure in failures.values()):
                by_rank = {int(running[-1].envs[local]["RANK"]): failure for local, failure in failures.items()}
                raise ChildFailedError(context.name, by_rank)
            forget(os.environ[variables.RUN_DIR])
        launch = context._start

        def listen_and_launch() -> None:
            running.append(context)
            passing.begin()  # replaces the handlers that the agent has just set
            launch()  # a signal during this would make the agent abandon the ranks that it has started
            passing.catch_up()

        context._start = listen_and_launch  # type: ignore[method-assign]
        agents_start(context)

    # Until the ranks start: torch waits for other nodes in C++, where Python's own handler of Ctrl-C cannot run.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    PContext.start = start  # type: ignore[method-assign,assignment]
    try:
        yield passing.received
    finally:
        PContext.start = agents_start  # type: ignore[method-assign]
        passing.end()


def run_alone(program: Sequence[str], grace_s: float) -> tuple[dict[int, End], list[int]]:
    """Run `program` as one rank; return its failure, if it failed, and the signals that this process received.

    Without torch's agent, which takes seconds to import: it would serve a store and restart ranks.
    """
    stay_on_this_machine()
    ranks: list[subprocess.Popen[bytes]] = []
    passing = Passing(lambda: [rank.pid for rank in ranks if rank.returncode is None], grace_s)
    passing.begin()
    try:
        command = [sys.executable, "-u", "-m", "ddpshim.launch.rank", *program]
        ranks.append(subprocess.Popen(command, env={**os.environ, **variables_of_one()}, start_new_session=True))
        passing.catch_up()
        # Not `Popen.wait`: a signal that the system gives to another thread does not wake it.
        while (code := ranks[0].poll()) is None:
            time.sleep(_LOOK_EVERY_S)
    finally:
        passing.end()
    return {0: End(code, int(time.time()))} if code else {}, passing.received


def variables_of_one() -> dict[str, str]:
    """Return the variables that torchrun would set for a job of one rank, with a free port. Local."""
    with socket.socket() as free:  # a program may make its own process group; ddpshim's needs no port
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kinds = ("", "LOCAL_", "GROUP_", "ROLE_")
    return {
        **{f"{kind}RANK": "0" for kind in kinds},
        **{f"{kind}WORLD_SIZE": "1" for kind in kinds},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "ROLE_NAME": "default"},
        **{"TORCHELASTIC_RUN_ID": secrets.token_hex(8), "TORCHELASTIC_USE_AGENT_STORE": "False"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }


def read(run_dir: str) -> dict[int, Note]:
    """Return the notes of the ranks that failed, by rank. Local."""
    return {int(file.suffix[1:]): Note(*json.loads(file.read_text())) for file in Path(run_dir).glob("failed.*")}


def forget(run_dir: str) -> None:
    """Remove all notes: the ranks are about to be restarted, and some may never write one. Local."""
    for file in Path(run_dir).glob("failed.*"):
        file.unlink()


def first(seen: Mapping[int, Any], notes: Mapping[int, Note], log_dir: Optional[Path] = None) -> tuple[int, int]:
    """Return the rank that failed first, and its exit code. Local.

    Args:
        seen: the end of each rank's process that failed: torch's `ProcessFailure`, or anything with its attributes
            `exitcode` and `timestamp`.
        notes: the notes of the ranks.
        log_dir: where the ranks' logs are.
    """

    def order(rank: int) -> tuple[int, int, bool, float]:
        # First ranks with an error of their own, then those that only lost a peer (perhaps before the agent saw the
        # peer end), last those that the agent ended because of another one. Among them the earliest; the agent's times
        # are whole seconds, and within one second a rank with a note counts as first.
        own = notes.get(rank)
        if own is not None:
            return int(own.lost_a_peer), int(own.moment), False, own.moment
        code = seen[rank].exitcode
        # nccl's watchdog ends a process that waits for another one by SIGABRT: it only lost a peer.
        waited = code == -signal.SIGABRT and (log_dir is None or _ends_with_a_sign(log_dir / f"rank_{rank}.log"))
        return 2 if code == -signal.SIGTERM else int(waited), int(seen[rank].timestamp), True, 0.0

    first = min({*seen, *notes}, key=order)
    return first, notes[first].exit_code if first in notes else seen[first].exitcode


def _ends_with_a_sign(log: Path) -> bool:
    return meaning_of(end_of(log, _NUM_LINES_OF_WATCHDOG)) is not None


def end_of(log: Path, num_lines: int = _NUM_LINES_SHOWN) -> str:
    """Return the last lines of `log`, of a progress bar the last state; "" if it does not exist. Local."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 16)))
        lines = file.read().decode(errors="replace").rstrip().split("\n")[-num_lines:]
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
