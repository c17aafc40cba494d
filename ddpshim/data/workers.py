"""Starts a loader's worker processes, and ends those that remain."""

from __future__ import annotations

import functools
import os
import weakref
from multiprocessing.util import Finalize
from typing import Any, Callable, Optional

from ddpshim.data.augmentation import show_dataset_to_worker
from ddpshim.job import shares

_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # torch's iterators with running workers


def dismiss_in_the_end(batches: Any) -> None:
    """End the workers of torch's iterator `batches` when this process ends. Local."""
    _with_workers.add(batches)
    _dismiss_workers_with(os.getpid())


def start(start: Optional[Callable[[int], None]], worker: int) -> None:
    """Initialise a worker, with the user's `start`."""
    from ddpshim.failures import preemption

    preemption.ignore_in_worker()
    shares.end_batch()  # inherited from an abandoned pass: the worker draws nothing for it
    show_dataset_to_worker()
    if start is not None:
        start(worker)


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
