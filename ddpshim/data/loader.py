"""Builds data loaders that give each rank its share of the global batch of one process."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, default_collate

from ddpshim.data.alike import length, refuse_unlike
from ddpshim.data.fetching import Collate, fetcher_of
from ddpshim.data.sampler import (
    DrawnOrder,
    EpochCounter,
    Order,
    SequentialOrder,
    ShardedBatchSampler,
    ShardedSampler,
    ShuffledOrder,
    Split,
    SplitBatchSampler,
    draws_by_weight,
    layers,
)
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world
from ddpshim.job.group import world as current_world
from ddpshim.job.job import current
from ddpshim.job.random_streams import derive_seed
from ddpshim.job.say import count, say
from ddpshim.job.world import World

if TYPE_CHECKING:
    from ddpshim.data.iterable import ShardedStream


class _Said(set[tuple[int, int]]):
    """The global batch sizes that were said in a job, with the number of ranks."""


def make_loader(
    dataset: Any,
    batch_size: Optional[int] = 1,
    shuffle: Optional[bool] = None,
    sampler: Optional[Iterable[Any]] = None,
    batch_sampler: Optional[Iterable[list[Any]]] = None,
    num_workers: int = 0,
    collate_fn: Optional[Callable[[list[Any]], Any]] = None,
    pin_memory: bool = False,
    drop_last: bool = True,
    timeout: float = 0,
    worker_init_fn: Optional[Callable[[int], None]] = None,
    multiprocessing_context: Any = None,
    generator: Optional[torch.Generator] = None,
    *,
    prefetch_factor: Optional[int] = None,
    persistent_workers: bool = False,
    pin_memory_device: str = "",
    per_rank_batch: Optional[bool] = None,
    seed: Optional[int] = None,
    already_sharded: bool = False,
    world: Optional[World] = None,
    **newer: Any,
) -> "DataLoader[Any]":
    """Return a DataLoader that gives this rank its share of each global batch.

    Takes what torch's DataLoader takes, in its order; `drop_last` defaults to True. Without a launcher it
    *is* that DataLoader, with torch's order and random draws. Launched, also as a world of one, it is a
    :class:`ShardedLoader`, and the call is collective, as is `iter()` where the order comes from the user's
    sampler or batch_sampler: every rank makes it, with equal arguments.

    The order is a function of (seed, epoch), so step t consumes the same samples at any world size. The
    epoch advances with each `iter()`, also when the pass before was abandoned. Iterating leaves the global
    random states alone; only what a map-style dataset draws in this process (`num_workers=0`) comes from
    them, as always. Workers are seeded by rank, worker and epoch; persistent ones go on with their stream.

    10 samples, 2 ranks, unshuffled: rank 0 sees 0 2 4 6 8, rank 1 sees 1 3 5 7 9.

    Args:
        dataset: map-style or iterable. An iterable one is read in full by every rank and worker, each of
            which keeps its share; so it must give the same items wherever (seed, epoch) are the same: what
            it draws from the global generators is, entropy of its own is not. `get_worker_info()` is None
            in it, lest it shards a second time; one that shards by rank wants `already_sharded`, and one
            that reads too slowly :func:`ddpshim.shard_iterable`. Its `set_epoch`, if it has one, is called.
        batch_size: of all ranks together. None takes items as ready batches.
        sampler: keeps its meaning; one draw of it is split over the ranks.
        batch_sampler: each of its lists is a global batch. `drop_last` says nothing about it.
        drop_last: False fills the last global batch up to a multiple of the ranks, with samples from the
            start of the order (iterable: of that batch). Those count twice in a mean over the pass.
        collate_fn: without one, robomimic's sequence datasets are fetched by the batch, with the same values
            (option `batched_fetch`).
        generator: only its `initial_seed()` is used, where `seed` is None; else the seed is the world's.
        per_rank_batch: `batch_size` is that of each rank; see :func:`scale_lr`. Default: the world's option.
        already_sharded: `dataset` holds, and `sampler` draws, only this rank's share; only the batch is
            divided. An iterable one must then give equally many batches on every rank, and minds its workers.
        newer: parameters of a torch newer than 2.1 (`in_order`), handed to DataLoader as they are.

    Raises:
        DataError: the batch, dataset or sampler does not split over the ranks, or would give no step; on
            every rank, also where the fault is another rank's.
        ValueError: torch's own, for combinations that it refuses.
    """
    here = current_or_new_world() if world is None else world
    options = dict(
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        pin_memory_device=pin_memory_device,
        **newer,
    )
    # torch refuses drop_last where it has no batches to make; our default must not trip over that.
    drop_last = drop_last and batch_sampler is None and batch_size is not None
    if not here.is_launched:
        return DataLoader(
            dataset, batch_size, shuffle, sampler, batch_sampler, drop_last=drop_last, generator=generator, **options
        )
    if seed is None:
        seed = generator.initial_seed() if generator is not None else here.seed or 0
    parts = _Parts(
        here,
        dataset,
        batch_size,
        bool(shuffle),
        sampler,
        batch_sampler,
        drop_last,
        seed,
        here.options.per_rank_batch if per_rank_batch is None else per_rank_batch,
        already_sharded,
        options,
    )
    collate: Optional[Collate] = None
    makes_batches = batch_size is not None or batch_sampler is not None
    if makes_batches and collate_fn in (None, default_collate) and here.options.batched_fetch:
        options["collate_fn"] = collate = _fetch_batches(here, dataset)
    loader = _make_alike(parts)
    if collate is not None and hasattr(collate, "expect") and persistent_workers and loader.batch_size:
        collate.expect(dataset, loader.batch_size, num_workers, prefetch_factor)
    _announce(here, loader.global_batch_size)
    return loader


def _fetch_batches(world: World, dataset: Any) -> Optional[Collate]:
    """The collate_fn for a dataset that an adapter knows; it gives whole batches from here on, if it can. Else None."""
    fetcher = fetcher_of(dataset)
    if fetcher is None:
        return None
    reason = fetcher.attach()
    if reason is not None and world.is_main:
        from ddpshim.data import advice

        advice.give(
            f"{type(dataset).__name__} is fetched sample by sample, many times slower than by the batch: {reason}"
        )
    return fetcher.collate()


def scale_lr(lr: float, rule: Optional[str] = None, world_size: Optional[int] = None) -> float:
    """Return the learning rate that goes with `per_rank_batch=True`.

    There, W ranks make the batch W times as large and the steps 1/W as many. "linear" multiplies by W (SGD:
    Goyal et al. 2017, with a warm-up), "sqrt" by the root of W (Adam and its kin), "none" leaves it. With
    the global batch, which is the default of :func:`make_loader`, batch and steps stay: use "none". Local;
    with one process every rule returns `lr`.

    >>> scale_lr(1e-4, "linear", world_size=4)
    0.0004
    >>> scale_lr(1e-4, "sqrt", world_size=4)
    0.0002

    Args:
        rule: else the world's option where its `per_rank_batch` is on, else linear.
        world_size: W, else the current world's.

    Raises:
        DataError: another rule.
    """
    if rule is None:
        options = current_world().options
        rule = options.lr_rule if options.per_rank_batch else "linear"
    size = current_world().world_size if world_size is None else world_size
    factors = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    if rule not in factors:
        raise DataError(f"rule={rule!r} is no learning-rate rule; the rate would be a guess. Use linear, sqrt or none.")
    return lr * factors[rule]


@dataclass
class _Parts:
    """What a ShardedLoader is made of. Everything here is local; see :func:`_make_alike`."""

    world: World
    dataset: Any
    batch_size: Optional[int]
    shuffle: bool
    sampler: Optional[Iterable[Any]]
    batch_sampler: Optional[Iterable[list[Any]]]
    drop_last: bool
    seed: int
    per_rank_batch: bool
    already_sharded: bool
    options: dict[str, Any]  # others of DataLoader's

    def __post_init__(self) -> None:
        # One rank's share is split no further: as in a world of one, but with draws of its own.
        alone = self.already_sharded
        self.sharers = World() if alone else self.world
        self.num_shares = self.sharers.world_size
        self.order_seed = derive_seed(self.seed, "share", self.world.rank) if alone else self.seed

    def make(self) -> ShardedLoader:
        """Return the loader, having refused what does not split. Local."""
        is_stream = isinstance(self.dataset, IterableDataset)
        if not is_stream and self.sampler is None and self.batch_sampler is None:
            self._refuse_too_small(self.dataset, "dataset")
        # Only for torch's own refusals (shuffle with a sampler, a negative batch, ...), in torch's words.
        DataLoader(self.dataset, self.batch_size, self.shuffle or None, self.sampler, self.batch_sampler)
        if self.options.get("in_order", True) is False and self.options["num_workers"] > 0:
            raise DataError(
                "in_order=False with workers: each rank would get its batches in an order of its own, and "
                "a step would mix global batches. Drop in_order."
            )
        if self.batch_sampler is not None:
            return self._over_batch_sampler()
        split = self._split()
        return self._over_stream(split) if is_stream else self._over_samples(split)

    def _split(self) -> Split:
        if self.batch_size is None:
            if self.num_shares > 1:
                raise DataError(
                    f"batch_size=None on {self.num_shares} ranks: the items are ready batches, which only "
                    "the dataset could divide; every rank would train on all of them. Give batch_size=, "
                    "or a dataset of this rank's batches with already_sharded=True."
                )
            return Split(1, 0, 1, drop_last=True)
        per_rank = self.batch_size if self.per_rank_batch else divide(self.batch_size, self.world.world_size)
        return Split(per_rank * self.num_shares, self.sharers.rank, self.num_shares, self.drop_last)

    def _over_samples(self, split: Split) -> ShardedLoader:
        order: Order
        if self.sampler is not None:
            if draws_by_weight(self.sampler):
                from ddpshim.data.weighted import WeightedOrder

                order = WeightedOrder(self.sampler, self.order_seed, self.sharers.gather, self.sharers.run_on_main)
            else:
                order = DrawnOrder(self.sampler, self.order_seed, self.sharers.run_on_main)
            self._refuse_shards(self.sampler)
            self._refuse_too_small(self.sampler, "sampler")
        elif self.shuffle:
            order = ShuffledOrder(len(self.dataset), self.order_seed)
        else:
            order = SequentialOrder(len(self.dataset))
        self._refuse_no_step(len(order), split)
        sharded = ShardedSampler(order, split)
        if self.batch_size is None:
            return self._loader(self.dataset, sharded, None, {}, batch_size=None, sampler=sharded)
        per_rank = split.global_batch_size // split.world_size
        shown = {"batch_size": per_rank, "drop_last": self.drop_last, "sampler": sharded}
        return self._loader(self.dataset, sharded, per_rank, shown, batch_sampler=ShardedBatchSampler(sharded))

    def _over_batch_sampler(self) -> ShardedLoader:
        assert self.batch_sampler is not None
        if self.per_rank_batch:
            raise DataError(
                "per_rank_batch=True with a batch_sampler: its lists are global batches, so their size "
                "would be read in two ways. Drop per_rank_batch and let the batch_sampler give larger lists."
            )
        order = DrawnOrder(self.batch_sampler, self.order_seed, self.sharers.run_on_main)
        self._refuse_shards(self.batch_sampler)
        if len(order) == 0:
            raise DataError("The batch_sampler has length 0; a pass would have no step. Give it at least one batch.")
        declared = getattr(self.batch_sampler, "batch_size", None)
        per_rank = divide(declared, self.num_shares) if isinstance(declared, int) else None
        sharded = SplitBatchSampler(order, self.sharers.rank, self.num_shares, EpochCounter())
        return self._loader(self.dataset, sharded, per_rank, {"sampler": sharded}, batch_sampler=sharded)

    def _over_stream(self, split: Split) -> ShardedLoader:
        from ddpshim.data.iterable import ShardedIterable, ShardedStream

        if isinstance(self.dataset, (ShardedIterable, ShardedStream)) and not self.already_sharded:
            raise DataError(
                f"{type(self.dataset).__name__} is this rank's share already; split over {self.num_shares} ranks "
                "again, most samples would never be seen. Pass already_sharded=True, or the whole dataset."
            )
        num_samples = length(self.dataset)
        if num_samples is not None:
            self._refuse_too_small(self.dataset, "dataset")
            self._refuse_no_step(num_samples, split)
        stays = self.options["persistent_workers"]
        stream = ShardedStream(
            self.dataset, split, self.order_seed, EpochCounter(), not self.already_sharded, persistent_workers=stays
        )
        # torch shards a pipe by itself, if it can see that it is one.
        as_is = self.already_sharded and isinstance(self.dataset, IterDataPipe)
        per_rank = None if self.batch_size is None else split.global_batch_size // split.world_size
        batching = {"batch_size": per_rank, "drop_last": self.drop_last}
        return self._loader(self.dataset if as_is else stream, stream, per_rank, {}, **batching)

    def _loader(
        self,
        dataset: Any,
        source: "Union[ShardedSampler, SplitBatchSampler, ShardedStream]",
        batch_size_per_rank: Optional[int],
        shown: dict[str, Any],
        **batching: Any,
    ) -> ShardedLoader:
        worker_seed = derive_seed(self.seed, "rank", self.world.rank)
        global_batch_size = batch_size_per_rank * self.world.world_size if batch_size_per_rank else None
        return ShardedLoader(dataset, source, global_batch_size, worker_seed, shown, **batching, **self.options)

    def _refuse_too_small(self, sized: Any, name: str) -> None:
        num_samples, what = length(sized), f"The {name} ({type(sized).__name__})"
        if num_samples is None:
            raise DataError(
                f"{what} has no __len__; ranks could not agree on the number of steps and would wait for each other. "
                "Give it a __len__, or make the dataset an IterableDataset."
            )
        if num_samples == 0:
            raise DataError(f"{what} is empty; a pass would have no step. Check its filter.")
        if num_samples < self.num_shares:
            raise DataError(
                f"{what} has {num_samples} samples for {self.num_shares} ranks; some would train on none. Use at most "
                f"{num_samples} ranks, or more samples."
            )

    def _refuse_no_step(self, num_samples: int, split: Split) -> None:
        if split.num_steps(num_samples) == 0:
            whose = "This rank's batch" if self.already_sharded else "Global batch"
            largest = num_samples // split.world_size
            raise DataError(
                f"{whose} {split.global_batch_size} is larger than the {num_samples} samples; with "
                f"drop_last=True a pass would have no step. Use at most {largest * split.world_size} "
                f"({largest} for each rank), or drop_last=False."
            )

    def _refuse_shards(self, sampler: Any) -> None:
        for layer in layers(sampler):
            num_replicas = getattr(layer, "num_replicas", None)
            is_shard = isinstance(num_replicas, int) and num_replicas > 1 and hasattr(layer, "rank")
            if is_shard and not self.already_sharded:
                raise DataError(
                    f"{type(layer).__name__} already takes one share of {num_replicas} (rank "
                    f"{layer.rank}), and make_loader splits over {self.num_shares} rank(s): it would be "
                    "sharded twice and most samples never seen. Drop it and pass shuffle= instead."
                )


def divide(batch_size: int, world_size: int) -> int:
    """Each rank's part of a global batch. Raises DataError where it does not split. Local."""
    left_over = batch_size % world_size
    if left_over:
        lower = batch_size - left_over
        nearest = f"{lower} or {lower + world_size}" if lower > 0 else f"{world_size}"
        raise DataError(
            f"Global batch {batch_size} does not split over {world_size} ranks ({left_over} left over); "
            f"ranks would step on unequal shards. Use {nearest}."
        )
    return batch_size // world_size


def _make_alike(parts: _Parts) -> ShardedLoader:
    """Return the loader, once all ranks have made one that steps alike; collective.

    A rank whose dataset alone is short would end its pass first, and the others would wait in the next
    all-reduce; so what decides the steps is compared here, where an error can still be raised on all ranks.
    """
    loader: Optional[ShardedLoader] = None
    problem: Optional[Exception] = None
    facts: dict[str, Any] = {}
    try:
        loader = parts.make()
        facts = {
            "number of samples": None if parts.already_sharded else length(parts.dataset),
            "number of steps": length(loader),
            "global batch": loader.global_batch_size,
            "seed": parts.seed,
            "shuffle": parts.shuffle,
            "drop_last": parts.drop_last,
        }
    except Exception as error:
        # Raised below: peers are on their way to the same gather.
        problem = error
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    share = None  # of the machine, which nobody has to be advised about without workers
    if parts.options["num_workers"]:
        from ddpshim.data import advice

        share = advice.own_share(parts.options["num_workers"])
    reports = parts.world.gather((said, facts, share))
    if problem is not None:
        raise problem
    assert loader is not None
    for rank, (failure, _, _) in enumerate(reports):
        if failure is not None:
            raise DataError(
                f"Rank {rank} could not make its loader ({failure}); this rank would wait for it for ever. "
                f"See the traceback of rank {rank}."
            )
    refuse_unlike(
        [other for _, other, _ in reports], "Call make_loader with equal arguments and datasets on every rank."
    )
    shares = [share for _, _, share in reports if share is not None]
    if parts.world.is_main and shares:
        from ddpshim.data import advice

        advice.give(advice.on_workers(shares))
    return loader


def _announce(world: World, global_batch_size: Optional[int]) -> None:
    said = current().part(_Said)
    if world.is_main and global_batch_size is not None and (global_batch_size, world.world_size) not in said:
        said.add((global_batch_size, world.world_size))
        ranks = count(world.world_size, "rank")
        say(f"global batch {global_batch_size} = {ranks} x {global_batch_size // world.world_size}")
