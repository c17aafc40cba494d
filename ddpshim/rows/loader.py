"""A DataLoader that hands out row tensors. Order, batches, workers and random draws are those of one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import secrets
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Optional, TypeVar

import torch
from torch.utils import data as torch_data

from ddpshim import adapters
from ddpshim.errors import DataError
from ddpshim.failures.failure import abort
from ddpshim.job import news
from ddpshim.job.group import world
from ddpshim.job.passes import Enterable, generator_states, indices_of, layers, restore_generators
from ddpshim.model import guard
from ddpshim.process.job import current
from ddpshim.process.random_streams import changed, global_states, restore_global_states
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say_on_main, say_once
from ddpshim.process.users_line import users_line
from ddpshim.rows import blocks
from ddpshim.rows.probe import DRAWS, Found, first_difference, probed
from ddpshim.rows.samples import Batches, Numbered, Own, joins_samples, name_of, walked
from ddpshim.rows.tensor import Counts, Rows, leaves

T_co = TypeVar("T_co", covariant=True)
_TorchsLoader = torch_data.DataLoader  # now: `trainers` replaces the name

_END = object()
_HAS_LINES = sys.platform == "linux"  # for data workers of a node (`relay`)
_MOST_DRAWS = 1000  # states of a pass, of some kilobytes, that every progress file holds


class DataLoader(torch_data.DataLoader[T_co], Enterable):
    """torch's DataLoader with the same attributes, whose passes can begin in the middle."""

    _num_waited = 10  # batches for which ranks wait for each other's news; then for the first of each pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.place = users_line()
        self._num_waits = self._num_waited  # how often this rank still waits for the others' news
        self._by_sample: Any = None  # a copy for whose samples generators are seeded
        self._of_rows: Any = None
        self._is_decided = False  # how batches are fetched
        self._first = self._num_passes = 0  # step of the next pass; passes that have begun
        # Random streams of this pass, and whether it has a seed of workers that stay; and of the next one after an
        # interruption.
        self._begun_with: Optional[dict[str, Any]] = None
        self._begins_with: Optional[dict[str, Any]] = None

    def can_enter(self) -> bool:
        # A class of the program's may count passes in a way of its own.
        return type(self) is DataLoader and not isinstance(self.dataset, torch_data.IterableDataset)

    def order_state(self) -> dict[str, Any]:
        return {**self._at_a_pass(), "begun with": self._begun_with}

    def enter(self, epoch: int, step: int, order: Optional[dict[str, Any]] = None, is_inside: bool = False) -> None:
        self._first = step
        if order is not None:
            self._begins_with = order["begun with"] if is_inside else order

    def _at_a_pass(self) -> dict[str, Any]:
        """Return what a pass that begins now begins with, but for the random streams."""
        made = [loader for loader in (self._of_rows, self._by_sample, self) if loader is not None]
        workers_stay = made[0]._iterator is not None
        return {"generators": generator_states(self), "has seed": workers_stay, "passes": self._num_passes}

    def __iter__(self) -> Any:
        (first, self._first), (states, self._begins_with) = (self._first, 0), (self._begins_with, None)
        now, has_seed = global_states(), False
        draws = (states or {}).get("draws", [])
        if states is not None:
            restore_global_states(states)
            restore_generators(self, states["generators"])
            has_seed, self._num_passes = states["has seed"], states["passes"]
        self._begun_with = {**global_states(), **self._at_a_pass(), "draws": draws}
        self._begun_with["has seed"] |= has_seed
        self._num_passes += current().part(Counts).is_in_lock_step()  # else other ranks would not have counted it
        if first and draws is None:
            say_on_main(
                f"{self.place}: {type(_of_program(self)).__name__} uses random numbers during iteration, from the RNG "
                f"state of the training, in more than {_MOST_DRAWS} steps: the batches of the resumed epoch may differ "
                "from those without the interruption"
            )
        with contextlib.ExitStack() as until:
            if first:
                until.callback(restore_global_states, now)
            if has_seed:
                until.enter_context(replaced(self, "generator", torch.Generator()))
            return self._pass(first)

    @property
    def _index_sampler(self) -> Any:
        sampler = super()._index_sampler
        return sampler if _of_program(self) is None else _Redrawn(self, sampler)

    def _pass(self, first: int) -> Any:
        """Begin a pass at step `first`, with all draws for its order."""
        counts, made, num_left_out = current().part(Counts), self._seeded(), first
        is_plain = blocks.num_pieces() == 1 or not counts.is_in_lock_step()
        if not is_plain and not self._is_decided:
            self._is_decided, self._of_rows = True, rows_loader(self, made)
        if not is_plain and self._of_rows is not None:
            made = self._of_rows
            made.dataset.begin_pass()
            if self.num_workers and made.dataset.fetches_own:
                num_left_out = first % self.num_workers  # each worker gets the batches that it would have got
                made.batch_sampler.first = first - num_left_out
        vars(made)["generator"] = self.generator
        # Now, since torch draws the seed of workers when a pass begins.
        with contextlib.nullcontext() if is_plain else counts.fetching():
            batches: Any = _TorchsLoader.__iter__(made)
            for _ in range(num_left_out):  # workers fetch them, for the draws in it
                next(batches if self.num_workers else batches._sampler_iter)
        return batches if is_plain else self._batches_of_rows(batches)

    def _seeded(self) -> Any:
        """Return the loader for whose samples generators are seeded, by the option `draws`; else this one. Local."""
        here = current().world
        if (
            here is None
            or here.options.draws != "sample"
            or isinstance(self.dataset, torch_data.IterableDataset)  # its samples have no index
            or adapters.fetcher_of(self.dataset) is not None  # it fetches by the batch, and draws nothing
        ):
            return self
        if self._by_sample is None:
            from ddpshim.rows.draws import by_sample

            self._by_sample = by_sample(self)
        self._by_sample.indices.num_passes = self._num_passes
        return self._by_sample

    def _batches_of_rows(self, batches: Any) -> Iterator[Any]:
        """Yield the batches of one pass (collective)."""
        num_passes, counts = guard.num_reductions(), current().part(Counts)
        self._num_waits = max(self._num_waits, min(1, self._num_waited))
        try:
            for step in itertools.count(1):
                with counts.fetching():
                    batch = next(batches, _END)
                if batch is _END:
                    break
                number = f"batch {step} of epoch {self._num_passes}"
                yield batch if self._of_rows is None else self._with_rows(batch, number)
            if self._of_rows is not None and counts.is_in_own_thread() and world().world_size > 1:
                news.tell((0, 0), lambda told: None, self._num_waits > 0, f"has read all of its data at {self.place}")
                news.settle()  # raises if another rank takes a batch
        finally:
            batches = None  # ends an abandoned pass now, on every rank: Python up to 3.10 keeps this frame
        if counts.is_in_own_thread() and guard.num_reductions() != num_passes:
            guard.check_equal_steps(f"an epoch of the DataLoader of {self.place}")

    def _with_rows(self, fetched: Any, number: str) -> Any:
        """Return the batch with row tensors (collective)."""
        (num_rows, batch), here = fetched, world()
        part = blocks.part_of(num_rows)
        if part is None:
            return walked(lambda x: x.rows if isinstance(x, Own) else x, batch)
        is_ahead = not current().part(Counts).is_in_own_thread()  # a thread of the program's: it may send nothing
        if not is_ahead:
            self._tell(num_rows, batch, number)

        def whole(x: Any) -> Any:
            if not isinstance(x, Own):
                return x
            if isinstance(x.rows, torch.Tensor):
                return Rows(x.rows, 0, part)
            if is_ahead:
                abort(  # an error would end the thread alone, and the program would wait for it
                    DataError(
                        f"{self.place}: texts of a batch that data workers load, in a thread of the program: each rank "
                        "has those of its local shard, and would train with them only. Begin the epoch in that thread, "
                        "iter(loader), or set num_workers=0: then each rank loads the whole batch."
                    )
                )
            news.settle()  # another rank may have no batch
            return type(x.rows)([one for theirs in here.gather(x.rows) for one in theirs])

        return walked(whole, batch)

    def _tell(self, num_rows: int, batch: Any, number: str) -> None:
        """Raise DataError if samples differ between ranks in shape or type, WorldError if batches do (collective).

        Now, or before the next message of the training: once a loader's batches are known, no rank waits.
        """
        if world().world_size == 1:
            return
        kinds = num_rows, [kind for kind in _kinds(batch) if kind != "str"]
        waits = self._num_waits > 0
        self._num_waits -= waits

        def judge(told: list[Any]) -> None:
            if len({*told}) == 1:  # something else differs
                return
            of_ranks = world().gather(repr(_kinds(batch)))
            raise DataError(
                f"{self.place}: samples of one batch differ in shape or type: {of_ranks[0]} on rank 0, and "
                f"{next(x for x in of_ranks if x != of_ranks[0])} on another. torch's collate cannot join them. Make "
                "samples alike, or give the loader a collate_fn"
            )

        tag = zlib.crc32(f"{number} {os.path.basename(self.place)}".encode(errors="backslashreplace"))
        place = f"takes a batch of the DataLoader of {self.place} ({number})"
        of_batch = zlib.crc32(repr(kinds).encode())
        news.tell((of_batch, tag), judge, waits, place, of_batch)


def _of_program(loader: DataLoader[Any]) -> Any:
    """Return the loader's sampler that is none of torch's, which draw only when a pass begins; else None."""
    samplers = layers(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    return next((one for one in samplers if not type(one).__module__.startswith("torch.")), None)


class _Redrawn:
    """An index sampler of the program, which draws again in a resumed pass from the states from which it had drawn.

    It draws between the draws of the training, and for workers some batches before the training takes them.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self._loader, self._sampler = weakref.ref(loader), sampler  # no cycle, which would keep workers that stay

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self._loader()
        return self._drawn(iter(self._sampler), loader._begun_with)

    def _drawn(self, batches: Iterator[Any], begun_with: Any) -> Iterator[Any]:
        after: dict[str, Any] = {}
        for step in itertools.count():
            now, draws = global_states(), begun_with["draws"]
            is_known = draws is not None and step < len(draws)
            if is_known:
                restore_global_states({**after, **draws[step]})
            batch = next(batches, _END)
            drawn = changed(now, then := global_states())
            if is_known and step:  # the seed of a pass may be that of the state after the first (`draws`)
                restore_global_states(now)
            if draws is not None and not is_known:
                # What goes on from the last draw needs no state.
                draws.append({name: now[name] for name in changed(after, now) if name in drawn})
                if draws[-1] and sum(map(bool, draws)) > _MOST_DRAWS:
                    begun_with["draws"] = None
            after = then
            if batch is _END:
                return
            yield batch


def rows_loader(loader: DataLoader[Any], source: Any) -> Any:
    """Return a copy of a loader whose batches are `Fetched`; None if each rank's whole batch is plain (collective).

    `source`: the loader, or a copy of it which seeds generators, to fetch from.
    """
    here = world()
    collate: Any = loader.collate_fn
    is_torchs, is_known = _is_torchs(loader), False
    fetcher = adapters.fetcher_of(loader.dataset)
    if fetcher is not None:
        reason = fetcher.attach()
        if reason is None:
            collate, is_known = fetcher.collate(), True  # it fetches each sample alone
        elif here.is_main:
            kind = type(loader.dataset).__name__
            say_once(f"{kind} is read sample by sample, many times slower than by the batch: {reason}")
    is_stream = isinstance(loader.dataset, torch_data.IterableDataset)
    found = Found("it is a stream") if is_stream else probed(source, collate if is_torchs else list)
    with contextlib.suppress(TypeError, NotImplementedError):
        found = found if is_stream else found._replace(num_samples=len(loader.dataset))  # type: ignore[arg-type]
    told = here.gather((indices_of(loader.dataset), found), f"the DataLoader of {os.path.basename(loader.place)}")
    _check_same_data(loader, told)
    is_torchs = is_torchs and (is_known or not joins_samples(loader.dataset))
    fetches_own = is_torchs and not any(theirs.why for _, theirs in told)
    is_apart = loader.num_workers > 0 and not isinstance(loader.dataset, getattr(torch_data, "IterDataPipe", ()))
    if not (is_apart or is_torchs):
        return None
    is_relayed = is_apart and here.local_world_size > 1 and _HAS_LINES and not any(f.is_shared for _, f in told)
    address, token = None, here.broadcast(secrets.token_hex(16))
    if is_relayed:
        from ddpshim.rows.relay import Address

        name = f"{token}/{here.node_rank}"  # several nodes may be of one machine, as containers are
        address = Address(name, here.rank, here.local_rank, here.local_world_size)
    counts = current().part(Counts)
    counts.num_workers = max(counts.num_workers, loader.num_workers)
    if is_torchs and not fetches_own and here.world_size > 1:
        why = next(theirs.why for _, theirs in told if theirs.why)
        counts.has_drawn |= why == DRAWS
        _say_how(loader, why, is_relayed)
    made: Any = copy.copy(source)
    made.__class__ = _TorchsLoader
    batches = Batches(source, collate, address, fetches_own)
    vars(made).update(dataset=batches, collate_fn=_as_it_is, in_order=True, _iterator=None)
    if is_stream:
        vars(made).update(batch_sampler=None)
    elif loader.batch_sampler is not None:
        vars(made).update(batch_sampler=_OwnRows(source))
    else:
        vars(made).update(sampler=source._index_sampler)
    if loader.num_workers:
        vars(made).update(worker_init_fn=batches.start_worker)
    return made


def _as_it_is(batch: Any) -> Any:
    return batch


def _say_how(loader: DataLoader[Any], why: str, is_relayed: bool) -> None:
    how = "each batch is loaded once per node, by a data worker, as fast as in a single process"
    if not is_relayed:
        how = "each rank loads every whole batch and keeps its local shard: no faster than in a single process"
    own = ". DDPSHIM_DRAWS=sample loads local shards only, with other random numbers" * (why == DRAWS)
    say_on_main(f"{name_of(loader.dataset)}: {why}, so {how}{own}")


def _is_torchs(loader: DataLoader[Any]) -> bool:
    """Whether a batch is samples that torch's own functions join."""
    collates: Any = getattr(torch_data._utils.collate, "default_collate_fn_map", {})
    return (
        not isinstance(loader.dataset, torch_data.IterableDataset)
        and loader.batch_sampler is not None
        and loader.collate_fn is torch_data.default_collate
        and all(function.__module__.startswith("torch.") for function in collates.values())
    )


class _OwnRows:
    """The batches of a loader from step `first` of a pass on, as this rank's indices with those of all ranks."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batches: Any = loader._index_sampler
        self._num_workers, self.first = loader.num_workers, 0

    def __iter__(self) -> Iterator[Numbered]:
        # Now: a sampler may draw, before torch draws the seed of workers.
        return self._parts(iter(self._batches), self.first)

    def _parts(self, batches: Iterator[Any], first: int) -> Iterator[Numbered]:
        here = blocks.ranks()
        left_out = [[*next(batches)] for _ in range(first)]
        for step, indices in enumerate(batches):
            part = blocks.part_of(len(indices))
            rows = range(len(indices)) if part is None else range(*part.bounds(*here))
            numbered = Numbered([*indices], rows)
            if step < self._num_workers:  # `first` is a multiple of the number of workers
                numbered.left_out = left_out[step :: self._num_workers]
            yield numbered


def _kinds(batch: Any) -> list[Any]:
    return [(x.dtype, x.shape[1:]) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves(batch)]


def _check_same_data(loader: DataLoader[Any], told: Sequence[tuple[list[int], Found]]) -> None:
    """Raise DataError if ranks hold different data, or different parts of it. Local."""
    for rank, (indices, found) in enumerate(told):
        if indices != told[0][0]:
            raise DataError(
                f"{loader.place}: the Subsets of ranks 0 and {rank} have different indices; a sample would be used "
                "for training on one rank and for validation on another. Draw the split from torch's, numpy's or "
                "Python's global generator, or with a fixed seed (np.random.default_rng(0))."
            )
        if what := first_difference(told[0][1], found):
            raise DataError(
                f"{loader.place}: ranks 0 and {rank} have different data: {what}. Samples would be trained on twice or "
                "never. Sort lists of files (os.listdir has no order, nor has a set), and give ranks one version of "
                "the data. If each rank reads its own part: make_loader(already_sharded=True)."
            )
