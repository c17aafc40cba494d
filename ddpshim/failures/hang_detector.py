"""Reports where each rank is when one waits in a collective for too long, with a thread in each rank.

The thread looks once a second, which costs steps nothing. If its rank waits too long (`Waits`), it asks the others
through the job's store, and judges by their answers which rank is missing (`judge`). Each thread answers for its rank,
by its stack (`place_of`), even if the rank sleeps or reads from a terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from ddpshim.errors import SyncError
from ddpshim.failures import failure
from ddpshim.process.job import Job
from ddpshim.process.job_store import claim, first_failure, is_there
from ddpshim.process.observed import Progress
from ddpshim.process.say import count, ranks_called, say
from ddpshim.process.users_line import is_torchs_or_ours, is_users, short, shown, users_line

if TYPE_CHECKING:
    from ddpshim.job.world import World

_LOOK_EVERY_S = 1.0
_ANSWER_S = 5.0
STORE_S = 10.0  # for an answer of the store
_GPU_AFTER_S = 10.0  # the GPU is not queried during steps: that breaks the capture of a graph
_MOST_PRINT = 8  # in larger worlds only the main rank and the named ranks print
_RANKS_PER_S = 128  # how many ranks look for questions in the store each second
FLOOR_S = 30.0  # a rank may always wait so long, and three times its longest wait at that line
_FACTOR = 3.0
_LATE_S = 5.0  # a longer time between two looks means that the process itself was stopped
NCCL_GRACE_S = 60.0  # nccl's watchdog waits so much longer than this one
MOVES_S = 3.0  # a rank that made progress within this time is working
_DECLARED_S = 600.0  # work that one rank is known to do alone is not reported before
DEADLOCK_S = 10.0  # ranks that wait in different places for so long will wait forever
# Frames that are not shown: outermost in every program, or innermost because a rank is asked for its place, or ends.
_AROUND = (
    *("python/runpy.py", "<frozen", "python/contextlib.py", "ddpshim/launch/", "ddpshim/failures/"),
    *("ddpshim/process/users_line.py", "ddpshim/process/job.py"),
    *("ddpshim/job/group.py", "ddpshim/job/process_group.py"),
)
_MOST_FRAMES = 10
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+).*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

# Work that one rank may do alone for any time: (file, function, name), found in its stack. A wait for it is not
# reported for ten minutes.
_SECTIONS = (
    ("ddpshim/job/collectives.py", "run_on_main", "World.run_on_main"),
    ("ddpshim/checkpoint/", "", "a save"),
    ("ddpshim/evaluation/", "", "a rollout"),
    ("ddpshim/robomimic/rollout.py", "", "a rollout"),
    ("robomimic/utils/train_utils.py", "rollout_with_stats", "a rollout"),
    ("robomimic/utils/train_utils.py", "save_model", "a save"),
    ("ddpshim/robomimic/node_memory.py", "", "reading a dataset"),
    ("ddpshim/robomimic/calls.py", "load_data_for_training", "reading a dataset"),
    ("robomimic/utils/dataset.py", "load_dataset_in_memory", "reading a dataset"),
    ("python/bdb.py", "", "a debugger"),
)
_PASSES = "torch/autograd/", "ddpshim/model/mean_gradients.py"
_WORLDS = ("ddpshim/job/world.py", "ddpshim/job/collectives.py")
# Functions of ddpshim that wait for other ranks outside of torch.distributed's own functions.
_WAITS = {
    ("ddpshim/job/collectives.py", "wait"): "a message to all ranks",
    ("ddpshim/job/collectives.py", "table"): "a gather of tensors",
    ("ddpshim/job/collectives.py", "add_up"): "a sum of tensors",
    ("ddpshim/job/collectives.py", "backward"): "a sum of gradients",
    ("ddpshim/rows/blocks.py", "wait"): "a gather of rows",
    ("ddpshim/job/collectives.py", "gather_with_deadline"): "World.gather_with_deadline",
    ("ddpshim/checkpoint/resume.py", "_meet"): "a check between two steps",
    ("ddpshim/model/guard.py", "_compare"): "the comparison of weights",
    ("ddpshim/job/debugger.py", "_meet"): "a debugger, for the main rank",
}


class Standing(NamedTuple):
    """A rank's state, as it reports it; see `observed.Progress`."""

    num_passes: int
    batch: Optional[Sequence[int]]
    waits_in: Optional[str]  # the collective in which it waits for other ranks; None if it works itself
    section: Optional[str]  # the work that it does, if that may take arbitrarily long
    site: str  # the innermost line of the user's program
    lines: list[str]  # its stack, as in a traceback
    still_s: float = 0.0  # without progress
    has_left: bool = False  # the job, or its program has ended


class Verdict(NamedTuple):
    """What is wrong, by a rank's question about the others."""

    named: Sequence[int]  # the missing ranks, if any
    text: str  # which rank waits for which, and where each rank is
    ends_job: bool = False  # waiting is useless


Standings = Mapping[int, Optional[Standing]]  # by rank; None: it gave no answer


class Waits:
    """How long this rank has waited, and how long it may: three times its longest wait at that line, at least 30 s.

    At most half of `timeout_s`, after which torch ends a collective, and nccl's watchdog the process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._most_s = timeout_s / 2
        self._longest_s: dict[str, float] = {}  # by line
        self._state: Any = None
        self.site: Optional[str] = None
        self._since = self._last_look = 0.0
        self._factor = 1.0

    def look(self, now: float, state: Any, site: Optional[str]) -> bool:
        """Return whether this rank has waited too long `now` (s), at line `site`, None if it does not wait. Local.

        `state` differs after progress.
        """
        if now - self._last_look > _LATE_S:
            self._since += now - self._last_look
        self._last_look = now
        if state != self._state:
            if self.site is not None:
                self._longest_s[self.site] = max(self._longest_s.get(self.site, 0.0), self.waited_s)
            self._state, self.site, self._since, self._factor = state, site, now, 1.0
        return site is not None and self.waited_s > self.deadline_s(site)

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
    """The thread, which watches the thread that made this object until `end`, and what it has seen of its rank.

    `verdict`: the last one, until the rank makes progress; None if nothing was wrong.
    """

    def __init__(self, job: Job, here: World, timeout_s: float) -> None:
        import torch.distributed as dist

        store = job.store if job.second_store is None else job.second_store
        self.verdict: Optional[Verdict] = None
        self._rank, self.ranks, self._store = here.rank, range(here.world_size), dist.PrefixStore("watch", store)
        self._job, self._watched = job, threading.get_ident()
        self._waits, self._round = Waits(timeout_s), 0
        self._timeout_s = timeout_s
        # Under nccl a rank whose GPU waits for a dead rank gets no error, but is killed later, and blamed.
        self._gets_no_errors = here.backend == "nccl"
        self._asks_now = False  # although it no longer waits
        self._is_on_gpu = False  # whether the rank's GPU waits
        self._cpu_s = 0.0  # of the watched thread
        self._counted: Any = None  # its progress
        self._waiting: Optional[Standing] = None  # when it waited last, since it made progress
        self._every_s = max(_LOOK_EVERY_S, here.world_size / _RANKS_PER_S)
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="ddpshim-watch", daemon=True)

    def end(self) -> None:
        """Stop watching, and report that this rank has left. Local; idempotent."""
        atexit.unregister(self.end)
        if self._ended.is_set():
            return
        self._ended.set()
        self.thread.join(STORE_S)
        self._waiting = None  # a World that was left may keep this object
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
        left = {rank: their for rank in self.ranks if (their := self._stored(f"left/{rank}")) is not None}
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
        if self._gets_no_errors and self._is_on_gpu and self._waits.site is not None:
            self._end_in_vain()
        asks = is_late and claim(self._store, question, me) == me
        if not asks and not is_there(self._store, question):
            return
        self._round += 1
        self._store.set(f"stands/{self._round}/{self._rank}", json.dumps(self._standing()))
        key, end = f"verdict/{self._round}", time.monotonic() + 2 * _ANSWER_S + self._every_s
        if asks:
            standings = self._answers()
            still_waits = self._see() or self._job.is_failing()  # torch may have ended its wait
            self._store.set(key, json.dumps(judge(standings, self._rank) if still_waits else None))
        while not is_there(self._store, key):
            if time.monotonic() > end or self._ended.is_set():
                return
            self._pause()
        told = json.loads(self._store.get(key))
        self._take(None if told is None else Verdict(*told))

    def _end_in_vain(self) -> None:
        """End this rank if it waits for one that has failed, or has waited for `timeout_s`."""
        first = first_failure()
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
        if counted != self._counted:
            self._counted, self._waiting, self.verdict = counted, None, None
        (mine, stack), cpu_s = self._place(), 0.0
        with contextlib.suppress(AttributeError, OSError):  # not every system says it
            cpu_s = time.clock_gettime(time.pthread_getcpuclockid(self._watched))
        spins = self._is_on_gpu or (mine.waits_in or "").startswith("World.")
        if not spins and cpu_s > self._cpu_s + 0.02:
            self._cpu_s = cpu_s  # a pass that computes, and calls of torch's own collectives, may have the same stack
        state = (counted, stack, self._cpu_s if mine.waits_in is not None else 0.0)
        is_late = self._waits.look(now, state, mine.site if mine.waits_in is not None else None)
        if mine.waits_in is not None and not self._job.is_failing():
            self._waiting = mine._replace(still_s=self._waits.waited_s)
        return is_late

    def _place(self) -> tuple[Standing, list[traceback.FrameSummary]]:
        """Return the rank's state, and its stack, outermost frame first."""
        progress, stack = self._job.part(Progress), stack_of(self._watched)
        self._is_on_gpu = self._waits.waited_s > _GPU_AFTER_S and progress.waits_on_gpu()
        return place_of(stack, progress, self._is_on_gpu), stack

    def _standing(self) -> Standing:
        if self._job.is_failing() and self._waiting is not None:  # torch ended its wait: what counts is where it waited
            return self._waiting
        return self._place()[0]._replace(still_s=self._waits.waited_s)

    def _stored(self, key: str) -> Optional[Standing]:
        return Standing(*json.loads(self._store.get(key))) if is_there(self._store, key) else None

    def _answers(self) -> dict[int, Optional[Standing]]:
        """Return the state of each rank; None for one that does not answer in time."""
        states = {rank: self._stored(f"left/{rank}") for rank in self.ranks}
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
        if verdict is not None and (self._rank in (0, *verdict.named) or len(self.ranks) <= _MOST_PRINT):
            say(verdict.text, directly=True)
        self._waits.postpone()


def begin(job: Job, here: World, timeout_s: float) -> Watch:
    """Watch this rank until the end of its job. Local."""
    watch = Watch(job, here, timeout_s)
    job.at_end.callback(watch.end)
    atexit.register(watch.end)  # if Python ends a thread in the middle of a call to the store, the process crashes
    watch.thread.start()
    return watch


def stack_of(thread: int) -> list[traceback.FrameSummary]:
    """Return the stack of a thread, outermost frame first, at most 100 frames; empty if it has ended. Local.

    Python writes it into a file. Who gets another thread's frames, and lets go of them when they have ended, ends the
    lives of their variables in the wrong thread: TorchScript's crash, and __del__ may run anywhere.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        _, *told = _THREAD.split(file.read().decode("unicode_escape", "replace"))
    frames = next((frames for number, frames in zip(told[::2], told[1::2]) if int(number, 16) == thread), "")
    found = reversed(_FRAME.findall(frames))
    return [traceback.FrameSummary(name, int(line), function, lookup_line=False) for name, line, function in found]


def place_of(stack: list[traceback.FrameSummary], progress: Progress, waits_on_gpu: bool = False) -> Standing:
    """Return the state of a rank with this stack, outermost frame first. Local."""
    stack = [frame for frame in stack if not short(frame.filename).startswith(_AROUND)]
    files = [(short(frame.filename), frame.name) for frame in stack]
    own = [frame for frame in stack if not is_torchs_or_ours(frame.filename)]
    inner = [frame for frame in own if is_users(frame.filename)] or own or stack
    if waits_on_gpu:
        waits_in: Optional[str] = f"backward pass {progress.num_passes}"
    elif progress.is_reducing and any(file.startswith(_PASSES) for file, _ in files):
        waits_in = f"backward pass {progress.num_passes + 1}"
    else:
        waits_in = _collective(files, progress)
    found = (s[2] for s in _SECTIONS for at in files if s[0] in at[0] and s[1] in ("", at[1]))
    section = None if waits_in else next(found, None)
    site = shown(inner[-1].filename, inner[-1].lineno) if inner else "at the end of its program"
    if waits_in is not None and own:
        stack = stack[: stack.index(own[-1]) + 1]  # without torch's frames
    lines = "".join(traceback.format_list(stack[-_MOST_FRAMES:])).splitlines()
    return Standing(progress.num_passes, progress.batch, waits_in, section, site, lines)


def _collective(files: list[tuple[str, str]], progress: Progress) -> Optional[str]:
    """Return the collective of World or torch in which a thread with these files and functions is; None if in none."""
    waits_in: Optional[str] = None
    for file, function in reversed(files):
        if file == "torch/distributed/distributed_c10d.py":
            waits_in = f"torch.distributed.{function}"
        elif (file, function) in _WAITS:
            waits_in = _WAITS[file, function]
        elif file in _WORLDS and waits_in is not None and not function.startswith("_"):
            waits_in = f"World.{function} (collective {progress.num_collectives} of World's)"
        elif not file.startswith(("torch/", "ddpshim/", "python/")):
            break
    return waits_in


def judge(standings: Standings, asker: int) -> Optional[Verdict]:
    """Return which ranks are missing if rank `asker` has waited too long; None if it may wait. Local.

    It ends the job where waiting is useless: all have waited for ten seconds, in different places, or the missing ranks
    have left.
    """
    mine, others = standings[asker], [theirs for theirs in standings.values() if theirs is not None]
    if mine is None or mine.waits_in is None:
        return None
    if any(theirs.section and not theirs.has_left for theirs in others) and mine.still_s < _DECLARED_S:
        return None
    away = [rank for rank, theirs in standings.items() if theirs is None or theirs.has_left or theirs.waits_in is None]
    named = away or _apart(standings)
    waited = f"rank {asker} has waited {mine.still_s:.0f} s in {mine.waits_in} ({mine.site})"
    where = f"Where each rank is:\n{describe(standings, named)}"
    if not named:
        none = "and so have all others: none is missing; their messages differ, or their network fails"
        return Verdict([], f"{waited}, {none}. {where}")
    said = f"{waited} for {ranks_called(named)}" if away else f"{waited}, while others wait elsewhere"
    have_left = all((theirs := standings[rank]) is not None and theirs.has_left for rank in named)
    is_deadlock = not away and all(theirs.still_s >= DEADLOCK_S for theirs in others)
    if not (have_left or is_deadlock):
        return Verdict(named, f"{said}. {where}")
    from ddpshim.failures.failure_notes import SAME_WAY

    why = f"; {ranks_called(named)} left the job" if have_left else ""
    to_do = f"{SAME_WAY} (DDPSHIM_GUARD=0 turns this check off)"
    return Verdict(named, f"{said}{why}: ranks would hang until a timeout. {to_do}. {where}", ends_job=True)


def _apart(standings: Standings) -> list[int]:
    """Return the ranks that wait in another collective than most; in a tie, those with fewer backward passes."""
    by_place: dict[Optional[str], list[int]] = {}
    for rank, theirs in standings.items():
        by_place.setdefault(theirs and theirs.waits_in, []).append(rank)
    most = max(by_place.values(), key=lambda ranks: (len(ranks), getattr(standings[ranks[0]], "num_passes", 0)))
    return [rank for rank in standings if rank not in most]


def describe(standings: Standings, named: Sequence[int]) -> str:
    """Return a line for each rank (one line for ranks in the same place), and the stacks of the named ranks. Local."""
    ranks_at = dict[str, list[int]]()
    for rank, theirs in standings.items():
        if rank not in named:
            ranks_at.setdefault(_where(theirs), []).append(rank)
    lines = [f"  {ranks_called(ranks)}: {where}" for where, ranks in ranks_at.items()]
    for rank in named:
        theirs = standings[rank]
        lines += [f"  rank {rank}: {_where(theirs)}", *(f"    {line}" for line in (theirs.lines if theirs else []))]
    return "\n".join(lines)


def _where(theirs: Optional[Standing]) -> str:
    if theirs is None:
        return "gave no answer: its process is stopped or gone, or holds the GIL"
    made = count(theirs.num_passes, "backward pass", "es")
    if theirs.batch is not None:
        made += f", batch {theirs.batch[1]} of epoch {theirs.batch[0]}"
    if theirs.has_left:
        return f"{made}; has left the job ({theirs.site})"
    does = f"waits in {theirs.waits_in}" if theirs.waits_in else f"is in {theirs.section or 'its own code'}"
    since = f"for {theirs.still_s:.0f} s" if theirs.still_s > MOVES_S else "and moves"
    return f"{made}; {does} ({theirs.site}), {since}"
