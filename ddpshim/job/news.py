"""What ranks tell each other with the next message of a training: where they are, and which numbers they read.

News wait for a message that is sent anyway: that at the end of a backward pass, or the next gather that waits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

from ddpshim.errors import WorldError
from ddpshim.job.collectives import CROSSED_DEADLINE_S, begin_pairs
from ddpshim.job.group import world
from ddpshim.process.job import current

_MOST = 256  # between two messages
_NUM_REMEMBERED = 3  # comparisons that foretell the next one: a step of an actor and its critics has so many


class Habit:
    """What all ranks did between two comparisons, by what they had done before: a step is like an earlier one.

    A message of the training may be sent before ranks compare what they do only if it is expected: gloo ends a process
    that gets a message of another size, and NCCL hangs, before anything could name the difference.
    """

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()
        self._after: dict[tuple[int, ...], list[int]] = {}

    def expected(self) -> list[int]:
        """Return what all ranks do until the next comparison if they repeat a step; nothing if unknown. Local."""
        return self._after.get(self._before, [])

    def learn(self, did: list[int]) -> None:
        """Note what all ranks did until a comparison; nothing if it was not equal. Local."""
        if len(self._after) == _MOST:  # each step leaves out layers at random
            self._after.clear()
        self._after[self._before] = did
        self._before = (*self._before, hash(tuple(did)))[-_NUM_REMEMBERED:]


class News:
    """What this rank has not told yet: two integers, what judges those of all ranks, and its place."""

    def __init__(self) -> None:
        self.pending: list[tuple[tuple[int, int], Callable[[list[Any]], Any], str]] = []
        self.kinds: list[int] = []  # of what is pending
        self.habit = Habit()


def tell(own: tuple[int, int], judge: Callable[[list[Any]], Any], waits: bool, place: str, kind: int = 0) -> Any:
    """Tell all ranks two integers: a number, and a hash of `place`, what this rank does, and where.

    Ranks compare them now if `waits`, and each _MOST times (then collective), else with the next backward pass or
    gather. If they differ, `judge` gets those of all ranks; returns its answer, or None if they are equal, or not
    compared yet. Raises WorldError if ranks are at different places.

    Args:
        kind: a hash of what this rank does, which is the same when a step repeats it; equal if `own` and `place` are.
    """
    news, answers = current().part(News), list[Any]()
    news.pending.append((own, lambda told: answers.append(judge(told)), place))
    news.kinds.append(kind)
    if waits or len(news.pending) == _MOST:
        settle(place)
    return answers[0] if answers else None


def is_foreseen() -> bool:
    """Whether what this rank has told since the last comparison is what all told in an earlier step. Local."""
    news = current().part(News)
    return news.habit.expected()[: len(news.kinds)] == news.kinds


def settle(place: str = "gathers, or ends a backward pass") -> None:
    """Compare what ranks would have told each other, in one message (collective). Raises what is wrong with it."""
    if current().part(News).pending and (where := compared((0, 0), lambda: place)()):
        raise _are_apart(where)


def compared(own: tuple[int, int], place: Callable[[], str]) -> Callable[[], dict[int, str]]:
    """Begin to compare what ranks have told each other, and that they are at one place (collective, does not wait).

    Returns what waits for the answer: the ranks' places if their numbers differ, else nothing. It raises what is wrong
    with the news, and WorldError if ranks are at different places.

    Args:
        own: a number, and a hash of the kind of place, as other ranks have them.
        place: returns what this rank does, and where. Called if something differs.
    """
    news, here = current().part(News), world()
    told, kinds, news.pending, news.kinds = news.pending, news.kinds, [], []
    numbers = own, *(pair for pair, _, _ in told)
    packed = struct.pack(f"<{2 * len(numbers)}q", *(number for pair in numbers for number in pair))
    digest = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little", signed=True)
    answers = begin_pairs((digest, own[1]), here)

    def wait() -> dict[int, str]:
        is_equal = len({*answers()}) == 1
        if kinds:
            news.habit.learn(kinds if is_equal else [])
        if is_equal:
            return {}
        mine = [*((*pair, False, where) for pair, _, where in told), (*own, True, place())]
        of_ranks = here.gather_with_deadline("apart", mine, CROSSED_DEADLINE_S)
        if len(of_ranks) == here.world_size:
            for i, one in enumerate(zip(*of_ranks.values())):
                if len({(theirs, is_end) for _, theirs, is_end, _ in one}) > 1:
                    raise _are_apart(dict(enumerate(where for *_, where in one)))
                if i < len(told):
                    told[i][1]([(number, tag) for number, tag, _, _ in one])
        ends = [theirs[-1] for theirs in of_ranks.values()]
        is_good = len(ends) == here.world_size and len({number for number, *_ in ends}) == 1
        return {} if is_good else {rank: theirs[-1][-1] for rank, theirs in of_ranks.items()}

    return wait


def _are_apart(said: dict[int, str]) -> WorldError:
    """Return the error of ranks that do different things, by rank."""
    lines = "; ".join(f"rank {rank} {said.get(rank, 'does something else')}" for rank in range(world().world_size))
    return WorldError(
        f"ranks are at different lines: {lines}. Their numbers would be mixed up, and ranks would train "
        "differently. They diverged earlier: by a decision on something that is not a tensor (a clock, a file, "
        "entropy), or in code that one rank runs alone."
    )
