"""Builds loaders over orders that are not torch's: streams, computed orders, a rank's own share."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterDataPipe

from ddpshim.data.alike import length
from ddpshim.data.epochs import EpochCounter
from ddpshim.data.parts import TWO_WAYS, Parts, divide
from ddpshim.data.sampler import (
    DrawnOrder,
    Order,
    SequentialOrder,
    ShardedBatchSampler,
    ShardedSampler,
    ShuffledOrder,
    SplitBatchSampler,
    draws_by_weight,
)
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.data.split import Split
from ddpshim.errors import DataError


def over_samples(parts: Parts, split: Split) -> ShardedLoader:
    """Return a loader over the sampler's draws, or a computed order (collective if the sampler draws)."""
    order: Order
    if parts.sampler is not None:
        if draws_by_weight(parts.sampler):
            from ddpshim.data.weighted import WeightedOrder

            order = WeightedOrder(parts.sampler, parts.order_seed, parts.sharers.gather, parts.sharers.run_on_main)
        else:
            order = DrawnOrder(parts.sampler, parts.order_seed, parts.sharers.run_on_main)
        parts.refuse_shards(parts.sampler)
        parts.refuse_too_small(parts.sampler, "sampler")
    elif parts.shuffle:
        order = ShuffledOrder(parts.dataset, parts.order_seed)
    else:
        order = SequentialOrder(parts.dataset)
    parts.refuse_no_step(len(order), split)
    sharded = ShardedSampler(order, split)
    if parts.batch_size is None:
        return parts.loader(parts.dataset, sharded, None, {}, batch_size=None, sampler=sharded)
    per_rank = split.global_batch_size // split.world_size
    shown = {"batch_size": per_rank, "drop_last": parts.drop_last, "sampler": sharded}
    whole = per_rank * parts.world.world_size
    return parts.loader(parts.dataset, sharded, whole, shown, batch_sampler=ShardedBatchSampler(sharded))


def over_batch_sampler(parts: Parts, batch_sampler: Any) -> ShardedLoader:
    """Return a loader over each rank's share of each batch that `batch_sampler` draws (collective)."""
    if parts.per_rank_batch:
        raise DataError(TWO_WAYS)
    order = DrawnOrder(batch_sampler, parts.order_seed, parts.sharers.run_on_main)
    parts.refuse_shards(batch_sampler)
    if len(order) == 0:
        raise DataError("The batch_sampler has length 0; a pass would have no step. Give it at least one batch.")
    declared = getattr(batch_sampler, "batch_size", None)
    per_rank = divide(declared, parts.num_shares) if isinstance(declared, int) else None
    whole = per_rank and per_rank * parts.world.world_size
    sharded = SplitBatchSampler(order, parts.sharers.rank, parts.num_shares, EpochCounter())
    return parts.loader(parts.dataset, sharded, whole, {"sampler": sharded}, batch_sampler=sharded)


def over_stream(parts: Parts, split: Split) -> ShardedLoader:
    """Return a loader over a stream. Local."""
    from ddpshim.data.iterable import ShardedIterable, ShardedStream

    if isinstance(parts.dataset, (ShardedIterable, ShardedStream)) and not parts.already_sharded:
        raise DataError(
            f"{type(parts.dataset).__name__} is already this rank's share; split over {parts.num_shares} ranks "
            "again, it would never give most samples. Pass already_sharded=True, or the whole dataset."
        )
    num_samples = length(parts.dataset)
    if num_samples is not None:
        parts.refuse_too_small(parts.dataset, "dataset")
        parts.refuse_no_step(num_samples, split)
    stays, num_readers = parts.options["persistent_workers"], max(1, parts.options["num_workers"])
    is_split, is_compared = not parts.already_sharded, parts.world.options.guard
    stream = ShardedStream(
        parts.dataset, split, parts.order_seed, EpochCounter(), is_split, stays, num_readers * is_compared
    )
    # torch shards an IterDataPipe itself, if it is not wrapped.
    as_is = parts.already_sharded and isinstance(parts.dataset, IterDataPipe)
    per_rank = None if parts.batch_size is None else split.global_batch_size // split.world_size
    batching = {"batch_size": per_rank, "drop_last": parts.drop_last}
    whole = per_rank and per_rank * parts.world.world_size
    return parts.loader(parts.dataset if as_is else stream, stream, whole, {}, **batching)
