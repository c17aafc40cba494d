"""Scales the gradients of a loss that is not a mean over rows, so that their mean over ranks is the global batch's.

For a sum over samples, gradients must be added. For a mean over entries of which ranks have different numbers (tokens
without padding), ranks must be weighted by these numbers. One loss may have terms of several kinds, so hooks on nodes
of the graph scale the gradient of each term. The loss keeps its value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job import shares
from ddpshim.job.group import world
from ddpshim.job.job import current
from ddpshim.trainers.unedited.places import line_of_the_program, say_on_main

# Nodes that the graph may have between a loss and its terms.
_ELEMENTWISE = {"AddBackward0", "SubBackward0", "NegBackward0", "MulBackward0", "DivBackward0", "ToCopyBackward0"}
_SCALING = {"MulBackward0", "DivBackward0"}
_STACKED, _COMPILED = "StackBackward0", "CompiledFunctionBackward"
_MOST_SCALES = 16
_SELECTED = {"IndexBackward0", "MaskedSelectBackward0"}
_ROUNDING = 1e-6
_MEAN, _SUM = 1, 2  # values of at::Reduction
# torch's default ignore_index, -100, as torch stores it. With one label a sample, it is assumed not to occur.
_IGNORED_INDEX = 2**64 - 100
_MOST_KEPT = 8  # losses
_KEY = "ddpshim: what makes it that of the batch"  # the key of a `Reading` in a node's metadata


class Term(NamedTuple):
    """One term of the sum that makes up a loss."""

    name: str  # class name of the node that computed it
    is_sum: bool
    num: Optional[float]  # product of its divisors, or entries of its mean; None: unknown (a divisor with gradients)
    is_counted: bool  # whether `num` may differ between ranks
    is_constant: bool  # whether all divisors are Python numbers, not tensors such as mask.sum()
    is_plain: bool  # whether all divisors are probably constants, not counts read from a mask
    is_by_rows: bool  # whether a divisor is probably the number of this rank's samples
    num_rows: int  # first size of the summed tensor; 0 if unknown
    own: Any  # its node
    node: Any  # the node above, whose gradient for input `number` goes to this term; `own` if the loss is this term
    number: int


class Reading(NamedTuple):
    """How to average a number over ranks to get the number of the global batch."""

    times: float = 1.0  # factor for a rank's number, before averaging
    weight: Optional[float] = None  # a rank's weight in the mean; None: its number of rows
    is_sure: bool = True  # False: derived from this rank's graph only
    is_mixed: bool = False  # terms need different factors or weights, so no average gives the global batch's number


@contextlib.contextmanager
def of_the_batch(given: Sequence[Any]) -> Iterator[None]:
    """Within this block, a backward pass of the losses `given` scales the gradient of each term of a loss.

    The mean of the gradients over ranks is then the gradient of the global batch. Collective if a term's divisor may
    differ between ranks.

    Raises:
        SyncError: a term occurs twice, with divisors that need different factors.
    """
    by_node: dict[Any, dict[int, float]] = {}
    for loss in given:
        factors, reading = _factors(loss)
        for term, factor in factors.items():
            known = by_node.setdefault(term.node, {}).setdefault(term.number, factor)
            if abs(known - factor) > _ROUNDING * abs(factor):
                _refuse_twice(term)
        _note(loss, reading)
    handles = []
    try:
        for node, of_inputs in by_node.items():
            if any(factor != 1 for factor in of_inputs.values()):
                is_above = _name(node) in _ELEMENTWISE or _name(node) == _STACKED
                register = node.register_hook if is_above else node.register_prehook
                handles.append(register(functools.partial(_scaled, of_inputs)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scaled(by: dict[int, float], gradients: Sequence[Any], *_: Any) -> tuple[Any, ...]:
    # A factor of 0 means that this rank divided by 0: its gradient is nan, so it is replaced, not multiplied.
    scaled = {number: by.get(number, 1.0) for number, x in enumerate(gradients) if x is not None}
    return tuple(
        x if x is None else x * scaled[number] if scaled[number] else torch.zeros_like(x)
        for number, x in enumerate(gradients)
    )


def _factors(loss: Any) -> tuple[dict[Term, float], Reading]:
    """Return the factor of each term's gradient, and how to read `loss`. Collective if a term `is_counted`."""
    share = shares.at_hand()
    found = terms(loss.grad_fn)
    if share is None or not found:
        return {}, Reading()
    own = _counts(found, share)
    of_ranks = world().gather(own) if any(count is not None for count in own) else [own] * share.world_size
    factors = {term: _factor_of(term, [counts[i] for counts in of_ranks], share) for i, term in enumerate(found)}
    of_samples = [term for term in found if term.is_sum and not term.is_counted and factors[term] != 1]
    if any(_name(term.own) == _COMPILED for term in found):
        say_on_main(
            f"{line_of_the_program()}: the loss comes from a compiled function, whose terms ddpshim cannot see, so it "
            "counts as a mean over the samples. If it is a sum over samples, or a mean over unmasked entries, the "
            "gradients differ from one process: compile only the network"
        )
    if of_samples:
        say_on_main(
            f"{line_of_the_program()}: the loss has a sum over the samples of a batch ({of_samples[0].name}), and each "
            f"rank has only its share. DDP averages gradients, so those of the sum are multiplied by "
            f"{share.world_size}. If the program multiplies the sum by 1 / len(batch), they are too large: divide by "
            "len(batch). A number read from the sum is that of the whole batch; divided by the length of a rank's "
            f"batch it is {share.world_size} times too large"
        )
    return factors, _reading(found, of_ranks, share)


def _counts(found: list[Term], share: shares.Share) -> list[Optional[float]]:
    # A rank that repeats another rank's rows counts 0: the backward pass weights its gradients by 0.
    return [(term.num if share.weight else 0.0) if term.is_counted else None for term in found]


def _refuse_twice(term: Term) -> None:
    raise SyncError(
        f"{line_of_the_program()}: a part of the loss ({term.name}) is in it several times, divided by different "
        "numbers: one is the number of the rank's samples or of unpadded entries, another is not. Its gradient would "
        "be right for only one of them. Compute it once for each: (x * mask).sum() / mask.sum() + x.mean(), instead "
        "of reusing one sum."
    )


def refuse_ragged(given: Any) -> None:
    """Raise SyncError if the entries per row of a mean in a loss differ between ranks (collective)."""
    share = shares.at_hand()
    if share is None:
        return
    means = [term for loss in given for term in terms(loss.grad_fn) if not term.is_sum and not term.is_counted]
    of_ranks = world().gather([share.num_rows, *(_num_averaged(term.own) for term in means)])
    if len({len(found) for found in of_ranks}) > 1:
        return
    for term, *numbers in zip(means, *(found[1:] for found in of_ranks)):
        per_row = {number / found[0] for number, found in zip(numbers, of_ranks)}
        if len({*numbers}) > 1 and len(per_row) > 1:
            entries = " and ".join(f"{number:,g}" for number in numbers)
            raise SyncError(
                f"{line_of_the_program()}: a mean in the loss ({term.name}) is over {entries} entries on the ranks, "
                f"for {' and '.join(str(found[0]) for found in of_ranks)} samples: each rank pads to its longest "
                "sample, or samples differ in size. Gradients are averaged over samples, but one process would "
                "average over all entries. Divide the sum of unmasked entries by their number: "
                "(loss * mask).sum() / mask.sum()."
            )


def scales(loss: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the one-element tensors without gradients that multiply terms of `loss`, and those that divide. Local."""
    share, multipliers = shares.at_hand(), list[torch.Tensor]()
    num_rows = 2 if share is None else max(share.num_rows, 2)
    divisors: list[torch.Tensor] = []
    waiting: list[tuple[Any, tuple[torch.Tensor, ...]]] = [(loss.grad_fn, ())]
    while waiting:
        node, path = waiting.pop()
        if node is None or len(path) > _MOST_SCALES:
            continue
        name, weight = _name(node), getattr(node, "_saved_total_weight", None)
        stacked = _stacked(node, name)
        if stacked is not None or name in _ELEMENTWISE:
            saved = [getattr(node, part, None) for part in ("_saved_self", "_saved_other")] if name in _SCALING else []
            numbers = [x for x in saved if isinstance(x, torch.Tensor) and x.numel() == 1 and not x.requires_grad]
            if name == "DivBackward0":
                divisors += numbers
            else:
                path += tuple(numbers)
            waiting += [(inner, path) for inner, _ in (stacked or node).next_functions]
        else:
            # A term of few entries (a learned temperature) may be multiplied by a mean over the batch: the loss is
            # linear in that mean, so it couples no samples.
            multipliers += path if _is_sum(node) or _num_entries(node) >= num_rows else ()
            divisors += [] if weight is None else [weight]
    return multipliers, divisors


class _Losses:
    """The losses of the last backward passes that are not read as a plain mean, by the address of their data."""

    def __init__(self) -> None:
        self.by_place: dict[int, tuple[torch.Tensor, Reading]] = {}


def _note(loss: torch.Tensor, found: Reading) -> None:
    """Record how to read a loss and its parts: reads may happen after its graph is freed. Local."""
    waiting: list[tuple[Any, Optional[Reading]]] = [(loss.grad_fn, found)]
    while waiting:
        node, reading = waiting.pop()
        if node is not None and _KEY not in node.metadata:
            node.metadata[_KEY] = reading or _reading_by_graph(node)
            stacked = _stacked(node, _name(node))
            if stacked is not None or _name(node) in _ELEMENTWISE:
                waiting += [(inner, None) for inner, _ in (stacked or node).next_functions]
    if found != Reading():
        kept = current().part(_Losses).by_place
        kept[loss.data_ptr()] = loss.detach(), found
        while len(kept) > _MOST_KEPT:
            del kept[next(iter(kept))]


def reading_of(tensor: torch.Tensor) -> Reading:
    """Return how to read the number in `tensor`. Local.

    A sum over samples is recognised by its graph, before and after the backward pass; a loss also once detached.
    """
    node: Any = tensor.grad_fn
    if node is None:
        return current().part(_Losses).by_place.get(tensor.data_ptr(), (None, Reading()))[1]
    return node.metadata.get(_KEY) or _reading_by_graph(node)


def _reading_by_graph(node: Any) -> Reading:
    """Return how to read the result of `node`, from this rank's graph only."""
    share = shares.at_hand()
    try:
        found = terms(node)
    except RuntimeError:  # the graph was freed
        return Reading()
    if share is None or not found:
        return Reading()
    return _reading(found, [_counts(found, share)] * share.world_size, share)._replace(is_sure=False)


def _reading(found: list[Term], of_ranks: list[list[Optional[float]]], share: shares.Share) -> Reading:
    """Return how to read the sum of these terms; `of_ranks`: the `_counts` of each rank."""
    counts = [[of_rank[i] for of_rank in of_ranks] for i in range(len(found))]
    are_weighed = [_is_weighed(term, of_term) for term, of_term in zip(found, counts)]
    if all(are_weighed):
        weights = [of_term[share.rank] for of_term in counts]
        if _is_one(weights):
            return Reading(weight=weights[0])
    if any(are_weighed):
        is_number = all(of_term[share.rank] for of_term, is_weighed in zip(counts, are_weighed) if is_weighed)
        # A rank that divided by 0 gets the weight 0: its number is nan.
        return Reading(weight=float(share.num_counted if is_number else 0), is_mixed=True)
    factors = [_factor_of(term, of_term, share) for term, of_term in zip(found, counts)]
    # Where ranks have different numbers of rows, a read after the batch needs those of the batch.
    rows = float(share.num_counted) if share.totals else None
    return Reading(factors[0], rows) if _is_one(factors) else Reading(weight=rows, is_mixed=True)


def _is_one(numbers: list[Any]) -> bool:
    return bool(max(numbers) - min(numbers) <= _ROUNDING)


def _factor_of(term: Term, counts: list[Any], share: shares.Share) -> float:
    """Return the factor of this term's gradient; `counts`: of each rank."""
    if term.is_sum and term.num_rows and share.num_samples(term.num_rows) is None:
        return 1.0  # a sum over something other than samples
    if _is_weighed(term, counts):
        return float(counts[share.rank] / sum(counts)) * _whole(share) if sum(counts) else 1.0
    return _whole(share) if term.is_sum and term.num is not None and not term.is_by_rows else 1.0


def _is_weighed(term: Term, counts: list[Any]) -> bool:
    """Whether each rank is weighted by its divisor of this term; `counts`: of each rank."""
    return term.is_counted and not (term.is_plain and len({*counts}) == 1)


def _whole(share: shares.Share) -> float:
    """Return the factor that turns the mean over ranks into a sum; undoes `share.weight` of the backward pass."""
    return share.world_size / share.weight if share.weight else 1.0


def terms(node: Any) -> list[Term]:
    """Return the terms of a loss with this `grad_fn`. Local."""
    found: dict[Term, None] = {}
    waiting: list[tuple[Any, tuple[Any, int], _Divided]] = [(node, (node, 0), _Divided())]
    seen, share = set(), shares.at_hand()
    while waiting:
        node, place, divided = waiting.pop()
        if node is None:
            continue
        name, num = _name(node), divided.num
        stacked = _stacked(node, name)
        if stacked is not None or name in _ELEMENTWISE:
            if (node, num) not in seen:
                seen.add((node, num))
                above = stacked or node
                inside = divided.by(node, name)
                waiting += [(inner, (above, i), inside) for i, (inner, _) in enumerate(above.next_functions)]
            continue
        if _is_sum(node):
            own = getattr(node, "_saved_self", None)
            sizes: Any = getattr(node, "_saved_self_sym_sizes", ()) if own is None else own.shape
            rows = int(sizes[0]) if len(sizes) else 0
            is_counted = divided.is_counted and num is not None
            found[Term(name, True, num, is_counted, *divided[2:], rows, node, *place)] = None
        elif name != "AccumulateGrad":
            averaged = _count(node, name)
            if averaged is None and divided.is_counted and num is not None and not divided.is_constant and share:
                averaged = num * share.weight  # a mean divided by another mean, such as mask.mean()
            found[Term(name, False, averaged, averaged is not None, False, False, False, 0, node, *place)] = None
    return [*found]


def _stacked(node: Any, name: str) -> Any:
    """Return the torch.stack node if this node is the sum or mean of stacked losses; else None."""
    share = shares.at_hand()
    sizes: Any = getattr(node, "_saved_self_sym_sizes", ()) if name in ("SumBackward0", "MeanBackward0") else ()
    # A stack as long as the batch may have one loss per sample.
    if len(sizes) != 1 or share is None or share.num_samples(int(sizes[0])) is not None:
        return None
    inner = node.next_functions[0][0]
    return inner if inner is not None and _name(inner) == _STACKED else None


def _name(node: Any) -> str:
    return type(node).__name__  # torch 2.1 has no `name()` of a torch.autograd.Function


def _is_sum(node: Any) -> bool:
    """Whether `node` may be a sum over samples. Computed only from parameters of the summed shape, it is a penalty."""
    if _name(node) != "SumBackward0":
        return getattr(node, "_saved_reduction", None) == _SUM
    waiting, seen = [node], {None}
    while waiting:
        inner = waiting.pop()
        leaf = inner.variable if _name(inner) == "AccumulateGrad" else None
        if leaf is not None and not (isinstance(leaf, nn.Parameter) and leaf.shape == node._saved_self_sym_sizes):
            return True
        waiting += [further for further, _ in inner.next_functions if further not in seen]
        seen.update(waiting)
    return False


def _count(node: Any, name: str) -> Optional[float]:
    """Return the number of entries of a mean if it may differ between ranks with the same shapes; else None."""
    weight, target = getattr(node, "_saved_total_weight", None), getattr(node, "_saved_target", None)
    share, reduction = shares.at_hand(), getattr(node, "_saved_reduction", None)
    if reduction == _MEAN and weight is not None and target is not None:  # `weight` excludes ignored labels
        is_counted = node._saved_weight is not None or node._saved_ignore_index != _IGNORED_INDEX
        return float(weight) if share is not None and (is_counted or target.numel() > share.num_rows) else None
    is_mean = name == "MeanBackward0" or reduction == _MEAN
    if not is_mean or not any(inner is not None and _name(inner) in _SELECTED for inner, _ in node.next_functions):
        return None
    own = getattr(node, "_saved_self", None)
    return float(node._saved_self_sym_numel if own is None else own.numel())


def _num_averaged(node: Any) -> float:
    """Return the number of entries of a mean; 0 if unknown."""
    weight = getattr(node, "_saved_total_weight", None)
    return _num_entries(node) if weight is None else float(weight)


def _num_entries(node: Any) -> int:
    own = getattr(node, "_saved_self", None)
    return int(own.numel() if own is not None else getattr(node, "_saved_self_sym_numel", 0))


class _Divided(NamedTuple):
    """The divisors of a part of a loss. Fields: see `Term`."""

    num: Optional[float] = 1.0
    is_counted: bool = False
    is_constant: bool = True
    is_plain: bool = True
    is_by_rows: bool = False

    def by(self, node: Any, name: str) -> _Divided:
        """Return these divisors together with that of `node`."""
        # Multiplications do not count: 0.1 is a weight, not 1 / 10 samples. So sum * (1 / len(batch)) remains a sum.
        if name != "DivBackward0" or self.num is None:
            return self
        other, share = getattr(node, "_saved_other", None), shares.at_hand()
        if other is None or other.numel() != 1 or other.requires_grad:
            return _Divided(None, True, False, False)
        number = float(other)
        is_constant = _is_of_python(other)
        is_plain = is_constant and (share is None or _is_plain(number, share))
        is_by_rows = share is not None and number % share.num_rows == 0 and number != share.total(share.num_rows)
        return _Divided(
            self.num * number,
            True,
            self.is_constant and is_constant,
            self.is_plain and is_plain,
            self.is_by_rows or is_by_rows,
        )


def _is_of_python(number: torch.Tensor) -> bool:
    """Whether this was a Python number: unlike a tensor, it does not determine the dtype of a result."""
    other = torch.empty((), dtype=torch.float16 if number.is_floating_point() else torch.int8, device="cpu")
    return torch.result_type(number, other) != number.dtype


def _is_plain(number: float, share: shares.Share) -> bool:
    """Whether a divisor is probably a constant, not the sum of a mask, which would be large."""
    total = share.total(share.num_rows)
    most_rows = -(-total // share.world_size)  # of any rank
    return number <= most_rows or number % most_rows == 0 or number == total
