"""Deals tasks to ranks, balanced by their costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, TypeVar

from ddpshim.errors import DataError
from ddpshim.job.group import world

T = TypeVar("T")


class Part(NamedTuple):
    """A rank's part of a task: of n episodes every `num_parts`-th, from `number` on."""

    number: int = 0
    num_parts: int = 1


class Tasks(list[T]):
    """The tasks of a rank, in the order in which they were given.

    Attributes:
        parts: for each task this rank's `Part` of it; (0, 1) is all of it.
    """

    parts: list[Part]


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
            mine.parts.append(Part(holders.index(here.rank), len(holders)))
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
