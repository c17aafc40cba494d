"""Builds the loader of one rank's share from `make_loader`'s arguments, and refuses those that cannot be split.

Where an adapter has a fetcher, whole batches are fetched.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Optional, Protocol, Union

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddpshim import adapters
from ddpshim.data.dataset_fingerprint import facts_of, length, probe, refuse_unlike
from ddpshim.data.numbered import EpochCounter, layers
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError
from ddpshim.job import noise
from ddpshim.job.noise import draws_alike, use_own_batches
from ddpshim.job.world import World
from ddpshim.process.job import current
from ddpshim.process.say import count, say, say_once
from ddpshim.process.seeds import derive_seed
from ddpshim.process.users_line import users_line

if TYPE_CHECKING:
    from ddpshim.data.iterable import OwnStream
    from ddpshim.data.torchs_order import TorchsBatches


@dataclass
class Parts:
    """The arguments of `make_loader`, which `make` turns into a ShardedLoader. All local; see :func:`make_alike`."""

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
    generator: Optional[torch.Generator]
    options: dict[str, Any]  # other arguments of DataLoader

    def __post_init__(self) -> None:
        # already_sharded: nothing is split, as in a world of one rank, but each rank has its own draws.
        self.sharers = World() if self.already_sharded else self.world
        self.num_shares = self.sharers.world_size
        self.own_seed = derive_seed(self.seed, "share", self.world.rank) if self.already_sharded else self.seed

    def state_of_the_generator(self) -> Optional[str]:
        """Return a hash of the state from which torch's sampler draws, if the caller gave a generator."""
        if self.generator is None or self.already_sharded:
            return None
        return hashlib.blake2b(bytes(self.generator.get_state().tolist()), digest_size=8).hexdigest()

    def make(self) -> ShardedLoader:
        """Return the loader. Raises DataError for arguments that do not split. Local."""
        is_stream = isinstance(self.dataset, IterableDataset)
        if not is_stream and self.sampler is None and self.batch_sampler is None:
            self.refuse_too_small(self.dataset, "dataset")
        # Made only so that torch raises its own errors (shuffle with a sampler, a negative batch, ...).
        DataLoader(self.dataset, self.batch_size, self.shuffle or None, self.sampler, self.batch_sampler)
        if self.options.get("in_order", True) is False and self.options["num_workers"] > 0:
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
                self.refuse_shards(given)
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
        from ddpshim.data.torchs_order import TorchsBatches

        batches = TorchsBatches(plain, self.sharers, EpochCounter(), self.options["num_workers"])
        declared = getattr(plain.batch_sampler, "batch_size", None)
        whole = declared if isinstance(declared, int) else None
        per_rank = None if whole is None else whole // self.num_shares
        if whole is not None and self.already_sharded:
            whole *= self.world.world_size
        shown: dict[str, Any] = {} if plain.batch_sampler is None else {"sampler": batches}
        if self.batch_sampler is None and plain.batch_sampler is not None:
            shown.update(batch_size=per_rank, drop_last=self.drop_last)
        if plain.batch_sampler is None:
            return self.loader(self.dataset, batches, None, shown, batch_size=None, sampler=batches)
        return self.loader(self.dataset, batches, whole, shown, batch_sampler=batches)

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
        num_ranks, num_whole = self.world.world_size, self.batch_size
        if self.per_rank_batch:
            num_whole *= num_ranks
        else:
            divide(num_whole, num_ranks)
        return num_whole * self.num_shares // num_ranks

    def loader(
        self,
        dataset: Any,
        source: "Union[OwnStream, TorchsBatches]",
        global_batch_size: Optional[int],
        shown: dict[str, Any],
        **batching: Any,
    ) -> ShardedLoader:
        made = ShardedLoader(dataset, source, global_batch_size, self.own_seed, shown, **batching, **self.options)
        made.deals_shares = not self.already_sharded and self.world is current().world
        made.rank, made.world_size = self.sharers.rank, self.num_shares
        made.number, made.called = current().next_number("loader"), f"the loader of {users_line()}"
        return made

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

    def refuse_shards(self, sampler: Any) -> None:
        for layer in layers(sampler):
            num_replicas = getattr(layer, "num_replicas", None)
            is_shard = isinstance(num_replicas, int) and num_replicas > 1 and hasattr(layer, "rank")
            if is_shard and not self.already_sharded:
                raise DataError(
                    f"{type(layer).__name__} already takes one share of {num_replicas} (rank {layer.rank}), and "
                    f"make_loader would split it again over {self.num_shares} rank(s): most samples would never be "
                    "seen. Leave it out, and pass shuffle= instead."
                )


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


def make_alike(parts: Parts) -> ShardedLoader:
    """Return the loader, after all ranks have made one with the same steps (collective).

    If one rank's dataset were shorter, that rank would end its pass first, and the others would wait in the next
    all-reduce. So everything that decides the steps is compared here, where all ranks can still raise an error.
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
            "state of the generator": parts.state_of_the_generator(),
        }
    except Exception as error:
        # Raised below, because the other ranks wait in the same gather.
        problem = error
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    share = None  # of the machine, for advice on workers
    if parts.options["num_workers"]:
        from ddpshim.data import advice

        share = advice.own_share(parts.options["num_workers"])
    is_compared = parts.world.world_size > 1 and parts.world.options.guard and not parts.already_sharded
    held = facts_of(parts.dataset) if is_compared else {}
    # With workers this process reads no item, because they would inherit the files that it opens.
    items = probe(parts.dataset) if is_compared and not parts.options["num_workers"] and problem is None else {}
    reports = parts.world.gather((said, facts, share, held, items))
    if problem is not None:
        raise problem
    assert loader is not None
    for rank, (failure, *_) in enumerate(reports):
        if failure is not None:
            raise DataError(
                f"Rank {rank} could not make its loader ({failure}); this rank would hang. See the traceback of "
                f"rank {rank}."
            )
    refuse_unlike(
        [other for _, other, *_ in reports], "Call make_loader with equal arguments and datasets on every rank."
    )
    _refuse_other_data(parts, [report[3] for report in reports], [report[4] for report in reports])
    shares = [report[2] for report in reports if report[2] is not None]
    if parts.world.is_main and shares:
        from ddpshim.data import advice

        advice.give(advice.on_workers(shares))
    return loader


def _refuse_other_data(parts: Parts, held: list[dict[str, int]], items: list[dict[str, int]]) -> None:
    """Raise DataError on all ranks if an index means a different sample on one of them (collective)."""
    odd = _first_unlike(held)
    if odd is None and _first_unlike(items) is not None:
        # An item with entropy of its own differs at each read; such items are not compared.
        again = probe(parts.dataset, num_reads=2)
        are_steady = parts.world.gather([name for name, item in items[parts.world.rank].items() if again[name] == item])
        odd = _first_unlike(
            [
                {name: item for name, item in own.items() if all(name in steady for steady in are_steady)}
                for own in items
            ]
        )
    if odd is not None:
        name, rank = odd
        raise DataError(
            f"Ranks 0 and {rank} hold different data ({name}); an index means a different sample on each, so some "
            "would be trained on twice and others never. Seed the split, sort the result of os.listdir or glob, and "
            "load the same files on every rank; pass already_sharded=True if each rank holds its own share. "
            "DDPSHIM_GUARD=0 turns this check off."
        )


def _first_unlike(of_ranks: list[dict[str, int]]) -> Optional[tuple[str, int]]:
    """Return a name whose value on some rank differs from rank 0's, and that rank; None if there is none."""
    for rank, facts in enumerate(of_ranks):
        for name in of_ranks[0]:
            if name in facts and facts[name] != of_ranks[0][name]:
                return name, rank
    return None


class Fetcher(Protocol):
    """Gives whole batches of one dataset, with the values, types and order of keys of torch's collate."""

    def attach(self) -> Optional[str]:
        """Make torch's loaders fetch the dataset by the batch; return the reason if that is impossible. Local."""

    def collate(self) -> Callable[[Any], Any]:
        """Return the loader's `collate_fn`; it also accepts samples that were fetched one by one."""


class _Said(set[tuple[int, int]]):
    """The pairs (global batch size, number of ranks) that were printed in a job."""


def make(parts: Parts, says_dropped: bool) -> ShardedLoader:
    """Return the loader of this rank's share (collective). `says_dropped`: say how many samples `drop_last` omits."""
    here, dataset, options = parts.world, parts.dataset, parts.options
    collate: Optional[Callable[[Any], Any]] = None
    makes_batches = parts.batch_size is not None or parts.batch_sampler is not None
    if makes_batches and options["collate_fn"] in (None, default_collate):
        options["collate_fn"] = collate = _fetch_batches(here, dataset)
    loader = make_alike(parts)
    loader.fetches_whole_batches = collate is not None
    if parts.already_sharded:
        use_own_batches()
    elif here.world_size > 1 and draws_alike():
        noise.share()
    _announce(here, loader.global_batch_size)
    if says_dropped and parts.drop_last and not parts.already_sharded:
        _say_dropped(here, loader, dataset if parts.sampler is None else parts.sampler)
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


def _fetch_batches(world: World, dataset: Any) -> Optional[Callable[[Any], Any]]:
    """Make a dataset that an adapter knows give whole batches, if it can; return its collate_fn, else None."""
    fetcher = adapters.fetcher_of(dataset)
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
        say(f"global batch {global_batch_size} = {ranks} x {global_batch_size // world.world_size}")
