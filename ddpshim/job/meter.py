"""Measures where this process's time goes, while a `Meter` runs: each moment belongs to one phase of a step."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Callable, Optional

import torch
from torch.utils.data import dataloader

from ddpshim.process import timing
from ddpshim.process.observed import observe
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say_once

# In the order of a step. `after`: from a backward pass to the next batch, without the optimizer.
PHASES = (
    *("data", "transfer", "forward", "backward", "communication", "optimizer", "after"),
    *("save", "rollout", "evaluation", "outside"),
)
# Reports show parts; each phase belongs to one.
_PART_OF = {
    "data": "data_wait",
    **dict.fromkeys(("transfer", "forward", "backward", "after", "evaluation"), "compute"),
    "communication": "communication",
    "optimizer": "optimizer",
    **dict.fromkeys(("save", "rollout", "outside"), "other"),
}
PARTS = tuple(dict.fromkeys(_PART_OF.values()))
_STEPS_WITHOUT_LOADER = 8  # optimizer steps without a batch; after these each optimizer step ends a training step


class Clock:
    """This process's one clock, from the first `Meter` that starts to the last that stops. Local.

    A phase begins at a call that torch or ddpshim makes:
    - data: a batch is requested.
    - transfer: the batch has arrived, and no wrapped network was called yet.
    - forward: a wrapped network is called, or one of its methods is.
    - backward: torch.autograd.backward, without communication.
    - communication: this rank waits for the reducer or for a collective of `World`.
    - optimizer: the steps of optimizers.
    - after: from the end of a backward pass to the next request.
    - save, rollout: within `timing.counted`.
    - evaluation: the batches of a loop under torch.no_grad().
    - outside: before the first batch, and after the end of a pass over a loader.

    Attributes:
        seconds: by phase, since the clock was made.
        num_batches: the number of batches that arrived.
        num_workers: the workers of the loader that returned the last batch.
        busy: (num_workers, 2): seconds that each spent on batches, and how many; None if the loader does not report it.
        waited: seconds that a GPU's stream waited for nccl; the host counted them as compute.
        marks: events on the GPU's stream, each with the phase that begins there; None if they are not collected.
        at_border: called whenever a step ends and the next one begins.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.num_batches, self.num_workers, self.waited = 0, 0, 0.0
        self.busy: Optional[torch.Tensor] = None
        self._last_batches = 0
        self.marks: Optional[list[tuple[str, Any]]] = None
        self.at_border: Optional[Callable[[], None]] = None
        self.num_users, self.num_event_users = 0, 0
        self._phase, self._since = "outside", time.perf_counter()
        self._outer: list[str] = []  # the phases that the current one interrupts
        self._events: list[tuple[Any, Any]] = []
        self._num_steps_since_batch = 0
        self._thread = threading.get_ident()
        self._undo = contextlib.ExitStack()
        observe(self._undo, before_step=lambda *_: self.begin("optimizer"), after_step=lambda *_: self._end_optimizer())
        # All of torch's loaders, with workers or without, call this one method.
        batches_of_any = getattr(dataloader, "_BaseDataLoaderIter", None)
        if batches_of_any is None:
            say_once("this torch hides its loaders' iterators; time spent waiting for data is counted in `other`")
            return
        original = batches_of_any.__next__

        def timed_next(batches: Any) -> Any:
            # One loader reads another, a save or rollout reads one, or a thread fetches ahead.
            if self._phase in ("data", "save", "rollout") or threading.get_ident() != self._thread:
                return original(batches)
            trains = torch.is_grad_enabled()
            if trains:
                self._num_steps_since_batch = 0
                self._end_step()
            self._become("data")
            arrived = "outside"
            try:
                batch = original(batches)
                self.num_batches += 1
                if id(batches) != self._last_batches:
                    self._last_batches = id(batches)
                    self.num_workers, self.busy = getattr(batches, "_num_workers", 0), getattr(batches, "busy", None)
                arrived = "transfer" if trains else "evaluation"
            finally:
                self._become(arrived)
            return batch

        self._undo.enter_context(replaced(batches_of_any, "__next__", timed_next))

    def close(self) -> None:
        """Stop counting, and restore torch."""
        self._become("outside")
        self._outer.clear()
        self._undo.close()

    def begin(self, phase: str) -> None:
        """Count time as `phase` until `end()`; may be nested."""
        if phase == "backward" and self._phase == "transfer":  # no wrapped network reported its call
            self._phase = "forward"
            if self.marks is not None:
                self.marks = [("forward" if name == "transfer" else name, event) for name, event in self.marks]
        if phase == "communication" and self.num_event_users and "communication" not in (self._phase, *self._outer):
            self._events.append((mark(), None))
        self._outer.append(self._phase)
        self._become(phase)

    def end(self) -> None:
        """Return to the phase that `begin` interrupted. Does nothing if the clock was started in between."""
        if not self._outer:
            return
        ended, before = self._phase, self._outer.pop()
        if ended == "backward" and before in ("transfer", "forward"):
            before = "after"
        self._become(before)
        if self._events and ended == "communication" and "communication" not in (before, *self._outer):
            self._events[-1] = self._events[-1][0], mark()
            self.read_events()

    def call_network(self) -> None:
        """Record that a wrapped network is called."""
        begins = self._phase == "transfer" or (self._phase == "after" and torch.is_grad_enabled())
        if begins and threading.get_ident() == self._thread:
            self._become("forward")

    def skip(self) -> None:
        """Count the time since the current phase began as none: the program stood at a prompt."""
        self._since, self.marks = time.perf_counter(), None

    def worker_s(self) -> Optional[float]:
        """Return the seconds that a worker of the last loader takes per batch; None if no worker reports it. Local."""
        if self.busy is None:
            return None
        seconds, num_batches = self.busy.sum(0).tolist()
        return float(seconds / num_batches) if num_batches else None

    def leave_loop(self) -> None:
        """Count the time until the next batch as `outside`, and so to no step."""
        if not self._outer:
            self._become("outside")

    def now(self) -> dict[str, float]:
        """Return the seconds by phase so far."""
        self._become(self._phase)
        return dict(self.seconds)

    def _end_optimizer(self) -> None:
        self.end()
        self._num_steps_since_batch += 1
        if self._num_steps_since_batch > _STEPS_WITHOUT_LOADER and not self._outer:
            self._end_step()
            self._become("after")

    def _end_step(self) -> None:
        self._outer.clear()  # phases that an exception left open
        if self.at_border is not None:
            self._become(self._phase)
            self.at_border()

    def _become(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        if self.marks is not None:
            self.marks.append((phase, mark()))

    def read_events(self, waits: bool = False) -> None:
        """Add up how long the GPU has waited so far; with `waits`, wait until it has finished."""
        if waits and self._events:
            torch.cuda.synchronize()
        while self._events and self._events[0][1] is not None and self._events[0][1].query():
            first, last = self._events.pop(0)
            self.waited += first.elapsed_time(last) / 1000


class Meter:
    """Seconds by part, and the number of batches, between `start` and `stop`; both may be called again. Local.

    The parts are those of `PARTS`: data_wait, compute, communication, optimizer, other. Several meters may run at
    once, on one clock. On a GPU under nccl the host does not wait for the reducer, but the GPU's stream does: this time
    is measured by events, and subtracted from compute, in which the host waits for the GPU at some point.
    """

    def __init__(self, uses_events: bool = False) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.num_batches = 0
        self._uses_events = uses_events
        self._clock: Optional[Clock] = None
        self._begun_with = dict[str, float](), 0, 0.0

    def start(self) -> Clock:
        """Start counting; returns the clock."""
        clock = timing.running
        if not isinstance(clock, Clock):
            clock = Clock()
            timing.measure_by(clock)
        clock.num_users += 1
        clock.num_event_users += self._uses_events
        clock.leave_loop()
        self._clock, self._begun_with = clock, (clock.now(), clock.num_batches, clock.waited)
        return clock

    def stop(self) -> None:
        """Stop counting; the last meter restores torch."""
        clock, self._clock = self._clock, None
        if clock is None:
            return
        clock.leave_loop()
        clock.read_events(waits=self._uses_events)
        seconds, num_batches, waited = self._begun_with
        for phase, until_now in clock.now().items():
            self.seconds[_PART_OF[phase]] += until_now - seconds[phase]
        self.seconds["communication"] += clock.waited - waited
        self.seconds["compute"] -= clock.waited - waited
        self.num_batches += clock.num_batches - num_batches
        clock.num_users -= 1
        clock.num_event_users -= self._uses_events
        if not clock.num_users:
            timing.measure_by(None)
            clock.close()

    def begin(self, phase: str) -> None:
        """Count time as `phase` until `end()`; may be nested. Does nothing if this meter is stopped."""
        if self._clock is not None:
            self._clock.begin(phase)

    def end(self) -> None:
        """Return to the phase that `begin` interrupted."""
        if self._clock is not None:
            self._clock.end()


def mark() -> Any:
    """Return a timed event on the GPU's current stream. Local; does not wait."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
