"""Builds data loaders that give each rank its share of the global batch of one process."""

import math
from collections.abc import Iterable
from typing import Any, Callable, Optional

import torch
from torch.utils.data import (
    DataLoader,
    default_collate,
)

from ddpshim.data.alike import length
from ddpshim.data.fetching import Collate, fetcher_of
from ddpshim.data.parts import Parts, make_alike
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError
from ddpshim.job import noise
from ddpshim.job.group import current_or_new_world, draws_alike, use_own_batches
from ddpshim.job.group import world as current_world
from ddpshim.job.job import current
from ddpshim.job.say import count, say, say_once
from ddpshim.job.world import World


class _Said(set[tuple[int, int]]):
    """The pairs (global batch size, number of ranks) that were printed in a job."""


def make_loader(
    dataset: Any,
    batch_size: Optional[int] = 1,
    shuffle: Optional[bool] = None,
    sampler: Optional[Iterable[Any]] = None,
    batch_sampler: Optional[Iterable[list[Any]]] = None,
    num_workers: int = 0,
    collate_fn: Optional[Callable[[list[Any]], Any]] = None,
    pin_memory: bool = False,
    drop_last: Optional[bool] = None,
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

    Takes the arguments of torch's DataLoader, in the same order. Without a launcher it returns that DataLoader, with
    torch's defaults, order and random draws; after `setup(batch="global")` one with the same batches on every rank.
    Otherwise, also with one rank, it returns a :class:`ShardedLoader`. The call is then collective, with equal
    arguments on every rank, and so is `iter()` if the order comes from the user's sampler or batch_sampler.

    The order is the one that torch draws in one process, from the same random streams, at any world size. For an
    iterable dataset, and with the option order=computed, it is a function of (seed, epoch). The epoch advances
    with each `iter()`, even if the previous pass was abandoned. While a batch is trained on, random numbers are drawn
    for the batch of all ranks, and each rank takes its rows (option noise). If a map-style dataset draws random
    numbers for samples, each rank fetches whole batches, with the draws of one process (option data_draws).

    10 samples, 2 ranks, unshuffled: rank 0 sees 0 2 4 6 8, rank 1 sees 1 3 5 7 9.

    Args:
        dataset: map-style or iterable. Every rank and worker reads an iterable one in full and keeps its share. So it
            must give the same items for the same (seed, epoch): draws from the global generators do, entropy of
            its own does not, and raises DataError in the pass. `get_worker_info()` is None in it, so that it does not
            shard a second time. If it shards by rank, set `already_sharded`; if it reads too slowly, use
            :func:`ddpshim.shard_iterable`. Its `set_epoch`, if it has one, is called.
        batch_size: of all ranks together. None: items are ready batches.
        sampler: as in torch; one draw of it is split over the ranks.
        batch_sampler: each of its lists is a global batch. `drop_last` does not apply to it.
        drop_last: default False without a launcher, as in torch; True launched, and a line reports samples left out.
            In a batch that the ranks do not divide, some ranks have one row more, and gradients are the mean over all
            rows; a rank without a row repeats one, with weight 0. A stream, a computed order and the order of
            `already_sharded` are filled up instead, with samples from the start of the order (a stream: of the batch),
            which then count twice.
        collate_fn: if not given, robomimic's sequence datasets are fetched by the batch, with the same values
            (option `batched_fetch`).
        generator: torch's sampler draws from it, as in torch. Its `initial_seed()` is the default of `seed`, which a
            computed order uses.
        per_rank_batch: `batch_size` is per rank; see :func:`scale_lr`. Default: the world's option.
        already_sharded: `dataset` holds, and `sampler` draws, only this rank's share; only the batch size is divided.
            An iterable dataset must then give equally many batches on every rank, and shard over its workers itself.
        newer: parameters of torch versions after 2.1 (`in_order`), passed to DataLoader unchanged.

    Raises:
        DataError: the batch, dataset or sampler does not split over the ranks, or would give no step. It is raised on
            every rank, even if only one has the problem.
        ValueError: raised by torch, for combinations that it refuses.
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
    is_default, is_whole = drop_last is None, current().holds_whole_batches or not here.is_launched
    if drop_last is None:  # torch refuses True if it makes no batches
        drop_last = not is_whole and batch_sampler is None and batch_size is not None
    if is_whole:
        if here.is_launched and (already_sharded or per_rank_batch or here.options.per_rank_batch):
            raise DataError(
                'make_loader(already_sharded or per_rank_batch) after setup(batch="global"): every rank would take its '
                'share for the whole batch. Leave it out, or use batch="local".'
            )
        return torch.utils.data.DataLoader(  # of row tensors, after `setup(batch="global")`
            dataset, batch_size, shuffle, sampler, batch_sampler, drop_last=drop_last, generator=generator, **options
        )
    if seed is None:
        seed = generator.initial_seed() if generator is not None else here.seed or 0
    parts = Parts(
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
        generator,
        options,
    )
    collate: Optional[Collate] = None
    makes_batches = batch_size is not None or batch_sampler is not None
    if makes_batches and collate_fn in (None, default_collate) and here.options.batched_fetch:
        options["collate_fn"] = collate = _fetch_batches(here, dataset)
    loader = make_alike(parts)
    loader.fetches_whole_batches = collate is not None
    if here.options.exact is not None:
        _check_virtual_ranks(here.options.exact, loader.global_batch_size, drop_last or batch_sampler is not None)
    if already_sharded:
        use_own_batches()
    elif here.world_size > 1 and draws_alike():
        noise.share()
    if collate is not None and hasattr(collate, "expect") and persistent_workers and loader.batch_size:
        collate.expect(dataset, loader.batch_size, num_workers, prefetch_factor)
    _announce(here, loader.global_batch_size)
    if is_default and drop_last and not already_sharded:
        _say_dropped(here, loader, dataset if sampler is None else sampler)
    return loader


def _say_dropped(world: World, loader: ShardedLoader, samples: Any) -> None:
    num_samples = length(samples)
    dropped = (num_samples or 0) % (loader.global_batch_size or 1)
    if dropped and world.is_main:
        say_once(
            f"{loader.called} drops {dropped} of {num_samples} samples in each epoch, the incomplete last batch: "
            "drop_last defaults to True on ranks, and to False in a plain `python train.py`. drop_last=False trains on "
            "all of them, as one process does"
        )


def _check_virtual_ranks(exact: int, global_batch_size: Optional[int], drop_last: bool) -> None:
    if global_batch_size is None or global_batch_size % exact:
        raise DataError(
            f"a global batch of {global_batch_size} samples with exact={exact}, which does not divide it: virtual "
            "ranks would have different numbers of samples. Use a batch size that is a multiple of it."
        )
    if not drop_last:
        raise DataError(
            f"drop_last=False with exact={exact}: the last batch of a pass would not divide over the virtual ranks. "
            "Leave drop_last at True."
        )


def _fetch_batches(world: World, dataset: Any) -> Optional[Collate]:
    """Make a dataset that an adapter knows give whole batches, if it can; return its collate_fn, else None."""
    fetcher = fetcher_of(dataset)
    if fetcher is None:
        return None
    reason = fetcher.attach()
    if reason is not None and world.is_main:
        from ddpshim.data import advice

        advice.give(f"{type(dataset).__name__} is read sample by sample, many times slower than by the batch: {reason}")
    return fetcher.collate()


def scale_lr(lr: float, rule: Optional[str] = None, world_size: Optional[int] = None) -> float:
    """Return the learning rate for training with `per_rank_batch=True`.

    W ranks then train on batches W times as large, in 1/W of the steps. "linear" multiplies by W (SGD: Goyal et al.
    2017, with a warm-up), "sqrt" by the square root of W (Adam and similar), "none" does not change it. With a global
    batch, the default of :func:`make_loader`, batches and steps do not change: use "none". Local; with one process
    every rule returns `lr`.

    >>> scale_lr(1e-4, "linear", world_size=4)
    0.0004
    >>> scale_lr(1e-4, "sqrt", world_size=4)
    0.0002

    Args:
        rule: default the world's option `lr_rule` if its `per_rank_batch` is on, else linear.
        world_size: W; default the current world's.

    Raises:
        DataError: the rule is unknown.
    """
    if rule is None:
        options = current_world().options
        rule = options.lr_rule if options.per_rank_batch else "linear"
    size = current_world().world_size if world_size is None else world_size
    factors = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    if rule not in factors:
        raise DataError(f"rule={rule!r} is not a learning-rate rule. Use linear, sqrt or none.")
    return lr * factors[rule]


def _announce(world: World, global_batch_size: Optional[int]) -> None:
    said = current().part(_Said)
    if world.is_main and global_batch_size is not None and (global_batch_size, world.world_size) not in said:
        said.add((global_batch_size, world.world_size))
        ranks = count(world.world_size, "rank")
        each, left = divmod(global_batch_size, world.world_size)
        say(f"global batch {global_batch_size} = {ranks} x {f'{each} or {each + 1}' if left else each}")
