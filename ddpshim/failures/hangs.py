"""Decides, from the ranks' own states, which rank is missing, and whether to end the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional

from ddpshim.failures.hang_detector import Standing, Verdict
from ddpshim.process.remedies import remedy
from ddpshim.process.say import count, ranks_called

_DECLARED_S = 600.0  # work that one rank is known to do alone is not reported before
_MOVES_S = 3.0  # a rank that made progress within this time is working
_IDLE_SHARE = 0.02  # of a core: a process that uses less, with its children, does nothing
_ASLEEP_S = 0.0005  # core seconds: a thread that wakes up now and then uses more
OPT_OUT = "DDPSHIM_GUARD=0 turns this check off"


Standings = Mapping[int, Optional[Standing]]  # by rank; None: it gave no answer


def judge(now: Standings, asker: int, before: Optional[Standings] = None, window_s: float = 0.0) -> Optional[Verdict]:
    """Return which ranks are missing if rank `asker` has waited too long; None if nothing is wrong. Local.

    With `before`, the ranks' states `window_s` earlier, it also decides whether to end the job: if waiting is useless,
    because all ranks wait in different places or have left, or if the missing ranks do nothing at all.
    """
    mine = now[asker]
    if mine is None or mine.waits_in is None:
        return None
    away = [rank for rank, theirs in now.items() if theirs is None or theirs.has_left or theirs.waits_in is None]
    on_work = any(theirs is not None and theirs.is_declared and not theirs.has_left for theirs in now.values())
    if on_work and mine.still_s < _DECLARED_S:
        return None
    elsewhere = [] if away else _apart(now)
    named = away or elsewhere
    waited = f"rank {asker} has waited {mine.still_s:.0f} s in {mine.waits_in} ({mine.site})"
    if not named:
        said = f"{waited}, and so have all others: none is missing; their messages differ, or their network fails"
        return Verdict([], f"{said}. Where each rank is:\n{describe(now, [])}")
    said = f"{waited}, while others wait elsewhere" if elsewhere else f"{waited} for {ranks_called(named)}"
    where = describe(now, named)
    verdict = Verdict(named, f"{said}. Where each rank is:\n{where}")
    if before is None:
        return verdict
    patient = mine.waits_in.startswith("World.")  # one rank may work alone for side_timeout_s
    if not all(_never_arrives(rank, now, before, window_s, patient, bool(elsewhere)) for rank in named):
        return verdict
    have_left = [rank for rank in named if (theirs := now[rank]) is not None and theirs.has_left]
    if have_left:
        why = f"; {ranks_called(have_left)} left the job"
    else:
        why = "" if elsewhere else f"; {ranks_called(named)} did nothing for {window_s:.0f} s"
    return verdict._replace(
        error=f"{said}{why}: ranks would hang until a timeout. {remedy('same passes')} ({OPT_OUT}). Where each "
        f"rank is:\n{where}"
    )


def _never_arrives(
    rank: int, now: Standings, before: Standings, window_s: float, patient: bool, is_deadlock: bool
) -> bool:
    first, last = before.get(rank), now[rank]
    if first is None or last is None:
        return False
    same = (first.num_passes, first.waits_in, first.lines) == (last.num_passes, last.waits_in, last.lines)
    if last.has_left or (is_deadlock and same):
        return True
    if patient or last.section is not None or first.cpu_s is None or last.cpu_s is None:
        return False
    if last.num_passes is not None:  # it answers: a loop with short sleeps between its rounds is not idle
        same = same and first.thread_s is not None is not last.thread_s and last.thread_s - first.thread_s < _ASLEEP_S
    return same and last.cpu_s - first.cpu_s < max(0.05, _IDLE_SHARE * window_s)


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
    if theirs is None or theirs.num_passes is None:
        why = theirs.site if theirs else "its process is stopped or gone, or holds the GIL"
        return f"gave no answer: {why}"
    made = count(theirs.num_passes, "backward pass", "es")
    if theirs.batch is not None:
        made += f", batch {theirs.batch[1]} of epoch {theirs.batch[0]}"
    if theirs.has_left:
        return f"{made}; has left the job ({theirs.site})"
    does = f"waits in {theirs.waits_in}" if theirs.waits_in else f"is in {theirs.section or 'its own code'}"
    since = f"for {theirs.still_s:.0f} s" if theirs.still_s > _MOVES_S else "and moves"
    return f"{made}; {does} ({theirs.site}), {since}"
