"""Gathers, sums and copies values and tensors over several ranks, in few messages.

With several ranks, the methods of `World` call the functions of their names, which use a CPU group or the job's store.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, Union, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from ddpshim.errors import DataError, WorldError
from ddpshim.failures import failure
from ddpshim.process import messages
from ddpshim.process.job import current
from ddpshim.process.job_store import first_failure, is_there
from ddpshim.process.observed import Progress
from ddpshim.process.say import described
from ddpshim.process.users_line import users_line

if TYPE_CHECKING:
    from ddpshim.job.world import World

T = TypeVar("T")
CROSSED_DEADLINE_S = 20.0
_MESSAGE_BYTES = 250 * 1024 * 1024  # of weights that are copied to all ranks
FIRST_PAUSE_S = 5e-5  # a program may look at the clock several times a step, and then other ranks wait here


def gather(here: World, value: T, what: str) -> list[T]:
    trusts = here.options.trust_peers
    own = messages.tensor_of(messages.packed(value, trusts))
    lengths = _lengths(here, own.numel(), what)
    longest = max(lengths)
    everyones = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(here.world_size)]
    dist.all_gather(everyones, torch.cat((own, own.new_zeros(longest - own.numel()))), group=here._job.control)
    of_ranks = (messages.bytes_of(message[:length]) for message, length in zip(everyones, lengths))
    return [messages.unpacked(message, sender, trusts) for sender, message in enumerate(of_ranks)]


def broadcast(here: World, value: T, src: int, what: Optional[str]) -> T:
    trusts, is_mine = here.options.trust_peers, here.rank == src
    message = messages.tensor_of(messages.packed(value, trusts) if is_mine else b"")
    length = _lengths(here, message.numel(), what or f"broadcast from rank {src}")[src]
    message = message if is_mine else torch.empty(length, dtype=torch.uint8, device="cpu")
    dist.broadcast(message, src, group=here._job.control)
    return value if is_mine else cast(T, messages.unpacked(messages.bytes_of(message), src, trusts))


def _lengths(here: World, own: int, what: str) -> list[int]:
    """Return the lengths of all ranks' messages. Raises WorldError on all ranks if their `what` differ."""
    place = zlib.crc32(what.encode(errors="backslashreplace"))
    lengths, places = zip(*pairs((own, place), here))
    if len(set(places)) > 1:
        from ddpshim.failures.failure_notes import SAME_WAY

        mine = [(own, place, True, f"is in {what} at {users_line()}")]  # a rank may compare `news` meanwhile
        where = here.gather_with_deadline("apart", mine, CROSSED_DEADLINE_S)
        there = "; ".join(f"rank {rank} {theirs[-1][-1]}" for rank, theirs in where.items())
        raise WorldError(f"ranks met in different collectives: {there}. Their values would be confused. {SAME_WAY}.")
    return list(lengths)


def mean_over(here: World, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    own = torch.stack(torch.broadcast_tensors(total.detach().to(count.dtype), count))
    total_of_all, over_all = add_up(own, group())
    mean: torch.Tensor = total * here.world_size / over_all  # the ranks' gradients are averaged
    with torch.no_grad():  # the gradient stays that of this rank's part
        mean.copy_(total_of_all / over_all)
    return mean


def all_gather(here: World, x: torch.Tensor) -> torch.Tensor:
    counts = table(torch.tensor([x.shape[0]], device=x.device), group()).flatten().tolist()
    if len(set(counts)) > 1:  # gloo would end the process
        told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        raise DataError(
            f"all_gather of different numbers of rows ({told}): they do not form one batch. Sum over each rank's "
            "rows instead (World.mean_over)."
        )
    gathered: torch.Tensor = RowsOfRanks.apply(x, here.rank, group())  # type: ignore[no-untyped-call]
    return gathered


def gather_with_deadline(here: World, name: str, value: T, deadline_s: float) -> dict[int, T]:
    job = here._job
    key = f"meet/{name}/{job.next_number(f'meet/{name}')}"
    job.store.set(f"{key}/{here.rank}", messages.packed(value))
    end, received = time.monotonic() + deadline_s, {here.rank: value}
    for rank in range(here.world_size if deadline_s > 0 else 0):
        if rank != here.rank and comes(job.store, rank, f"{key}/{rank}", end):
            received[rank] = messages.unpacked(job.store.get(f"{key}/{rank}"), rank)
    return dict(sorted(received.items()))


def run_on_main(here: World, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    name = getattr(function, "__qualname__", type(function).__name__)
    error: Optional[BaseException] = None
    told: Any = None
    if here.is_main:
        try:
            told = function(*args, **kwargs), None
            messages.packed(told, here.options.trust_peers)
        except BaseException as raised:
            told, error = (None, described(raised)), raised
    result, message = here.broadcast(told, 0, f"run_on_main({name})")
    if error is not None:
        raise error
    if message is not None:
        lost = f"rank {here.rank} would continue without its result. See the main rank's traceback."
        raise failure.caused_by(0, WorldError(f"{name} failed on the main rank ({message}); {lost}"))
    return cast(T, result)


def comes(store: Any, rank: int, key: Union[str, Callable[[], bool]], end: float) -> Optional[bool]:
    """Return whether `rank` sets `key` before `end`; None if the process that serves the store has ended.

    Polls, because torch prints a warning if a wait times out.

    Args:
        key: of the store; or returns whether the rank has done what is waited for.
    """
    pause = FIRST_PAUSE_S
    with contextlib.suppress(RuntimeError, ValueError):
        while not (key() if callable(key) else store.check([key]) if hasattr(store, "check") else is_there(store, key)):
            if time.monotonic() > end or (pause > 0.1 and is_there(store, f"watch/left/{rank}")):
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return True
    return None


def main_sets(here: World, key: Union[str, Callable[[], bool]], end: float) -> bool:
    """Return whether the main rank sets `key` before `end`; see `comes`. Raises WorldError if a rank has failed."""
    store = here._job.store  # torch's own wait would notice neither a failure nor a signal
    while not (came := comes(store, 0, key, min(end, time.monotonic() + 1))):
        first = first_failure()
        if first is not None or came is None:
            why = f"rank {first} failed" if first is not None else "it has ended: the job's store does not answer"
            raise failure.caused_by(first or 0, WorldError(f"rank {here.rank} waits for the main rank, and {why}"))
        if time.monotonic() > end or is_there(store, "watch/left/0"):
            return False
    return True


def begin_gather(everyones: list[torch.Tensor], own: torch.Tensor, group: Any) -> Any:
    """Begin to gather `own`, and return the work (collective): `dist.all_gather` without its checks, which take long.

    `own` and all `everyones` are contiguous, and of one shape, type and device.
    """
    if own.is_complex():
        everyones, own = [torch.view_as_real(x) for x in everyones], torch.view_as_real(own)
    ranks: Any = group or dist.group.WORLD
    return ranks.allgather([everyones], [own])


def pairs(own: tuple[int, int], here: World, deadline: timedelta = timedelta()) -> list[tuple[int, int]]:
    """Return two int64 of each rank (collective). Without a `deadline` that of World's group counts.

    Every message of World's collectives begins with such a pair. The second identifies the collective in which a rank
    is, so that ranks in different ones detect it.

    Raises WorldError after `cleanup()`, and RuntimeError if a rank does not come within the deadline.
    """
    return begin_pairs(own, here, deadline)()


def begin_pairs(
    own: tuple[int, int], here: World, deadline: timedelta = timedelta()
) -> Callable[[], list[tuple[int, int]]]:
    """Begin `pairs`; return what waits for them (collective, does not wait)."""
    if here.world_size == 1:
        return lambda: [own]
    if here._job.control is None:
        raise WorldError(
            f"rank {here.rank} of {here.world_size} has left its job by cleanup(), so a collective would fail. "
            "Call cleanup() last."
        )
    progress = here._job.part(Progress)
    progress.num_collectives += 1
    everyones = torch.empty((here.world_size, 2), dtype=torch.int64, device="cpu")
    mine = torch.tensor(own, dtype=torch.int64, device="cpu")
    work = begin_gather([*everyones.unbind()], mine, here._job.control)

    def wait() -> list[tuple[int, int]]:
        with progress.waiting():
            work.wait(deadline)
        return [tuple(theirs) for theirs in everyones.tolist()]

    return wait


def table(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the tensors of all ranks, of one shape, joined in a new first dimension (collective)."""
    here, own = current().world, own.detach()
    if here is None or here.world_size == 1:
        return own.unsqueeze(0)
    everyones = own.new_empty((dist.get_world_size(group), *own.shape))
    work = begin_gather([*everyones.unbind()], own.contiguous(), group)
    with here._job.part(Progress).waiting():
        work.wait()
    return everyones


def add_up(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of all ranks' tensors, as a new tensor (collective)."""
    total = own.detach().clone()
    with current().part(Progress).waiting():
        dist.all_reduce(total, group=group)
    return total


class RowsOfRanks(torch.autograd.Function):
    """Gathers the rows of all ranks; their gradients are summed over the ranks, and return to the rows' ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int, group: Any) -> torch.Tensor:
        ctx.rank, ctx.group = rank, group
        return table(x, group).flatten(0, 1).clone()  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = add_up(gradient.contiguous(), ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[ctx.rank], None, None


def new_group(backend: Optional[str] = None) -> Any:
    """Return another process group of all ranks, with the first one's timeout and default backend (collective)."""
    timeout = current().timeout
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    return dist.new_group(backend=backend, **options)


class _Groups(dict[Optional[str], Any]):
    """The groups of a job for messages within forward and backward passes, by backend."""


def group(backend: Optional[str] = None) -> Any:
    """Return the group for messages within forward and backward passes, which is not that of the buckets.

    The first call for a `backend` is collective. Its default is that of the job; "gloo" is for messages between hosts.
    """
    groups = current().part(_Groups)
    if backend not in groups:
        groups[backend] = new_group(backend)
    return groups[backend]


class Buffers:
    """A module's buffers, of which all ranks get the main rank's, if it is asked for."""

    def __init__(self, module: nn.Module, is_asked: bool) -> None:
        # Their places and not the tensors, because a module may replace a tensor.
        modules = module.modules() if is_asked else ()
        self._places = [(child._buffers, name) for child in modules for name in child._buffers]
        self._sent: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []

    def start(self) -> None:
        """Send the buffers, or prepare to receive them (collective, does not wait)."""
        now = [home.get(name) for home, name in self._places]
        # No row tensor: it is each rank's own. .data: otherwise a second backward pass over the same forward would
        # refuse what `finish` writes as an in-place change.
        self._sent = [*_sent([buffer.data for buffer in now if type(buffer) is torch.Tensor])]

    def finish(self) -> None:
        """Wait for the messages of `start`, and write the received values into the buffers."""
        for work, message, buffers in self._sent:
            work.wait()
            if dist.get_rank():
                for buffer, values in zip(buffers, message.split([buffer.numel() for buffer in buffers])):
                    buffer.copy_(values.view(buffer.shape))
        self._sent.clear()


def broadcast_state(module: nn.Module) -> None:
    """Copy the main rank's parameters and buffers to all ranks, frozen ones included (collective)."""
    for work, message, tensors in _sent([tensor.detach() for tensor in (*module.parameters(), *module.buffers())]):
        work.wait()
        for tensor, values in zip(tensors, message.split([tensor.numel() for tensor in tensors])):
            if not torch.equal(tensor, values.view(tensor.shape)):  # else a graph that holds it stays valid
                tensor.copy_(values.view(tensor.shape))


def _sent(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor, list[torch.Tensor]]]:
    """Broadcast `tensors`; yield (work, message, the tensors in it) of each message, without waiting (collective)."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for left in by_kind.values():
        while left:
            ends = itertools.accumulate([tensor.numel() * tensor.element_size() for tensor in left])
            num = max(1, len([end for end in ends if end <= _MESSAGE_BYTES]))
            same, left = left[:num], left[num:]
            message = torch.cat([tensor.reshape(-1) for tensor in same])
            # Bytes, because gloo does not support bool.
            yield dist.broadcast(message.view(torch.uint8), 0, async_op=True), message, same


class StandIn:
    """The object that `World.only_main` returns on ranks other than the main rank.

    Attributes, items and calls return it again; it is empty and false, and as a context manager it lets exceptions
    through. It is not a number, text or path: computing with it, or opening it, raises TypeError.
    """

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy, pickle, numpy and others look up protocol methods
        return self

    def _itself(self, *args: Any, **kwargs: Any) -> StandIn:
        return self

    def _nothing(self, *args: Any) -> None: ...

    def __next__(self) -> Any:
        raise StopIteration

    def __len__(self) -> int:
        return 0

    def __contains__(self, item: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return "<stand-in for an object of the main rank>"

    __call__ = __enter__ = __getitem__ = __iter__ = _itself
    __setattr__ = __delattr__ = __setitem__ = __delitem__ = __exit__ = _nothing
