"""The claims of ranks that fail, in the job's store: the first one names the rank that failed first."""

from __future__ import annotations

from typing import Optional, Union

from ddpshim.process.job import current
from ddpshim.process.job_store import ask_store, claim, is_there
from ddpshim.process.say import place


def rank() -> int:
    """Return this process's rank; 0 without a job. Local."""
    job = current()
    known = job.watched or job.world or job.left
    return 0 if known is None else known.rank


def first() -> Optional[int]:
    """Return the rank that failed first; None if none has reported a failure. Local; safe in any thread."""
    claimed = ask_store(lambda store: store.get("first_failure") if is_there(store, "first_failure") else None)
    return None if claimed is None else _rank_in(claimed)


def silent() -> list[int]:
    """Return the ranks that have not reported a failure. Local."""
    last = current().world or current().left
    ranks = range(0 if last is None else last.world_size)
    return ask_store(lambda store: [rank for rank in ranks if not is_there(store, f"why/{rank}")]) or []


def claim_first(error: BaseException) -> int:
    """Return the rank that failed first: this one, unless another is named in the store already. Local."""
    if "first_failure" in error.__dict__:
        return int(error.__dict__["first_failure"])
    raised = f" in {where}" if (where := place(error)) else ""  # another thread's error may never have been raised
    why = f"{type(error).__name__}{raised}".encode(errors="backslashreplace").decode()
    ask_store(lambda store: store.set(f"why/{rank()}", why))
    claimed = ask_store(lambda store: _rank_in(claim(store, "first_failure", str(rank()))))
    if claimed == rank() and isinstance(error, SystemExit):
        ask_store(lambda store: store.set("left", "1"))  # it has no traceback for the others to wait for
    if claimed is not None:
        return claimed
    from ddpshim.failures.signs import lost_a_peer

    # If no agent serves the store (torchrun up to 2.2, mpirun), it ends with rank 0, which has then failed first.
    return 0 if current().watched is not None and lost_a_peer(error) else rank()


def _rank_in(claimed: Union[str, bytes]) -> Optional[int]:
    """Return the rank in `claimed`; None if no rank wrote it: any process that reaches the store can write to it."""
    text = claimed if isinstance(claimed, str) else claimed.decode(errors="replace")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
