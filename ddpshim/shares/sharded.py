"""Loads this rank's share of each global batch, as DistributedSampler does."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ddpshim.errors import DataError
from ddpshim.failures import preemption
from ddpshim.job.passes import Enterable, generator_states, indices_of, layers, restore_generators
from ddpshim.job.world import World
from ddpshim.process.job import current, derive_seed
from ddpshim.process.observed import Progress
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.process.say import count, say_once


def load(
    dataset: Any,
    here: World,
    is_per_rank: bool,
    already_sharded: bool,
    drop_last: Optional[bool],
    given: dict[str, Any],
) -> DataLoader[Any]:
    """Return what `make_loader` does on ranks; `given` are the arguments of DataLoader (collective)."""
    door, batch_size, batch_sampler = current().door, given["batch_size"], given["batch_sampler"]
    if door.loader is not None and door.joined is not None:
        if is_per_rank:
            raise DataError(
                'make_loader(per_rank_batch=True) after setup(batch="global"): every rank would take a local batch '
                'for the global one. Leave it out, or use batch="local".'
            )
        if already_sharded:
            return cast("DataLoader[Any]", door.joined(dataset, **{**given, "drop_last": drop_last}))
        return cast("DataLoader[Any]", door.loader(dataset, **given))
    if is_per_rank and batch_sampler is not None:
        raise DataError(
            "per_rank_batch=True with a batch_sampler: each of its lists is a global batch, which ranks "
            "split all the same. Leave one of the two out."
        )
    if batch_sampler is None and batch_size is not None:
        each, left = (batch_size, 0) if is_per_rank else divmod(batch_size, here.world_size)
        if left or (batch_size > 0 and not each):
            raise DataError(
                f"Global batch {batch_size} does not split over {here.world_size} ranks ({left} left over): they would "
                f'step on unequal local batches. Use a multiple of {here.world_size}, or setup(batch="global").'
            )
        given.update(batch_size=each if already_sharded else each * here.world_size, drop_last=drop_last is not False)
    is_stream = isinstance(dataset, IterableDataset) or (batch_size is None and batch_sampler is None)
    if is_stream and not already_sharded:
        raise DataError(
            f"{type(dataset).__name__} is a stream, or gives ready batches, which every rank would read whole. If it "
            'gives each rank its own samples, pass already_sharded=True; else use setup(batch="global").'
        )
    seed = here.seed or 0
    if is_stream:
        own = torch.Generator().manual_seed(derive_seed(seed, "workers", here.rank))
        return DataLoader(cast(Any, dataset), **{**given, "generator": given["generator"] or own})
    if already_sharded:
        alone = ShardedLoader(dataset, World(seed=derive_seed(seed, "own data", here.rank)), **given)
        alone.order = None  # each rank has its own
        return alone
    shared = ShardedLoader(dataset, here, **given)
    shared.check_alike(here)
    return shared


class ShardedLoader(DataLoader[Any], Enterable):
    """torch's DataLoader over this rank's share of its batches; made by :func:`make_loader`.

    Attributes:
        global_batch_size: of all ranks together; None with a `batch_sampler` that has no `batch_size`.
        order: what the order of an epoch depends on on all ranks, for `Resumable`.
    """

    def __init__(self, dataset: Any, here: World, **given: Any) -> None:
        if given["num_workers"]:
            given["worker_init_fn"] = functools.partial(_start_worker, given["worker_init_fn"])
        super().__init__(dataset, **given)
        batches = cast(Any, self.batch_sampler)
        for one in (dataset, *layers(batches)):
            if not hasattr(one, "__len__"):
                raise DataError(
                    f"{type(one).__name__} has no __len__: how many steps an epoch has is unknown. Give it one."
                )
            if getattr(one, "num_replicas", 1) > 1 and here.world_size > 1:
                raise DataError(
                    f"{type(one).__name__} shards already, and make_loader would shard again: most samples "
                    "would never be seen. Leave it out, and pass shuffle= instead."
                )
        is_torchs = given["sampler"] is given["batch_sampler"] is given["generator"] is None
        self._shares = Shares(batches, here, is_torchs)
        self.global_batch_size: Optional[int] = getattr(batches, "batch_size", None)
        self.order: Optional[str] = f"{len(dataset)} samples, seed {here.seed}"
        each = None if self.global_batch_size is None else self.global_batch_size // here.world_size
        # torch forbids to set these: what users read, and what an iterator of torch's takes. It draws the seed of
        # workers from `generator`.
        new = {"batch_size": each, "batch_sampler": self._shares, "sampler": self._shares}
        vars(self).update(new, generator=self._shares.of_workers)

    def check_alike(self, here: World) -> None:
        """Raise DataError if ranks have other data, or would make other steps (collective)."""
        num, steps, batch = len(self.dataset), len(self), self.global_batch_size  # type: ignore[arg-type]
        facts = here.gather((num, steps, batch, indices_of(self.dataset)))
        odd = next((rank for rank, theirs in enumerate(facts) if theirs != facts[0]), None)
        if odd is not None:
            raise DataError(
                f"(samples, steps, batch, hash of the indices of a Subset) are {facts[0]} on rank 0 and {facts[odd]} "
                f"on rank {odd}: samples would be seen twice or never, or ranks would hang. Give every rank the same "
                "data; draw a split with a fixed seed."
            )
        batches = self._shares.batches
        order: Any = batches.sampler if type(batches) is BatchSampler else ()
        left = len(order) % (batch or 1)
        drops = getattr(batches, "drop_last", False)
        if not steps or (left % here.world_size and not drops):
            raise DataError(
                f"{len(order) if order else num} samples leave {left} for the last batch of {batch}, which "
                f"{here.world_size} ranks do not divide, or there is none: samples would weigh differently, or "
                "ranks make no step. Use a smaller batch or drop_last=True. To evaluate, give a rank Subset(dataset, "
                "range(rank, len(dataset), world_size)) with already_sharded=True and drop_last=False, and use "
                'world.mean_over; setup(batch="global") divides any batch.'
            )
        if here.is_main and batch:
            dropped = f"; an epoch leaves out {left} of {num} samples" if left and drops else ""
            say_once(f"global batch {batch} = {count(here.world_size, 'rank')} x {self.batch_size}{dropped}")

    def __iter__(self) -> Any:
        self._shares.begin()  # here: an iterator of torch's asks for its sampler's more than once
        return super().__iter__()

    def can_enter(self) -> bool:
        return bool(getattr(self, "in_order", True))

    def set_epoch(self, epoch: int) -> None:
        self._shares.set_epoch(epoch)

    def order_state(self) -> Optional[dict[str, Any]]:
        return self._shares.state()

    def enter(self, epoch: int, step: int, order: Optional[dict[str, Any]] = None, is_inside: bool = False) -> None:
        self._shares.set_epoch(epoch, step)
        self._shares.restore(order, is_inside)


def _start_worker(start: Optional[Callable[[int], None]], worker: int) -> None:
    preemption.ignore_in_worker()
    if start is not None:
        start(worker)


class Shares:
    """This rank's samples r, r + W, r + 2 W... of each batch, from the first step of the pass on.

    torch's own order is drawn on every rank, from seed and epoch. Any other is drawn by the main rank at the beginning
    of a pass, with streams that derive from seed and epoch, and sent.
    """

    def __init__(self, batches: Any, here: World, is_torchs: bool) -> None:
        self.batches, self.of_workers = batches, torch.Generator()
        self._here, self._is_torchs = here, is_torchs
        self._next = 0, 0  # epoch and first step of the next pass
        self._pass: tuple[Iterable[list[Any]], int, int] = (), 0, 0  # batches, epoch, first step
        self._restored: Optional[list[list[Any]]] = None

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """As DistributedSampler's, for a program that calls it. Local."""
        self._next = operator.index(epoch), operator.index(start_step)

    def begin(self) -> None:
        """Draw the order of the next pass (collective, for an order of the caller's)."""
        (epoch, first), here = self._next, self._here
        self._next, seed = (epoch + 1, 0), here.seed or 0
        self.of_workers.manual_seed(derive_seed(seed, "workers", here.rank, epoch, first))
        batches = self.batches
        if not self._is_torchs:
            batches = here.run_on_main(self._draw, epoch)
        elif isinstance(batches.sampler, RandomSampler):
            order = RandomSampler(batches.sampler.data_source, generator=torch.Generator().manual_seed(seed + epoch))
            batches = BatchSampler(order, batches.batch_size, batches.drop_last)
        self._pass = batches, epoch, first

    def __iter__(self) -> Iterator[list[Any]]:
        return self._own(*self._pass)  # now: another pass may begin before the first batch of this one

    def _draw(self, epoch: int) -> list[list[Any]]:
        restored, self._restored = self._restored, None
        if restored is not None:
            return restored
        for one in layers(self.batches):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        with shared_random_streams(derive_seed(self._here.seed or 0, "order", epoch)):
            return [[*batch] for batch in self.batches]

    def _own(self, batches: Iterable[list[Any]], epoch: int, first: int) -> Iterator[list[Any]]:
        here = self._here
        for step, batch in enumerate(batches):
            if len(batch) % here.world_size or not batch:
                raise DataError(
                    f"a batch of {len(batch)} samples does not split over {here.world_size} ranks: their means would "
                    'weigh samples differently. Use drop_last=True, or setup(batch="global"), which divides any batch.'
                )
            if step >= first:
                current().part(Progress).batch = (epoch, step)
                yield batch[here.rank :: here.world_size]

    def state(self) -> Optional[dict[str, Any]]:
        """Return, on the main rank, an order that does not follow from seed and epoch. Local."""
        if self._is_torchs or not self._here.is_main:
            return None
        return {"batches": self._pass[0], "generators": generator_states(self.batches)}

    def restore(self, state: Optional[dict[str, Any]], is_inside: bool) -> None:
        """Take the `state` of an interrupted run: its pass goes on if `is_inside`, else the next follows. Local."""
        if state is not None and not self._is_torchs:
            self._restored = state["batches"] if is_inside else None
            restore_generators(self.batches, state["generators"])
