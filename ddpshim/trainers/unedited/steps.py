"""Checks the backward passes and optimizer steps of a program for one process; what is checked depends on the batch."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from ddpshim.errors import SyncError
from ddpshim.job import shares
from ddpshim.job.group import world
from ddpshim.job.job import current
from ddpshim.model.equality import is_milestone
from ddpshim.trainers.unedited import coupling, losses
from ddpshim.trainers.unedited.networks import Networks
from ddpshim.trainers.unedited.places import line_of_the_program, say_on_main

if TYPE_CHECKING:
    from ddpshim.trainers.unedited.loaders import DataLoader

_ROUNDING = 1e-3
_DEADLINE_S = 600.0


class Steps:
    """State of one program that its replaced functions share.

    Attributes:
        networks: the networks that it trains.
        training: the loaders whose training pass has not ended.
        source: the loader of the last batch; None if no loader gave one.
        is_split: whether that batch is only this rank's share.
        is_reading: whether a loader is producing a batch now.
        is_compiled: whether the program compiles a network.
        num_split: number of loaders that were split.
        num_passes: backward passes so far.
        shadows: computes on three more batches beside the current one.
    """

    def __init__(self) -> None:
        self.networks = Networks()
        self.training: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self.source: Optional[DataLoader[Any]] = None
        self.is_split = self.is_reading = self.is_compiled = False
        self.num_split = self.num_passes = 0
        self.shadows = coupling.Shadows()
        self._followed: list[DataLoader[Any]] = []
        self._is_looked_at = False  # whether the current batch is one of those that are checked
        self._num_whole = 0  # backward passes on a whole batch
        self._has_said = False  # whether it was reported that no DataLoader gives batches

    def checked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch.autograd.backward (`original`) that first wraps new networks and checks the loss."""

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            with self.shadows.aside():
                self.networks.wrap()
                self.num_passes += 1
                given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                if self.is_split:
                    self._check_coupling(given)
                    if self._is_looked_at:
                        losses.refuse_ragged(given)
                    with losses.of_the_batch(given):
                        return original(tensors, *args, **kwargs)
                self._num_whole += 1
                if is_milestone(self._num_whole):
                    self._check_alike(given)
                return original(tensors, *args, **kwargs)

        return backward

    def follow(self, loader: DataLoader[Any], batch: Any) -> None:
        """Follow computations on `batch`, this rank's share of a batch of `loader`, if it is to be checked. Local."""
        at_hand = shares.at_hand()
        loader.num_given += 1
        self._is_looked_at = is_milestone(loader.num_given) and world().options.guard
        if self._is_looked_at and not self.is_compiled and at_hand is not None:
            self._followed.append(loader)
            self.shadows.begin(batch, at_hand.num_rows, loader.num_given)

    def leave(self, loader: DataLoader[Any]) -> None:
        """Stop following a batch of `loader`. Local."""
        if any(loader is followed for followed in self._followed):
            self._followed.clear()
            self.shadows.end()

    def compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch.compile (`original`) that also turns following off: compiled operations cannot be followed."""

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self.is_compiled = True
            return original(*args, **kwargs)

        return compile

    def _check_coupling(self, given: Any) -> None:
        """Raise SyncError if a loss is neither a mean nor a sum over samples. Local."""
        if current().part(shares.Sharing).is_permuted:
            return
        for loss in given:
            sums, found = self.shadows.excess(loss), ""
            multipliers, divisors = losses.scales(loss)
            if any(map(self.shadows.differs, multipliers)):
                found = (
                    "a part of it is multiplied by a number that was computed from the whole batch, without gradients"
                )
            elif any(self.shadows.excess(divisor) is not None for divisor in divisors):
                found = "it is divided by a number of the batch that is neither a sum over its samples nor a mean"
            elif sums is not None and not any(map(self.shadows.differs, divisors)):
                found = (
                    f"the losses of two batches sum to {sums[0]:.6g}, and to {sums[1]:.6g} after exchanging some rows"
                )
            if found:
                coupling.refuse(found, line_of_the_program(), world().world_size)

    def check_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Report once if a step used a batch that every rank computes whole, so without speed-up. Local."""
        if self.is_split:
            return
        if self.source is None and self._has_said:
            return
        if self.source is None:
            self._has_said = True
            say_on_main(
                f"{line_of_the_program()}: a step was made on a batch that no DataLoader gave, so every rank "
                "computes the whole batch: the same result as in one process, but no faster. To split batches, take "
                "them from a DataLoader with shuffle=True or a sampler"
            )
        else:
            say_on_main(
                f"{self.source.place}: every rank computes whole batches of this DataLoader (it is sequential or "
                "iterable, or its pass began in eval mode): the same result as in one process, but no faster. With "
                "shuffle=True, or a sampler, batches are split"
            )

    def _check_alike(self, given: Any) -> None:
        """Raise SyncError if ranks computed different losses on a batch that should be the same (collective)."""
        own = [float(loss.detach().double().sum()) for loss in given]
        found = world().meet("losses of whole batches", own, _DEADLINE_S)
        expected = next(iter(found.values()))
        for rank, theirs in found.items():
            if not all(_is_close(x, y) for x, y in zip(expected, theirs)) or len(expected) != len(theirs):
                raise SyncError(
                    f"{line_of_the_program()}: rank 0 computed the loss {expected} and rank {rank} {theirs} on a "
                    "batch that no DataLoader has split; it should be the same batch on all ranks, so the step "
                    "would be wrong. Draw it from torch's, numpy's or Python's global generator, or with a fixed "
                    "seed (np.random.default_rng(0)), or take it from a DataLoader."
                )
        if len(found) < world().world_size:
            raise SyncError(
                f"{line_of_the_program()}: of {world().world_size} ranks only {[*found]} reached backward pass "
                f"{self.num_passes} within {_DEADLINE_S:g} s; the others do something else. The decision must be the "
                "same on all ranks: it must not depend on a clock or on entropy."
            )


def _is_close(one: float, two: float) -> bool:
    return one == two or abs(one - two) <= _ROUNDING * max(abs(one), abs(two)) or (one != one and two != two)
