"""Fetches batches as one process does, and gives this rank its rows: in the process or the data worker of one process.

`Batches` stands in for the dataset of torch's loader, whose fetcher it calls. A rank fetches its own rows only where
samples are functions of their index (`probe`); elsewhere one data worker of a node fetches a batch for all its ranks
(`relay`), or each rank fetches it whole.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch.utils import data as torch_data

from ddpshim.errors import DataError
from ddpshim.failures import failure
from ddpshim.process.random_streams import changed, global_states, restore_global_states
from ddpshim.rows import blocks

if TYPE_CHECKING:
    from ddpshim.rows.relay import Address, Lines


class Own(NamedTuple):
    """A part of a batch that one process has whole: this rank's rows of a tensor, or of a list of texts."""

    rows: Any


class Fetched(NamedTuple):
    num_rows: int  # of all ranks; 0: the batch is whole on each
    batch: Any  # with `Own` where only this rank's rows are


class Numbered(list[Any]):
    """A rank's indices of one step; also sent to data workers."""

    def __init__(self, whole: list[Any], rows: range) -> None:
        super().__init__(whole[row] for row in rows)
        self.whole = whole  # of all ranks
        self.left_out: list[Any] = []  # earlier batches of the same worker, which a resumed pass leaves out


def walked(of_part: Callable[[Any], Any], batch: Any) -> Any:
    """Return a batch with `of_part` of its tensors, texts and `Own` parts, and of the lists of texts in it. Local."""
    if isinstance(batch, (torch.Tensor, Own)):
        return of_part(batch)
    if isinstance(batch, Mapping):
        changed = {key: walked(of_part, value) for key, value in batch.items()}
        if type(batch) is dict or not hasattr(batch, "update"):
            return changed
        copied: Any = copy.copy(batch)
        copied.update(changed)
        return copied
    if not isinstance(batch, (list, tuple)):
        return batch
    if batch and all(isinstance(one, (str, bytes)) for one in batch):
        return of_part(batch)
    parts = [walked(of_part, one) for one in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[Any] = []
    walked(found.append, batch)
    return [x for x in found if isinstance(x, torch.Tensor)]


def divisible(batch: Any, num_rows: int) -> Any:
    """Return a whole batch with `Own` around each tensor whose rows give every rank a part of it. Local."""
    found = _tensors(batch)
    memory = {x.untyped_storage().data_ptr() for x in found if x.layout is torch.strided and x.numel()}
    if len(memory) < sum(x.numel() > 0 for x in found):
        return batch  # two are views of one memory, or one is given twice: a change of one is seen in the other

    def marked(x: Any) -> Any:
        if type(x) is not torch.Tensor or x.layout is not torch.strided or x.shape[:1] != (num_rows,):
            return x
        is_dense = x.stride() == torch.empty_like(x, device="meta").stride()
        return Own(x) if is_dense and not x.requires_grad else x

    return walked(marked, batch)


def of_rank(marked: Any, start: int, end: int) -> Any:
    """Return what `divisible` returned for the rank with these rows. Local."""
    return walked(lambda x: Own(x.rows[start:end].clone()) if isinstance(x, Own) else x, marked)


class Batches:
    """The batches of a torch loader, in place of its dataset: with indices, or one after the other. Local."""

    def __init__(self, loader: Any, collate: Any, address: Optional[Address], fetches_own: bool) -> None:
        self.dataset, self._collate = loader.dataset, collate
        self._joins = loader.batch_sampler is not None
        self._size, self._drop_last = loader.batch_size, loader.drop_last
        self._ranks, self._num_pieces = blocks.ranks(), blocks.num_pieces()
        self._address = address
        self.fetches_own = fetches_own  # of each batch this rank's samples; a data worker may find that it cannot
        self._start: Optional[Callable[[int], None]] = loader.worker_init_fn
        self._fetcher: Any = None
        self._error: Any = None  # of what comes before a worker's first batch
        self._lines: Optional[Lines] = None
        self._num_joined = 0  # samples of the last batch
        self._left_out: list[Any] = []  # batches that are fetched before the first one whose samples draw

    def begin_pass(self) -> None:
        """Make the workers of the next pass meet at another address."""
        if self._address is not None:
            self._address = self._address._replace(num_passes=self._address.num_passes + 1)

    def start_worker(self, worker: int) -> None:
        """Initialise a data worker as the program does, where it fetches: torch's info names its dataset."""
        info: Any = torch_data.get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", self.dataset)
        if self._address is not None:
            failure.end_with_parent()  # while it waits for a worker of another rank
            from ddpshim.rows.relay import Lines

            self._lines = Lines(self._address, worker)
        if self._start is not None and self._fetches_here():
            self._noting_errors(self._start, worker)

    def _fetches_here(self) -> bool:
        return self._lines is None or self._lines.is_owner or self.fetches_own

    def _noting_errors(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function; other ranks raise its error too, with the first batch."""
        if self._lines is None:
            return function(*args)
        try:
            return function(*args)
        except Exception:
            self._error = self._error or torch._utils.ExceptionWrapper(where=self._lines.where)

    def _begin(self) -> None:
        arguments = self.dataset, self._joins, self._joined, self._drop_last
        self._fetcher = self._noting_errors(fetcher, *arguments)

    def _joined(self, samples: Any) -> Any:
        self._num_joined = len(samples) if self._joins and hasattr(samples, "__len__") else 0
        return self._collate(samples)

    def __iter__(self) -> Any:
        if self._fetches_here():
            self._begin()
        indices = [None] * self._size if self._joins else None
        return iter(lambda: self.__getitem__(indices), None)

    def __getitem__(self, index: Any) -> Any:
        """Return a batch as `Fetched`, or the error that each rank raises. Raises StopIteration as torch's fetcher."""
        if self._fetcher is None and self._error is None and self._fetches_here():
            self._begin()
        self._left_out += getattr(index, "left_out", ())
        if threading.current_thread() is not threading.main_thread():
            # The program's: what others draw meanwhile would be taken for a sample's, and it may read what it gets.
            return Fetched(0, self._marked(index).batch)
        if self.fetches_own:
            return self._own(index)
        return self._whole(index) if self._lines is None else self._once(index, self._lines)

    __getitems__ = __getitem__

    def _own(self, indices: Numbered) -> Any:
        """Fetch this rank's samples; if one draws, or fails, on any rank of the node: as if none had been fetched."""
        before, lines = global_states(), self._lines
        batch = None
        try:
            batch = self._fetcher.fetch([*indices])
        except Exception:
            if lines is None:
                raise
        is_alike = batch is not None and before.keys().isdisjoint(changed(before, global_states()))
        if lines is None and not is_alike:
            worker = ", or use a data worker (num_workers=1), which fetches for all ranks of a node"
            raise DataError(
                f"a sample of {name_of(self.dataset)} uses random numbers, and those before did not. Other ranks do "
                "not, so they would train with other random numbers. Use some for each sample"
                + worker * (torch_data.get_worker_info() is None)
                + ", or set DDPSHIM_DRAWS=sample"
            )
        if lines is None or lines.all(is_alike):
            whole = walked(lambda x: x if isinstance(x, Own) else Own(x), batch)
            return Fetched(len(indices.whole), whole)
        restore_global_states(before)
        self.fetches_own = False
        return self._once(indices, lines)

    def _marked(self, index: Any) -> Fetched:
        while self._left_out:  # for their draws, and what samples remember
            self._fetcher.fetch(self._left_out.pop(0))
        batch = self._fetcher.fetch(index.whole if isinstance(index, Numbered) else index)
        if isinstance(index, Numbered):
            num_rows = len(index.whole)
        elif self._joins:
            num_rows = self._num_joined
        else:  # a batch of the program's own
            sizes = {x.shape[:1] for x in _tensors(batch)}
            num_rows = sizes.pop()[0] if len(sizes) == 1 and () not in sizes else 0
        part = blocks.part_of(num_rows, self._num_pieces)
        return Fetched(num_rows, batch if part is None else divisible(batch, num_rows))

    def _part(self, whole: Fetched, rank: int) -> Fetched:
        part = blocks.part_of(whole.num_rows, self._num_pieces)
        if part is None:
            return whole
        return Fetched(whole.num_rows, of_rank(whole.batch, *part.bounds(rank, self._ranks.size)))

    def _whole(self, index: Any) -> Fetched:
        return self._part(self._marked(index), self._ranks.rank)

    def _once(self, index: Any, lines: Lines) -> Any:
        if not lines.is_owner:
            got = lines.receive()
            if got is None:
                raise StopIteration
            return got
        whole: Any = None
        try:
            whole, self._error = self._error or self._marked(index), None
        except Exception as error:
            if isinstance(error, StopIteration) and isinstance(self.dataset, torch_data.IterableDataset):
                lines.send(lambda rank: None)
                raise
            whole = torch._utils.ExceptionWrapper(where=lines.where)
        if not isinstance(whole, Fetched):
            lines.send(lambda rank: whole)
            return whole
        lines.send(lambda rank: self._part(whole, rank))
        return self._part(whole, self._ranks.rank)


class Around:
    """A dataset of ours that holds the program's."""

    dataset: Any


def _inside(dataset: Any) -> list[Any]:
    """Return the datasets that one of torch's own, or of ours, holds."""
    if isinstance(dataset, (torch_data.Subset, Around)):
        return [dataset.dataset]
    held = dataset.datasets if isinstance(dataset, (torch_data.ConcatDataset, torch_data.StackDataset)) else ()
    return [*held.values()] if isinstance(held, dict) else [*held]


def fetcher(dataset: Any, joins: bool, collate: Callable[[Any], Any], drop_last: bool) -> Any:
    """Return torch's own fetcher of a loader's batches. Local."""
    is_stream = isinstance(dataset, torch_data.IterableDataset)
    kinds = torch_data._DatasetKind
    return kinds.create_fetcher(kinds.Iterable if is_stream else kinds.Map, dataset, joins, collate, drop_last)


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
