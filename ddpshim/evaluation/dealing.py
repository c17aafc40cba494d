"""Distributes tasks over the ranks by their costs, and the turns (episodes) of an evaluation, whose results it gathers.

Ranks wait for each other only at its end. Until then they share counters in the store.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, Callable, Optional, TypeVar

from ddpshim.errors import DataError, RolloutError
from ddpshim.failures.failure import caused_by
from ddpshim.job.world import World, world
from ddpshim.process.job import current
from ddpshim.process.say import described

T = TypeVar("T")


def deal(tasks: Sequence[T], costs: Optional[Sequence[float]] = None) -> list[tuple[T, slice]]:
    """Return this rank's tasks and its part of each, so that all ranks have about the same cost (collective).

    Tasks are dealt from the highest cost down, each to the rank with the lowest cost so far (longest processing time
    first); each rank gets them in the order given. If there are fewer tasks than ranks, ranks share tasks, the
    costliest among the most ranks: each has one, and the slice selects its part of the task's episodes.

    3 tasks that cost 5, 3 and 2 on 2 ranks: rank 0 gets the first, rank 1 the others. 1 task on 2 ranks: rank 0 plays
    its episodes 0, 2, 4..., rank 1 the others:
    `for task, part in ddpshim.deal(tasks): for number in range(100)[part]: ...`

    Args:
        tasks: the same on all ranks, in the same order.
        costs: of each task, at least 0, in any unit (seconds, episodes); the main rank's are used. Default: equal.

    Raises DataError if ranks have different tasks, or costs are invalid.
    """
    here, tasks = world(), list(tasks)
    known = [task if isinstance(task, (str, int, float)) else None for task in tasks]
    everyones = here.gather((known, None if costs is None else [float(cost) for cost in costs]))
    odd = next((rank for rank, (theirs, _) in enumerate(everyones) if theirs != everyones[0][0]), None)
    if odd is not None:
        raise DataError(
            f"rank 0 deals {len(everyones[0][0])} tasks and rank {odd} {len(everyones[odd][0])}, or different ones: "
            "some would be done twice, and some never. Give every rank the same tasks in the same order (a set has "
            "no order)."
        )
    costs = everyones[0][1] or [1.0] * len(tasks)
    if len(costs) != len(tasks) or not all(0 <= cost < math.inf for cost in costs):
        raise DataError(
            f"{len(tasks)} tasks with costs {costs}: ranks would get unequal work, or none. Give each task a cost of "
            "at least 0."
        )
    return [
        (task, slice(ranks.index(here.rank), None, len(ranks)))
        for task, ranks in zip(tasks, _holders(costs, here.world_size))
        if here.rank in ranks
    ]


def _holders(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Return for each task the ranks that have it."""
    num = [1] * len(costs)
    for _ in range(num_ranks - len(costs) if costs else 0):
        num[max(range(len(costs)), key=lambda task: (costs[task] / num[task], -num[task], -task))] += 1
    load, held = [(0.0, 0, rank) for rank in range(num_ranks)], [[0]] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task] / num[task], task)):
        load.sort()
        held[task] = sorted(rank for _, _, rank in load[: num[task]])
        load[: num[task]] = [(cost + costs[task], tasks + 1, rank) for cost, tasks, rank in load[: num[task]]]
    return held


def render_on_own_gpu(here: World) -> None:
    """Make EGL renderers use the GPU of this rank, if it computes on one: call it before environments are made. Local.

    Sets MUJOCO_EGL_DEVICE_ID and EGL_DEVICE_ID in `os.environ`, unless they are set. EGL counts GPUs that torch
    does not see, too.
    """
    if not here.is_launched or here.device.type != "cuda":
        return
    gpu = here.device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = visible[gpu].strip() if gpu < len(visible) and visible[0].strip() else str(gpu)
    if number.isascii() and number.isdigit():  # EGL does not know UUIDs
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", number)
        os.environ.setdefault("EGL_DEVICE_ID", number)


class Deal:
    """The turns of one evaluation, and the results of all ranks. All ranks make one, with the same arguments.

    A rank that is done takes the next turn, so that ranks with short episodes play more of them. `is_fixed`: rank r of
    W plays turns r, r + W, r + 2W and so on, however long they take.
    """

    def __init__(self, here: World, num_turns: int, *, is_fixed: bool = False) -> None:
        self.results: dict[int, Any] = {}  # by turn; empty before `play`
        self.failed_at, self.text = num_turns, ""  # the first turn that failed, and the message about it
        self.own: Optional[BaseException] = None  # the exception of this rank's own turn
        self._name = f"rollouts/{current().next_number('rollouts')}"
        self._here, self._num_turns, self._is_fixed = here, num_turns, is_fixed

    def play(
        self,
        play: Callable[[int], Any],
        what: Callable[[int], str],
        *,
        is_told_to_end: Callable[[], bool] = lambda: False,
        ends_at_failure: bool = True,
        played: Callable[[int], None] = lambda so_far: None,
    ) -> None:
        """Play this rank's turns, and gather the results of all ranks (collective).

        All ranks stop after their current turn if a turn failed (with `ends_at_failure`), or if `is_told_to_end`,
        called before each, returned True on one. An exception of `play` is kept for `raise_failure`.

        Args:
            play: called with a turn's number; returns its result, plain values.
            what: called with the number of a failed turn; returns its name: "environment 'Lift', episode 3".
            played: called with the number of turns that all ranks have played so far.
        """
        dealt = (self._count("dealt", 1) - 1 for _ in itertools.count())
        fixed = itertools.count(self._here.rank, self._here.world_size)
        for turn in itertools.takewhile(lambda turn: turn < self._num_turns, fixed if self._is_fixed else dealt):
            if self._count("told to end", is_told_to_end()) or (self._count("failed") and ends_at_failure):
                break
            try:
                self.results[turn] = play(turn)
            except Exception as error:
                self._count("failed", 1)
                self.own, self.failed_at = error, turn
                said = str(error) if isinstance(error, RolloutError) else described(error)
                self.text = (
                    f"{what(turn)} failed on rank {self._here.rank} ({said}); statistics without it would be "
                    "incomplete. See that rank's traceback."
                )
                break
            played(self._count("played", 1))
        everyones = self._here.gather((self.results, self.failed_at, self.text))
        self._by = min(range(len(everyones)), key=lambda rank: (not everyones[rank][2], everyones[rank][1]))
        self.results = {turn: result for part, _, _ in everyones for turn, result in part.items()}
        _, self.failed_at, self.text = everyones[self._by]

    def raise_failure(self) -> None:
        """Raise RolloutError if a turn failed on any rank. Local; raises on all ranks."""
        if self.text:
            failure = RolloutError(self.text)
            raise (failure if self._by == self._here.rank else caused_by(self._by, failure)) from self.own

    def is_told_to_end(self) -> bool:
        """Whether any rank was told to end. Local; equal on all ranks after `play`."""
        return bool(self._count("told to end"))

    def _count(self, what: str, by: int = 0) -> int:
        return self._here.count(f"{self._name}/{what}", by)
