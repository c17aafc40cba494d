"""Splits an iterable dataset over ranks and data workers."""

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Callable, Optional

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ddpshim.data.alike import length
from ddpshim.data.sampler import EpochCounter, Split
from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world, use_own_batches
from ddpshim.job.random_streams import PrivateRandom, derive_seed
from ddpshim.job.world import World


def shard_iterable(
    dataset: Iterable[Any],
    decode: Optional[Callable[[Any], Any]] = None,
    drop_last: bool = True,
    *,
    seed: Optional[int] = None,
    world: Optional[World] = None,
) -> "ShardedIterable":
    """Return an IterableDataset with this rank's and data worker's share of `dataset`, for torch's own DataLoader.

    Item i goes to rank i % W, and of the rank's items worker w of n gets every n-th. W items are a round, which is
    held back until all of it is read: ranks get equally many items, and so take equally many steps with equal batch
    sizes and workers. Every rank and worker iterates over `dataset`; `decode` is called on its share alone. So let
    `dataset` give what is cheap (paths, records) and `decode` do what is dear.

    Local, but for `ddpshim.setup()` where nobody called it. With one process it divides over workers only. It gives the
    same items wherever (seed, epoch) are the same, on the condition that :func:`make_loader` names. Each pass in
    this process begins a new epoch; with workers call `set_epoch` before each pass, as for torch's DistributedSampler.
    :func:`make_loader` needs none of this where it is given `dataset` itself; with `decode`, give it the result and
    `already_sharded=True`.

    >>> from torch.utils.data import DataLoader
    >>> ranks = [World(rank=rank, world_size=2) for rank in range(2)]
    >>> shares = [shard_iterable(range(7), decode=lambda i: 10 * i, world=world) for world in ranks]
    >>> [list(DataLoader(share, batch_size=None)) for share in shares]
    [[0, 20, 40], [10, 30, 50]]

    Args:
        dataset: anything that can be iterated over again and again; its `set_epoch`, if it has one, is called.
            `get_worker_info()` is None in it, lest it shards a second time.
        decode: from one item to one sample. It draws from this process's own random streams.
        drop_last: what becomes of a round that is not whole: dropped, or filled up from its own start (those
            count twice).
        seed: of what `dataset` draws from the global generators, equal on all ranks; default the world's.

    Raises:
        DataError: `dataset` cannot be read twice, is a share already, is not iterable, or has fewer items than ranks.
    """
    here = current_or_new_world() if world is None else world
    kind = type(dataset).__name__
    if isinstance(dataset, (ShardedIterable, ShardedStream)):
        raise DataError(
            f"{kind} is already this rank's share; split again over {here.world_size} ranks, it would never give "
            "most samples. Call shard_iterable once, on the whole dataset."
        )
    if isinstance(dataset, Iterator):
        raise DataError(
            f"{kind} is an iterator, which can be read only once; the second epoch would be empty. Give "
            "shard_iterable an object whose __iter__ starts again."
        )
    if not isinstance(dataset, Iterable):
        raise DataError(
            f"{kind} has no __iter__; a dataset that is read by index would lose its order here. Give it to "
            "ddpshim.make_loader."
        )
    num_items = length(dataset)
    if num_items is not None and num_items < here.world_size:
        raise DataError(
            f"The dataset ({kind}) has {num_items} items for {here.world_size} ranks; some would train on none. Use at "
            f"most {num_items} ranks, or more items."
        )
    if world is None:
        use_own_batches()
    split = Split(here.world_size, here.rank, here.world_size, drop_last)
    return ShardedIterable(dataset, split, (here.seed or 0) if seed is None else seed, decode)


class ShardedIterable(IterableDataset[Any]):
    """One rank's and worker's share of an iterable; made by :func:`shard_iterable`.

    `len()` is the number of items of this rank, equal on every rank.
    """

    def __init__(
        self, dataset: Iterable[Any], split: Split, seed: int, decode: Optional[Callable[[Any], Any]] = None
    ) -> None:
        # torch's loader does not say whether its workers live on, so they always hear of epochs as if they did.
        self._stream = ShardedStream(dataset, split, seed, EpochCounter(), persistent_workers=True)
        self._decode = decode

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass use `epoch`, here and in workers, and those after it in this process what follows. Local.

        Call it between passes: a pass that workers still read would go over to the new epoch.
        """
        self._stream.epochs.set(epoch)
        self._stream.begin(epoch)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is None:
            self._stream.begin(self._stream.epochs.advance())
        share = iter(self._stream)
        return share if self._decode is None else map(self._decode, share)

    def __len__(self) -> int:
        return self._stream.num_steps()


class ShardedStream(IterableDataset[Any]):
    """One rank's and worker's share of an iterable dataset; other attributes are the dataset's own.

    Item i goes to rank i % W. Worker w of n takes the global batches t with t % n == w: torch asks workers in
    turn, so the batches come in the order of the stream for any n. A batch is held back until all of it is
    read; that is how ranks end at the same step without asking each other.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        split: Split,
        seed: int,
        epochs: EpochCounter,
        is_split: bool = True,
        persistent_workers: bool = False,
    ) -> None:
        self.dataset = dataset
        self.epochs = epochs
        self._split = split
        self._seed = seed
        self._is_split = is_split
        self._begun = (epochs.current, 0)
        # Workers that outlive a pass learn of the next one through shared memory. Others must not: they would
        # see a pass begun after theirs.
        self._shared = torch.zeros(2, dtype=torch.int64, device="cpu") if persistent_workers else None
        if self._shared is not None:
            self._shared.share_memory_()

    def begin(self, epoch: int) -> None:
        """Make the iterators that follow, in this process and in workers, read `epoch`, from its first step. Local.

        Raises:
            DataError: a later first step, where only the dataset knows what this rank's steps are.
        """
        self._begun = (epoch, self.epochs.start_step)
        if self._begun[1] and not self._is_split:
            raise DataError(
                f"epoch {epoch} is to resume at step {self._begun[1]}, but the dataset is already_sharded: which "
                "items those steps had is unknown, and some would be seen twice. Resume at the start of an epoch, "
                "or let make_loader do the sharding."
            )
        if self._shared is not None:
            self._shared.copy_(torch.tensor(self._begun, device="cpu"))

    def num_steps(self) -> int:
        """Return the number of global batches, where the dataset has a length.

        Raises:
            TypeError: it has none.
        """
        return self._split.num_steps(len(self))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Half-made copies (pickle, copy) have no dataset yet: asking it for its own would not end.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        # All of this before the first item is asked for: by then the loader may be in another epoch.
        epoch, start = self._begun if self._shared is None else self._shared.tolist()
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        if not self._is_split:
            return iter(self.dataset)
        worker = get_worker_info()
        return self._share(epoch, start, *((worker.id, worker.num_workers) if worker is not None else (0, 1)))

    def _share(self, epoch: int, start: int, worker: int, num_workers: int) -> Iterator[Any]:
        # Seeded alike everywhere, so that a shuffle buffer shuffles alike everywhere; swapped in only while
        # the dataset is read, because the consumer runs between two batches.
        private = PrivateRandom(derive_seed(self._seed, "stream", epoch))
        with private.swapped_in(), _worker_info_hidden():
            items = iter(self.dataset)
        step, is_whole = 0, True
        while is_whole:
            with private.swapped_in(), _worker_info_hidden():
                share, is_whole = self._read_batch(items)
            if step >= start and (step - start) % num_workers == worker:
                yield from share
            step += 1

    def _read_batch(self, items: Iterator[Any]) -> tuple[list[Any], bool]:
        """Read one global batch; return this rank's share of it and whether it was whole."""
        split = self._split
        share: list[Any] = []
        head: list[Any] = []
        num_read = 0
        for item in islice(items, split.global_batch_size):
            if num_read < split.world_size:
                head.append(item)
            if num_read % split.world_size == split.rank:
                share.append(item)
            num_read += 1
        if num_read == split.global_batch_size:
            return share, True
        if split.drop_last or num_read == 0:
            return [], False
        # The last position of this rank may lie past the end; there, the batch starts over.
        last = (num_read - 1) // split.world_size * split.world_size + split.rank
        if last >= num_read:
            share.append(head[(last - num_read) % num_read])
        return share, False


@contextlib.contextmanager
def _worker_info_hidden() -> Iterator[None]:
    """Make get_worker_info() None: a dataset that shards by worker would be split a second time."""
    from torch.utils.data._utils import worker as torch_worker

    info = torch_worker._worker_info  # without it there is no hiding: a loud AttributeError
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
