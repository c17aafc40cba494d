"""Makes the loader of a rank's share of each global batch: from whole batches, where an adapter has a fetcher."""

from collections.abc import Iterable
from typing import Any, Optional, Protocol

import torch
from torch.utils.data import default_collate

from ddpshim import adapters
from ddpshim.data.dataset_fingerprint import length
from ddpshim.data.loader_builder import Parts, make_alike
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError
from ddpshim.job import noise
from ddpshim.job.own_streams import draws_alike, use_own_batches
from ddpshim.job.world import World
from ddpshim.process.job import current
from ddpshim.process.say import count, say, say_once


class Collate(Protocol):
    """A `collate_fn` that also accepts a whole batch from a fetcher's dataset."""

    def __call__(self, samples: Any) -> Any:
        """Return the batch, as torch's default collate makes it."""

    def expect(self, dataset: Any, batch_size: int, num_workers: int, prefetch_factor: Optional[int]) -> None:
        """Allocate memory for the batches of persistent workers. Local; this method is optional."""


class Fetcher(Protocol):
    """Gives whole batches of one dataset, with the values, types and order of keys of torch's collate."""

    def attach(self) -> Optional[str]:
        """Make torch's loaders fetch the dataset by the batch; return the reason if that is impossible. Local."""

    def collate(self) -> Collate:
        """Return the loader's `collate_fn`; it also accepts samples that were fetched one by one."""


class _Said(set[tuple[int, int]]):
    """The pairs (global batch size, number of ranks) that were printed in a job."""


def make(
    here: World,
    dataset: Any,
    batch_size: Optional[int],
    shuffle: bool,
    sampler: Optional[Iterable[Any]],
    batch_sampler: Optional[Iterable[list[Any]]],
    drop_last: bool,
    seed: int,
    per_rank_batch: bool,
    already_sharded: bool,
    generator: Optional[torch.Generator],
    options: dict[str, Any],
    says_dropped: bool,
) -> ShardedLoader:
    """Return the loader of this rank's share (collective).

    Args:
        options: other arguments of torch's DataLoader.
        says_dropped: whether to say how many samples `drop_last` leaves out.
    """
    parts = Parts(
        here,
        dataset,
        batch_size,
        shuffle,
        sampler,
        batch_sampler,
        drop_last,
        seed,
        per_rank_batch,
        already_sharded,
        generator,
        options,
    )
    collate: Optional[Collate] = None
    makes_batches = batch_size is not None or batch_sampler is not None
    if makes_batches and options["collate_fn"] in (None, default_collate):
        options["collate_fn"] = collate = _fetch_batches(here, dataset)
    loader = make_alike(parts)
    loader.fetches_whole_batches = collate is not None
    if here.options.exact is not None:
        _check_virtual_ranks(here.options.exact, loader.global_batch_size, drop_last or batch_sampler is not None)
    if already_sharded:
        use_own_batches()
    elif here.world_size > 1 and draws_alike():
        noise.share()
    if collate is not None and hasattr(collate, "expect") and options["persistent_workers"] and loader.batch_size:
        collate.expect(dataset, loader.batch_size, options["num_workers"], options["prefetch_factor"])
    _announce(here, loader.global_batch_size)
    if says_dropped and drop_last and not already_sharded:
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
        size = "unknown size (batch_sampler=)" if global_batch_size is None else f"{global_batch_size} samples"
        raise DataError(
            f"a global batch of {size} with exact={exact}, which must divide it: virtual ranks would have different "
            "numbers of samples. Use batch_size=, a multiple of it."
        )
    if not drop_last:
        raise DataError(
            f"drop_last=False with exact={exact}: the last batch of a pass would not divide over the virtual ranks. "
            "Leave drop_last at True."
        )


def _fetch_batches(world: World, dataset: Any) -> "Optional[Collate]":
    """Make a dataset that an adapter knows give whole batches, if it can; return its collate_fn, else None."""
    fetcher = fetcher_of(dataset)
    if fetcher is None:
        return None
    reason = fetcher.attach()
    if reason is not None and world.is_main:
        from ddpshim.data import advice

        advice.give(f"{type(dataset).__name__} is read sample by sample, many times slower than by the batch: {reason}")
    return fetcher.collate()


def _announce(world: World, global_batch_size: Optional[int]) -> None:
    said = current().part(_Said)
    if world.is_main and global_batch_size is not None and (global_batch_size, world.world_size) not in said:
        said.add((global_batch_size, world.world_size))
        ranks = count(world.world_size, "rank")
        each, left = divmod(global_batch_size, world.world_size)
        say(f"global batch {global_batch_size} = {ranks} x {f'{each} or {each + 1}' if left else each}")


def fetcher_of(dataset: Any) -> Optional[Fetcher]:
    """Return the fetcher of `dataset`; None if no adapter has one. Local."""
    found = (offer(dataset) for offer in adapters.functions_for(dataset, "fetcher"))
    return next((fetcher for fetcher in found if fetcher is not None), None)
