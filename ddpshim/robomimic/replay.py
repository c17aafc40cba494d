"""Repeats to a resumed, unedited trainer what it was given in the epochs it has finished.

A trainer that nobody edited begins at its first epoch, with its own idea of the best loss so far. It is led through the
epochs that are done without doing them: what it asks is answered as it was then, and it comes to the same decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddpshim.job.world import World


class Replay:
    """The answers of past epochs by what was asked, and a clock that is the same on every rank.

    Between two training epochs the clock stands still, as what ranks do there they must do alike. It goes on, after a
    restart, where it was when the epoch that is gone on with began.
    """

    def __init__(self, here: World) -> None:
        self._world = here
        self._told: dict[tuple[str, int], list[Any]] = {}
        self._asked: dict[tuple[str, int], int] = {}
        self.epoch = self.live_from = 0
        self._start = self.now = here.broadcast(time.time())
        self._behind = 0.0  # of our clock, where it is not the main rank's

    @property
    def is_past(self) -> bool:
        """Whether the trainer is in an epoch that an earlier start of it has done."""
        return self.epoch < self.live_from

    def go_on(self, told: dict[tuple[str, int], list[Any]], live_from: int) -> None:
        """Have the epochs before `live_from` told again. Local."""
        self._told = {key: answers for key, answers in told.items() if key[1] < live_from}
        self.live_from = live_from

    def begin_epoch(self, epoch: int) -> dict[tuple[str, int], list[Any]]:
        """Take note that this epoch of training begins; what was told so far, to be kept with the progress. Local."""
        was_past, self.epoch = self.is_past, epoch
        if was_past and not self.is_past:
            self._behind = self.now - time.time()
        return self._told

    def end_epoch(self) -> None:
        """Let the clock go on to the end of the training of an epoch (collective, but in the past)."""
        elapsed = self.answer("clock", lambda: self._world.broadcast(time.time() + self._behind) - self._start)
        self.now = self._start + elapsed

    def answer(self, question: str, find_out: Callable[[], Any]) -> Any:
        """What was answered in this epoch, when it is past; else what `find_out` says, kept for later."""
        key = (question, self.epoch)
        number = self._asked[key] = self._asked.get(key, 0) + 1
        answers = self._told.setdefault(key, [])
        if self.is_past and number <= len(answers):
            return answers[number - 1]
        answers.append(find_out())
        return answers[-1]
