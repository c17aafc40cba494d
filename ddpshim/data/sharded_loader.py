"""Defines `ShardedLoader`, a DataLoader over one rank's share whose passes can start at any step."""

import functools
import threading
from typing import TYPE_CHECKING, Any, Callable, Optional, Union, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpshim.data.augmentation import SampleStreams
from ddpshim.data.numbered import Enterable, joins_samples
from ddpshim.job import shares
from ddpshim.job.noise import draws_alike
from ddpshim.process.job import current
from ddpshim.process.seeds import derive_seed

if TYPE_CHECKING:
    from ddpshim.data.iterable import OwnStream
    from ddpshim.data.torchs_order import TorchsBatches


class ShardedLoader(DataLoader[Any], Enterable):
    """A DataLoader over one rank's share; made by :func:`make_loader`.

    `len()` is the number of steps, equal on every rank. `batch_size` is this rank's, `global_batch_size` that of all
    ranks (None for a batch_sampler without a fixed size).
    """

    def __init__(
        self,
        dataset: Any,
        source: "Union[OwnStream, TorchsBatches]",
        global_batch_size: Optional[int],
        seed: int,
        shown: dict[str, Any],
        **options: Any,
    ) -> None:
        if options.get("num_workers"):
            from ddpshim.data import workers

            options["worker_init_fn"] = functools.partial(workers.start, options.get("worker_init_fn"))
        # torch draws the seed of the workers from this generator, and without it from the global one.
        self._of_workers = torch.Generator()
        super().__init__(dataset, generator=self._of_workers, **options)
        self.global_batch_size = global_batch_size
        self._source = source
        self._seed = seed
        self.rank, self.world_size = 0, 1  # among the ranks that share the order
        self.deals_shares = False  # whether batches are shares of one process's
        self.number, self.called = 0, "a loader"  # its number in the job, its name in messages
        self.fetches_whole_batches = False  # if so, it draws nothing for a sample
        self._streams: Optional[SampleStreams] = None
        self.restarts_workers = not self.persistent_workers  # at each start torch draws a seed
        self.has_begun = False  # a pass, so that persistent workers have their seed
        # Attributes that users read. torch forbids setting them once its batch sampler exists, so this bypasses it;
        # `shown` has the values that describe this loader's batches.
        for name, value in shown.items():
            object.__setattr__(self, name, value)

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or the one set for the next pass."""
        return self._source.epochs.current

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        self._source.epochs.set(epoch, start_step)

    def order_state(self) -> Optional[dict[str, Any]]:
        source: Any = self._source
        if not hasattr(source, "begun_with"):
            return None
        generators = source.generator_states()
        return {"begun with": source.begun_with, "generators": generators, "workers": source.workers_begun_with}

    def restore_order(self, state: Optional[dict[str, Any]], is_inside: bool) -> None:
        source: Any = self._source
        if state is not None and hasattr(source, "begins_with"):
            source.begins_with = state["begun with"] if is_inside else None
            source.workers_begun_with = state["workers"]
            self.has_begun = state["begun with"] is not None
            source.restore_generators(state["generators"])

    def __iter__(self) -> Any:
        epoch = self._source.epochs.advance()
        start, source = self._source.epochs.start_step, cast(Any, self._source)
        draw, next_size, num_ahead = None, lambda: self.batch_size, 0
        if hasattr(source, "draw"):
            source.begin(epoch, draws_seed=self.restarts_workers or not self.has_begun)
            draw, next_size = functools.partial(source.draw, source.drawn), source.drawn.sizes.popleft
            num_ahead = source.drawn.num_ahead
            if self.num_workers:
                draw = draw()
        else:
            source.begin(epoch)
            is_drawn = not start and (self.restarts_workers or not self.has_begun)
            if is_drawn and (draws_alike() or self.rank == 0):  # the seed of workers, which torch's loader draws
                torch.empty((), dtype=torch.int64).random_()
        self.has_begun = True
        streams = None if self.fetches_whole_batches else self._draws()
        if streams is not None and draws_alike():
            self._of_workers.set_state(source.workers_begun_with)
        else:
            scope: list[Union[int, str]] = ["rank", self.rank, epoch, *([start] if start else [])]
            self._of_workers.manual_seed(derive_seed(self._seed, "workers", *scope))
        shown = {name: self.__dict__[name] for name in ("dataset", "collate_fn")}
        if streams is not None:  # torch's iterator reads these two
            self.__dict__.update(dataset=streams, collate_fn=streams.collated)
        try:
            batches = super().__iter__()
        finally:
            self.__dict__.update(shown)
        if self.num_workers:
            from ddpshim.data import workers

            workers.dismiss_in_the_end(batches)
        num_samples = source.num_samples() if hasattr(source, "num_samples") else None
        first = shares.Position(self.number, epoch, start, num_samples)
        return _Pass(batches, draw, next_size, self.deals_shares, first, self.called, num_ahead)

    def _draws(self) -> Optional[SampleStreams]:
        """Return the dataset with the draws of one process; None if each rank draws for its own rows."""
        is_stream = isinstance(self.dataset, IterableDataset)
        if is_stream or not self.deals_shares or not (draws_alike() or joins_samples(self.dataset)):
            return None
        if self._streams is None:
            share = self.rank, self.world_size
            self._streams = SampleStreams(self.dataset, self.collate_fn, share, self.num_workers)
        return self._streams

    def __len__(self) -> int:
        return self._source.num_steps()


class _Pass:
    """The batches of a pass. Each is fetched with the dataset's random streams, and becomes the current batch."""

    def __init__(
        self,
        batches: Any,
        draw: Optional[Callable[[], None]],
        next_size: Callable[[], Any],
        deals_shares: bool,
        first: shares.Position,
        called: str,
        num_ahead: int,
    ) -> None:
        self._batches, self._draw, self._next_size = batches, draw, next_size
        self._deals_shares = deals_shares
        self._next, self.called = first, called
        self._num_ahead = num_ahead  # batches fetched and dropped, so that each worker continues with its own
        self.position: Optional[shares.Position] = None  # of the current batch, if it may be trained on

    def __iter__(self) -> "_Pass":
        return self

    def __next__(self) -> Any:
        if self._deals_shares:
            shares.end_batch(self)
        if self._draw is not None:
            draw, self._draw = self._draw, None
            draw()
        for _ in range(self._num_ahead):
            next(self._batches), self._next_size()
        self._num_ahead = 0
        batch = next(self._batches)
        num_rows = self._next_size()
        current().progress.batch = (self._next.epoch, self._next.step)
        # A thread that fetches ahead may be at different batches on different ranks.
        feeds = torch.is_grad_enabled() and threading.current_thread() is threading.main_thread()
        self.position = self._next if feeds else None
        self._next = self._next._replace(step=self._next.step + 1)
        if self._deals_shares and num_rows:
            shares.begin_batch(num_rows, self)
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
