"""A DataLoader of batches of which each rank reads its rows from data of its own, as from its part of a stream."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from ddpshim.errors import DataError
from ddpshim.job.group import world
from ddpshim.process.job import derive_seed
from ddpshim.process.random_streams import global_states, restore_global_states, seed_globals
from ddpshim.rows import blocks
from ddpshim.rows.loader import DataLoader
from ddpshim.rows.samples import Fetched, Own, walked
from ddpshim.rows.tensor import leaves


class JoinedLoader(DataLoader[Any]):
    """Loads batches of `batch_size` rows, of which each rank reads its block from its own `dataset` (collective).

    10 samples in a batch, 3 ranks: it has 3 samples of rank 0's data, 3 of rank 1's and 4 of rank 2's, in this order.
    Nothing is read twice or sent. The loss and its gradients are those of one process that holds this batch; but no
    process reads the data in this order, so the run is not that of one process.

    A pass ends with the last whole batch of the rank that has the fewest; a dataset without `__len__` must end after
    equally many batches on all ranks, else WorldError says where each is. Random draws of the dataset, its sampler and
    workers are this rank's own; the training's streams stay equal on all ranks. A pass cannot be entered in the middle.

    Raises DataError if a rank would have fewer than two rows of a batch, or with `drop_last=False`.
    """

    _num_waited = 0  # a rank whose data has ended must not be waited for

    def __init__(self, dataset: Any, batch_size: int, **options: Any) -> None:
        here, part = world(), blocks.part_of(batch_size)
        if part is None:
            raise DataError(
                f"Global batch {batch_size} on {here.world_size} ranks leaves a rank fewer than {blocks.LEAST_ROWS} "
                f"samples, so it cannot be sharded. Use at least {blocks.LEAST_ROWS * here.world_size}."
            )
        if options.pop("drop_last", None) is False:
            raise DataError(
                "drop_last=False with already_sharded=True: the last local batches have any sizes, so they make no "
                "global batch. Leave it out; the remaining samples are not used."
            )
        start, end = part.bounds(*blocks.ranks())
        super().__init__(dataset, end - start, drop_last=True, **options)
        try:
            own = super().__len__()
        except TypeError:
            own = None
        known = [num for num in here.gather(own) if num is not None]
        self._num_steps = min(known) if known else None
        self._num_own, self._num_rows = end - start, batch_size
        vars(self)["batch_size"] = batch_size  # which torch forbids to set: the program's batch is the whole one
        self._of_rows: Any = self if blocks.num_pieces() > 1 else None  # its batches become rows
        self._own_states = global_states()

    def __len__(self) -> int:
        return super().__len__() if self._num_steps is None else self._num_steps

    def _pass(self, first: int) -> Iterator[Any]:
        return self._batches_of_rows(self._own_batches(self._num_passes))

    def _own_batches(self, number: int) -> Iterator[Any]:
        """Yield this rank's rows of each batch of a pass; other ranks do the same."""
        here = world()
        with self._own_streams():
            # Here, so that a resumed pass draws alike.
            seed_globals(derive_seed(here.seed or 0, "own data", here.rank, number))
            batches = super(DataLoader, self).__iter__()  # torch's own
        for step in itertools.count():
            if step == self._num_steps:
                return
            with self._own_streams():
                batch = next(batches, None)
            if batch is None:
                return
            odd = [x.shape for x in leaves(batch) if hasattr(x, "shape") and x.shape[:1] != (self._num_own,)]
            if odd:
                raise DataError(
                    f"{self.place}: a tensor of shape {tuple(odd[0])} in a batch with {self._num_own} samples of this "
                    "rank: its first dimension is not the samples, so it is no local shard. Change the collate_fn."
                )
            yield batch if self._of_rows is None else Fetched(self._num_rows, walked(Own, batch))

    @contextlib.contextmanager
    def _own_streams(self) -> Iterator[None]:
        """Within this block random draws are this rank's own: others fetch other samples. Local."""
        alike = global_states()
        restore_global_states(self._own_states)
        try:
            yield
        finally:
            self._own_states = global_states()
            restore_global_states(alike)
