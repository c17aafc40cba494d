"""Deals the turns of an evaluation to the ranks, and gathers what they played.

Ranks meet at the end only. Before, each adds to counters that all see: who plays what, how much is played, and that
a turn has failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, Optional

from ddpshim.errors import RolloutError
from ddpshim.job.failure import caused_by
from ddpshim.job.group import world
from ddpshim.job.job import current
from ddpshim.job.say import described
from ddpshim.job.world import World

IsDecided = Callable[[int, int], bool]


def plays_rollouts() -> bool:
    """Whether this rank plays episodes, and needs environments; call it before they are made. Local.

    All ranks do, unless the option `rollouts` is "main". Where the rank computes on a GPU, renderers
    that open a display through EGL are pointed at the same one (MUJOCO_EGL_DEVICE_ID and EGL_DEVICE_ID are set
    in `os.environ`, where nobody has set them).
    """
    here = world()
    if not here.is_launched:
        return True
    if here.device.type == "cuda":
        render_on(here.device.index or 0)
    return here.options.rollouts == "all" or here.is_main


def render_on(gpu: int) -> None:
    """Point EGL renderers at the GPU that torch numbers `gpu`; they count as if all were visible. Local."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = visible[gpu].strip() if gpu < len(visible) and visible[0].strip() else str(gpu)
    if number.isascii() and number.isdigit():  # not a UUID, which EGL does not know
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", number)
        os.environ.setdefault("EGL_DEVICE_ID", number)


@dataclass
class Dealt:
    """What all ranks played, on all ranks.

    Attributes:
        results: by turn.
        failed_at: the first turn that failed; the number of turns where none did.
        text: what is said of it; "" where none failed.
        by: the rank on which it failed.
        own: the exception, on that rank.
    """

    results: dict[int, Any]
    failed_at: int
    text: str
    by: int
    own: Optional[BaseException]

    def raise_failure(self, rank: int) -> None:
        """Raise RolloutError on all ranks where a turn failed on one. Local."""
        if self.text:
            failure = RolloutError(self.text)
            raise (failure if self.by == rank else caused_by(self.by, failure)) from self.own


class Deal:
    """The turns of one evaluation. All ranks make it, with the same arguments.

    A rank that is done takes the next turn that nobody has, so that ranks with short episodes play more of them.

    Args:
        is_fixed: rank r of W plays turns r, r + W, r + 2W and so on, whatever they take.
        plays: whether this rank takes any.
        is_decided: called with the successes in the first n turns and n: whether the others need not be played.

    Attributes:
        name: of its counters.
    """

    def __init__(
        self,
        here: World,
        num_turns: int,
        *,
        is_fixed: bool = False,
        plays: bool = True,
        is_decided: Optional[IsDecided] = None,
    ) -> None:
        self.name = f"rollouts/{current().next_number('rollouts')}"
        self._here, self._num_turns, self._is_fixed = here, num_turns, is_fixed
        self._plays, self._is_decided = plays, is_decided
        self._num_seen = self._num_successes = 0  # of the first turns, all of which are played

    def play(
        self,
        play: Callable[[int], Any],
        what: Callable[[int], str],
        *,
        is_told_to_end: Callable[[], bool] = lambda: False,
        ends_at_failure: bool = True,
        played: Callable[[int], None] = lambda so_far: None,
        is_success: Callable[[Any], bool] = bool,
    ) -> Callable[[], Dealt]:
        """Play this rank's turns; what is returned gathers those of all ranks (collective). Itself local.

        Ranks end after the turn that they are in where one has failed, or one was told to end. An exception of `play`
        is kept for `Dealt`.

        Args:
            play: called with a turn's number; returns its result, plain values.
            what: called with the number of a turn that failed; returns its name: "environment 'Lift', episode 3".
            played: called with the number of turns that all ranks have played so far.
            is_success: called with a result, where there is something to decide.
        """
        results: dict[int, Any] = {}
        own: Optional[BaseException] = None
        failed_at, text = self._num_turns, ""
        for turn in self._turns():
            if self._count("told to end", is_told_to_end()) or (self._count("failed") and ends_at_failure):
                break
            try:
                results[turn] = play(turn)
            except Exception as error:
                self._count("failed", 1)
                own, failed_at = error, turn
                said = str(error) if isinstance(error, RolloutError) else described(error)
                text = (
                    f"{what(turn)} failed on rank {self._here.rank} ({said}); statistics without it would be "
                    "incomplete. See that rank's traceback."
                )
                break
            if self._is_decided is not None:
                self._count(f"success/{turn}", 1 + is_success(results[turn]))
            played(self._count("played", 1))

        def gathered() -> Dealt:
            everyones = self._here.gather((results, failed_at, text))
            first = min(range(len(everyones)), key=lambda rank: (not everyones[rank][2], everyones[rank][1]))
            every = {turn: result for part, _, _ in everyones for turn, result in part.items()}
            return Dealt(every, everyones[first][1], everyones[first][2], first, own)

        return gathered

    def is_told_to_end(self) -> bool:
        """Whether a rank was. Local; the same on all ranks once they have gathered."""
        return bool(self._count("told to end"))

    def _turns(self) -> Iterator[int]:
        here, turn = self._here, self._here.rank
        while self._plays:
            if not self._is_fixed:
                turn = self._count("dealt", 1) - 1
            if turn >= self._num_turns or self._is_over():
                return
            yield turn
            turn += here.world_size

    def _is_over(self) -> bool:
        """Whether the first turns, as many as are played without a gap, decide."""
        while self._is_decided is not None and (seen := self._count(f"success/{self._num_seen}")):
            self._num_seen, self._num_successes = self._num_seen + 1, self._num_successes + seen - 1
            if self._is_decided(self._num_successes, self._num_seen):
                return True
        return False

    def _count(self, what: str, by: int = 0) -> int:
        return self._here.count(f"{self.name}/{what}", by)
