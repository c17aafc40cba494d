"""Replays the finished epochs of a resumed, unedited trainer without training.

An unedited trainer begins at its first epoch, without the best loss so far. In finished epochs its calls return the
results recorded at that time, so that it makes the same decisions again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddpshim.job.world import World


class Replay:
    """The recorded answers of past epochs by question, and a clock that is the same on every rank.

    Between two training epochs the clock stops, since ranks must make the same decisions there. After a restart it
    continues from its value at the beginning of the resumed epoch.
    """

    def __init__(self, here: World) -> None:
        self._world = here
        self._answers: dict[tuple[str, int], list[Any]] = {}
        self._num_asked: dict[tuple[str, int], int] = {}
        self.epoch = self.live_from = 0
        self._start = self.now = here.broadcast(time.time())
        self._behind = 0.0  # seconds from this process's time to the clock, after a restart

    @property
    def is_past(self) -> bool:
        """Whether the trainer is in an epoch that an earlier start has finished."""
        return self.epoch < self.live_from

    def go_on(self, told: dict[tuple[str, int], list[Any]], live_from: int) -> None:
        """Replay the epochs before `live_from` with the answers in `told`. Local."""
        self._answers = {key: answers for key, answers in told.items() if key[1] < live_from}
        self.live_from = live_from

    def begin_epoch(self, epoch: int) -> dict[tuple[str, int], list[Any]]:
        """Begin this epoch of training; return the answers so far, to be saved with the progress. Local."""
        was_past, self.epoch = self.is_past, epoch
        if was_past and not self.is_past:
            self._behind = self.now - time.time()
        return self._answers

    def end_epoch(self) -> None:
        """Advance the clock to the end of this epoch's training (collective, except in past epochs)."""
        elapsed = self.answer("clock", lambda: self._world.broadcast(time.time() + self._behind) - self._start)
        self.now = self._start + elapsed

    def answer(self, question: str, find_out: Callable[[], Any]) -> Any:
        """Return the recorded answer if this epoch is past; else call `find_out`, and record its result."""
        key = (question, self.epoch)
        number = self._num_asked[key] = self._num_asked.get(key, 0) + 1
        answers = self._answers.setdefault(key, [])
        if self.is_past and number <= len(answers):
            return answers[number - 1]
        answers.append(find_out())
        return answers[-1]
