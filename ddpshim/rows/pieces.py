"""Computes rules in pieces, for the option `exact`: the bits of a result then do not depend on the number of ranks.

With exact=V every dimension of rows is divided into V pieces, of which each of W ranks holds V / W. A rule is computed
for one piece after the other, with tensors of the same shapes and layouts for every W. Gradients of whole tensors are
added up over all pieces, from the first to the last, so no wrapper reduces those of parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import torch

from ddpshim.model.mean_gradients import moved_back, order_in_memory
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced
from ddpshim.rows import blocks, rules
from ddpshim.rows.blocks import Part, Ranks
from ddpshim.rows.tensor import RULES, Rows, divided, leaves, mapped, on_whole

_ALIGNMENT = 64  # bytes; kernels round differently at other addresses


class AddUp(torch.autograd.Function):
    """The pieces' gradients of this rank -> the sum over all pieces, in their order (collective)."""

    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        ctx.num = len(gradients)
        every = [gradient for theirs in blocks.gather_alike(torch.stack(gradients)) for gradient in theirs]
        total: torch.Tensor = every[0].clone()
        for gradient in every[1:]:
            total.add_(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ForPieces.apply(gradient, ctx.num)  # type: ignore[no-untyped-call]


class ForPieces(torch.autograd.Function):
    """A whole tensor -> itself for each piece of this rank (its backward pass is collective)."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, num: int) -> tuple[torch.Tensor, ...]:
        return tuple(whole.view_as(whole) for _ in range(num))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return AddUp.apply(*gradients), None  # type: ignore[no-untyped-call]


def dense(tensor: torch.Tensor, order: Optional[list[int]] = None) -> torch.Tensor:
    """Return a tensor in a layout, and at an address, that do not depend on what it is a part of. Local.

    So is its gradient, and the gradient of that: a backward pass may make it a part of one of more pieces.
    `order`: its dimensions from the one with the largest stride to the one with the smallest; default as they are.
    """
    order = order_in_memory(tensor) if order is None else order
    made = tensor.permute(order).contiguous()
    made = moved_back(made.clone() if made.data_ptr() % _ALIGNMENT else made, order)
    if made.requires_grad and not made.is_leaf:
        made.register_hook(dense)
    return made


def parted(rows: Rows) -> list[Rows]:
    """Return a row tensor for each piece of this rank. Local."""
    cuts, dim, block, outer = rows.part.cuts, rows.dimension, rows.block, rows.part.outer
    sizes = [cuts[i + 1] - cuts[i] for i in _own_pieces()]  # of one `outer`
    if len(sizes) == 1:
        found: Sequence[torch.Tensor] = [block]
    elif outer == 1:
        found = block.split(sizes, dim)
    else:
        found = [one.flatten(dim, dim + 1) for one in block.unflatten(dim, (outer, sum(sizes))).split(sizes, dim + 1)]
    return [Rows(dense(one), dim, rows.part) for one in found]


def joined(pieces: Sequence[Rows]) -> Rows:
    """Return the row tensor of this rank's pieces. Local."""
    first, dim, outer = pieces[0], pieces[0].dimension, pieces[0].part.outer
    found = [piece.block for piece in pieces]
    for one in found:
        if one.requires_grad and not one.is_leaf:  # its gradient may be a part of that of more pieces
            one.register_hook(functools.partial(dense, order=order_in_memory(one)))
    if len(found) == 1:
        return Rows(dense(found[0]), dim, first.part)
    if outer > 1:
        found = [one.unflatten(dim, (outer, one.shape[dim] // outer)) for one in found]
        dim += 1
    order = order_in_memory(found[0])
    block = moved_back(torch.cat([one.permute(order) for one in found], order.index(dim)), order)
    return Rows(block.flatten(dim - 1, dim) if outer > 1 else block, first.dimension, first.part)


def _own_pieces() -> range:
    here, num_pieces = blocks.ranks(), current().part(blocks.State).num_pieces
    each = num_pieces // here.size
    return range(here.rank * each, (here.rank + 1) * each)


class Expand(torch.autograd.Function):
    """A block -> its view with more rows in other dimensions; the backward pass adds these up piece by piece.

    Arguments: the block, the view's shape, and dimension and part of the rows, in the block and in the view.
    """

    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, shape: Any, dim: int, dim_of_view: int, part: Part) -> torch.Tensor:
        ctx.place = block.shape, dim, dim_of_view, part
        return block.expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shape, dim, dim_of_view, part = ctx.place
        pieces = parted(Rows(gradient, dim_of_view, part))
        sizes = [[*shape[:dim], one.block.shape[dim_of_view], *shape[dim + 1 :]] for one in pieces]
        sums = [Rows(one.block.sum_to_size(size), dim, part) for one, size in zip(pieces, sizes)]
        return joined(sums).block, None, None, None, None


def _expanding(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def expanded(func: Any, args: Any, kwargs: Any) -> Any:
        found = rule(func, args, kwargs)
        if type(found) is not Rows or not found.block.requires_grad:
            return found
        rows, shape = args[0], found.block.shape
        view: Any = Expand.apply(rows.block, shape, rows.dimension, found.dimension, found.part)  # type: ignore[no-untyped-call]
        return rules.made(view, rows, found.dimension)

    return expanded


def in_pieces(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that computes `rule` for one piece after the other."""

    @functools.wraps(rule)
    def computed(func: Any, args: Any, kwargs: Any) -> Any:
        given = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_drawing = "attention" in func.__name__ and rules.argument(args, kwargs, 4, "dropout_p", 0.0)
        state = current().part(blocks.State)
        if state.is_in_piece or is_drawing:
            return rule(func, args, kwargs)
        if func is torch.batch_norm and len(args) > 5 and args[5]:  # in training: over all rows
            return divided(on_whole(func, args, kwargs))
        own = _own_pieces()
        of: dict[int, Any] = {}
        for x in given:
            if type(x) is Rows:
                x.memory.pull()
                of[id(x)] = parted(x)
        if not of:
            return rule(func, args, kwargs)
        changed = args[0] if rule is rules.in_place and type(args[0]) is Rows else None
        if changed is not None:
            for piece in of[id(changed)]:
                piece.block = piece.block.clone()
        for x in given:
            if id(x) not in of and x.requires_grad and torch.is_grad_enabled():
                of[id(x)] = ForPieces.apply(x, len(own))  # type: ignore[no-untyped-call]
        found = []
        for i, number in enumerate(own):
            inside = mapped(lambda x, i=i: of[id(x)][i] if id(x) in of else x, (args, kwargs))  # type: ignore[misc]
            ranks = Ranks(number, state.num_pieces)  # for which this one computes the piece
            with replaced(state, "ranks", ranks), replaced(state, "is_in_piece", True):
                found.append(rule(func, *inside))
        tensors = [x for x in leaves(found[0]) if isinstance(x, torch.Tensor) and type(x) is not Rows]
        if found[0] is NotImplemented or any(x.requires_grad for x in tensors):
            return NotImplemented  # each piece would have all of a whole's gradient, and they are added up
        if changed is not None:
            changed.block.copy_(joined(of[id(changed)]).block)
            changed.memory.wrote()
            return changed
        if isinstance(found[0], (tuple, list)):
            return type(found[0])([joined(ones) if type(ones[0]) is Rows else ones[0] for ones in zip(*found)])
        return joined(found) if type(found[0]) is Rows else found[0]

    return computed


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within this block, rules are computed in pieces. Local."""
    before = dict(RULES)
    RULES.update((func, in_pieces(rule)) for func, rule in before.items() if func not in rules.MOVING)
    expands = [func for func in rules.functions(("expand", "expand_as", "broadcast_to")) if func in before]
    RULES.update((func, _expanding(before[func])) for func in expands)
    try:
        yield
    finally:
        RULES.clear()
        RULES.update(before)
