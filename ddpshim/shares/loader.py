"""Loads this rank's share of each global batch, as DistributedSampler does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional, Protocol, Union, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world
from ddpshim.job.world import World
from ddpshim.process.job import current, derive_seed
from ddpshim.process.observed import Progress
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.process.say import count, say_once
from ddpshim.shares.passes import Enterable, EpochCounter, generator_states, indices_of, layers, restore_generators


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
) -> DataLoader[Any]:
    """Return a DataLoader that gives this rank its share of each global batch; takes torch's arguments, in its order.

    The order and the noise of data workers are not those of `python train.py`: they derive from `setup`'s seed, the
    epoch, and for workers the rank. `setup(batch="global")` keeps one process's numbers; there, and without a launcher,
    this is `torch.utils.data.DataLoader`.

    Collective under a launcher, and so is each `iter()` with an order of the caller's own (`sampler`, `batch_sampler`,
    `generator`): the main rank draws it for all. Each `iter()` begins the next epoch, so `set_epoch` is not needed.
    `Resumable.steps` enters an epoch in the middle, on any number of ranks.

    10 samples in batches of 4, 2 ranks, unshuffled: rank 0 sees 0 2, then 4 6; rank 1 sees 1 3, then 5 7. Shuffled,
    they see what `DistributedSampler(seed=seed)` gives them.

    Args:
        batch_size: of all ranks together. With `per_rank_batch`, of each.
        drop_last: default True on ranks, which must divide each batch; False in one process, as in torch.
        already_sharded: `dataset` holds only this rank's share; only the batch size is divided. After
            `setup(batch="global")` a batch is the rows of all ranks' shares.

    Raises DataError, on every rank, if the batch or the data do not divide, or differ between ranks.
    """
    here = current_or_new_world()
    is_per_rank = here.options.per_rank_batch if per_rank_batch is None else per_rank_batch
    given: dict[str, Any] = dict(
        shuffle=shuffle,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        drop_last=bool(drop_last),
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        generator=generator,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        pin_memory_device=pin_memory_device,
        **({} if in_order else {"in_order": False}),  # which torch before 2.6 lacks
    )
    loader: Any = current().door.loader if here.is_launched else DataLoader
    if loader is not None:
        if here.is_launched and is_per_rank:
            raise DataError(
                'make_loader(per_rank_batch=True) after setup(batch="global"): every rank would take its share for the '
                'whole batch. Leave it out, or use batch="local".'
            )
        if here.is_launched and already_sharded:
            joined: Any = current().door.joined
            return cast("DataLoader[Any]", joined(dataset, batch_size, **{**given, "drop_last": drop_last}))
        return cast("DataLoader[Any]", loader(dataset, batch_size, batch_sampler=batch_sampler, **given))
    given.update(batch_size=batch_size, batch_sampler=batch_sampler)
    if is_per_rank and batch_sampler is not None:
        raise DataError(
            "per_rank_batch=True with a batch_sampler: each of its lists is a batch of all ranks, shared "
            "all the same. Leave one of the two out."
        )
    if batch_sampler is None and batch_size is not None:
        given["drop_last"] = drop_last is not False
        each, left = (batch_size, 0) if is_per_rank else divmod(batch_size, here.world_size)
        if left or (batch_size > 0 and not each):
            raise DataError(
                f"Global batch {batch_size} does not split over {here.world_size} ranks ({left} left over): they would "
                f'step on unequal shares. Use a multiple of {here.world_size}, or setup(batch="global").'
            )
        given["batch_size"] = each if already_sharded else each * here.world_size
    is_ready = batch_size is None and batch_sampler is None
    if already_sharded and (isinstance(dataset, IterableDataset) or is_ready):
        own = torch.Generator().manual_seed(derive_seed(here.seed or 0, "workers", here.rank))
        return DataLoader(cast(Any, dataset), **{**given, "generator": generator or own})
    if already_sharded:
        alone = ShardedLoader(dataset, World(seed=derive_seed(here.seed or 0, "own data", here.rank)), **given)
        alone.order = None  # each rank has its own
        return alone
    if isinstance(dataset, IterableDataset) or is_ready:
        raise DataError(
            f"{type(dataset).__name__} is a stream, or gives ready batches, which every rank would read whole. If it "
            'gives each rank its own share, pass already_sharded=True; else use setup(batch="global").'
        )
    made = ShardedLoader(dataset, here, **given)
    made.check_alike(here)
    return made


class ShardedLoader(DataLoader[Any], Enterable):
    """torch's DataLoader over this rank's share of its batches; made by :func:`make_loader`.

    Attributes:
        global_batch_size: of all ranks together; None with a `batch_sampler` that has no `batch_size`.
        order: what the order of an epoch depends on on all ranks, for `Resumable`.
    """

    def __init__(self, dataset: Any, here: World, **given: Any) -> None:
        super().__init__(dataset, **given)
        batches = cast(Any, self.batch_sampler)
        taken = next((one for one in layers(batches) if getattr(one, "num_replicas", 1) > 1), None)
        if taken is not None and here.world_size > 1:
            raise DataError(
                f"{type(taken).__name__} takes one share already, and make_loader would split it again: most samples "
                "would never be seen. Leave it out, and pass shuffle= instead."
            )
        lacks = next((one for one in (dataset, *layers(batches)) if not hasattr(one, "__len__")), None)
        if lacks is not None:
            raise DataError(
                f"{type(lacks).__name__} has no __len__: how many steps an epoch has is unknown. Give it one."
            )
        is_torchs = given["sampler"] is given["batch_sampler"] is given["generator"] is None
        shares = Shares(batches, here, is_torchs)
        self.global_batch_size: Optional[int] = getattr(batches, "batch_size", None)
        self.order: Optional[str] = f"{len(dataset)} samples, seed {here.seed}"
        each = None if self.global_batch_size is None else self.global_batch_size // here.world_size
        # torch forbids to set these: what users read, and what an iterator of torch's takes. It draws the seed of
        # workers from `generator`.
        vars(self).update(batch_size=each, batch_sampler=shares, sampler=shares, generator=shares.of_workers)

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
        batches = cast(Shares, self.batch_sampler).batches
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
        cast(Shares, self.batch_sampler).begin()  # here: an iterator of torch's asks for its sampler's more than once
        return super().__iter__()

    def can_enter(self) -> bool:
        return bool(getattr(self, "in_order", True))

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        cast(Shares, self.batch_sampler).epochs.set(epoch, start_step)

    def order_state(self) -> Optional[dict[str, Any]]:
        return cast(Shares, self.batch_sampler).state()

    def restore_order(self, state: Optional[dict[str, Any]], is_inside: bool) -> None:
        cast(Shares, self.batch_sampler).restore(state, is_inside)


class Shares:
    """This rank's samples r, r + W, r + 2 W... of each batch, from the first step of the pass on.

    torch's own order is drawn on every rank, from seed and epoch. Any other is drawn by the main rank at the beginning
    of a pass, with streams that derive from seed and epoch, and sent.
    """

    def __init__(self, batches: Any, here: World, is_torchs: bool) -> None:
        self.batches, self.epochs, self.of_workers = batches, EpochCounter(), torch.Generator()
        self._here, self._is_torchs = here, is_torchs
        self._drawn: Optional[list[list[Any]]] = None  # the main rank's, of this pass
        self._restored: Optional[list[list[Any]]] = None
        self._pass: tuple[Iterable[list[Any]], int, int] = (), 0, 0  # batches, epoch, first step

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """As DistributedSampler's, for a program that calls it. Local."""
        self.epochs.set(epoch)

    def begin(self) -> None:
        """Draw the order of the next pass (collective, for an order of the caller's)."""
        here, epoch = self._here, self.epochs.advance()
        seed, first = here.seed or 0, self.epochs.start_step
        self.of_workers.manual_seed(derive_seed(seed, "workers", here.rank, epoch, first))
        if not self._is_torchs:
            self._pass = here.run_on_main(self._draw, epoch), epoch, first
            return
        order, size, drops = self.batches.sampler, self.batches.batch_size, self.batches.drop_last
        if isinstance(order, RandomSampler):
            order = RandomSampler(order.data_source, generator=torch.Generator().manual_seed(seed + epoch))
        self._pass = BatchSampler(order, size, drops), epoch, first

    def __iter__(self) -> Iterator[list[Any]]:
        return self._shares(*self._pass)  # now: another pass may begin before the first batch of this one

    def _draw(self, epoch: int) -> list[list[Any]]:
        drawn, self._restored = self._restored, None
        if drawn is None:
            for one in layers(self.batches):
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
            with shared_random_streams(derive_seed(self._here.seed or 0, "order", epoch)):
                drawn = [[*batch] for batch in self.batches]
        self._drawn = drawn
        return drawn

    def _shares(self, batches: Iterable[list[Any]], epoch: int, first: int) -> Iterator[list[Any]]:
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
        return {"batches": self._drawn, "generators": generator_states(self.batches)}

    def restore(self, state: Optional[dict[str, Any]], is_inside: bool) -> None:
        """Take the `state` of an interrupted run: its pass goes on if `is_inside`, else the next follows. Local."""
        if state is not None and not self._is_torchs:
            self._restored = state["batches"] if is_inside else None
            restore_generators(self.batches, state["generators"])


def scale_lr(lr: float, rule: Optional[str] = None, world_size: Optional[int] = None) -> float:
    """Return the learning rate for `per_rank_batch=True`: "linear" multiplies it by W, "sqrt" by its root. Local.

    >>> scale_lr(1e-4, "linear", world_size=4)
    0.0004
    """
    here = current_or_new_world() if rule is None or world_size is None else None
    if rule is None and here is not None:
        rule = here.options.lr_rule if here.options.per_rank_batch else "linear"
    size: int = cast(World, here).world_size if world_size is None else world_size
    factors = {"linear": float(size), "sqrt": float(size**0.5), "none": 1.0}
    if rule not in factors:
        raise DataError(f"rule={rule!r} is not a learning-rate rule. Use linear, sqrt or none.")
    return lr * factors[rule]
