"""Splits an iterable dataset over ranks and data workers."""

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from ddpshim.data.dataset_fingerprint import hash_of, length
from ddpshim.data.numbered import EpochCounter, has_drawn
from ddpshim.errors import DataError
from ddpshim.job.group import current_or_new_world
from ddpshim.job.noise import use_own_batches
from ddpshim.job.world import World
from ddpshim.process.random_streams import PrivateRandom, global_states
from ddpshim.process.say import say
from ddpshim.process.seeds import derive_seed

if TYPE_CHECKING:
    from ddpshim.data.loader_builder import Parts
    from ddpshim.data.sharded_loader import ShardedLoader

_NUM_COMPARED = 8  # items of a global batch that are hashed


class Split(NamedTuple):
    """Divides a stream: of each global batch, rank r takes every W-th item, from the r-th on.

    With `drop_last` only whole global batches are used; without, the last one is filled up to a multiple of W from its
    own start.
    """

    global_batch_size: int
    rank: int
    world_size: int
    drop_last: bool

    def num_steps(self, num_samples: int) -> int:
        """Return the number of global batches in `num_samples`, equal on every rank."""
        rounding = 0 if self.drop_last else self.global_batch_size - 1
        return (num_samples + rounding) // self.global_batch_size


def loader_over(parts: "Parts") -> "ShardedLoader":
    """Return a loader over the stream `parts.dataset`. Local."""
    if isinstance(parts.dataset, (ShardedIterable, ShardedStream)) and not parts.already_sharded:
        raise DataError(
            f"{type(parts.dataset).__name__} is already this rank's share; split over {parts.num_shares} ranks "
            "again, it would never give most samples. Pass already_sharded=True, or the whole dataset."
        )
    whole = parts.whole_batch_size(may_be_uneven=False)
    split = Split(whole or 1, parts.sharers.rank, parts.num_shares, parts.drop_last or whole is None)
    num_samples = length(parts.dataset)
    if num_samples is not None:
        parts.refuse_too_small(parts.dataset, "dataset")
        parts.refuse_no_step(num_samples, whole)
    stays, num_readers = parts.options["persistent_workers"], max(1, parts.options["num_workers"])
    is_split, is_compared = not parts.already_sharded, parts.world.options.guard
    stream = ShardedStream(
        parts.dataset, split, parts.own_seed, EpochCounter(), is_split, stays, num_readers * is_compared
    )
    # torch shards an IterDataPipe itself, if it is not wrapped.
    as_is = parts.already_sharded and isinstance(parts.dataset, IterDataPipe)
    per_rank = whole and whole // parts.num_shares
    batching = {"batch_size": per_rank, "drop_last": parts.drop_last}
    of_all = per_rank and per_rank * parts.world.world_size
    return parts.loader(parts.dataset if as_is else stream, stream, of_all, {}, **batching)


def shard_iterable(
    dataset: Iterable[Any],
    decode: Optional[Callable[[Any], Any]] = None,
    drop_last: bool = True,
    *,
    seed: Optional[int] = None,
    world: Optional[World] = None,
) -> "ShardedIterable":
    """Return an IterableDataset with this rank's and data worker's share of `dataset`, for torch's own DataLoader.

    Item i goes to rank i % W, and worker w of n gets every n-th of the rank's items. W items are a round, which is
    given out only when all of it is read: so ranks get equally many items, and take equally many steps with equal
    batch sizes and workers. Every rank and worker iterates over the whole `dataset`; `decode` is called on its share
    alone. So let `dataset` give cheap items (paths, records), and do expensive work in `decode`.

    Local, except that it calls `ddpshim.setup()` if necessary. With one process it divides over workers only. It gives
    the same items for the same (seed, epoch), under the condition in :func:`make_loader`. Each pass in this process
    begins a new epoch; with workers, call `set_epoch` before each pass, as for torch's DistributedSampler.
    :func:`make_loader` does all of this itself if it gets `dataset`; with `decode`, give it the result and
    `already_sharded=True`.

    >>> from torch.utils.data import DataLoader
    >>> ranks = [World(rank=rank, world_size=2) for rank in range(2)]
    >>> shares = [shard_iterable(range(7), decode=lambda i: 10 * i, world=world) for world in ranks]
    >>> [list(DataLoader(share, batch_size=None)) for share in shares]
    [[0, 20, 40], [10, 30, 50]]

    Args:
        dataset: any object that can be iterated repeatedly; its `set_epoch`, if it has one, is called.
            `get_worker_info()` is None in it, so that it does not shard a second time.
        decode: makes a sample from an item. It draws from its process's own random streams.
        drop_last: True: an incomplete round is dropped. False: it is filled up from its own start (those items count
            twice).
        seed: for draws of `dataset` from the global generators, equal on all ranks; default the world's.

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
        # torch's loader does not tell whether its workers are persistent, so they always read epochs as if they were.
        self._stream = ShardedStream(dataset, split, seed, EpochCounter(), persistent_workers=True)
        self._decode = decode

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass use `epoch`, here and in workers, and later ones here the following epochs. Local.

        Call it between passes: a pass that workers still read would switch to the new epoch.
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
    turn, so batches arrive in the order of the stream for any n. A batch is given out only when all of it is
    read, so that ranks end at the same step without messages.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        split: Split,
        seed: int,
        epochs: EpochCounter,
        is_split: bool = True,
        persistent_workers: bool = False,
        num_readers: int = 0,
    ) -> None:
        """`num_readers`: how many processes of this rank read it, and are compared; 0: they are not."""
        self.dataset = dataset
        self.num_readers = num_readers
        self.epochs = epochs
        self._split = split
        self._seed = seed
        self._is_split = is_split
        self._begun = (epochs.current, 0)
        # Persistent workers read the next pass from shared memory. Others must not: they would see a pass that
        # began after theirs.
        self._shared = torch.zeros(2, dtype=torch.int64, device="cpu") if persistent_workers else None
        if self._shared is not None:
            self._shared.share_memory_()
        # Of each reader: hashes of the first items of global batches 0, 1, 2, 4, 8, ...
        self._hashes = torch.zeros(num_readers, 64, dtype=torch.int64, device="cpu").share_memory_()
        self._said = torch.zeros(1, dtype=torch.int8, device="cpu").share_memory_()  # workers live for one pass

    def begin(self, epoch: int) -> None:
        """Make the next iterators, in this process and in workers, read `epoch` from its start step on. Local.

        Raises:
            DataError: the start step is not 0, and the dataset is already sharded.
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
        else:  # new ones, because workers of an abandoned pass may still write
            self._hashes = torch.zeros_like(self._hashes).share_memory_()

    def comparison(self, here: World, name: str) -> Callable[[int], None]:
        """Return a function to call with the step of each batch of the pass that begins. Local: it never waits.

        It raises DataError if the readers have read other items than another reader, of any rank. Each adds its hash to
        a sum of all ranks, which is a multiple of it if all are equal. The last reader to add sees a difference.
        """
        (epoch, start), hashes = self._begun, self._hashes
        due = [0] * self.num_readers  # each reader's next global batch to compare

        def compare(step: int) -> None:
            reader = (step - start) % len(due)
            while (at := due[reader]) <= step:
                due[reader], own = max(1, 2 * at), int(hashes[reader, at.bit_length()])
                if here.count(f"{name}/{at}", own) % own:
                    raise DataError(
                        f"In step {at} of epoch {epoch}, rank {here.rank} read other items of "
                        f"{type(self.dataset).__name__} than another rank or data worker. Each keeps its share of "
                        "what it reads, so some items would be trained on twice and others never. Let the dataset "
                        "draw from torch, random or np.random, which are equal everywhere while it is read, or from "
                        "np.random.default_rng(epoch) with the epoch that its set_epoch gets. If each rank has data "
                        "of its own, pass already_sharded=True. DDPSHIM_GUARD=0 turns this check off."
                    )

        return compare

    def num_steps(self) -> int:
        """Return the number of global batches, if the dataset has a length.

        Raises:
            TypeError: it has none.
        """
        return self._split.num_steps(len(self))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Incomplete copies (pickle, copy) have no dataset yet: this look-up would recurse forever.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        # Read here and not at the first item, because by then the loader may be in another epoch.
        epoch, start = self._begun if self._shared is None else self._shared.tolist()
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        if not self._is_split:
            return iter(self.dataset)
        worker = get_worker_info()
        return self._share(epoch, start, *((worker.id, worker.num_workers) if worker is not None else (0, 1)))

    def _share(self, epoch: int, start: int, worker: int, num_workers: int) -> Iterator[Any]:
        # Seeded equally everywhere, so that a shuffle buffer gives one order everywhere; swapped in only while
        # the dataset is read, because the consumer's code runs between two batches.
        private = PrivateRandom(derive_seed(self._seed, "stream", epoch))
        with private.swapped_in(), _worker_info_hidden():
            before = global_states()
            items = iter(self.dataset)
            read = self._read_batch(items)
            self._report_other_batches(has_drawn(before), worker, num_workers)
        step, is_whole = 0, True
        while is_whole:
            if step:
                with private.swapped_in(), _worker_info_hidden():
                    read = self._read_batch(items)
            share, is_whole, head = read
            if self.num_readers and not step & (step - 1):
                self._hashes[worker, step.bit_length()] = 1 + hash_of(head[:_NUM_COMPARED])
            if step >= start and (step - start) % num_workers == worker:
                yield from share
            step += 1

    def _report_other_batches(self, draws: bool, worker: int, num_workers: int) -> None:
        """Print a line, once, if one process has other batches: there each worker reads the dataset for itself."""
        is_due = self._split.world_size > 1 and self._split.rank == worker == int(self._said[0]) == 0
        if is_due and (draws or num_workers > 1):
            self._said[0] = 1
            why = "draws random numbers" if draws else f"is read by {num_workers} workers"
            say(
                f"{type(self.dataset).__name__} {why}: its batches are the same on any number of ranks, but not those "
                'of one process, which ddpshim.setup(batch="global") has'
            )

    def _read_batch(self, items: Iterator[Any]) -> tuple[list[Any], bool, list[Any]]:
        """Read one global batch; return this rank's share of it, whether it was whole, and its first items."""
        split = self._split
        share: list[Any] = []
        head: list[Any] = []
        num_read = 0
        for item in islice(items, split.global_batch_size):
            if num_read < max(split.world_size, _NUM_COMPARED):
                head.append(item)
            if num_read % split.world_size == split.rank:
                share.append(item)
            num_read += 1
        if num_read == split.global_batch_size:
            return share, True, head
        if split.drop_last or num_read == 0:
            return [], False, head
        # This rank's last position may be past the end; it then wraps to the start of the batch.
        last = (num_read - 1) // split.world_size * split.world_size + split.rank
        if last >= num_read:
            share.append(head[(last - num_read) % num_read])
        return share, False, head


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
