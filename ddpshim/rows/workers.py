"""Fetches batches in a data worker, or by `__getitems__`, of a program that every rank runs whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpshim.data.augmentation import SampleStreams, show_dataset_to_worker
from ddpshim.rows import blocks
from ddpshim.rows.loader import Fetched


class InWorkers(SampleStreams):
    """The dataset, with the draws that it makes in one process."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], num_workers: int) -> None:
        here = blocks.ranks()
        super().__init__(dataset, collate, (here.rank, here.size), num_workers)

    def __getitems__(self, indices: Any) -> Any:
        return len(indices.whole), super().__getitems__(indices)

    def collated_rows(self, given: Any) -> Any:
        num_rows, samples = given
        return Fetched(num_rows, self.collated(samples), False)


class Init:
    """The program's worker_init_fn, in a worker that shows it the program's dataset."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, worker: int) -> None:
        show_dataset_to_worker()
        if self._original is not None:
            self._original(worker)
