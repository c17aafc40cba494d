"""Reports where each rank is when one waits in a collective for too long, with a thread in each rank.

The thread looks once a second, which costs steps nothing. If its rank waits too long (`Waits`), it asks the others
through the job's store, and judges by their answers which rank is missing (`standings`). Each thread answers for its
rank, even if the rank sleeps or reads from a terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import traceback
from collections.abc import Hashable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Optional

from ddpshim.errors import SyncError
from ddpshim.failures import failure
from ddpshim.process.job import Job
from ddpshim.process.job_store import claim, is_there
from ddpshim.process.observed import Progress
from ddpshim.process.say import count, say
from ddpshim.process.users_line import users_line

if TYPE_CHECKING:
    from ddpshim.failures.standings import Place, Standing, Verdict

_LOOK_EVERY_S = 1.0
_QUIET_S = 3.0  # the stack is read only if the rank has made no progress for so long
_ANSWER_S = 5.0
_STORE_S = 10.0
_GPU_AFTER_S = 10.0  # the GPU is not queried during steps: that breaks the capture of a graph
_MOST_PRINT = 8  # in larger worlds only the main rank and the named ranks print
_RANKS_PER_S = 128  # how many ranks look for questions in the store each second
FLOOR_S = 30.0  # a rank may always wait so long, and three times its longest wait at that line
_FACTOR = 3.0
_LATE_S = 5.0  # a longer time between two looks means that the process itself was stopped
NCCL_GRACE_S = 60.0  # nccl's watchdog waits so much longer than this one


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
    """The thread, and what it has seen of its rank.

    Args:
        gets_no_errors: as under nccl, where a rank whose GPU waits for a dead rank gets no error, but is killed later,
            and blamed.

    Attributes:
        thread: watches the thread that made this object, from its start until `end`.
        verdict: the last one, until the rank makes progress; None if nothing was wrong.
    """

    def __init__(self, job: Job, rank: int, world_size: int, timeout_s: float, gets_no_errors: bool) -> None:
        import torch.distributed as dist

        store = job.store
        if hasattr(store, "clone"):  # newer torch: a separate connection, which the rank's own waits do not block
            store = store.clone()
            store.set_timeout(timedelta(seconds=_STORE_S))
        self.verdict: Optional[Verdict] = None
        self._rank, self._ranks, self._store = rank, range(world_size), dist.PrefixStore("watch", store)
        self._job, self._watched = job, threading.get_ident()
        self._waits, self._round = Waits(timeout_s), 0
        self._timeout_s, self._gets_no_errors = timeout_s, gets_no_errors
        self._asks_now = False  # although it no longer waits
        self._is_on_gpu = False  # whether the rank's GPU waits
        self._cpu_s = 0.0  # of the watched thread
        self._counted: Any = None
        self._counted_at, self._quiet_s = 0.0, min(_QUIET_S, timeout_s / 10)
        self._waiting: Optional[Standing] = None  # when it waited last, since it made progress
        self._every_s = max(_LOOK_EVERY_S, world_size / _RANKS_PER_S)
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="ddpshim-watch", daemon=True)

    def end(self) -> None:
        """Stop watching, and report that this rank has left. Local; idempotent."""
        atexit.unregister(self.end)
        if self._ended.is_set():
            return
        self._ended.set()
        self.thread.join(_STORE_S)
        progress, site = self._job.part(Progress), users_line(default="at the end of its program")
        standing: Any = progress.num_passes, progress.batch, None, None, site, [], 0.0, True
        with contextlib.suppress(RuntimeError, ValueError):
            self._store.set(f"left/{self._rank}", json.dumps(standing))

    def await_verdict(self) -> Optional[Verdict]:
        """Return the last verdict, for a rank whose wait torch has ended; without one, ask the others. Local."""
        self._asks_now, end = self.verdict is None, time.monotonic() + _ANSWER_S + 3 * self._every_s
        while self.verdict is None and self.thread.is_alive() and time.monotonic() < end:
            time.sleep(0.1)
        return self.verdict

    def describe_left(self) -> str:
        """Return which ranks have left the job, and after what; empty if none has. Local."""
        from ddpshim.failures.standings import describe

        left = {rank: their for rank in self._ranks if (their := self._stored(f"left/{rank}")) is not None}
        mine = f"  rank {self._rank}: {count(self._job.part(Progress).num_passes, 'backward pass', 'es')} so far"
        return f"{mine}\n{describe(left, list(left))}" if left else ""

    def _run(self) -> None:
        # If the process that serves the store has ended, so has the job.
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._ended.wait(self._every_s):
                self._look()

    def _look(self) -> None:
        """Look at the rank; ask the others if it has waited too long, and answer a rank that asks."""
        is_late, question, me = self._see() or self._asks_now, f"asked/{self._round + 1}", str(self._rank)
        if self._gets_no_errors and self._is_on_gpu and self._waits.is_waiting:
            self._end_in_vain()
        asks = is_late and claim(self._store, question, me) == me
        if not asks and not is_there(self._store, question):
            return
        from ddpshim.failures.standings import Verdict, judge

        self._round += 1
        if asks:
            standings = {**self._answers(), self._rank: self._standing()}
            still_waits = self._see() or self._job.is_failing()  # torch may have ended its wait
            verdict = judge(dict(sorted(standings.items())), self._rank) if still_waits else None
            self._store.set(f"verdict/{self._round}", json.dumps(verdict))
            self._take(verdict)
            return
        self._store.set(f"stands/{self._round}/{self._rank}", json.dumps(self._standing()))
        key, end = f"verdict/{self._round}", time.monotonic() + 2 * _ANSWER_S + self._every_s
        while not is_there(self._store, key):
            if time.monotonic() > end or self._ended.is_set():
                return
            self._pause()
        told = json.loads(self._store.get(key))
        self._take(None if told is None else Verdict(*told))

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
        progress, now = self._job.part(Progress), time.monotonic()
        counted = (progress.num_passes, progress.num_collectives, progress.batch, progress.is_reducing)
        if counted != self._counted:  # it makes progress: no need to read its stack
            self._counted, self._waiting, self.verdict, self._counted_at = counted, None, None, now
        if now - self._counted_at < self._quiet_s:
            return self._waits.look(now, counted, None)
        (place, frames), cpu_s = self._place(), _cpu_seconds_of(self._watched)
        spins = self._is_on_gpu or (place.waits_in or "").startswith("World.")
        if not spins and cpu_s > self._cpu_s + 0.02:
            self._cpu_s = cpu_s  # a pass that computes, and calls of torch's own collectives, may have the same stack
        code = tuple((id(frame.f_code), frame.f_lasti) for frame in frames)
        state = (counted, code, self._cpu_s if place.waits_in is not None else 0.0)
        is_late = self._waits.look(now, state, place.site if place.waits_in is not None else None)
        if place.waits_in is not None and not self._job.is_failing():
            self._waiting = self._standing(place)
        return is_late

    def _place(self) -> tuple[Place, list[FrameType]]:
        """Return the rank's activity, and its stack."""
        from ddpshim.failures.standings import frames_of, place_of

        progress, frames = self._job.part(Progress), frames_of(self._watched)
        stack = traceback.StackSummary.extract(((frame, frame.f_lineno) for frame in frames), lookup_lines=False)
        self._is_on_gpu = self._waits.waited_s > _GPU_AFTER_S and progress.waits_on_gpu()
        return place_of(stack, progress, self._is_on_gpu), frames

    def _standing(self, place: Optional[Place] = None) -> Standing:
        from ddpshim.failures.standings import Standing

        if self._job.is_failing() and self._waiting is not None:  # torch ended its wait: what counts is where it waited
            return self._waiting
        progress, place = self._job.part(Progress), place or self._place()[0]
        return Standing(progress.num_passes, progress.batch, *place, still_s=self._waits.waited_s)

    def _stored(self, key: str) -> Optional[Standing]:
        from ddpshim.failures.standings import Standing

        return Standing(*json.loads(self._store.get(key))) if is_there(self._store, key) else None

    def _answers(self) -> dict[int, Optional[Standing]]:
        """Return the state of each other rank; None for one that does not answer in time."""
        states = {rank: self._stored(f"left/{rank}") for rank in self._ranks if rank != self._rank}
        end = time.monotonic() + _ANSWER_S + self._every_s
        while (silent := [rank for rank in states if states[rank] is None]) and time.monotonic() < end:
            states.update({rank: self._stored(f"stands/{self._round}/{rank}") for rank in silent})
            self._pause()
        return states

    def _pause(self) -> None:
        self._ended.wait(0.1)
        self._see()

    def _take(self, verdict: Optional[Verdict]) -> None:
        self.verdict = verdict
        if verdict is not None and verdict.ends_job:
            self._ended.set()
            failure.abort(SyncError(verdict.text))
        if verdict is not None and (self._rank in (0, *verdict.named) or len(self._ranks) <= _MOST_PRINT):
            say(verdict.text, directly=True)
        self._waits.postpone()


def begin(job: Job, rank: int, world_size: int, timeout_s: float, gets_no_errors: bool = False) -> None:
    """Watch this rank until the end of its job. Local."""
    watch = Watch(job, rank, world_size, timeout_s, gets_no_errors)
    if job.watched is not None:
        job.watched.watch = watch
    job.at_end.callback(watch.end)
    atexit.register(watch.end)  # if Python ends a thread in the middle of a call to the store, the process crashes
    watch.thread.start()


def _cpu_seconds_of(thread: int) -> float:
    """Return the CPU seconds that a thread of this process has used; 0 if the system does not say."""
    with contextlib.suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return 0.0
