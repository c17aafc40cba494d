"""Makes the random draws of a sample a function of its pass and its index: option `draws="sample"`.

Then samples are functions of their index, so each rank fetches its own rows, and any number of ranks and data workers
draws the same. Google's Grain does so, too, with a generator for each record.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.utils import data as torch_data

from ddpshim.process.job import derive_seed
from ddpshim.process.random_streams import global_states, restore_global_states, seed_globals
from ddpshim.rows.samples import Around, joins_samples


class _Index(NamedTuple):
    seed: int  # of the pass
    index: Any

    def __repr__(self) -> str:
        return repr(self.index)


class _Seeded(Around):
    """A dataset for whose samples the global generators are seeded, and put back."""

    def __init__(self, dataset: Any, start: Optional[Callable[[int], None]]) -> None:
        self.dataset, self._start = dataset, start

    def __getitem__(self, index: _Index) -> Any:
        return self._seeded(self.dataset.__getitem__, index)

    def _seeded(self, fetch: Callable[[Any], Any], index: _Index) -> Any:
        before = global_states()
        seed_globals(derive_seed(index.seed, "sample", repr(index.index)))
        try:
            return fetch(index.index)
        finally:
            restore_global_states(before)

    def start_worker(self, worker: int) -> None:
        """Initialise a data worker as the program does: torch's info names its dataset. Local."""
        info: Any = torch_data.get_worker_info()
        object.__setattr__(info, "dataset", self.dataset)
        if self._start is not None:
            self._start(worker)


class _SeededByBatch(_Seeded):
    """One of a dataset that fetches a batch at a time."""

    def __getitems__(self, batch: list[_Index]) -> Any:
        indices = [one.index for one in batch]
        return self._seeded(self.dataset.__getitems__, _Index(batch[0].seed, indices))


class _Indices:
    """What a loader's sampler yields, with the seed of the pass: of what the program has drawn before, and how many."""

    def __init__(self, sampler: Any, is_of_batches: bool) -> None:
        self._sampler, self._is_of_batches = sampler, is_of_batches
        self.num_passes = 0  # that have begun, also before an interruption

    def __iter__(self) -> Iterator[Any]:
        seed: Optional[int] = None
        for one in self._sampler:
            if seed is None:
                # Now that the sampler has drawn. Not of Python's or numpy's state, which programs may leave unseeded.
                state = torch.default_generator.get_state()
                seed = derive_seed(self.num_passes, "pass", str(state.tolist()))
            yield [_Index(seed, each) for each in one] if self._is_of_batches else _Index(seed, one)

    def __len__(self) -> int:
        return len(self._sampler)


def by_sample(loader: Any) -> Any:
    """Return a copy of a loader with torch's methods, for whose samples the generators are seeded. Local."""
    made = copy.copy(loader)
    torchs = "torch.utils.data.dataloader"  # where another class may stand now
    made.__class__ = next(kind for kind in type(loader).__mro__ if kind.__module__ == torchs)
    seeded = (_SeededByBatch if joins_samples(loader.dataset) else _Seeded)(loader.dataset, loader.worker_init_fn)
    which = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = _Indices(loader._index_sampler, loader.batch_sampler is not None)
    vars(made).update({"dataset": seeded, which: indices, "worker_init_fn": seeded.start_worker, "_iterator": None})
    made.indices = indices
    return made
