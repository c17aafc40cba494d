"""Fetches a batch's samples with the random draws that one process makes for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, get_worker_info

from ddpshim.errors import DataError
from ddpshim.process.job import current
from ddpshim.process.random_streams import global_states, is_same_state, restore_global_states
from ddpshim.process.say import say, say_once
from ddpshim.rows import blocks


class Fetched(NamedTuple):
    num_rows: int  # of all ranks
    rows: Any  # of this rank


class Numbered(list[Any]):
    """A rank's indices of one step, with its number in the pass; both are also sent to data workers."""

    def __init__(self, whole: list[Any], rows: Sequence[int], step: int) -> None:
        super().__init__(whole[row] for row in rows)
        self.whole, self.rows, self.step = whole, rows, step  # of all ranks; the positions of this rank's in them
        self.before: list[Sequence[Any]] = []  # batches of the same worker, before the pass was interrupted


def _has_drawn(before: dict[str, Any]) -> bool:
    """Whether a generator's state is not that of `before`, an earlier `global_states()`."""
    now = global_states()
    return any(name in before and not is_same_state(before[name], state) for name, state in now.items())


def _fetched(dataset: Any, indices: Sequence[Any]) -> Any:
    """Return the samples at `indices`, as torch's loader fetches them."""
    by_batch = getattr(dataset, "__getitems__", None)
    return by_batch([*indices]) if by_batch else [dataset[index] for index in indices]


def _inside(dataset: Any) -> list[Any]:
    """Return the datasets that one of torch's own holds."""
    if isinstance(dataset, Subset):
        return [dataset.dataset]
    held = dataset.datasets if isinstance(dataset, (ConcatDataset, StackDataset)) else ()
    return [*held.values()] if isinstance(held, dict) else [*held]


def name_of(dataset: Any) -> str:
    """Return the name of the program's own dataset, also of one in a Subset."""
    return " and ".join(dict.fromkeys(map(name_of, _inside(dataset)))) or type(dataset).__name__


def joins_samples(dataset: Any) -> bool:
    """Whether a sample may depend on the others of its batch: a `__getitems__` of the program's own fetches it."""
    by_batch = getattr(dataset, "__getitems__", None)
    if not by_batch:
        return False
    module = getattr(getattr(by_batch, "func", by_batch), "__module__", None) or ""  # of what a partial calls
    is_known = module.startswith(("torch.utils.data.", "ddpshim."))  # these fetch each sample alone
    return any(map(joins_samples, _inside(dataset))) if is_known else True


class _Said(dict[str, torch.Tensor]):
    """By dataset, in memory that workers share: whether a line said that loading is slow, and one that draws differ."""


class SampleStreams(Dataset[Any]):
    """`dataset` with the random streams of one process.

    In one process a worker, or the training process, fetches whole batches. So each rank fetches the first batch of a
    pass whole. If fetching or collating it draws from the global generators of Python, numpy or torch, the rank
    continues with whole batches; if not, with its rows alone. A first draw for a later batch is refused.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], num_workers: int) -> None:
        self.dataset, self._collate = dataset, collate
        self._rank, self._world_size = blocks.ranks()
        self._joins, self._name = joins_samples(dataset), name_of(dataset)
        # Whether it draws, or joins samples, in this pass; None until the first batch is collated.
        self._draws: Optional[bool] = self._joins or None
        self._last_step = -1
        self._said = current().part(_Said).setdefault(self._name, torch.zeros(2, dtype=torch.int8, device="cpu"))
        if num_workers:
            with contextlib.suppress(RuntimeError, OSError):  # without shared memory each worker prints its lines
                self._said.share_memory_()
        if self._joins and self._rank == 0 < self._world_size - 1:
            say_once(
                f"the __getitems__ of {self._name} may combine the samples of a batch: each rank loads every whole "
                "batch and keeps its rows, which makes loading as slow as in one process. Without it each rank "
                "would load its rows only"
            )

    def __getitems__(self, indices: Any) -> Any:
        """Return the indices (Numbered), samples, and whether these are of all ranks, of which there are several."""
        if indices.step <= self._last_step:  # another pass
            self._draws = self._joins or None
        self._last_step = indices.step
        if indices.before:
            self._draw_for_batches_before(indices)
        before = global_states()
        if self._draws is False:
            samples = _fetched(self.dataset, indices)
            if _has_drawn(before):
                raise DataError(
                    f"a sample of {self._name} draws random numbers, and those of earlier batches in this pass did "
                    "not. Other ranks do not draw them, so they would train with other noise. Draw for each sample"
                )
            return indices, samples, False
        whole, are_several = _fetched(self.dataset, indices.whole), self._world_size > 1
        if are_several and self._draws is None and _has_drawn(before):
            self._continue_with_whole_batches("draws random numbers for a sample")
        return indices, whole, are_several

    def _draw_for_batches_before(self, indices: Numbered) -> None:
        """Make the draws of this worker for the batches before `indices`, if it draws for these."""
        before = global_states()
        self._collate(_fetched(self.dataset, indices.whole))
        if _has_drawn(before):
            restore_global_states(before)
            for batch in indices.before:
                self._collate(_fetched(self.dataset, batch))

    def collated(self, given: Any) -> Fetched:
        """Collate samples with the loader's collate_fn; if that draws, collate the whole batch and take own rows."""
        indices, samples, are_of_all = given
        num_rows, before = len(indices.whole), global_states()
        if are_of_all:
            return Fetched(num_rows, self._rows_of_all(samples, num_rows, indices.rows))
        batch = self._collate(samples)
        if self._world_size > 1 and _has_drawn(before):
            self._print_once(
                f"{_name(self._collate)} draws random numbers now but did not for the first batch: one process "
                "would draw different ones",
                is_seen_by_all=False,
            )
        return Fetched(num_rows, batch)

    def _rows_of_all(self, whole: Any, num_rows: int, rows: Sequence[int]) -> Any:
        if not isinstance(whole, Sequence) or len(whole) != num_rows:  # a batch, which `__getitems__` has made
            try:
                return _rows_of(self._collate(whole), num_rows, rows)
            except _Indivisible:
                raise DataError(
                    f"the __getitems__ of {self._name} was asked for {num_rows} samples, and what it returns "
                    "has not one row for each: ranks would take other samples. Return a list of as many samples."
                ) from None
        before = global_states()
        batch = self._collate([whole[row] for row in rows])
        if _has_drawn(before):
            restore_global_states(before)
            try:
                batch = _rows_of(self._collate([*whole]), num_rows, rows)
            except _Indivisible:
                self._print_once(
                    f"{_name(self._collate)} draws random numbers for a batch that cannot be divided: one process "
                    "would draw different ones"
                )
            if self._draws is None:
                self._continue_with_whole_batches(f"is collated by {_name(self._collate)}, which draws random numbers")
        elif self._draws is None:
            self._draws = False
        return batch

    def _continue_with_whole_batches(self, what: str) -> None:
        self._draws = True
        self._print_once(
            f"{what}: to draw what one process draws, each rank loads every whole batch and keeps its rows, which "
            "makes loading as slow as in one process",
            kind=0,
        )

    def _print_once(self, what: str, is_seen_by_all: bool = True, kind: int = 1) -> None:
        """Print a line about the dataset, once per kind: on rank 0, or on any rank if others may not see it."""
        if not (self._rank and is_seen_by_all) and not self._said[kind].item():
            self._said[kind] = 1
            say(f"{self._name} {what}")


class _Indivisible(Exception):
    """Raised for a collated batch with a part that cannot be divided into rows."""


def _rows_of(batch: Any, num_rows: int, rows: Sequence[int]) -> Any:
    """Return `rows` of a collated batch. Raises _Indivisible."""
    if hasattr(batch, "shape") and len(batch.shape):
        if batch.shape[0] != num_rows:
            raise _Indivisible
        return batch[list(rows)]
    if isinstance(batch, dict):
        return {key: _rows_of(part, num_rows, rows) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        if len(batch) == num_rows and not all(hasattr(part, "shape") and len(part.shape) for part in batch):
            return type(batch)([batch[row] for row in rows])
        parts = [_rows_of(part, num_rows, rows) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise _Indivisible


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def start_worker(start: Optional[Callable[[int], None]], worker: int) -> None:
    """Initialise a data worker with the user's `start`: torch's worker info names the user's own dataset. Local."""
    info: Any = get_worker_info()
    if info is not None and isinstance(info.dataset, SampleStreams):
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if start is not None:
        start(worker)
