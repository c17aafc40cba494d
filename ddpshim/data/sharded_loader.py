"""Defines `ShardedLoader`, a DataLoader over one rank's share whose passes can start at any step."""

import functools
import os
import threading
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpshim.data.numbered import Enterable, SampleStreams, joins_samples, start_worker
from ddpshim.data.torchs_order import TorchsBatches, restore_states, states_of
from ddpshim.job.noise import Position, begin_batch, draws_alike, end_batch
from ddpshim.process.job import current, derive_seed
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.users_line import users_line

if TYPE_CHECKING:
    from ddpshim.data.iterable import OwnStream
    from ddpshim.data.loader_builder import Parts
    from ddpshim.data.torchs_order import OrderOfPass

_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # torch's iterators with running workers


class ShardedLoader(DataLoader[Any], Enterable):
    """A DataLoader over one rank's share; made by :func:`make_loader`.

    `len()` is the number of steps, equal on every rank. `batch_size` is this rank's, `global_batch_size` that of all
    ranks (None for a batch_sampler without a fixed size).
    """

    def __init__(
        self,
        parts: "Parts",
        dataset: Any,
        source: "Union[OwnStream, TorchsBatches]",
        global_batch_size: Optional[int],
        shown: dict[str, Any],
        **batching: Any,
    ) -> None:
        options = {**parts.options, **batching}
        if options["num_workers"]:
            options["worker_init_fn"] = functools.partial(_start_worker, options["worker_init_fn"])
        super().__init__(dataset, generator=parts.generator, **options)
        self.global_batch_size = global_batch_size
        self._source, self._world = source, parts.sharers
        self._seed, self._rank = parts.world.seed or 0, parts.world.rank
        # Whether batches are shares of one process's; if so, the dataset that draws for them.
        self.deals_shares = not parts.already_sharded and parts.world is current().world
        self._streams: Optional[SampleStreams] = None
        self._number, self.called = current().next_number("loader"), f"the loader of {users_line()}"
        self.fetches_whole_batches = False  # if so, it draws nothing for a sample
        self.restarts_workers = not self.persistent_workers  # at each start torch draws a seed
        # Attributes that users read. torch forbids setting them once its batch sampler exists, so this bypasses it;
        # `shown` has the values that describe this loader's batches.
        self.__dict__.update(shown)

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or the one set for the next pass."""
        return self._source.epochs.current

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        self._source.epochs.set(epoch, start_step)

    def order_state(self) -> Optional[dict[str, Any]]:
        if not isinstance(self._source, TorchsBatches):
            return None
        state, latest = Enterable.order_state(self), self._source.latest
        if state is not None and latest is not None and latest.draws_with is not None:
            state["begun with"] = {**state["begun with"], "order": (latest.opened_with, latest.draws_with)}
        return state

    def workers_stay(self) -> bool:
        return super().workers_stay() and not self.restarts_workers

    def __iter__(self) -> Any:
        epoch, source, here = self._source.epochs.advance(), self._source, self._world
        start, streams = source.epochs.start_step, self._draws()
        now, (states, self._begins_with) = rank_states(here.device), (self._begins_with, None)
        if states is not None:
            restore_states(self, here, states)
        has_seed = self.workers_stay() if states is None else self._has_seed
        self._begun_with = {**states_of(self, here), "has seed": has_seed}
        # torch's iterator reads these three. Its generator only gives the seed of the workers.
        shown = {name: self.__dict__[name] for name in ("dataset", "collate_fn", "generator")}
        if streams is not None:
            self.__dict__.update(dataset=streams, collate_fn=streams.collated)
        if has_seed or not draws_alike():
            rank = 0 if draws_alike() else self._rank
            self.generator = torch.Generator().manual_seed(derive_seed(self._seed, "workers", rank, epoch))
        if not has_seed and (self.generator is not shown["generator"] or self._iterator is not None):
            torch.empty((), dtype=torch.int64).random_(generator=shown["generator"])  # as torch would
        try:
            if isinstance(source, TorchsBatches):
                source.opens_with = None if states is None else states.get("order")
                batches = super().__iter__()
                order, num_samples = source.latest, source.num_samples()
                assert order is not None
            else:
                source.begin(epoch)
                batches, order, num_samples = super().__iter__(), None, None
        finally:
            self.__dict__.update(shown)
        if self.num_workers:
            _with_workers.add(batches)
            _dismiss_workers_with(os.getpid())
        if states is not None and start:
            if order is not None:
                order.draw()
            restore_rank_states(now, here.device)
        first = Position(self._number, epoch, start, num_samples)
        return _PassOfShares(self, batches, order, first)

    def _draws(self) -> Optional[SampleStreams]:
        """Return the dataset with the draws of one process; None if each rank draws for its own rows."""
        is_stream = isinstance(self.dataset, IterableDataset)
        if is_stream or self.fetches_whole_batches or not self.deals_shares:
            return None
        if not draws_alike() and not joins_samples(self.dataset):
            return None
        if self._streams is None:
            share = self._world.rank, self._world.world_size
            self._streams = SampleStreams(self.dataset, self.collate_fn, share, self.num_workers)
        return self._streams

    def __len__(self) -> int:
        return self._source.num_steps()


class _PassOfShares:
    """The batches of a pass. Each becomes the current batch when it is given."""

    def __init__(self, loader: ShardedLoader, batches: Any, order: "Optional[OrderOfPass]", first: Position) -> None:
        self._batches, self._order, self._batch_size = batches, order, loader.batch_size
        self._next, self.called, self._deals_shares = first, loader.called, loader.deals_shares
        # Batches that are fetched and dropped, so that each worker continues with its own.
        self._num_ahead = 0 if order is None else order.num_ahead
        self.position: Optional[Position] = None  # of the current batch, if it may be trained on

    def __iter__(self) -> "_PassOfShares":
        return self

    def __next__(self) -> Any:
        if self._deals_shares:
            end_batch(self)
        for _ in range(self._num_ahead):
            self._fetch()
        self._num_ahead = 0
        batch, num_rows = self._fetch()
        current().progress.batch = (self._next.epoch, self._next.step)
        # A thread that fetches ahead may be at different batches on different ranks.
        feeds = torch.is_grad_enabled() and threading.current_thread() is threading.main_thread()
        self.position = self._next if feeds else None
        self._next = self._next._replace(step=self._next.step + 1)
        if self._deals_shares and num_rows:
            begin_batch(num_rows, self)
        return batch

    def _fetch(self) -> tuple[Any, Optional[int]]:
        """Return the next batch, and its number of rows on this rank."""
        batch = next(self._batches)
        return batch, self._batch_size if self._order is None else self._order.sizes.popleft()

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _start_worker(start: Optional[Callable[[int], None]], worker: int) -> None:
    from ddpshim.failures import preemption

    preemption.ignore_in_worker()
    end_batch()  # inherited from an abandoned pass: the worker draws nothing for it
    start_worker(start, worker)


@functools.lru_cache(maxsize=1)
def _dismiss_workers_with(process: int) -> None:
    """End the remaining workers when this process ends."""
    Finalize(None, _dismiss_workers, exitpriority=0)


def _dismiss_workers() -> None:
    # Python would send them a signal that they ignore, and wait forever. torch's own way no longer works by then.
    for batches in list(_with_workers):
        if getattr(batches, "_worker_pids_set", False):
            from torch.utils.data._utils import signal_handling

            signal_handling._remove_worker_pids(id(batches))  # else torch reports their end as a failure
            batches._worker_pids_set = False
        for worker in getattr(batches, "_workers", ()):
            worker.kill()
