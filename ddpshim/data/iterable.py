"""Splits an iterable dataset over ranks and data workers."""

import contextlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from ddpshim.data.dataset_fingerprint import length
from ddpshim.data.numbered import EpochCounter
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world
from ddpshim.job.noise import use_own_batches
from ddpshim.job.world import World
from ddpshim.process.random_streams import PrivateRandom
from ddpshim.process.seeds import derive_seed

if TYPE_CHECKING:
    from ddpshim.data.loader_builder import Parts


def loader_over(parts: "Parts") -> ShardedLoader:
    """Return a loader over the stream `parts.dataset`, which is this rank's share. Local."""
    kind = type(parts.dataset).__name__
    if parts.num_shares > 1:
        raise DataError(
            f"{kind} is a stream, which every rank would read whole: batches would be as many times as large. If it "
            "gives each rank its own share (`ddpshim.shard_iterable` divides one), pass already_sharded=True; to keep "
            'the batches of one process, use setup(batch="global").'
        )
    num_each = parts.whole_batch_size()
    num_samples = length(parts.dataset)
    if num_samples is not None:
        parts.refuse_too_small(parts.dataset, "dataset")
        parts.refuse_no_step(num_samples, num_each)
    stream = OwnStream(parts.dataset, num_each, parts.drop_last, parts.options["persistent_workers"])
    # torch shards an IterDataPipe itself, if it is not wrapped.
    dataset = parts.dataset if isinstance(parts.dataset, IterDataPipe) else stream
    of_all = num_each and num_each * parts.world.world_size
    return ShardedLoader(parts, dataset, stream, of_all, {}, batch_size=num_each, drop_last=parts.drop_last)


class _EpochOfWorkers:
    """The epoch that the next iterators read, in this process and in its data workers."""

    def __init__(self, workers_stay: bool) -> None:
        self._own = 0
        # Persistent workers read the next pass from shared memory. Others must not: they would see a pass that
        # began after theirs.
        self._shared = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_() if workers_stay else None

    def set(self, epoch: int) -> None:
        self._own = epoch
        if self._shared is not None:
            self._shared[0] = epoch

    def begin(self, dataset: Any) -> int:
        """Return it, and tell the dataset. Local."""
        epoch = self._own if self._shared is None else int(self._shared[0])
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        return epoch


class OwnStream(IterableDataset[Any]):
    """An iterable dataset that is a rank's share, in epochs; other attributes are the dataset's own."""

    def __init__(self, dataset: Iterable[Any], num_each: Optional[int], drop_last: bool, workers_stay: bool) -> None:
        """`num_each`: items in a batch; None if each is one."""
        self.dataset, self.epochs = dataset, EpochCounter()
        self._num_each, self._drops = num_each or 1, drop_last
        self._epoch = _EpochOfWorkers(workers_stay)

    def begin(self, epoch: int) -> None:
        """Make the next iterators, in this process and in workers, read `epoch`. Local.

        Raises:
            DataError: a run is to resume inside the epoch.
        """
        if self.epochs.start_step:
            raise DataError(
                f"epoch {epoch} is to resume at step {self.epochs.start_step}, but the dataset is already_sharded: "
                "which items those steps had is unknown, and some would be seen twice. Resume at the start of an epoch."
            )
        self._epoch.set(epoch)

    def num_steps(self) -> int:
        """Return the number of batches. Raises TypeError if the dataset has no length."""
        return (len(self) + (0 if self._drops else self._num_each - 1)) // self._num_each

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Incomplete copies (pickle, copy) have no dataset yet: this look-up would recurse forever.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        self._epoch.begin(self.dataset)  # now and not at the first item: by then the loader may be in another epoch
        return iter(self.dataset)


def shard_iterable(
    dataset: Iterable[Any], decode: Optional[Callable[[Any], Any]] = None, *, world: Optional[World] = None
) -> "ShardedIterable":
    """Return an IterableDataset with this rank's and data worker's share of `dataset`, for torch's own DataLoader.

    Item i goes to rank i % W, and worker w of n gets every n-th of the rank's items. W items are a round, which is
    given out only when all of it is read, so that ranks take equally many steps: the items of an incomplete last round
    are dropped. Every rank and worker iterates over the whole `dataset`; `decode` is called on its share alone. So let
    `dataset` give cheap items (paths, records), and do expensive work in `decode`.

    Local, except that it calls `ddpshim.setup()` if necessary. With one process it divides over workers only. `dataset`
    must give the same items for the same epoch: draws from the global generators do, which are seeded equally on all
    ranks; entropy of its own does not. Each pass in this process begins a new epoch; with workers, call `set_epoch`
    before each pass, as for torch's DistributedSampler. For :func:`make_loader`, add `already_sharded=True`.

    >>> from torch.utils.data import DataLoader
    >>> ranks = [World(rank=rank, world_size=2) for rank in range(2)]
    >>> shares = [shard_iterable(range(7), decode=lambda i: 10 * i, world=world) for world in ranks]
    >>> [list(DataLoader(share, batch_size=None)) for share in shares]
    [[0, 20, 40], [10, 30, 50]]

    Args:
        dataset: any object that can be iterated repeatedly; its `set_epoch`, if it has one, is called.
            `get_worker_info()` is None in it, so that it does not shard a second time.
        decode: makes a sample from an item. It draws from its process's own random streams.

    Raises:
        DataError: `dataset` cannot be read twice, is a share already, or has fewer items than ranks.
    """
    here = current_or_new_world() if world is None else world
    kind = type(dataset).__name__
    if isinstance(dataset, (ShardedIterable, OwnStream)):
        raise DataError(
            f"{kind} is already this rank's share; split again over {here.world_size} ranks, it would never give "
            "most samples. Call shard_iterable once, on the whole dataset."
        )
    if isinstance(dataset, Iterator):
        raise DataError(
            f"{kind} is an iterator, which can be read only once; the second epoch would be empty. Give "
            "shard_iterable an object whose __iter__ starts again."
        )
    num_items = length(dataset)
    if num_items is not None and num_items < here.world_size:
        raise DataError(
            f"The dataset ({kind}) has {num_items} items for {here.world_size} ranks; some would train on none. Use at "
            f"most {num_items} ranks, or more items."
        )
    if world is None:
        use_own_batches()
    return ShardedIterable(dataset, here, decode)


class ShardedIterable(IterableDataset[Any]):
    """One rank's and worker's share of an iterable; made by :func:`shard_iterable`.

    `len()` is the number of items of this rank, equal on every rank.
    """

    def __init__(self, dataset: Iterable[Any], here: World, decode: Optional[Callable[[Any], Any]]) -> None:
        self.dataset, self.epochs = dataset, EpochCounter()
        self._rank, self._world_size, self._seed, self._decode = here.rank, here.world_size, here.seed or 0, decode
        # torch's loader does not tell whether its workers are persistent, so they always read epochs as if they were.
        self._epoch = _EpochOfWorkers(workers_stay=True)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass use `epoch`, here and in workers, and later ones here the following epochs. Local.

        Call it between passes: a pass that workers still read would switch to the new epoch.
        """
        self.epochs.set(epoch)
        self._epoch.set(epoch)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is None:
            self._epoch.set(self.epochs.advance())
        share = self._share(self._epoch.begin(self.dataset))
        return share if self._decode is None else map(self._decode, share)

    def __len__(self) -> int:
        return len(self.dataset) // self._world_size  # type: ignore[arg-type]

    def _share(self, epoch: int) -> Iterator[Any]:
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        # Seeded equally everywhere, so that a shuffle buffer gives one order everywhere; swapped in only while
        # the dataset is read, because the consumer's code runs between two items.
        private, items = PrivateRandom(derive_seed(self._seed, "stream", epoch)), None
        for place in count():
            with private.swapped_in(), _worker_info_hidden():
                items = iter(self.dataset) if items is None else items
                of_all = [*islice(items, self._world_size)]
            if len(of_all) < self._world_size:
                return
            if place % num_workers == number:
                yield of_all[self._rank]


@contextlib.contextmanager
def _worker_info_hidden() -> Iterator[None]:
    """Make get_worker_info() return None: a dataset that shards by worker would be split a second time."""
    from torch.utils.data._utils import worker as torch_worker

    info = torch_worker._worker_info  # AttributeError if a torch lacks this name: nothing else hides it
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
