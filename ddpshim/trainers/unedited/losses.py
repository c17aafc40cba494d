"""Makes averaged gradients those of the whole batch, where a loss is no mean over a rank's rows.

A sum over samples wants gradients added. A mean over something of which ranks have different numbers (tokens that are
not padding) weighs ranks by these.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch

from ddpshim.errors import SyncError
from ddpshim.job import shares
from ddpshim.job.group import world
from ddpshim.job.job import current
from ddpshim.trainers.unedited.places import line_of_the_program, say_on_main

# Between a loss and the sum that it was computed from, the graph may have these nodes.
_ELEMENTWISE = {"AddBackward0", "SubBackward0", "NegBackward0", "MulBackward0", "DivBackward0", "ToCopyBackward0"}
_SCALING = {"MulBackward0", "DivBackward0"}
_MOST_SCALES = 16
_SELECTED = {"IndexBackward0", "MaskedSelectBackward0"}
_ROUNDING = 1e-6
_MEAN, _SUM = 1, 2  # as at::Reduction has it
_MOST_KEPT = 8  # losses
_KEY = "ddpshim: what makes it that of the batch"  # in the metadata of a node


class Term(NamedTuple):
    """What a loss was added up from."""

    name: str  # of the node that computed it
    is_sum: bool
    is_loss: bool  # a loss function's own sum
    num: Optional[float]  # by what it is divided, in all; None: by what needs gradients itself
    is_counted: bool  # whether that may differ between ranks
    is_constant: bool  # whether it looks like a number of the program's own
    num_rows: int  # of what was summed; 0 where that is not known
    num_averaged: int = 0  # over how many numbers it is a mean; 0 where that is not known


def factor(loss: Any) -> float:
    """By what to multiply `loss`, of a rank's share of a batch, so that averaged gradients are those of the batch.

    Collective where the loss may be a mean over different numbers on each rank. Raises SyncError where a part of it is
    a sum over samples and a part is none.
    """
    share = shares.at_hand()
    found = terms(loss.grad_fn)
    if share is None or not found:
        return 1.0
    # Of rows that another rank has as well nothing counts: the backward pass weighs them by 0.
    mine = [(term.num if share.weight else 0.0) if term.is_counted else None for term in found]
    of_ranks = world().gather(mine) if any(count is not None for count in mine) else [mine] * share.world_size
    factors = [_factor_of(term, [there[i] for there in of_ranks], share) for i, term in enumerate(found)]
    if max(factors) - min(factors) <= _ROUNDING:
        if all(term.is_sum and not term.is_counted for term in found) and factors[0] != 1:
            say_on_main(
                f"{line_of_the_program()}: the loss is a sum over the samples of a batch ({found[0].name}), of which "
                f"each rank has its share; it is multiplied by {share.world_size}, since gradients are averaged over "
                "the ranks. A number that is read out of it is the sum over the whole batch: where the program divides "
                f"that by the length of its batch, which is that of a share, it is {share.world_size} times too large"
            )
        return factors[0]
    _refuse_or_say(found, factors, share)
    return 1.0


def refuse_ragged(given: Any) -> None:
    """Raise SyncError where a mean in a loss is over other numbers of entries a row on other ranks (collective)."""
    share = shares.at_hand()
    if share is None:
        return
    means = [term for loss in given for term in terms(loss.grad_fn) if not term.is_sum and not term.is_counted]
    of_ranks = world().gather([share.num_rows, *(term.num_averaged for term in means)])
    if len({len(there) for there in of_ranks}) > 1:
        return
    for term, *numbers in zip(means, *(there[1:] for there in of_ranks)):
        a_row = {number / there[0] for number, there in zip(numbers, of_ranks)}
        if len({*numbers}) > 1 and len(a_row) > 1:
            told = " and ".join(f"{number:,}" for number in numbers)
            raise SyncError(
                f"{line_of_the_program()}: a mean in the loss ({term.name}) is over {told} numbers on the ranks, for "
                f"{' and '.join(str(there[0]) for there in of_ranks)} samples: these are padded to the longest of a "
                "rank, or are of different sizes. Gradients are averaged over samples, and one process would average "
                "over all numbers. Divide a sum over what counts by its count: (loss * mask).sum() / mask.sum()."
            )


def scales(loss: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By which tensors without gradients means in `loss` are multiplied or divided, and by which sums. Local."""
    share, of_means = shares.at_hand(), list[torch.Tensor]()
    num_rows = 2 if share is None else max(share.num_rows, 2)
    of_sums: list[torch.Tensor] = []
    waiting: list[tuple[Any, tuple[torch.Tensor, ...]]] = [(loss.grad_fn, ())]
    while waiting:
        node, path = waiting.pop()
        if node is None or len(path) > _MOST_SCALES:
            continue
        name, weight = node.name(), getattr(node, "_saved_total_weight", None)
        if name in _ELEMENTWISE:
            saved = [getattr(node, part, None) for part in ("_saved_self", "_saved_other")] if name in _SCALING else []
            path += tuple(x for x in saved if isinstance(x, torch.Tensor) and x.numel() == 1 and not x.requires_grad)
            waiting += [(inner, path) for inner, _ in node.next_functions]
        elif name == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM:
            of_sums += path
        else:
            # A temperature, of a few entries, that is multiplied by a mean of the batch is linear in that one.
            of_means += path if _num_entries(node) >= num_rows else ()
            of_sums += [] if weight is None else [weight]
    return of_means, of_sums


class _Losses:
    """Those of the last backward passes that are more than a mean, by where their number lies."""

    def __init__(self) -> None:
        self.by_place: dict[int, tuple[torch.Tensor, float]] = {}


def note(loss: torch.Tensor, found: float) -> None:
    """Keep the `factor` of a loss for who reads it, or parts of it, once its graph is freed. Local."""
    waiting: list[tuple[Any, float, bool]] = [(loss.grad_fn, found, True)]
    while waiting:
        node, by, is_loss = waiting.pop()
        if node is not None and _KEY not in node.metadata:
            node.metadata[_KEY] = by, is_loss
            if node.name() in _ELEMENTWISE:
                waiting += [(inner, _local_factor(inner), False) for inner, _ in node.next_functions]
    if found != 1:
        kept = current().part(_Losses).by_place
        kept[loss.data_ptr()] = loss.detach(), found
        while len(kept) > _MOST_KEPT:
            del kept[next(iter(kept))]


def factor_of_what_is_read(tensor: torch.Tensor) -> tuple[float, bool]:
    """(what makes the mean over the ranks of a number that of the whole batch, whether that is sure). Local.

    A sum over samples is known by its graph, before the backward pass and after it; a loss also without a graph.
    """
    node: Any = tensor.grad_fn
    if node is None:
        _, found = current().part(_Losses).by_place.get(tensor.data_ptr(), (None, 1.0))
        return found, True
    return node.metadata.get(_KEY) or (_local_factor(node), False)


def _local_factor(node: Any) -> float:
    """That of a sum of sums over samples; 1 for all else."""
    share = shares.at_hand()
    try:
        found = terms(node)
    except RuntimeError:  # the graph was freed
        return 1.0
    if share is None or not found or not all(term.is_sum for term in found):
        return 1.0
    if any(term.is_counted and not term.is_constant for term in found):
        return 1.0
    factors = {_factor_of(term, [term.num] * share.world_size, share) for term in found}
    return factors.pop() if len(factors) == 1 else 1.0


def _refuse_or_say(found: list[Term], factors: list[float], share: shares.Share) -> None:
    for term, wanted in zip(found, factors):
        if term.is_loss and wanted == _whole(share):
            raise SyncError(
                f"{line_of_the_program()}: the loss contains a sum over the samples of a batch ({term.name}, "
                'reduction="sum") beside terms that are none; each rank has its share of the samples, gradients are '
                f"averaged over the ranks, and those of the sum would be 1/{world().world_size} of those of one "
                "process. Divide it by the number of samples that it was summed over (len of the batch)."
            )
        if term.is_sum and wanted == _whole(share):
            say_on_main(
                f"the loss contains a sum ({term.name}); if it is over samples, and not divided by the number that "
                "this rank has of them (len of the batch, not a constant), gradients are too small by the number of "
                "ranks"
            )
        elif wanted != 1:
            say_on_main(
                f"{line_of_the_program()}: a part of the loss ({term.name}) is a mean over numbers of which ranks have "
                "different ones (what is not padding), and another part is not; ranks weigh equally in both"
            )


def _factor_of(term: Term, counts: list[Any], share: shares.Share) -> float:
    """For this term alone; `counts`: of each rank."""
    if term.is_sum and term.num_rows and share.num_samples(term.num_rows) is None:
        return 1.0  # over no samples
    if term.is_counted and not (term.is_constant and len({*counts}) == 1 and _is_plain(counts[0], share)):
        return float(counts[share.rank] / sum(counts)) * _whole(share) if sum(counts) else 1.0
    if not term.is_sum or term.num is None:
        return 1.0
    is_divided = term.num % share.num_rows == 0  # else by a weight, or the number of accumulated batches
    is_whole = not is_divided or term.num == share.total(share.num_rows)
    return _whole(share) if is_whole else 1.0


def _whole(share: shares.Share) -> float:
    """What makes an average over ranks a sum, beside the weight that the backward pass gives this rank's rows."""
    return share.world_size / share.weight if share.weight else 1.0


def _is_plain(count: float, share: shares.Share) -> bool:
    """Whether an integer is rather the program's own than the sum of a mask, which would be large."""
    return count <= share.num_rows or count % share.num_rows == 0


def terms(node: Any) -> list[Term]:
    """The terms of a loss with this `grad_fn`. Local."""
    found: dict[Term, None] = {}
    waiting: list[tuple[Any, Optional[float], bool, bool]] = [(node, 1.0, False, True)]
    seen = set()
    while waiting:
        node, count, is_divided, is_constant = waiting.pop()
        if node is None or (node, count) in seen:
            continue
        seen.add((node, count))
        name = node.name()
        reduction = getattr(node, "_saved_reduction", None)
        if name in _ELEMENTWISE:
            by, is_fixed = _divided_by(node, name)
            inside = None if by is None or count is None else by * count
            divides, is_ours = is_divided or name == "DivBackward0", is_constant and is_fixed
            waiting += [(inner, inside, divides, is_ours) for inner, _ in node.next_functions]
        elif reduction == _SUM:
            rows = _rows(getattr(node, "_saved_self", None))
            found[Term(name, True, True, count, is_divided and count is not None, is_constant, rows)] = None
        elif name == "SumBackward0":
            sizes: Any = getattr(node, "_saved_self_sym_sizes", ())
            rows = int(sizes[0]) if len(sizes) else 0
            found[Term(name, True, False, count, is_divided and count is not None, is_constant, rows)] = None
        elif name != "torch::autograd::AccumulateGrad":
            averaged = _num_averaged(node, name, reduction)
            share = shares.at_hand()
            if averaged is None and is_divided and count is not None and not is_constant and share is not None:
                averaged = count * share.weight  # by another mean: of a mask
            found[Term(name, False, False, averaged, averaged is not None, False, 0, _num_entries(node))] = None
    return [*found]


def _num_averaged(node: Any, name: str, reduction: Optional[int]) -> Optional[float]:
    """Over how many numbers it is a mean, where that is not by shape the same on all ranks; else None."""
    weight, target = getattr(node, "_saved_total_weight", None), getattr(node, "_saved_target", None)
    share = shares.at_hand()
    if reduction == _MEAN and weight is not None and target is not None:  # without what ignore_index leaves out
        is_weighted = getattr(node, "_saved_weight", None) is not None  # each class by its own
        return float(weight) if share is not None and (is_weighted or target.numel() > share.num_rows) else None
    is_mean = name == "MeanBackward0" or reduction == _MEAN
    if not is_mean or not any(inner is not None and inner.name() in _SELECTED for inner, _ in node.next_functions):
        return None
    own = getattr(node, "_saved_self", None)
    return float(node._saved_self_sym_numel if own is None else own.numel())


def _num_entries(node: Any) -> int:
    own = getattr(node, "_saved_self", None)
    return int(own.numel() if own is not None else getattr(node, "_saved_self_sym_numel", 0))


def _divided_by(node: Any, name: str) -> tuple[Optional[float], bool]:
    """By what number this node divides, and whether that is a constant of the program's."""
    if name not in _SCALING:
        return 1.0, True
    other = getattr(node, "_saved_other", None)
    if other is not None and (other.numel() != 1 or other.requires_grad):
        other = None
    if name == "MulBackward0":
        by = 1 / float(other) if other is not None and 0 < float(other) < 1 else 1.0
        return (float(round(by)), True) if abs(by - round(by)) < _ROUNDING * by else (1.0, True)
    if other is None:
        return None, False
    return float(other), other.dtype in (torch.float64, torch.int64) and other.device.type == "cpu"


def _rows(tensor: Any) -> int:
    return int(tensor.shape[0]) if tensor is not None and tensor.dim() else 0
