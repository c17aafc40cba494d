"""Distributes tasks over the ranks by their costs, and the turns (episodes) of an evaluation, whose results it gathers.

In an evaluation ranks wait for each other only at the end. Until then they share counters in the store: the turns
given out, those played, and whether one has failed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional, TypeVar

from ddpshim.errors import DataError, RolloutError
from ddpshim.failures.failure import caused_by
from ddpshim.job.world import World, world, world_of_shares
from ddpshim.process.job import current
from ddpshim.process.say import described

T = TypeVar("T")


class TaskPart(NamedTuple):
    """A rank's part of a task: of n episodes every `num_parts`-th, from `number` on."""

    number: int = 0
    num_parts: int = 1


class Tasks(list[T]):
    """The tasks of a rank, in the order in which they were given.

    Attributes:
        parts: for each task this rank's `TaskPart` of it; (0, 1) is all of it.
    """

    parts: list[TaskPart]


def deal(tasks: Sequence[T], costs: Optional[Sequence[float]] = None, minimum: int = 1) -> Tasks[T]:
    """Return this rank's share of `tasks`, so that all ranks have about the same cost (collective).

    Tasks are dealt from the highest cost down, each to the rank with the lowest cost so far (longest processing time
    first). Every rank gets at least `minimum` tasks. If there are too few for that, ranks share tasks, the costliest
    among the most ranks, and `parts` gives each rank's part. With `minimum=0` no task is shared; a rank may have none.

    3 tasks that cost 5, 3 and 2 on 2 ranks: rank 0 gets the first, rank 1 the others. 1 task on 2 ranks: rank 0 has
    part 0 of 2, rank 1 part 1:
    `for task, part in zip(mine, mine.parts): for number in range(100)[part.number :: part.num_parts]: ...`

    Args:
        tasks: the same on all ranks, in the same order.
        costs: of each task, at least 0, in any unit (seconds, episodes); the main rank's are used. Default: equal.
        minimum: the least number of tasks per rank, 0 or more; no rank has a task twice.

    Raises:
        DataError: ranks have different tasks, or costs or minimum are invalid.
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
    if len(costs) != len(tasks) or minimum < 0 or not all(0 <= cost < math.inf for cost in costs):
        raise DataError(
            f"{len(tasks)} tasks with costs {costs} and minimum={minimum}: ranks would get unequal work, or none. "
            "Give each task a cost of at least 0, and a minimum of at least 0."
        )
    mine: Tasks[T] = Tasks()
    mine.parts = []
    for index, holders in enumerate(_holders(costs, here.world_size, min(minimum, len(tasks)))):
        if here.rank in holders:
            mine.append(tasks[index])
            mine.parts.append(TaskPart(holders.index(here.rank), len(holders)))
    return mine


def _holders(costs: Sequence[float], num_ranks: int, minimum: int) -> list[list[int]]:
    """Return for each task the ranks that have it."""
    num_holders = [1] * len(costs)
    while sum(num_holders) < minimum * num_ranks:
        free = (task for task, num in enumerate(num_holders) if num < num_ranks)
        num_holders[max(free, key=lambda task: (costs[task] / num_holders[task], -num_holders[task], -task))] += 1
    is_shared = len(costs) < minimum * num_ranks
    load, num_tasks = [0.0] * num_ranks, [0] * num_ranks
    held: list[list[int]] = [[] for _ in costs]
    left = sum(num_holders)

    def by_load(rank: int) -> Any:
        return load[rank], num_tasks[rank], rank

    # If tasks are shared, all ranks get equally many. Ranks with the fewest go first, or a rank could get a task twice.
    def by_number(rank: int) -> Any:
        return num_tasks[rank], load[rank], rank

    for task in sorted(range(len(costs)), key=lambda task: (-costs[task] / num_holders[task], task)):
        lacking = [rank for rank in range(num_ranks) if num_tasks[rank] < minimum]
        is_tight = left <= sum(minimum - num_tasks[rank] for rank in lacking)
        ranks = sorted(lacking if is_tight else range(num_ranks), key=by_number if is_shared else by_load)
        held[task] = sorted(ranks[: num_holders[task]])
        for rank in held[task]:
            load[rank] += costs[task] / num_holders[task]
            num_tasks[rank] += 1
        left -= num_holders[task]
    return held


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
