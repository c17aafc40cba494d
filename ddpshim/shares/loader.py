"""Loads this rank's share of each global batch, as DistributedSampler does, or whole batches where the program holds
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Callable, Optional, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world
from ddpshim.job.world import World
from ddpshim.process.job import current, derive_seed
from ddpshim.process.say import count, say_once
from ddpshim.shares.passes import Enterable, EpochCounter, layers


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
    *,
    generator: Optional[torch.Generator] = None,
    per_rank_batch: Optional[bool] = None,
    already_sharded: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """Return a DataLoader that gives this rank its share of each global batch; torch's own loader in one process.

    Collective under a launcher. After `setup(batch="global")` every rank gets whole batches. The order of an epoch is
    one for all ranks: it derives from `setup`'s seed and the epoch, as DistributedSampler's does, so it is another one
    than that of `python train.py`. The epoch advances with each `iter()`. An order of the caller's own (`sampler`,
    `batch_sampler`, `generator`) is drawn by the main rank.

    10 samples in batches of 4, 2 ranks, unshuffled: rank 0 sees 0 1, then 4 5; rank 1 sees 2 3, then 6 7.

    Args:
        batch_size: of all ranks together. With `per_rank_batch`, of each.
        drop_last: default True on ranks, which must divide each batch; False in one process, as in torch.
        already_sharded: `dataset` holds only this rank's share; only the batch size is divided. After
            `setup(batch="global")` a batch is the rows of all ranks' shares.
        options: further arguments of torch's DataLoader.

    Raises DataError, on every rank, if the batch or the data do not divide, or differ between ranks.
    """
    here = current_or_new_world()
    options.update(num_workers=num_workers, collate_fn=collate_fn, pin_memory=pin_memory)
    is_per_rank = here.options.per_rank_batch if per_rank_batch is None else per_rank_batch
    loader = current().door.loader if here.is_launched else DataLoader
    if loader is not None:
        if here.is_launched and is_per_rank:
            raise DataError(
                'make_loader(per_rank_batch=True) after setup(batch="global"): every rank would take its share for the '
                'whole batch. Leave it out, or use batch="local".'
            )
        if here.is_launched and already_sharded:
            order = {"shuffle": shuffle, "sampler": sampler, "drop_last": drop_last, "generator": generator}
            joined: DataLoader[Any] = cast(Any, loader).joined(dataset, batch_size, **order, **options)
            return joined
        drops = bool(drop_last)
        whole: DataLoader[Any] = loader(
            dataset, batch_size, shuffle, sampler, batch_sampler, drop_last=drops, generator=generator, **options
        )
        return whole
    num_ranks, drops = here.world_size, drop_last is not False
    if batch_sampler is None and batch_size is not None:
        each, left = (batch_size, 0) if is_per_rank else divmod(batch_size, num_ranks)
        if left or not each:
            raise DataError(
                f"Global batch {batch_size} does not split over {num_ranks} ranks ({left} left over); ranks would step "
                f'on unequal shares. Use a multiple of {num_ranks}, or setup(batch="global").'
            )
    if already_sharded:
        return DataLoader(dataset, each, shuffle, sampler, drop_last=drops, generator=generator, **options)
    if isinstance(dataset, IterableDataset) or batch_size is None:
        raise DataError(
            f"{type(dataset).__name__} is a stream, or gives ready batches, which every rank would read whole. If it "
            'gives each rank its own share, pass already_sharded=True; else use setup(batch="global").'
        )
    seeded = None
    if batch_sampler is None:
        if sampler is None and shuffle and generator is None:
            seeded = torch.Generator()
        order = sampler or (
            RandomSampler(dataset, generator=seeded or generator) if shuffle else SequentialSampler(dataset)
        )
        batch_sampler = BatchSampler(cast(Any, order), each * num_ranks, drops)
    taken = next((one for one in layers(batch_sampler) if getattr(one, "num_replicas", 1) > 1), None)
    if taken is not None:
        raise DataError(
            f"{type(taken).__name__} takes one share already, and make_loader would split it again: most samples would "
            "never be seen. Leave it out, and pass shuffle= instead."
        )
    made = ShardedLoader(
        dataset, Shares(batch_sampler, here, seeded), getattr(batch_sampler, "batch_size", None), options
    )
    facts = here.gather((len(dataset), len(made), made.global_batch_size))
    if any(theirs != facts[0] for theirs in facts) or not facts[0][1]:
        raise DataError(
            f"(samples, steps, batch) of the ranks are {facts}: ranks would make different numbers of steps and "
            "hang, or none. Give every rank the same data, and at least one whole batch."
        )
    if here.is_main and made.global_batch_size:
        say_once(f"global batch {made.global_batch_size} = {count(num_ranks, 'rank')} x {made.batch_size}")
    return made


class Shares(BatchSampler):
    """This rank's n of the n * W indices of each batch, from r * n on.

    `seeded`: the generator from which the order is drawn; None if it is the caller's own, which the main rank draws.
    """

    def __init__(self, batches: Iterable[list[Any]], here: World, seeded: Optional[torch.Generator]) -> None:
        self.batches, self.epochs = batches, EpochCounter()
        self._here, self._seeded = here, seeded

    def __len__(self) -> int:
        return len(cast(Any, self.batches))

    def __iter__(self) -> Iterator[list[Any]]:
        here, epoch = self._here, self.epochs.advance()
        if self._seeded is not None:
            self._seeded.manual_seed(derive_seed(here.seed or 0, "order", epoch))
        is_alike = self._seeded is not None or isinstance(getattr(self.batches, "sampler", None), SequentialSampler)
        batches = self.batches if is_alike else here.run_on_main(list, self.batches)
        for step, batch in enumerate(islice(batches, self.epochs.start_step, None), self.epochs.start_step):
            each, left = divmod(len(batch), here.world_size)
            if left or not each:
                raise DataError(
                    f"a batch of {len(batch)} samples does not split over {here.world_size} ranks: their means would "
                    'weigh samples differently. Use drop_last=True, or setup(batch="global"), which divides any batch.'
                )
            current().progress.batch = (epoch, step)
            yield batch[here.rank * each : (here.rank + 1) * each]


class ShardedLoader(DataLoader[Any], Enterable):
    """A DataLoader over one rank's share, whose passes can begin at any step; made by :func:`make_loader`."""

    def __init__(self, dataset: Any, shares: Shares, global_batch_size: Optional[int], options: dict[str, Any]) -> None:
        super().__init__(dataset, batch_sampler=shares, **options)
        self.global_batch_size = global_batch_size
        size = None if global_batch_size is None else global_batch_size // current_or_new_world().world_size
        self.__dict__["batch_size"] = size  # which users read, and torch forbids to set

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        cast(Shares, self.batch_sampler).epochs.set(epoch, start_step)

    def order_state(self) -> Optional[dict[str, Any]]:
        return None  # it follows from seed and epoch


def scale_lr(lr: float, rule: Optional[str] = None, world_size: Optional[int] = None) -> float:
    """Return the learning rate for `per_rank_batch=True`: "linear" multiplies it by W, "sqrt" by its root. Local.

    >>> scale_lr(1e-4, "linear", world_size=4)
    0.0004
    """
    here = current_or_new_world() if rule is None or world_size is None else None
    if rule is None and here is not None:
        rule = here.options.lr_rule if here.options.per_rank_batch else "linear"
    size = cast(World, here).world_size if world_size is None else world_size
    factors = {"linear": float(size), "sqrt": size**0.5, "none": 1.0}
    if rule not in factors:
        raise DataError(f"rule={rule!r} is not a learning-rate rule. Use linear, sqrt or none.")
    return lr * factors[rule]
