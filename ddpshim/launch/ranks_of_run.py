"""What `run` does with ranks: passes signals on to them, and finds the one that failed first."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from ddpshim import variables
from ddpshim.failures.failure_notes import Note, meaning_of
from ddpshim.process.launch_env import EXIT_REQUEUE
from ddpshim.process.say import say

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_NUM_LINES_SHOWN = 20
_NUM_LINES_OF_WATCHDOG = 200  # nccl's watchdog prints stacks after its message


@contextlib.contextmanager
def passed_on_by_agent(grace_s: float) -> Iterator[list[int]]:
    """Within the block, signals go to the ranks, and torch's agent keeps watching them until they end.

    Yields the signals received so far, a list that grows. Each is passed on once, and not to data workers, which would
    die. Ranks that take more than `grace_s` seconds to stop are killed.

    Without this, the agent ends in a traceback at SIGTERM, kills ranks after half a minute, and drops their exit codes;
    at SIGUSR1 it dies and leaves them running.
    """
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    agents_start = PContext.start
    running: list[PContext] = []  # the ranks of each start; the last are the current ones
    received: list[int] = []
    too_early: list[int] = []  # received before the ranks started
    before = {signum: signal.getsignal(signum) for signum in (getattr(signal, name) for name in _SIGNALS)}

    def send(signum: int) -> None:
        for pid in running[-1].pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def give_up(name: str) -> None:
        say(f"ranks still ran {grace_s:g} s after {name}, and were killed")
        send(signal.SIGKILL)

    def pass_on(signum: int, frame: Optional[FrameType]) -> None:
        name = signal.Signals(signum).name
        if signum in received:
            if signum == signal.SIGINT:
                send(signal.SIGKILL)
            return
        received.append(signum)
        asks_to_end = signum not in (signal.SIGUSR1, signal.SIGUSR2)  # ranks decide what these mean
        say(f"{name}, passed on to the ranks{f', which have {grace_s:g} s to stop' if asks_to_end else ''}")
        if running[-1].pids():
            send(signum)
        else:  # the ranks are still being started
            too_early.append(signum)
        if asks_to_end:
            timer = threading.Timer(grace_s, give_up, [name])
            timer.daemon = True
            timer.start()

    def start(context: PContext) -> None:
        if running:  # the agent is about to restart the ranks
            ended = running[-1].wait(0)
            failures = ended.failures if ended is not None else {}
            if received or any(failure.exitcode == EXIT_REQUEUE for failure in failures.values()):
                by_rank = {int(running[-1].envs[local]["RANK"]): failure for local, failure in failures.items()}
                raise ChildFailedError(context.name, by_rank)
            forget(os.environ[variables.RUN_DIR])
        launch = context._start

        def listen_and_launch() -> None:
            running.append(context)
            for signum, handler in before.items():  # replaces the handlers that the agent has just set
                # Under nohup, SIGHUP stays ignored: another handler would end the job at the logout.
                signal.signal(signum, signal.SIG_IGN if handler == signal.SIG_IGN else pass_on)
            launch()  # a signal during this would make the agent abandon the ranks that it has started
            for signum in too_early:
                send(signum)

        context._start = listen_and_launch  # type: ignore[method-assign]
        agents_start(context)

    # Until the ranks start: torch waits for other nodes in C++, where Python's own handler of Ctrl-C cannot run.
    if before[signal.SIGINT] == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    PContext.start = start  # type: ignore[method-assign,assignment]
    try:
        yield received
    finally:
        PContext.start = agents_start  # type: ignore[method-assign]
        for signum, handler in before.items():
            signal.signal(signum, handler)


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
        seen: torch's `ProcessFailure` for each rank's process that failed.
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
