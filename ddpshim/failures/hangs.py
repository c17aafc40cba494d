"""Decides, from the ranks' own states, which rank is missing, and whether to end the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional

from ddpshim.failures.hang_detector import Standing, Verdict
from ddpshim.process.remedies import remedy
from ddpshim.process.say import count, ranks_called

_DECLARED_S = 600.0  # work that one rank is known to do alone is not reported before
_DEADLOCK_S = 10.0  # ranks that wait in different places for so long will wait forever
_MOVES_S = 3.0  # a rank that made progress within this time is working
OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"


Standings = Mapping[int, Optional[Standing]]  # by rank; None: it gave no answer


def judge(now: Standings, asker: int) -> Optional[Verdict]:
    """Return which ranks are missing if rank `asker` has waited too long; None if nothing is wrong. Local.

    It ends the job where waiting is useless: all ranks have waited for ten seconds, in different places, or the missing
    ranks have left.
    """
    mine = now[asker]
    if mine is None or mine.waits_in is None:
        return None
    away = [rank for rank, theirs in now.items() if theirs is None or theirs.has_left or theirs.waits_in is None]
    on_work = any(theirs is not None and theirs.section and not theirs.has_left for theirs in now.values())
    if on_work and mine.still_s < _DECLARED_S:
        return None
    elsewhere = [] if away else _apart(now)
    named = away or elsewhere
    waited = f"rank {asker} has waited {mine.still_s:.0f} s in {mine.waits_in} ({mine.site})"
    if not named:
        said = f"{waited}, and so have all others: none is missing; their messages differ, or their network fails"
        return Verdict([], f"{said}. Where each rank is:\n{describe(now, [])}")
    said = f"{waited}, while others wait elsewhere" if elsewhere else f"{waited} for {ranks_called(named)}"
    where = f"Where each rank is:\n{describe(now, named)}"
    have_left = all((theirs := now[rank]) is not None and theirs.has_left for rank in named)
    is_deadlock = bool(elsewhere) and all(theirs and theirs.still_s >= _DEADLOCK_S for theirs in now.values())
    if not (have_left or is_deadlock):
        return Verdict(named, f"{said}. {where}")
    why = f"; {ranks_called(named)} left the job" if have_left else ""
    error = f"{said}{why}: ranks would hang until a timeout. {remedy('same passes')} ({OPT_OUT}). {where}"
    return Verdict(named, "", error)


def _apart(now: Standings) -> list[int]:
    """Return the ranks that wait in another collective than most; in a tie, those with fewer backward passes."""
    by_place: dict[Optional[str], list[int]] = {}
    for rank, theirs in now.items():
        by_place.setdefault(theirs and theirs.waits_in, []).append(rank)

    def order(ranks: list[int]) -> tuple[int, int]:
        first = now[ranks[0]]
        return len(ranks), (first and first.num_passes) or 0

    most = max(by_place.values(), key=order)
    return [rank for rank in now if rank not in most]


def describe(standings: Standings, named: Sequence[int]) -> str:
    """Return a line for each rank (one line for ranks in the same place), and the stacks of the named ranks. Local."""
    lines, ranks_at = [], dict[str, list[int]]()
    for rank, theirs in standings.items():
        if rank not in named:
            ranks_at.setdefault(_where(theirs), []).append(rank)
    lines += [f"  {ranks_called(ranks)}: {where}" for where, ranks in ranks_at.items()]
    for rank in named:
        theirs = standings[rank]
        lines += [f"  rank {rank}: {_where(theirs)}", *(f"    {line}" for line in (theirs.lines if theirs else []))]
    return "\n".join(lines)


def _where(theirs: Optional[Standing]) -> str:
    if theirs is None:
        return "gave no answer: its process is stopped or gone, or holds the GIL"
    made = count(theirs.num_passes, "backward pass", "es")
    if theirs.batch is not None:
        made += f", batch {theirs.batch[1]} of epoch {theirs.batch[0]}"
    if theirs.has_left:
        return f"{made}; has left the job ({theirs.site})"
    does = f"waits in {theirs.waits_in}" if theirs.waits_in else f"is in {theirs.section or 'its own code'}"
    since = f"for {theirs.still_s:.0f} s" if theirs.still_s > _MOVES_S else "and moves"
    return f"{made}; {does} ({theirs.site}), {since}"
