"""Finds sums over samples in a loss: ranks average their gradients."""

from __future__ import annotations

from typing import Any

from ddpshim.errors import SyncError
from ddpshim.job.group import world
from ddpshim.trainers.unedited.places import say_on_main

# Nodes between a loss and what it was summed from.
_ELEMENTWISE = {"AddBackward0", "SubBackward0", "NegBackward0", "MulBackward0", "DivBackward0", "ToCopyBackward0"}


def check(loss: Any) -> None:
    """Raise SyncError where `loss`, of a rank's share of a batch, is a sum over samples; say what may be one. Local."""
    for name, is_loss, is_divided in sums(loss.grad_fn):
        if is_loss and not is_divided:
            raise SyncError(
                f'the loss is a sum over the samples of a batch ({name}, reduction="sum"), of which each rank has its '
                f"share; gradients are averaged over the ranks and would be 1/{world().world_size} of those of one "
                "process. Divide it by the number of samples that it was summed over (len of the batch)."
            )
        if is_loss or not is_divided:
            say_on_main(
                f"the loss contains a sum ({name}); if it is over samples, and not divided by the number that this "
                "rank has of them (len of the batch, not a constant), gradients are too small by the number of ranks"
            )


def sums(node: Any) -> set[tuple[str, bool, bool]]:
    """The sums in a loss with this `grad_fn`: (name, whether it is a loss function's own, whether divided). Local."""
    found: set[tuple[str, bool, bool]] = set()
    waiting, seen = [(node, False)], set()
    while waiting:
        node, is_divided = waiting.pop()
        if node is None or (node, is_divided) in seen:
            continue
        seen.add((node, is_divided))
        name = node.name()
        if name in _ELEMENTWISE:
            waiting += [(inner, is_divided or name == "DivBackward0") for inner, _ in node.next_functions]
        elif getattr(node, "_saved_reduction", None) == 2:  # as at::Reduction has it
            found.add((name, True, is_divided))
        elif name == "SumBackward0":
            found.add((name, False, is_divided))
    return found
