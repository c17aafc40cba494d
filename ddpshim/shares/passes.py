"""The passes over a loader: where the next one begins, and the state from which its order is drawn again."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch.utils.data import Subset


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
    """A loader whose passes can start at any step, with the order and the draws that they had."""

    __len__: Any  # the number of steps of an epoch
    _begins_with: Optional[dict[str, Any]] = None  # the random streams for the next pass
    _has_seed = False  # if they are given: whether the pass draws no seed, because the run's workers stayed
    _begun_with: Optional[dict[str, Any]] = None  # those of this pass

    def can_enter(self) -> bool:
        return True

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Make the next `iter()` begin `epoch` at `start_step`, and later ones the following epochs. Local."""
        raise NotImplementedError

    def order_state(self) -> Optional[dict[str, Any]]:
        """Return the state from which `restore_order` redraws this pass's order; None for a stream. Local."""
        return {
            "generators": generator_states(self),
            "workers stay": self.workers_stay(),
            "begun with": self._begun_with,
        }

    def restore_order(self, state: Optional[dict[str, Any]], is_inside: bool) -> None:
        """Make the next `iter()` redraw the order of the pass of `state` if `is_inside`, else the next one. Local."""
        if state is not None:
            self._begins_with = state["begun with"] if is_inside else {"generators": state["generators"]}
            self._has_seed = state["begun with"]["has seed"] if is_inside else state["workers stay"]

    def workers_stay(self) -> bool:
        return _has_iterator(self)


def order_of(loader: Any) -> Optional[dict[str, Any]]:
    """Return the state of the order of any of torch's loaders. Local."""
    if isinstance(loader, Enterable):
        return loader.order_state()
    return {"generators": generator_states(loader), "workers stay": _has_iterator(loader)}


def _has_iterator(loader: Any) -> bool:
    return getattr(loader, "_iterator", None) is not None


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that the caller has given to one of torch's loaders or to its samplers."""
    owners = [loader, *layers(getattr(loader, "sampler", None)), *layers(getattr(loader, "batch_sampler", None))]
    found = [getattr(owner, "generator", None) for owner in owners]
    return [*dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator))]


def generator_states(loader: Any) -> list[torch.Tensor]:
    """Return the states of the generators that the caller has given to one of torch's loaders or its samplers. Local"""
    return [generator.get_state() for generator in _own_generators(loader)]


def restore_generators(loader: Any, states: Sequence[torch.Tensor]) -> None:
    """Restore what `generator_states` returned, in this process or an earlier one. Local."""
    for generator, state in zip(_own_generators(loader), states):
        generator.set_state(state)


def layers(sampler: Any) -> Iterator[Any]:
    """Yield `sampler` and the samplers that it wraps in an attribute `sampler`, as a BatchSampler does."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def indices_of(dataset: Any) -> list[int]:
    """Return a hash of the indices of each Subset around the program's own dataset: ranks' splits must be equal."""
    found = []
    while isinstance(dataset, Subset):
        found.append(hash(tuple(int(index) for index in dataset.indices)))
        dataset = dataset.dataset
    return found
