"""Implements the collectives of `World` for several ranks: Python values over a CPU group, or over the job's store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

import torch
import torch.distributed as dist

from ddpshim.errors import WorldError
from ddpshim.failures import failure
from ddpshim.process import messages
from ddpshim.process.say import described
from ddpshim.process.users_line import users_line

if TYPE_CHECKING:
    from ddpshim.job.world import World

T = TypeVar("T")

CROSSED_DEADLINE_S = 10.0
_NUM_KEPT = 4  # values of `answers_of_main` that stay in the store for each name; no rank is further behind


def peers(here: World) -> Any:
    """Return the group of World's collectives, for one more of them. Local. Raises WorldError after `cleanup()`."""
    if here._job.control is None:
        raise WorldError(
            f"rank {here.rank} of {here.world_size} has left its job by cleanup(), so a collective would fail. "
            "Call cleanup() last."
        )
    here._job.progress.num_collectives += 1
    return here._job.control


def gather(here: World, value: T, what: str) -> list[T]:
    """See `World.gather`; `what` describes the collective (collective)."""
    group = peers(here)
    with _told_apart(here, what):
        return messages.gather(value, here.world_size, group, here.options.trust_peers, what)


def broadcast(here: World, value: T, src: int, what: str) -> T:
    """See `World.broadcast`; `what` describes the collective (collective)."""
    group, trusts = peers(here), here.options.trust_peers
    with _told_apart(here, what):
        received: T = messages.broadcast(value, src, here.rank, here.world_size, group, trusts, what)
        return received


@contextlib.contextmanager
def _told_apart(here: World, what: str) -> Iterator[None]:
    """Raise WorldError if ranks are in different collectives; `what` describes this rank's."""
    try:
        yield
    except messages.Crossed:
        where = here.gather_with_deadline("crossed", f"{what} at {users_line()}", CROSSED_DEADLINE_S)
        there = "; ".join(f"rank {rank} in {place}" for rank, place in where.items())
        from ddpshim.process.remedies import remedy

        raise WorldError(
            f"ranks met in different collectives: {there}. Their values would be confused. {remedy('same calls')}."
        ) from None


def begin_gather(here: World, numbers: list[int]) -> Callable[[float], list[list[int]]]:
    """See `World.begin_gather` (collective)."""
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    everyones = [torch.empty_like(mine) for _ in range(here.world_size)]
    work = dist.all_gather(everyones, mine, group=peers(here), async_op=True)

    def result(deadline_s: float) -> list[list[int]]:
        work.wait(timedelta(seconds=deadline_s))
        return [numbers.tolist() for numbers in everyones]

    return result


def gather_with_deadline(here: World, name: str, value: T, deadline_s: float) -> dict[int, T]:
    """See `World.gather_with_deadline` (collective)."""
    job = here._job
    name = f"{name}/{job.next_number(f'meet/{name}')}"
    own = messages.to_store(value)
    job.store.set(f"meet/{name}/{here.rank}", own)
    end, received = time.monotonic() + deadline_s, {here.rank: own.encode()}
    for rank in set(range(here.world_size if deadline_s > 0 else 0)) - {here.rank}:
        key = f"meet/{name}/{rank}"
        if comes(job.store, rank, key, end):
            received[rank] = job.store.get(key)
    return {rank: messages.from_store(received[rank], f"meet/{name}/{rank}") for rank in sorted(received)}


FIRST_PAUSE_S = 5e-5  # a program may look at the clock several times a step, and then other ranks wait here


def comes(store: Any, rank: int, key: str, end: float) -> bool:
    """Return whether `rank` sets `key` before `end`. Polls, because torch prints a warning if a wait times out."""
    pause = FIRST_PAUSE_S
    with contextlib.suppress(RuntimeError, ValueError):  # the process that serves the store has ended
        while not (store.check([key]) if hasattr(store, "check") else failure.is_there(store, key)):
            if time.monotonic() > end or (pause > 0.1 and failure.is_there(store, f"watch/left/{rank}")):
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return True
    return False


def main_sets(here: World, key: str, end: float) -> bool:
    """Return whether the main rank sets `key` of the store before `end`. Raises WorldError if a rank has failed."""
    store = here._job.store  # torch's own wait would notice neither a failure nor a signal
    while not comes(store, 0, key, min(end, time.monotonic() + 1)):
        first = failure.first()
        if first is not None:
            raise failure.caused_by(
                first, WorldError(f"rank {here.rank} waits for the main rank, and rank {first} failed")
            )
        if time.monotonic() > end or failure.is_there(store, "watch/left/0"):
            return False
    return True


def answers_of_main(here: World, name: str, value: T) -> T:
    """See `World.answers_of_main`."""
    number, store = here._job.next_number(f"answers_of_main/{name}"), here._job.store
    key = f"answers_of_main/{name}/{number}"
    if here.is_main:
        store.set(key, messages.packed(value, False))
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can delete keys
            store.delete_key(f"answers_of_main/{name}/{number - _NUM_KEPT}")
        return value
    timeout_s = here.options.side_timeout_s
    if not main_sets(here, key, time.monotonic() + timeout_s):
        raise WorldError(
            f"rank {here.rank} made call {number + 1} of {name}, but the main rank did not within {timeout_s:g} "
            "s, or has left; they would continue with different values. Let every rank make the same calls."
        )
    received: T = messages.unpacked(store.get(key), False, 0)
    return received


def run_on_main(here: World, call: Callable[[], T], name: str) -> T:
    """See `World.run_on_main`; `call` is the function with its arguments, `name` its name (collective)."""
    what = f"run_on_main({name})"
    error: Optional[BaseException] = None
    result: Any = None
    if here.is_main:
        try:
            result = call()
            messages.packed(result, here.options.trust_peers)
        except BaseException as raised:
            error = raised
    message = broadcast(here, None if error is None else described(error), 0, what)
    if error is not None:
        raise error
    if message is not None:
        raise failure.caused_by(
            0,
            WorldError(
                f"{name} failed on the main rank ({message}); rank {here.rank} would continue without its "
                "result. See the main rank's traceback."
            ),
        )
    result = broadcast(here, result, 0, what)
    return result  # type: ignore[no-any-return]
