"""Starts a loader's worker processes, measures their load, and ends those that remain."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from multiprocessing.util import Finalize
from typing import Any, Callable, Optional

import torch

from ddpshim.data.augmentation import show_dataset_to_worker
from ddpshim.job import shares

_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # torch's iterators with running workers


def busy_times(num_workers: int) -> Optional[torch.Tensor]:
    """Return shared memory for each worker's seconds and batches; None if there is none. Local."""
    with contextlib.suppress(RuntimeError, OSError):  # without shared memory their load is not measured
        shared: torch.Tensor = torch.zeros(num_workers, 2, dtype=torch.float64, device="cpu").share_memory_()
        return shared
    return None


def dismiss_in_the_end(batches: Any) -> None:
    """End the workers of torch's iterator `batches` when this process ends. Local."""
    _with_workers.add(batches)
    _dismiss_workers_with(os.getpid())


def start(start: Optional[Callable[[int], None]], busy: Optional[torch.Tensor], worker: int) -> None:
    """Initialise a worker, with the user's `start`; it counts its seconds and batches in `busy`."""
    from ddpshim.failures import preemption

    preemption.ignore_in_worker()
    shares.end_batch()  # inherited from an abandoned pass: the worker draws nothing for it
    if busy is not None:
        _count_fetches(busy[worker])
    show_dataset_to_worker()
    if start is not None:
        start(worker)


def _count_fetches(mine: torch.Tensor) -> None:
    """Make this worker count the seconds that it spends on batches, and their number, in `mine`."""
    from torch.utils.data._utils import fetch

    def counted(original: Callable[[Any, Any], Any], self: Any, index: Any) -> Any:
        start = time.perf_counter()
        batch = original(self, index)
        mine[0] += time.perf_counter() - start
        mine[1] += 1
        return batch

    kinds: tuple[Any, ...] = fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher
    for kind in kinds:
        original = kind.fetch
        kind.fetch = lambda self, index, original=original: counted(original, self, index)


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
