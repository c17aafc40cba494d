"""Compares the ranks when an epoch ends, or before a save."""

from __future__ import annotations

from ddpshim.errors import SyncError
from ddpshim.job.group import world
from ddpshim.model import guard
from ddpshim.model.equality import OPT_OUT
from ddpshim.model.guard import STEPS_DEADLINE_S
from ddpshim.process import events
from ddpshim.process.job import current


def check_equal_steps(what: str = "the epoch", deadline_s: float = STEPS_DEADLINE_S) -> None:
    """Raise SyncError if ranks made different numbers of backward passes, or hold different weights (collective).

    Call it at the end of an epoch, or before a save. `ddpshim.watch` lists what is compared. A rank that is still in a
    step would wait until the group's timeout for gradients that no rank will send; if it does not call this within
    `deadline_s`, the others raise. Does nothing with one process or without guards.

    Args:
        what: the name of what has ended, for the error.
        deadline_s: how long ranks wait for each other, in seconds; default 120.
    """
    here = world()
    if here.world_size == 1 or not here.options.guard:
        return
    mine = guard.num_reductions()
    of_ranks = here.gather_with_deadline("steps", [mine, guard.hash_of_all()], deadline_s)
    counts = ", ".join(f"{number} on rank {rank}" for rank, (number, _) in of_ranks.items())
    cure = (
        "Give every rank the same number of batches (make_loader does), and skip no step on one rank alone "
        f"({OPT_OUT})."
    )
    missing = [rank for rank in range(here.world_size) if rank not in of_ranks]
    is_good = not missing and len({number for number, _ in of_ranks.values()}) == 1
    said = "" if is_good else f"{what}: {counts}"
    events.note("guard", check="steps", passed=is_good, said=said, reductions=mine)
    if missing:
        current().part(guard.Watched).is_alone = True
        raise SyncError(
            f"ranks {missing} did not reach the end of {what} within {deadline_s:g} s of rank {here.rank}; they "
            f"wait in another step for gradients that no rank will send. Backward passes so far: {counts}. {cure}"
        )
    if not is_good:
        raise SyncError(
            f"ranks made different numbers of backward passes by the end of {what}: {counts}; gradients of "
            f"different steps were averaged with each other. {cure}"
        )
    guard.refuse_unequal([facts for _, facts in of_ranks.values()], what)
