"""Makes several virtual ranks of one process take turns, as threads of which one runs at a time.

A virtual rank ends its turn when it needs the others' values (`Turns.meet`), and continues when all have reached that
call. So the combined result does not depend on the number of processes. In EasyScale ("EasyScale: Elastic Training with
Consistent Accuracy", SC 2023) the workers of a GPU take turns in this way.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional, TypeVar

import torch

from ddpshim.errors import SyncError, WorldError
from ddpshim.process.random_streams import is_same_state, rank_states, restore_changed_states

T = TypeVar("T")
_END_S = 10.0  # a thread that has not ended by then is abandoned; it ends with the process

_APART = (
    "virtual rank {} of this process reached {}, virtual rank {} {}: as ranks they would deadlock. Make every "
    "step do the same, whatever its samples are."
)


class _Abandoned(BaseException):
    """Ends the step of a virtual rank because another one failed."""


class Turns:
    """The turns of this process's virtual ranks in a step.

    Args:
        size: how many there are.
        device: where they compute.
        begin_turn: called with a virtual rank's number in this process at the start of each turn.

    Attributes:
        now: whose turn it is; None between steps.
    """

    def __init__(self, size: int, device: torch.device, begin_turn: Callable[[int], None]) -> None:
        self.size, self.now = size, None  # type: tuple[int, Optional[int]]
        self._device, self._begin_turn = device, begin_turn
        self._may_go = [threading.Semaphore(0) for _ in range(size)]
        self._play: Optional[Callable[[int], Any]] = None
        self._results: list[Any] = [None] * size
        self._streams: list[Any] = [None] * size
        self._set: dict[str, Any] = {}  # the last known states of the generators
        self._arrived: list[dict[int, tuple[str, Any]]] = [{}, {}]  # in the current meeting, and in the next
        self._num_met = [0] * size
        self._outcome: list[Any] = [None, None]
        self._done = [True] * size
        self._error: Optional[BaseException] = None
        self._threads: list[threading.Thread] = []
        self._is_over = False
        self._num_threads = torch.get_num_threads()

    def check_between(self, what: str) -> None:
        """Raise WorldError within a step. Local."""
        if self.now is not None:
            raise WorldError(
                f"{what} in a step of {self.size} virtual ranks (option exact): results would depend on the number "
                "of processes. Call it between steps; gather, sum, mean, mean_over and all_gather work within steps."
            )

    def run(self, play: Callable[[int], T]) -> list[T]:
        """Run `play(i)` for each virtual rank i, in turns; all begin with the current random streams. Local.

        The first runs in this thread. Raises the first error of any of them, and SyncError if their meetings or draws
        differ.
        """
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._wait_for_steps, args=(i,), daemon=True) for i in range(1, self.size)
            ]
            for thread in self._threads:
                thread.start()
        self._play, self._error = play, None
        self._done, self._num_met, self._arrived = [False] * self.size, [0] * self.size, [{}, {}]
        streams = rank_states(self._device)
        self._streams, self._set = [streams] * self.size, streams
        self._step_of(0)
        while not all(self._done):
            self._end_turn(0)
            self._wait(0)
            late = next((j for j in range(self.size) if not self._done[j]), None)
            if late is not None and self._error is None:
                self._error = SyncError(_APART.format(0, "the end of its step", late, "a further meeting"))
        self.now = self._play = None
        if self._error is None:
            self._check_alike("the end of the step")
        if self._error is not None:
            raise self._error
        return self._results

    def close(self) -> None:
        """End the threads; the next `run` starts new ones. Call it between steps. Local."""
        self._is_over = True
        for i, thread in enumerate(self._threads, 1):
            self._may_go[i].release()
            thread.join(_END_S)
        self._is_over = False
        self._threads.clear()

    def meet(self, what: str, value: Any, combine: Callable[[list[Any]], T]) -> T:
        """Return `combine(values of all virtual ranks of this process)`, computed once.

        Call it in a step, from the virtual rank whose turn it is.
        """
        i = self.now
        assert i is not None
        number = self._num_met[i] % 2
        if i == 0:
            self._arrived[number] = {}
        self._arrived[number][i] = (what, value)
        self._num_met[i] += 1
        self._leave(i)
        self._enter(i)
        if i == 0:
            try:
                self._check_meeting(what, self._arrived[number])
                self._outcome[number] = combine([self._arrived[number][j][1] for j in range(self.size)])
            except BaseException as error:
                self._error = self._error or error
                raise
        return self._outcome[number]  # type: ignore[no-any-return]

    def _check_meeting(self, what: str, arrived: dict[int, tuple[str, Any]]) -> None:
        for j in range(self.size):
            theirs = arrived[j][0] if j in arrived else "the end of its step"
            if theirs != what:
                raise SyncError(_APART.format(0, what, j, theirs))
        self._check_alike(what)

    def _check_alike(self, what: str) -> None:
        for j in range(1, self.size):
            if not all(is_same_state(state, self._streams[j][name]) for name, state in self._streams[0].items()):
                raise SyncError(
                    f"up to {what}, virtual ranks 0 and {j} of this process drew different amounts of random "
                    "numbers: noise would depend on the number of ranks. Draw the same amount in every step, "
                    "whatever its samples are."
                )

    def _step_of(self, i: int) -> None:
        self._take_turn(i)
        assert self._play is not None
        try:
            self._results[i] = self._play(i)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = self._error or error
        self._leave_streams(i)
        self._done[i] = True

    def _leave_streams(self, i: int) -> None:
        states = rank_states(self._device)
        # An unchanged state keeps its object: most generators are not used, and then nothing is compared or restored.
        self._set = self._streams[i] = {
            name: self._set[name] if is_same_state(self._set[name], state) else state for name, state in states.items()
        }

    def _leave(self, i: int) -> None:
        self._leave_streams(i)
        self._end_turn(i)

    def _enter(self, i: int) -> None:
        self._wait(i)
        if self._error is not None:
            raise _Abandoned
        self._take_turn(i)

    def _take_turn(self, i: int) -> None:
        self.now = i
        restore_changed_states(self._set, self._streams[i], self._device)
        self._set = self._streams[i]
        self._begin_turn(i)

    def _end_turn(self, i: int) -> None:
        self._may_go[(i + 1) % self.size].release()

    def _wait(self, i: int) -> None:
        try:
            self._may_go[i].acquire()
        except BaseException as error:  # Ctrl-C during another one's turn: wait until that turn ends
            self._error = self._error or error
            self._may_go[i].acquire()

    def _wait_for_steps(self, i: int) -> None:
        from ddpshim.job.group import settle_rounding

        torch.set_num_threads(self._num_threads)  # torch keeps this number per thread
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        settle_rounding()
        while True:
            self._may_go[i].acquire()
            if self._is_over:
                return
            if not self._done[i] and self._error is None:
                self._step_of(i)
            self._done[i] = True
            self._end_turn(i)
