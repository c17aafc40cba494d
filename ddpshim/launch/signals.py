"""Passes signals that `run` receives on to the ranks, once each, and kills ranks that take too long to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Callable, Optional

from ddpshim import variables
from ddpshim.launch import first_failure
from ddpshim.process.launch_env import EXIT_REQUEUE
from ddpshim.process.say import say

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class Passing:
    """Passes signals on to the ranks in `pids`, but not to their data workers, which would die.

    Attributes:
        received: the signals received so far, a list that grows.
    """

    def __init__(self, pids: Callable[[], list[int]], grace_s: float) -> None:
        self._pids, self._grace_s = pids, grace_s
        self.received: list[int] = []
        self._too_early: list[int] = []  # received before the ranks started
        self._before = {signum: signal.getsignal(signum) for signum in (getattr(signal, name) for name in _NAMES)}

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
            first_failure.forget(os.environ[variables.RUN_DIR])
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
