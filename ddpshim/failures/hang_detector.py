"""Reports where each rank is when one waits in a collective for too long, with a thread in each rank.

The thread checks once a second, which costs steps nothing. If its rank waits too long (`Waits`), it asks the
others through the job's store. Each thread answers for its rank, even if the rank sleeps or reads from a terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import traceback
from collections.abc import Hashable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, Optional

from ddpshim.errors import SyncError
from ddpshim.failures import failure
from ddpshim.process.job import Job, current
from ddpshim.process.progress import Place, frames_of, place_of
from ddpshim.process.say import count, say

_LOOK_EVERY_S = 1.0
_ANSWER_S = 5.0
_STORE_S = 10.0
_GPU_AFTER_S = 10.0  # the GPU is not queried during steps: that breaks the capture of a graph
_MOST_PRINT = 8  # in larger worlds only the main rank and the named ranks print
_RANKS_PER_S = 128  # how many ranks look for questions in the store each second
FLOOR_S = 30.0  # a rank may always wait so long, and three times its longest wait at that line
_FACTOR = 3.0
_LATE_S = 5.0  # a longer time between two looks means that the process itself was stopped
NCCL_GRACE_S = 60.0  # nccl's watchdog waits so much longer than this one


class Standing(NamedTuple):
    """A rank's state, as it reports it; see `progress.Place` and `progress.Progress`.

    Attributes:
        num_passes: backward passes so far.
        still_s: seconds without progress.
        has_left: whether it has left the job, or its program has ended.
    """

    num_passes: int
    batch: Optional[Sequence[int]]
    waits_in: Optional[str]
    section: Optional[str]
    site: str
    lines: list[str]
    still_s: float = 0.0
    has_left: bool = False


class Verdict(NamedTuple):
    """The result of a rank's question about the others.

    Attributes:
        named: the missing ranks, if any.
        said: which rank waits for which, and where each rank is; empty with an error.
        error: why the job must end, with the same; empty if it need not.
    """

    named: list[int]
    said: str
    error: str = ""


class Waits:
    """How long this rank has waited, and how long it may: three times its longest wait at that line, at least 30 s.

    At most half of `timeout_s`, after which torch ends a collective, and nccl's watchdog the process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._most_s = timeout_s / 2
        self._longest_s: dict[str, float] = {}  # by line
        self._state: Hashable = None
        self._site: Optional[str] = None
        self._since = self._last_look = 0.0
        self._factor = 1.0

    def look(self, now: float, state: Hashable, site: Optional[str]) -> bool:
        """Return whether this rank has waited too long. Local.

        Args:
            now: the time in seconds.
            state: a different value if the rank has made progress.
            site: the line at which it waits; None if it does not wait.
        """
        if now - self._last_look > _LATE_S:
            self._since += now - self._last_look
        self._last_look = now
        if state != self._state:
            if self._site is not None:
                self._longest_s[self._site] = max(self._longest_s.get(self._site, 0.0), self.waited_s)
            self._state, self._site, self._since, self._factor = state, site, now, 1.0
        return site is not None and self.waited_s > self.deadline_s(site)

    @property
    def is_waiting(self) -> bool:
        return self._site is not None

    @property
    def waited_s(self) -> float:
        return self._last_look - self._since

    def deadline_s(self, site: str) -> float:
        """Return how many seconds this rank may wait at that line before it asks the others. Local."""
        return min(max(FLOOR_S, _FACTOR * self._longest_s.get(site, 0.0)), self._most_s) * self._factor

    def postpone(self) -> None:
        """Do not report again before the wait is twice as long. Local."""
        self._factor *= 2


class Watch:
    """The thread, and what it has seen of its rank."""

    def __init__(self) -> None:
        self._thread: Optional[threading.Thread] = None
        self._ended = threading.Event()

    def begin(self, rank: int, world_size: int, store: Any, timeout_s: float, gets_no_errors: bool = False) -> None:
        """Watch the calling thread until `end`. Local.

        `gets_no_errors`: as under nccl, where a rank whose GPU waits for a dead rank gets no error, but is killed
        later, and blamed.
        """
        import torch.distributed as dist

        if hasattr(store, "clone"):  # newer torch: a separate connection, which the rank's own waits do not block
            store = store.clone()
            store.set_timeout(timedelta(seconds=_STORE_S))
        self._rank, self._ranks, self._store = rank, range(world_size), dist.PrefixStore("watch", store)
        self._job, self._watched = current(), threading.get_ident()
        self._waits, self._round = Waits(timeout_s), 0
        self._timeout_s, self._gets_no_errors = timeout_s, gets_no_errors
        self._is_on_gpu = False  # whether the rank's GPU waits
        self._cpu_s = 0.0  # of the watched thread
        self._counted: Any = None
        self._every_s = max(_LOOK_EVERY_S, world_size / _RANKS_PER_S)
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="ddpshim-watch", daemon=True)
        self._thread.start()
        # If Python ends a thread in the middle of a call to the store, the process crashes.
        atexit.register(self.end)

    def end(self) -> None:
        """Stop watching, and report that this rank has left. Local; idempotent."""
        thread, self._thread = self._thread, None
        atexit.unregister(self.end)
        if thread is None or self._ended.is_set():
            return
        self._ended.set()
        thread.join(_STORE_S)
        standing = self._standing()._replace(has_left=True)
        with contextlib.suppress(RuntimeError, ValueError):
            self._store.set(f"left/{self._rank}", json.dumps(standing))

    def describe_others(self) -> tuple[list[int], str]:
        """Return which other ranks neither wait nor fail, or give no answer, and where each is; for a rank that fails.
        Local."""
        if self._thread is None:
            return [], ""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_STORE_S)
        self._ended.clear()
        from ddpshim.failures.hangs import describe

        try:
            asked = self._ask()
            theirs = self._answers(asked)
            self._store.set(f"verdict/{asked}", json.dumps(Verdict([], "")))
            away = [rank for rank, their in theirs.items() if their is None or their.waits_in is None]
            # Ranks that waited together time out together.
            named = [rank for rank in away if not failure.is_there(self._job.store, f"failed/{rank}")]
        except (RuntimeError, ValueError):  # the process that serves the store has ended
            return [], ""
        return named, describe(theirs, named)

    def describe_left(self) -> str:
        """Return which ranks have left the job, and after what; empty if none has. Local."""
        if self._thread is None:
            return ""
        from ddpshim.failures.hangs import describe

        left = {rank: their for rank in self._ranks if (their := self._left(rank)) is not None}
        mine = f"  rank {self._rank}: {count(self._job.progress.num_passes, 'backward pass', 'es')} so far"
        return f"{mine}\n{describe(left, list(left))}" if left else ""

    def _run(self) -> None:
        # If the process that serves the store has ended, so has the job.
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._ended.wait(self._every_s):
                self._look()

    def _look(self) -> None:
        is_late = self._see()
        if self._gets_no_errors and self._is_on_gpu and self._waits.is_waiting:
            self._end_in_vain()
        if failure.is_there(self._store, f"asked/{self._round + 1}"):
            self._round += 1
            self._store.set(f"stands/{self._round}/{self._rank}", json.dumps(self._standing()))
            self._hear()
        elif is_late and self._ask() == self._round:
            self._find_out()

    def _end_in_vain(self) -> None:
        """End this rank if it waits for one that has failed, or has waited for `timeout_s`."""
        first = failure.first()
        if first is not None and first != self._rank:
            self._ended.set()
            failure.abort(failure.caused_by(first, SyncError(f"its GPU waits for messages of rank {first}")))
        if self._waits.waited_s > self._timeout_s:
            self._ended.set()
            failure.abort(TimeoutError(f"Timed out waiting {self._timeout_s:g} s for other ranks (timeout_s)"))

    def _see(self) -> bool:
        """Look at the rank, and return whether it has waited too long."""
        progress, now = self._job.progress, time.monotonic()
        counted = (progress.num_passes, progress.num_collectives, progress.batch, progress.is_reducing)
        if counted != self._counted:  # it makes progress: no need to read its stack
            self._counted = counted
            return self._waits.look(now, counted, None)
        frames = frames_of(self._watched)
        place, cpu_s = self._place(frames), _cpu_seconds_of(self._watched)
        if not (place.waits_in or "").startswith(("backward pass", "World.")) and cpu_s > self._cpu_s + 0.02:
            self._cpu_s = cpu_s  # successive calls of torch's own collectives may have the same stack
        code = tuple((id(frame.f_code), frame.f_lasti) for frame in frames)
        state = (counted, code, self._cpu_s if place.waits_in is not None else 0.0)
        return self._waits.look(now, state, place.site if place.waits_in is not None else None)

    def _place(self, frames: list[FrameType]) -> Place:
        progress = self._job.progress
        stack = traceback.StackSummary.extract(((frame, frame.f_lineno) for frame in frames), lookup_lines=False)
        self._is_on_gpu = self._waits.waited_s > _GPU_AFTER_S and progress.waits_on_gpu()
        return place_of(stack, progress, self._is_on_gpu)

    def _standing(self) -> Standing:
        progress, place = self._job.progress, self._place(frames_of(self._watched))
        return Standing(progress.num_passes, progress.batch, *place, still_s=self._waits.waited_s)

    def _ask(self) -> int:
        """Ask all ranks to answer, unless another rank does so at the same moment; return the number of the round."""
        key = f"asked/{self._round + 1}"
        if failure.claim(self._store, key, str(self._rank)) == str(self._rank):
            self._round += 1
            return self._round
        return self._round + 1

    def _left(self, rank: int) -> Optional[Standing]:
        key = f"left/{rank}"
        return Standing(*json.loads(self._store.get(key))) if failure.is_there(self._store, key) else None

    def _answers(self, asked: int) -> dict[int, Optional[Standing]]:
        """Return the state of each other rank; None for one that does not answer in time."""
        states = {rank: self._left(rank) for rank in self._ranks if rank != self._rank}
        end = time.monotonic() + _ANSWER_S + self._every_s
        while (silent := [rank for rank in states if states[rank] is None]) and time.monotonic() < end:
            for rank in silent:
                if failure.is_there(self._store, f"stands/{asked}/{rank}"):
                    states[rank] = Standing(*json.loads(self._store.get(f"stands/{asked}/{rank}")))
            self._pause()
        return states

    def _pause(self) -> None:
        self._ended.wait(0.1)
        self._see()

    def _find_out(self) -> None:
        """Read all ranks' answers, and send the verdict to all."""
        from ddpshim.failures.hangs import judge

        everyones = {**self._answers(self._round), self._rank: self._standing()}
        verdict = judge(dict(sorted(everyones.items())), self._rank) if self._see() else None
        self._store.set(f"verdict/{self._round}", json.dumps(verdict or Verdict([], "")))
        self._take(verdict or Verdict([], ""))

    def _hear(self) -> None:
        """Wait for the verdict of the rank that asked, and act on it."""
        key, end = f"verdict/{self._round}", time.monotonic() + 2 * _ANSWER_S + self._every_s
        while not failure.is_there(self._store, key):
            if time.monotonic() > end or self._ended.is_set():
                return
            self._pause()
        self._take(Verdict(*json.loads(self._store.get(key))))

    def _take(self, verdict: Verdict) -> None:
        is_named = self._rank in verdict.named
        if verdict.said and (is_named or self._rank == 0 or len(self._ranks) <= _MOST_PRINT):
            say(verdict.said, directly=True)
        if verdict.error:
            self._end_job(verdict)
        self._waits.postpone()

    def _end_job(self, verdict: Verdict) -> None:
        self._ended.set()
        error, named = SyncError(verdict.error), verdict.named[0]
        if self._rank != named:
            end = time.monotonic() + _ANSWER_S
            while not (has_failed := failure.is_there(self._job.store, f"failed/{named}")) and time.monotonic() < end:
                time.sleep(0.05)
            if has_failed:
                failure.caused_by(named, error)
        failure.abort(error)


def begin(job: Job, rank: int, world_size: int, timeout_s: float, gets_no_errors: bool = False) -> None:
    """Watch this rank until the end of its job. Local."""
    watch = job.part(Watch)
    watch.begin(rank, world_size, job.store, timeout_s, gets_no_errors)
    if job.watched is not None:
        job.watched.watch = watch
    job.at_end.callback(watch.end)


def _cpu_seconds_of(thread: int) -> float:
    """Return the CPU seconds that a thread of this process has used; 0 if the system does not say."""
    with contextlib.suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return 0.0
