"""Passes over a loader that can start at any step, and the state from which their order is drawn again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch.utils.data import Subset


class Enterable:
    """A loader whose passes can start at any step, with the order and the draws that they had."""

    __len__: Any  # the number of steps of an epoch

    def can_enter(self) -> bool:
        return True

    def order_state(self) -> Optional[dict[str, Any]]:
        """Return the state from which `enter` redraws this pass's order; None if none is needed. Local."""
        raise NotImplementedError

    def enter(self, epoch: int, step: int, order: Optional[dict[str, Any]] = None, is_inside: bool = False) -> None:
        """Make the next `iter()` begin `epoch` at `step`, and later ones the following epochs. Local.

        It redraws the order of the pass of `order`, an `order_state`, if `is_inside`, else that of the next one.
        """
        raise NotImplementedError


def order_of(loader: Any) -> Optional[dict[str, Any]]:
    """Return the state of the order of any of torch's loaders. Local."""
    if isinstance(loader, Enterable):
        return loader.order_state()
    workers_stay = getattr(loader, "_iterator", None) is not None
    return {"generators": generator_states(loader), "workers stay": workers_stay}


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
