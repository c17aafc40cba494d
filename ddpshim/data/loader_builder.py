"""Builds the loader of one rank's share from `make_loader`'s arguments, and refuses those that cannot be split.

Where an adapter has a fetcher, whole batches are fetched.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddpshim import adapters
from ddpshim.data.dataset_fingerprint import facts_of, first_unlike, length, on_each_rank, refuse_unlike
from ddpshim.data.numbered import EpochCounter, layers
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.data.torchs_order import TorchsBatches
from ddpshim.errors import DataError
from ddpshim.job import noise
from ddpshim.job.group import world as current_world
from ddpshim.job.noise import draws_alike, use_own_batches
from ddpshim.job.world import World
from ddpshim.process.say import count, say_once


@dataclass
class Parts:
    """The arguments of `make_loader`, of which this rank makes its loader; see :func:`make`."""

    world: World
    dataset: Any
    batch_size: Optional[int]
    shuffle: bool
    sampler: Optional[Iterable[Any]]
    batch_sampler: Optional[Iterable[list[Any]]]
    drop_last: bool
    per_rank_batch: bool
    already_sharded: bool
    generator: Optional[torch.Generator]
    options: dict[str, Any]  # other arguments of DataLoader

    def __post_init__(self) -> None:
        # already_sharded: nothing is split, as in a world of one rank, but each rank has its own draws.
        self.sharers = World() if self.already_sharded else self.world
        self.num_shares = self.sharers.world_size

    def make(self) -> ShardedLoader:
        """Return the loader. Raises DataError for arguments that do not split. Local."""
        is_stream = isinstance(self.dataset, IterableDataset)
        if not is_stream and self.sampler is None and self.batch_sampler is None:
            self.refuse_too_small(self.dataset, "dataset")
        # Made only so that torch raises its own errors (shuffle with a sampler, a negative batch, ...).
        DataLoader(self.dataset, self.batch_size, self.shuffle or None, self.sampler, self.batch_sampler)
        if "in_order" in self.options and self.options["num_workers"] > 0:
            raise DataError(
                "in_order=False with workers: each rank would get its batches in a different order, and a step "
                "would mix global batches. Leave in_order out."
            )
        if is_stream:
            from ddpshim.data import iterable

            return iterable.loader_over(self)
        return self._over_torchs_batches()

    def _over_torchs_batches(self) -> ShardedLoader:
        for given in (self.sampler, self.batch_sampler):
            if given is not None:
                self._refuse_shards(given)
        batch_size = self.batch_size
        if self.batch_sampler is None:
            if self.sampler is not None:
                self.refuse_too_small(self.sampler, "sampler")
            batch_size = self.whole_batch_size()
            num_samples = length(self.dataset if self.sampler is None else self.sampler) or 0
            self.refuse_no_step(num_samples, batch_size)
            if not self.drop_last and batch_size is not None:
                self._refuse_uneven_end(num_samples, num_samples % batch_size)
        elif self.per_rank_batch:
            raise DataError(
                "per_rank_batch=True with a batch_sampler: its lists are global batches, so their size would be "
                "ambiguous. Leave per_rank_batch out, and make the batch_sampler's lists larger."
            )
        plain: DataLoader[Any] = DataLoader(
            self.dataset,
            1 if self.batch_sampler is not None else batch_size,
            self.shuffle or None,
            self.sampler,
            self.batch_sampler,
            drop_last=self.drop_last,
            generator=self.generator,
        )
        if self.batch_sampler is not None and len(plain) == 0:
            raise DataError("The batch_sampler has length 0; a pass would have no step. Give it at least one batch.")
        batches = TorchsBatches(plain, self.sharers, EpochCounter(), self.options["num_workers"])
        if plain.batch_sampler is None:
            return ShardedLoader(self, self.dataset, batches, None, {}, batch_size=None, sampler=batches)
        whole, of_all = getattr(plain.batch_sampler, "batch_size", None), None
        shown: dict[str, Any] = {"sampler": batches}
        if isinstance(whole, int):
            of_all = whole * self.world.world_size // self.num_shares
        if self.batch_sampler is None and whole is not None:
            shown.update(batch_size=whole // self.num_shares, drop_last=self.drop_last)
        return ShardedLoader(self, self.dataset, batches, of_all, shown, batch_sampler=batches)

    def _refuse_uneven_end(self, num_samples: int, num_left: int) -> None:
        if num_left % self.num_shares:
            raise DataError(
                f"{num_samples} samples leave {num_left} for the last batch, which {self.num_shares} ranks do not "
                "divide: their means would weigh samples differently. Use drop_last=True, a size that they divide, or "
                'setup(batch="global"), which divides any batch.'
            )

    def whole_batch_size(self) -> Optional[int]:
        """Return the size of a batch of all that share the order."""
        if self.batch_size is None:
            if self.num_shares > 1:
                raise DataError(
                    f"batch_size=None on {self.num_shares} ranks: the items are complete batches, which only the "
                    "dataset can divide; every rank would train on all of them. Give batch_size=, or a dataset of "
                    "this rank's batches with already_sharded=True."
                )
            return None
        num_ranks = self.world.world_size
        of_rank = self.batch_size if self.per_rank_batch else divide(self.batch_size, num_ranks)
        return of_rank * self.num_shares

    def refuse_too_small(self, sized: Any, name: str) -> None:
        num_samples, what = length(sized), f"The {name} ({type(sized).__name__})"
        if num_samples is None:
            raise DataError(
                f"{what} has no __len__; ranks could not agree on the number of steps, and would hang. Give it a "
                "__len__, or make the dataset an IterableDataset."
            )
        if num_samples == 0 and (self.shuffle or self.sampler is not None):
            raise DataError(f"{what} is empty; a pass would have no step. Check its filter.")
        if 0 < num_samples < self.num_shares:
            raise DataError(
                f"{what} has {num_samples} samples for {self.num_shares} ranks; some would train on none. Use at most "
                f"{num_samples} ranks, or more samples."
            )

    def refuse_no_step(self, num_samples: int, batch_size: Optional[int]) -> None:
        if self.drop_last and batch_size is not None and 0 < num_samples < batch_size:
            whose = "This rank's batch" if self.already_sharded else "Global batch"
            largest = num_samples // self.num_shares
            raise DataError(
                f"{whose} {batch_size} is larger than the {num_samples} samples; with drop_last=True a pass would "
                f"have no step. Use at most {largest * self.num_shares} ({largest} for each rank), or drop_last=False."
            )

    def _refuse_shards(self, sampler: Any) -> None:
        for layer in layers(sampler):
            num_replicas = getattr(layer, "num_replicas", None)
            is_shard = isinstance(num_replicas, int) and num_replicas > 1 and hasattr(layer, "rank")
            if is_shard and not self.already_sharded:
                raise DataError(
                    f"{type(layer).__name__} already takes one share of {num_replicas} (rank {layer.rank}), and "
                    f"make_loader would split it again over {self.num_shares} rank(s): most samples would never be "
                    "seen. Leave it out, and pass shuffle= instead."
                )

    def facts(self, loader: ShardedLoader) -> dict[str, str]:
        """Return what must be equal on all ranks, by name."""
        state = ""  # of the generator from which torch's sampler draws
        if self.generator is not None and not self.already_sharded:
            state = hashlib.blake2b(bytes(self.generator.get_state().tolist()), digest_size=8).hexdigest()
        return {
            "number of samples": repr(None if self.already_sharded else length(self.dataset)),
            "number of steps": repr(length(loader)),
            "global batch": repr(loader.global_batch_size),
            "shuffle": repr(self.shuffle),
            "drop_last": repr(self.drop_last),
            "state of the generator": state or "that of torch",
        }


def divide(batch_size: int, world_size: int) -> int:
    """Return each rank's part of a global batch. Raises DataError if it does not split. Local."""
    if 0 < batch_size < world_size:
        most = f"{batch_size} rank{'s' * (batch_size > 1)}"
        raise DataError(
            f"Global batch {batch_size} is smaller than {world_size} ranks: some ranks would have no sample in any "
            f"step. Raise the batch size to at least {world_size}, or use at most {most} (--nproc {batch_size})."
        )
    left_over = batch_size % world_size
    if left_over:
        lower = batch_size - left_over
        raise DataError(
            f"Global batch {batch_size} does not split over {world_size} ranks ({left_over} left over): their means "
            f'would weigh samples differently. Use {lower} or {lower + world_size}, or setup(batch="global"), which '
            "divides any batch."
        )
    return batch_size // world_size


class Fetcher(Protocol):
    """Gives whole batches of one dataset, with the values, types and order of keys of torch's collate."""

    def attach(self) -> Optional[str]:
        """Make torch's loaders fetch the dataset by the batch; return the reason if that is impossible. Local."""

    def collate(self) -> Callable[[Any], Any]:
        """Return the loader's `collate_fn`; it also accepts samples that were fetched one by one."""


def make(parts: Parts, says_dropped: bool) -> ShardedLoader:
    """Return the loader of this rank's share (collective). `says_dropped`: say how many samples `drop_last` omits.

    If one rank's dataset were shorter, that rank would end its pass first, and the others would wait in the next
    all-reduce. So everything that decides the steps is compared here, where all ranks can still raise an error.
    """
    here, options = parts.world, parts.options
    makes_batches = parts.batch_size is not None or parts.batch_sampler is not None
    fetcher = None
    if makes_batches and options["collate_fn"] in (None, default_collate):
        fetcher = adapters.fetcher_of(parts.dataset)
    if fetcher is not None:
        reason = fetcher.attach()
        if reason is not None and here.is_main:
            name = type(parts.dataset).__name__
            say_once(f"{name} is read sample by sample, many times slower than by the batch: {reason}")
        options["collate_fn"] = fetcher.collate()
    loader: Any = None
    is_compared = here.world_size > 1 and here.options.guard and not parts.already_sharded

    def make_own() -> list[Any]:
        nonlocal loader
        loader = parts.make()
        return [parts.facts(loader), facts_of(parts.dataset) if is_compared else {}]

    facts, hashes = zip(*on_each_rank(here, "make its loader", make_own))
    refuse_unlike(facts, "Call make_loader with equal arguments and datasets on every rank.")
    if (odd := first_unlike(hashes)) is not None:
        raise DataError(
            f"Ranks 0 and {odd[1]} hold different data ({odd[0]}); an index means a different sample on each, so some "
            "would be trained on twice and others never. Seed the split, sort the result of os.listdir or glob, and "
            "load the same files on every rank; pass already_sharded=True if each rank holds its own share. "
            "DDPSHIM_GUARD=0 turns this check off."
        )
    loader.fetches_whole_batches = fetcher is not None
    if parts.already_sharded:
        use_own_batches()
    elif here.world_size > 1 and draws_alike():
        noise.share()
    size, num_ranks = loader.global_batch_size, here.world_size
    if here.is_main and size is not None:
        say_once(f"global batch {size} = {count(num_ranks, 'rank')} x {size // num_ranks}")
        num_samples = length(parts.dataset if parts.sampler is None else parts.sampler) or 0
        if says_dropped and parts.drop_last and not parts.already_sharded and num_samples % size:
            say_once(
                f"{loader.called} drops {num_samples % size} of {num_samples} samples in each epoch, the incomplete "
                "last batch: drop_last defaults to True on ranks, and to False in a plain `python train.py`. "
                "drop_last=False trains on all of them, as one process does"
            )
    return loader  # type: ignore[no-any-return]


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
