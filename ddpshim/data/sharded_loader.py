"""Begins and ends the passes over one rank's share: a DataLoader that can start at any step, and its workers."""

import functools
import os
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import torch
from torch.utils.data import DataLoader

from ddpshim.data.sampler import ShardedSampler, SplitBatchSampler
from ddpshim.job.random_streams import derive_seed

if TYPE_CHECKING:
    from ddpshim.data.iterable import ShardedStream

_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # torch's iterators


class Enterable:
    """A loader whose passes can be begun at any step."""

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Make the next `iter()` begin `epoch` at `start_step`, and those after it the epochs that follow. Local."""
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of steps of an epoch."""
        raise NotImplementedError


class ShardedLoader(DataLoader[Any], Enterable):
    """A DataLoader over one rank's share; made by :func:`make_loader`.

    `len()` is the number of steps, equal on every rank. `batch_size` is this rank's,
    `global_batch_size` that of all (None where a batch_sampler does not say).
    """

    def __init__(
        self,
        dataset: Any,
        source: "Union[ShardedSampler, SplitBatchSampler, ShardedStream]",
        global_batch_size: Optional[int],
        seed: int,
        shown: dict[str, Any],
        **options: Any,
    ) -> None:
        # torch draws the seed of the workers from this generator, and without it from the global one.
        if options.get("num_workers"):
            options["worker_init_fn"] = functools.partial(_start_worker, options.get("worker_init_fn"))
        super().__init__(dataset, generator=torch.Generator(), **options)
        self.global_batch_size = global_batch_size
        self._source = source
        self._worker_seed = seed
        # What users read off a loader. torch forbids setting these because its batches are made already; so
        # are ours, and `shown` says how.
        for name, value in shown.items():
            object.__setattr__(self, name, value)

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs, or of the first one to come."""
        return self._source.epochs.current

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Make the next `iter()` use `epoch`, and those after it the epochs that follow. Local.

        With `start_step` that pass begins there: its batches are those that the whole pass has from this step on.
        """
        self._source.epochs.set(epoch, start_step)

    def __iter__(self) -> Any:
        epoch = self._source.epochs.advance()
        start = self._source.epochs.start_step
        self.generator.manual_seed(derive_seed(self._worker_seed, "workers", epoch, *([start] if start else [])))
        self._source.begin(epoch)
        batches = super().__iter__()
        if self.num_workers:
            _with_workers.add(batches)
            _dismiss_workers_with(os.getpid())
        return batches

    def __len__(self) -> int:
        return self._source.num_steps()


def _start_worker(start: Optional[Callable[[int], None]], worker: int) -> None:
    """What a worker does first, and the user's `start`."""
    from ddpshim.job import preemption

    preemption.ignore_in_worker()
    if start is not None:
        start(worker)


@functools.lru_cache(maxsize=1)
def _dismiss_workers_with(process: int) -> None:
    """Have the workers that are left leave when this process ends."""
    Finalize(None, _dismiss_workers, exitpriority=0)


def _dismiss_workers() -> None:
    # Python would end them by a signal that they ignore, and wait for ever. torch's own way is closed by then.
    for batches in list(_with_workers):
        if getattr(batches, "_worker_pids_set", False):
            from torch.utils.data._utils import signal_handling

            signal_handling._remove_worker_pids(id(batches))  # else torch takes their end for a failure
            batches._worker_pids_set = False
        for worker in getattr(batches, "_workers", ()):
            worker.kill()
