"""Defines `make_loader`: torch's own loader in one process, on ranks that of their shares or of row tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, Optional, Protocol, Union, cast

import torch
from torch.utils.data import DataLoader, Dataset

from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world


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
    given: dict[str, Any] = {**locals(), "drop_last": bool(drop_last)}
    for ours in ("dataset", "per_rank_batch", "already_sharded"):
        del given[ours]
    if in_order:
        del given["in_order"]  # which torch before 2.6 lacks
    here = current_or_new_world()
    is_per_rank = here.options.per_rank_batch if per_rank_batch is None else per_rank_batch
    if not here.is_launched:
        return DataLoader(cast(Any, dataset), **given)
    from ddpshim.shares import sharded

    return sharded.load(dataset, here, is_per_rank, already_sharded, drop_last, given)


def scale_lr(lr: float, rule: Optional[str] = None, world_size: Optional[int] = None) -> float:
    """Return the learning rate for `per_rank_batch=True`: "linear" multiplies it by W, "sqrt" by its root. Local.

    >>> scale_lr(1e-4, "linear", world_size=4)
    0.0004
    """
    if rule is None:
        options = current_or_new_world().options
        rule = options.lr_rule if options.per_rank_batch else "linear"
    size = current_or_new_world().world_size if world_size is None else world_size
    factors = {"linear": float(size), "sqrt": float(size**0.5), "none": 1.0}
    if rule not in factors:
        raise DataError(f"rule={rule!r} is not a learning-rate rule. Use linear, sqrt or none.")
    return lr * factors[rule]
