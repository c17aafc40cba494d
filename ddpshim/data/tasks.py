"""Deals tasks to ranks, balanced by what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, TypeVar

from ddpshim.errors import DataError
from ddpshim.job.group import world

T = TypeVar("T")


class Part(NamedTuple):
    """Which part of a task is a rank's: of n episodes those from `number` on, every `num_parts`-th."""

    number: int = 0
    num_parts: int = 1


class Tasks(list[T]):
    """The tasks of a rank, a list in the order in which they were given.

    Attributes:
        parts: for each of them which `Part` of it is this rank's; (0, 1) is all of it.
    """

    parts: list[Part]


def deal(tasks: Sequence[T], costs: Optional[Sequence[float]] = None, minimum: int = 1) -> Tasks[T]:
    """This rank's share of `tasks`, such that all ranks have about the same cost (collective).

    The costliest is dealt first, always to the rank that has least (longest processing time first). Every rank gets
    at least `minimum` tasks. Where there are too few for that, tasks are shared, the costliest by most ranks:
    each has a part of it, which `parts` names. With `minimum=0` no task is shared, and a rank may have none.

    3 tasks that cost 5, 3 and 2 on 2 ranks: rank 0 gets the first, rank 1 the others. 1 task on 2 ranks: rank 0 has
    part 0 of 2, rank 1 part 1:
    `for task, part in zip(mine, mine.parts): for number in range(100)[part.number :: part.num_parts]: ...`

    Args:
        tasks: the same on all ranks, in the same order.
        costs: of each, at least 0, in any unit: seconds, episodes, mean lengths. The main rank's count. Default: equal.
        minimum: of tasks for each rank, from 0 up; no rank has one twice.

    Raises:
        DataError: ranks with different tasks, costs that are none.
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
            mine.parts.append(Part(holders.index(here.rank), len(holders)))
    return mine


def _holders(costs: Sequence[float], num_ranks: int, minimum: int) -> list[list[int]]:
    """For each task the ranks that have it."""
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

    # Where tasks are shared all ranks get equally many. Those with fewest come first, else a rank got a task twice.
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
