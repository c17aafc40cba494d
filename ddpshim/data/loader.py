"""Builds data loaders that give each rank its share of the global batch of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, Optional, Protocol, Union, cast

import torch
from torch.utils.data import DataLoader, Dataset

from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world
from ddpshim.job.world import World
from ddpshim.process.job import current


class _MapStyle(Protocol):
    def __getitem__(self, index: Any, /) -> Any: ...


def make_loader(
    dataset: Union[Dataset[Any], _MapStyle, Iterable[Any]],
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
    in_order: bool = True,
    per_rank_batch: Optional[bool] = None,
    already_sharded: bool = False,
    world: Optional[World] = None,
) -> DataLoader[Any]:
    """Return a DataLoader that gives this rank its share of each global batch.

    Takes the arguments of torch's DataLoader, in the same order. Without a launcher it returns that DataLoader, with
    torch's defaults, order and random draws; after `setup(batch="global")` one with the same batches on every rank.
    Otherwise, also with one rank, it returns a :class:`ShardedLoader`. The call is then collective, with equal
    arguments on every rank, and so is `iter()` if the order comes from the user's sampler or batch_sampler.

    The order is the one that torch draws in one process, from the same random streams, at any world size. The epoch
    advances with each `iter()`, even if the previous pass was abandoned. While a batch is trained on, random numbers
    are drawn for the batch of all ranks, and each rank takes its rows (option noise). If a map-style dataset draws
    random numbers for samples, each rank fetches whole batches, with the draws of one process.

    10 samples in batches of 4, 2 ranks, unshuffled: rank 0 sees 0 1, then 4 5; rank 1 sees 2 3, then 6 7.

    Args:
        dataset: map-style; or iterable, if it gives this rank's share (`already_sharded`).
        batch_size: of all ranks together. None: items are ready batches.
        sampler: as in torch; one draw of it is split over the ranks.
        batch_sampler: each of its lists is a global batch. `drop_last` does not apply to it.
        drop_last: default False without a launcher, as in torch; True launched, and a line reports samples left out.
            False is refused if the ranks do not divide the last batch.
        collate_fn: if not given, robomimic's sequence datasets are fetched by the batch, with the same values.
        generator: torch's sampler draws from it, as in torch.
        per_rank_batch: `batch_size` is per rank; see :func:`scale_lr`. Default: the world's option.
        already_sharded: `dataset` holds, and `sampler` draws, only this rank's share; only the batch size is divided,
            and each rank draws its order from its own random streams. An iterable dataset must then give equally many
            batches on every rank, and shard over its workers itself.

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
        **({} if in_order else {"in_order": False}),  # which torch before 2.6 lacks
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
        loader = torch.utils.data.DataLoader  # of row tensors, after `setup(batch="global")`
        chosen = {"drop_last": drop_last, "generator": generator, **options}
        return loader(cast(Any, dataset), batch_size, shuffle, sampler, batch_sampler, **chosen)
    from ddpshim.data import loader_builder

    is_per_rank = here.options.per_rank_batch if per_rank_batch is None else per_rank_batch
    how = drop_last, is_per_rank, already_sharded, generator, options
    parts = loader_builder.Parts(here, dataset, batch_size, bool(shuffle), sampler, batch_sampler, *how)
    return loader_builder.make(parts, says_dropped=is_default)
