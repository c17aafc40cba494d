"""Prints what makes this job's steps slow, after the first steps and again later.

Each rank measures its own phases (`meter.Clock`) and writes them to the job's store after steps 20, 40, 80 and so on.
The main rank reads them in its next steps, and prints one line if `slowness.judge` finds a cause. No rank waits, and no
message is added to a step.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from ddpshim.failures import failure
from ddpshim.job.group import on_cleanup, world
from ddpshim.job.meter import PHASES, Clock, Meter, mark
from ddpshim.process import events
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say

if TYPE_CHECKING:
    from ddpshim.job.slowness import Blocks

FIRST_LOOK = 20  # steps
NUM_WARM_UP = 3
_NUM_BLOCKS = 20  # blocks of equally many steps from one look to the next
_LEAST_S = 1.0  # seconds of steps: a training that ends before needs no advice
_EVERY_ON_GPU = 3  # steps; does not divide usual numbers of workers: a loader with n workers stalls every n batches
_MOST_TRIES = 20  # attempts of the main rank, one per step, to read the others' numbers
_BY_HOST = ("save", "rollout")  # rare, and the host waits for them on a GPU too


class Pace:
    """The time of this rank's steps since the last check, by phase, and what was printed about it."""

    def __init__(self) -> None:
        self.num_steps = -1  # until the first step begins
        self._meter = Meter()
        self._clock: Optional[Clock] = None
        self._on_gpu = False
        self._before: list[float] = []  # the clock's seconds when the block began
        self._by_host = dict[int, list[float]]()  # seconds of a block's mean step, by the block's last step
        self._by_gpu = dict[int, list[float]]()
        self._width = 1  # steps in a block
        self._marked: list[tuple[int, list[tuple[str, Any]]]] = []
        self._since, self._next_look = NUM_WARM_UP, FIRST_LOOK
        self._awaited: Optional[tuple[int, int]] = None  # the look whose numbers the main rank collects, and its steps
        self._num_tries = 0
        self._said: dict[tuple[str, tuple[int, ...]], float] = {}

    def begin(self) -> None:
        """Measure this job's steps from now to `cleanup()`. Local; without effect if it has begun."""
        if self._clock is None:
            self._on_gpu = world().device.type == "cuda"
            self._clock = self._meter.start()
            self._clock.at_border = self._end_step
            if world().world_size == 1 or not current().holds_whole_batches:  # else `input` is another one already
                from ddpshim.process import timing

                current().at_end.enter_context(replaced(builtins, "input", timing.uncounted(input)))
            on_cleanup(self._end)

    def _end(self) -> None:
        self._read()
        if self._clock is not None:
            self._clock.at_border = self._clock.marks = None
        self._meter.stop()

    def _end_step(self) -> None:
        clock = self._clock
        assert clock is not None
        self.num_steps += 1
        if self._on_gpu:
            try:
                self._mark(clock)
            except RuntimeError:  # an event was captured into a graph: use the host's times
                self._on_gpu, clock.marks = False, None
                self._by_gpu.clear()
        if self._awaited is not None:
            self._read()
        if (self.num_steps - self._since) % self._width == 0:
            now = list(clock.seconds.values())
            if self.num_steps > self._since:
                spent = [(after - before) / self._width for before, after in zip(self._before, now)]
                self._by_host[self.num_steps] = spent
            self._before = now
            if self.num_steps == self._next_look:
                self._leave(clock)

    def _mark(self, clock: Clock) -> None:
        """Read when the GPU began each phase, for marked steps that it has finished; mark the next step if due."""
        if clock.marks:
            self._marked.append((self.num_steps, [*clock.marks, ("", mark())]))
        due = self.num_steps >= NUM_WARM_UP and self.num_steps % (_EVERY_ON_GPU * self._width) == 0
        clock.marks = [] if due else None  # for the step that begins
        while self._marked and self._marked[0][1][-1][1].query():
            step, marks = self._marked.pop(0)
            seconds = dict.fromkeys(PHASES, 0.0)
            for (phase, begin), (_, end) in zip(marks, marks[1:]):
                seconds[phase] += begin.elapsed_time(end) / 1000
            self._by_gpu[step] = list(seconds.values())

    def _leave(self, clock: Clock) -> None:
        """Send the measurements since the last look to the main rank through the store, and begin new ones."""
        here, blocks = world(), self._by_host
        if self._by_gpu:
            for place in map(PHASES.index, _BY_HOST):
                mean_s = sum(block[place] for block in blocks.values()) / len(blocks)
                for block in self._by_gpu.values():
                    block[place] = mean_s
            blocks = self._by_gpu
        worker_s = clock.worker_s()
        loads_s = None if worker_s is None else worker_s / clock.num_workers
        if here.world_size == 1:
            self._tell([blocks], [loads_s], self.num_steps - self._since)
        else:
            with contextlib.suppress(RuntimeError, ValueError):  # the process that serves the store has ended
                short = {step: [round(seconds, 7) for seconds in block] for step, block in blocks.items()}
                current().store.set(_key(self.num_steps, here.rank), json.dumps([short, loads_s]))
            if here.is_main:
                self._awaited, self._num_tries = (self.num_steps, self.num_steps - self._since), 0
        self._by_host, self._by_gpu = {}, {}
        self._since, self._next_look = self.num_steps, 2 * self._next_look
        self._width = max(1, (self._next_look - self._since) // _NUM_BLOCKS)

    def _read(self) -> None:
        """On the main rank: judge, once the numbers of all ranks are in the store."""
        if self._awaited is None:
            return
        (look, num_steps), store = self._awaited, current().store
        self._num_tries += 1
        keys = [_key(look, rank) for rank in range(world().world_size)]
        told = None
        with contextlib.suppress(RuntimeError, ValueError, TypeError, AttributeError):  # no store, or not our data
            if store.check(keys) if hasattr(store, "check") else all(failure.is_there(store, key) for key in keys):
                told = [_read_told(json.loads(store.get(key))) for key in keys]
                with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can delete keys
                    for key in keys:
                        store.delete_key(key)
        if told is not None or self._num_tries == _MOST_TRIES:
            self._awaited = None
        if told is not None:
            blocks, loads_s = zip(*told)
            self._tell(blocks, loads_s, num_steps)

    def _tell(self, ranks: Sequence[Blocks], loads_s: Sequence[Optional[float]], num_steps: int) -> None:
        from ddpshim.job.slowness import judge

        finding = judge(ranks, loads_s)
        if finding is None or finding.step_s * num_steps < _LEAST_S:
            return
        finding = finding._replace(has_room=self._has_room(), is_on_gpu=world().device.type == "cuda")
        key = finding.phase, finding.ranks
        if finding.share > 2 * self._said.get(key, 0.0):
            self._said[key] = finding.share
            about = {"phase": finding.phase, "ranks": finding.ranks, "share": round(finding.share, 4)}
            events.note("slow", steps=self.num_steps, **about, said=str(finding))
            say(f"after {self.num_steps} steps: {finding} (DDPSHIM_DIAGNOSE=no turns this off)")

    def _has_room(self) -> bool:
        """Whether this node has cores for one more data worker of each rank."""
        from ddpshim.process import machine

        num_ranks, num_cores = world().local_world_size, machine.num_cores()
        if num_ranks * len(machine.cores()) <= (os.cpu_count() or 1):  # the launcher may have given each rank its own
            num_ranks = 1
        return self._clock is None or num_ranks * (self._clock.num_workers + 2) <= num_cores


def _key(look: int, rank: int) -> str:
    return f"pace/{look}/{rank}"


def _read_told(told: Any) -> tuple[Blocks, Optional[float]]:
    """Return the numbers that a rank has stored; raises ValueError or TypeError for anything else."""
    told, loads_s = told
    blocks = {int(first): [float(seconds) for seconds in block] for first, block in told.items()}
    if any(len(block) != len(PHASES) for block in blocks.values()):
        raise ValueError("not the phases of this ddpshim")
    return blocks, None if loads_s is None else float(loads_s)
