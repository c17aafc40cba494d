"""Distributes the turns (episodes) of an evaluation over the ranks, and gathers their results.

Ranks wait for each other only at the end. Until then they share counters in the store: the turns given out, those
played, and whether one has failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, Optional

from ddpshim.errors import RolloutError
from ddpshim.failures.failure import caused_by
from ddpshim.job.world import World, world_of_shares
from ddpshim.process.job import current
from ddpshim.process.say import described


def plays_rollouts() -> bool:
    """Whether this rank plays episodes, and so needs environments; call it before they are made. Local.

    All ranks do, unless the option `rollouts` is "main". If the rank computes on a GPU, EGL renderers are made to use
    the same one: MUJOCO_EGL_DEVICE_ID and EGL_DEVICE_ID are set in `os.environ`, unless they already are.
    """
    here = world_of_shares()
    if not here.is_launched:
        return True
    if here.device.type == "cuda":
        render_on(here.device.index or 0)
    return here.options.rollouts == "all" or here.is_main


def render_on(gpu: int) -> None:
    """Make EGL renderers use torch's GPU number `gpu`; EGL also counts the GPUs that torch does not see. Local."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = visible[gpu].strip() if gpu < len(visible) and visible[0].strip() else str(gpu)
    if number.isascii() and number.isdigit():  # EGL does not know UUIDs
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", number)
        os.environ.setdefault("EGL_DEVICE_ID", number)


@dataclass
class Dealt:
    """The results of all ranks, on each rank.

    Attributes:
        results: by turn.
        failed_at: the first turn that failed; the number of turns if none did.
        text: the message about it; "" if none failed.
        by: the rank on which it failed.
        own: the exception of this rank's own turn, if one failed.
    """

    results: dict[int, Any]
    failed_at: int
    text: str
    by: int
    own: Optional[BaseException]

    def raise_failure(self, rank: int) -> None:
        """Raise RolloutError if a turn failed on any rank. Local; raises on all ranks."""
        if self.text:
            failure = RolloutError(self.text)
            raise (failure if self.by == rank else caused_by(self.by, failure)) from self.own


class Deal:
    """The turns of one evaluation. All ranks make one, with the same arguments.

    A rank that is done takes the next turn, so that ranks with short episodes play more of them.

    Args:
        is_fixed: rank r of W plays turns r, r + W, r + 2W and so on, however long they take.
        plays: whether this rank takes any.

    Attributes:
        name: prefix of its counters.
    """

    def __init__(
        self,
        here: World,
        num_turns: int,
        *,
        is_fixed: bool = False,
        plays: bool = True,
    ) -> None:
        self.name = f"rollouts/{current().next_number('rollouts')}"
        self._here, self._num_turns, self._is_fixed, self._plays = here, num_turns, is_fixed, plays

    def play(
        self,
        play: Callable[[int], Any],
        what: Callable[[int], str],
        *,
        is_told_to_end: Callable[[], bool] = lambda: False,
        ends_at_failure: bool = True,
        played: Callable[[int], None] = lambda so_far: None,
    ) -> Callable[[], Dealt]:
        """Play this rank's turns, and return a function that gathers the results of all ranks (collective). Local.

        All ranks stop after their current turn if a turn failed, or if `is_told_to_end` returned True on one. An
        exception of `play` is kept for `Dealt`.

        Args:
            play: called with a turn's number; returns its result, plain values.
            what: called with the number of a failed turn; returns its name: "environment 'Lift', episode 3".
            is_told_to_end: called before each turn.
            ends_at_failure: False: other ranks continue after a failure.
            played: called with the number of turns that all ranks have played so far.
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
            played(self._count("played", 1))

        def gathered() -> Dealt:
            everyones = self._here.gather((results, failed_at, text))
            first = min(range(len(everyones)), key=lambda rank: (not everyones[rank][2], everyones[rank][1]))
            every = {turn: result for part, _, _ in everyones for turn, result in part.items()}
            return Dealt(every, everyones[first][1], everyones[first][2], first, own)

        return gathered

    def is_told_to_end(self) -> bool:
        """Whether any rank was told to end. Local; equal on all ranks after they gathered."""
        return bool(self._count("told to end"))

    def _turns(self) -> Iterator[int]:
        here, turn = self._here, self._here.rank
        while self._plays:
            if not self._is_fixed:
                turn = self._count("dealt", 1) - 1
            if turn >= self._num_turns:
                return
            yield turn
            turn += here.world_size

    def _count(self, what: str, by: int = 0) -> int:
        return self._here.count(f"{self.name}/{what}", by)
