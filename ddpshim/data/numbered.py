"""Numbers the passes over a loader and their batches of indices, and fetches a batch's samples from a dataset."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler, StackDataset, Subset

from ddpshim.process.random_streams import global_states, is_same_state

LATE_DRAW = (
    "a sample of {} draws random numbers, and those of earlier batches in this pass did not. Other ranks do not draw "
    "them, so they would train with other noise. Draw for each sample"
)
_NUM_AT_ONCE = 2**15  # indices of a permutation that become Python's ints


class Numbered(list[Any]):
    """A rank's indices of one step, with its number in the pass; both are also sent to data workers.

    Attributes:
        whole: the indices of all ranks; empty if they are not known.
        rows: the positions of this rank's indices in `whole`.
        before: batches that the same worker fetched earlier in the pass, before the pass was interrupted.
    """

    def __init__(self, indices: Iterable[Any], step: int) -> None:
        super().__init__(indices)
        self.step = step
        self.whole: list[Any] = []
        self.rows: Sequence[int] = ()
        self.before: list[Sequence[Any]] = []


def has_drawn(before: dict[str, Any]) -> bool:
    """Whether a generator's state is not that of `before`, an earlier `global_states()`."""
    now = global_states()
    return any(name in before and not is_same_state(before[name], state) for name, state in now.items())


def fetched(dataset: Any, indices: Sequence[Any]) -> Any:
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
    module = getattr(by_batch, "__module__", None) or ""
    is_known = module.startswith(("torch.utils.data.", "ddpshim."))  # these fetch each sample alone
    return any(map(joins_samples, _inside(dataset))) if is_known else True


class EpochCounter:
    """The epoch and first step of the current pass, or those set for the next one. Local, equal on all ranks."""

    def __init__(self) -> None:
        self.current = 0
        self.start_step = 0
        self._is_set = True

    def set(self, epoch: int, start_step: int = 0) -> None:
        """Make the next pass use `epoch`, from `start_step` on, and later passes the following epochs, from step 0."""
        self.current, self.start_step = operator.index(epoch), operator.index(start_step)
        self._is_set = True

    def advance(self) -> int:
        """Begin a pass and return its epoch."""
        if not self._is_set:
            self.current += 1
            self.start_step = 0
        self._is_set = False
        return self.current


class Enterable:
    """A loader whose passes can start at any step."""

    __len__: Any  # the number of steps of an epoch

    def can_enter(self) -> bool:
        return True

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Make the next `iter()` begin `epoch` at `start_step`, and later ones the following epochs. Local."""
        raise NotImplementedError

    def order_state(self) -> Optional[dict[str, Any]]:
        """Return the state from which `restore_order` redraws this pass's order; None for a stream. Local."""
        return None

    def restore_order(self, state: Optional[dict[str, Any]], is_inside: bool) -> None:
        """Make the next `iter()` redraw the order of the pass of `state` if `is_inside`, else the next one. Local."""


def own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that the caller has given to one of torch's loaders or to its samplers. Local."""
    owners = [loader, *layers(getattr(loader, "sampler", None)), *layers(getattr(loader, "batch_sampler", None))]
    found = [getattr(owner, "generator", None) for owner in owners]
    return [*dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator))]


def order_of(loader: Any) -> dict[str, Any]:
    """Return what one of torch's loaders keeps from pass to pass. Local."""
    return {
        "generators": [generator.get_state() for generator in own_generators(loader)],
        "workers stay": getattr(loader, "_iterator", None) is not None,
    }


def layers(sampler: Any) -> Iterator[Any]:
    """Yield `sampler` and the samplers that it wraps in an attribute `sampler`, as a BatchSampler does."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        sampler = getattr(sampler, "sampler", None)


class _Permuted:
    """The order of a RandomSampler without replacement, drawn as torch does, but stored as a tensor.

    torch's sampler makes a list of Python's ints, which takes 40 bytes a sample on every rank. Here it is 4.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        num, num_samples, given = len(self._sampler.data_source), self._sampler.num_samples, self._sampler.generator
        generator = torch.Generator() if given is None else given
        if given is None:
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        is_small = num < 2**31 and generator.device.type == "cpu"  # int32 then gives the same numbers
        options: Any = {"dtype": torch.int32 if is_small else torch.int64, "device": generator.device}
        for left in range(num_samples, -1, -num):
            if left or given is not None:  # torch draws once more at the end
                for part in torch.randperm(num, generator=generator, **options)[:left].split(_NUM_AT_ONCE):
                    yield from part.tolist()


def without_lists(sampler: Any) -> Any:
    """Return `sampler`, with torch's RandomSampler in it replaced by one that needs less memory."""
    if type(sampler) is BatchSampler:
        return BatchSampler(without_lists(sampler.sampler), sampler.batch_size, sampler.drop_last)
    return _Permuted(sampler) if type(sampler) is RandomSampler and not sampler.replacement else sampler
