"""Builds the loader over an iterable dataset that is a rank's share, and tells the dataset of its epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from ddpshim.data.dataset_fingerprint import length
from ddpshim.data.numbered import EpochCounter
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError

if TYPE_CHECKING:
    from ddpshim.data.loader_builder import Parts


def loader_over(parts: Parts) -> ShardedLoader:
    """Return a loader over the stream `parts.dataset`, which is this rank's share. Local."""
    if parts.num_shares > 1:
        raise DataError(
            f"{type(parts.dataset).__name__} is a stream, which every rank would read whole: batches would be as many "
            "times as large. If it gives each rank its own share (every world_size-th item from its rank on, equally "
            'many), pass already_sharded=True; to keep the batches of one process, use setup(batch="global").'
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


class OwnStream(IterableDataset[Any]):
    """An iterable dataset that is a rank's share, in epochs; other attributes are the dataset's own."""

    def __init__(self, dataset: Iterable[Any], num_each: Optional[int], drop_last: bool, workers_stay: bool) -> None:
        """`num_each`: items in a batch; None if each is one."""
        self.dataset, self.epochs = dataset, EpochCounter()
        self._num_each, self._drops = num_each or 1, drop_last
        # Persistent workers read the next pass from shared memory. Others must not: they would see a pass that
        # began after theirs.
        self._epoch: Any = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_() if workers_stay else [0]

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
        self._epoch[0] = epoch

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
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(int(self._epoch[0]))  # type: ignore[attr-defined]
        return iter(self.dataset)
