"""Rules of products, convolutions, normalisations, recurrent layers, attention and losses."""

from __future__ import annotations

import math
from string import ascii_letters
from typing import Any, Optional

import torch

from ddpshim.job.collectives import group
from ddpshim.process.job import current
from ddpshim.rows.blocks import State, added_up, ranks
from ddpshim.rows.rules import (
    Mixed,
    Rule,
    T,
    argument,
    made,
    meeting,
    met,
    place_of,
    row_tensor,
    row_wise,
    rule_if_alike,
    rule_of_rows,
    used_by_rows,
)
from ddpshim.rows.tensor import Rows, total


@rule_if_alike("matmul mm bmm mv __matmul__ __rmatmul__")
def _product(func: Any, args: Any, kwargs: Any) -> Any:
    """(..., M, K) times (..., K, N), with the rows in M, in N, or in one of the dimensions before them."""
    one, other = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "mat2", kwargs.get("other"))
    if func is T.__rmatmul__:
        one, other, func = other, one, torch.matmul
    if not isinstance(one, T) or not isinstance(other, T):
        return NotImplemented
    part, place = place_of((one, other))
    is_vector = one.dim() == 1, other.dim() == 1
    if all(is_vector):
        raise Mixed
    if type(one) is Rows and type(other) is Rows:
        if place < 3:
            raise Mixed
        return row_tensor(func(one.block, other.block), place, part)
    if any(is_vector) and (type(one) is Rows) == is_vector[0] and (type(other) is Rows) == is_vector[1]:
        raise Mixed
    if place >= 3:
        block = func(meeting(one, part, place), meeting(other, part, place))
        return row_tensor(block, place - any(is_vector), part)
    if place != (2 if type(one) is Rows else 1):
        raise Mixed  # the rows are added up
    block = func(*(x.block if type(x) is Rows else used_by_rows(x) for x in (one, other)))
    return row_tensor(block, place - (type(one) is Rows and is_vector[1]), part)


@rule_if_alike("addmm baddbmm")
def _product_and_sum(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) < 3 or type(args[1]) is not Rows:
        return NotImplemented
    part, place = place_of(args)
    if args[1].dimension:
        raise Mixed
    other = meeting(args[2], part, place) if args[1].dim() == 3 else used_by_rows(args[2])
    block = func(meeting(args[0], part, place), args[1].block, other, *args[3:], **kwargs)
    return made(block, args[1], 0)


@rule_of_rows("cdist")
def _distances(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    """(..., P, M) and (..., R, M), with the rows in P, or in a dimension before it."""
    part, place = place_of((rows, others[0]))
    if place < 2 or (place == 2 and isinstance(others[0], Rows)):
        raise Mixed
    other = used_by_rows(others[0]) if place == 2 else meeting(others[0], part, place)
    return row_tensor(func(rows.block, other, *others[1:], **kwargs), place, part)


@rule_if_alike(torch._C._VariableFunctions.einsum)  # type: ignore[attr-defined]
def _einsum(func: Any, args: Any, kwargs: Any) -> Any:
    equation = args[0]
    given = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(equation, str) or "->" not in equation or kwargs:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    letters = inputs.split(",")
    if "..." in equation:  # by letters of its own
        free = "".join(letter for letter in ascii_letters if letter not in equation)
        nums = [x.dim() - len(names) + 3 if "..." in names else 0 for names, x in zip(letters, given)]
        letters = [names.replace("...", free[max(nums) - num : max(nums)]) for names, num in zip(letters, nums)]
        output = output.replace("...", free[: max(nums)])
        equation = ",".join(letters) + "->" + output
    if any(len(names) != x.dim() for names, x in zip(letters, given)):
        raise Mixed  # torch says what is wrong
    found = {(names[x.dimension], x.part) for names, x in zip(letters, given) if type(x) is Rows}
    if len(found) != 1:
        raise Mixed
    ((letter, part),) = found
    if output.count(letter) != 1 or any(names.count(letter) > 1 for names in letters):
        raise Mixed
    for x in given:
        if type(x) is Rows:
            x.memory.pull()
    inside = [
        meeting(x, part, len(names) - names.index(letter)) if letter in names else used_by_rows(x)
        for names, x in zip(letters, given)
    ]
    return row_tensor(func(equation, inside), len(output) - output.index(letter), part)


def _is_first_of(num_dims: int) -> Any:
    return lambda rows, *_: rows.dimension == 0 and rows.dim() == num_dims


def _is_before_sizes(name: str, per_dimension: int) -> Any:
    """Return whether the rows are in a dimension before the last ones, to which an argument's numbers belong. Local."""

    def is_before(rows: Rows, others: Any, kwargs: Any) -> bool:
        return rows.dim() - rows.dimension > len(argument(others, kwargs, 0, name)) // per_dimension

    return is_before


row_wise("linear", where=lambda rows, *_: rows.dimension < rows.dim() - 1)
row_wise("prelu", where=lambda rows, *_: rows.dimension != 1)  # which is that of the weights
row_wise("bucketize")
row_wise(torch._C._nn.pad, where=_is_before_sizes("pad", 2))
row_wise("layer_norm rms_norm", where=_is_before_sizes("normalized_shape", 1))
row_wise("group_norm", where=lambda rows, *_: rows.dimension == 0)
row_wise(
    "instance_norm",  # without statistics that it changes
    where=lambda rows, others, kwargs: not (rows.dimension or kwargs or any(isinstance(x, T) for x in others[2:4])),
)
row_wise(
    "conv1d conv_transpose1d max_pool1d max_pool1d_with_indices avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d "
    "upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d reflection_pad1d replication_pad1d col2im",
    where=_is_first_of(3),
)
row_wise(
    "conv2d conv_transpose2d max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa pixel_shuffle pixel_unshuffle channel_shuffle im2col reflection_pad2d replication_pad2d",
    where=_is_first_of(4),
)
row_wise(
    "conv3d conv_transpose3d max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d "
    "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d",
    where=_is_first_of(5),
)


@rule_if_alike("grid_sampler grid_sampler_2d grid_sampler_3d")
def _sampled(func: Any, args: Any, kwargs: Any) -> Any:
    part, place = place_of(args)
    if place != args[0].dim() or any(x.shape[0] != part.size for x in args[:2]):
        raise Mixed
    return row_tensor(met(func, args, kwargs, part, place), place, part)


@rule_of_rows(torch.batch_norm)
def _batch_norm(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    """In training: over the rows of all ranks (collective, and once differentiable)."""
    if len(others) < 7 or rows.dimension:
        return NotImplemented
    weight, bias, running_mean, running_var, trains, momentum, eps = others[:7]
    if trains:
        from ddpshim.model import batchnorm

        if ranks().size == 1:
            return made(func(rows.block, *others), rows)
        size, part, each = ranks().size, rows.part, rows.block[0, 0].numel() * rows.part.outer
        counts = tuple(each * (end - start) for start, end in (part.bounds(rank, size) for rank in range(size)))
        of_layer = running_mean, running_var, used_by_rows(weight), used_by_rows(bias), momentum, eps
        with_state = (rows.block, *of_layer, group(), counts)
        return made(current().part(State).call(batchnorm.over_ranks, *with_state), rows)
    return made(func(rows.block, *map(used_by_rows, others)), rows)


@rule_if_alike(torch.embedding)
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    """Args: weight, indices, padding_idx, scale_grad_by_freq, sparse."""
    is_odd = argument(args, kwargs, 3, "scale_grad_by_freq") or argument(args, kwargs, 4, "sparse")
    if len(args) < 2 or type(args[1]) is not Rows or is_odd:
        return NotImplemented
    args[1].memory.pull()
    return made(func(used_by_rows(args[0]), args[1].block, *args[2:], **kwargs), args[1])


@rule_if_alike("scaled_dot_product_attention")
def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    if argument(args, kwargs, 4, "dropout_p", 0.0):
        return _attention_that_draws(*args, **kwargs)
    part, place = place_of((*args, *kwargs.values()))
    if place < 3:
        raise Mixed
    return row_tensor(met(func, args, kwargs, part, place), place, part)


def _attention_that_draws(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Any:
    """Return what torch's own attention computes on a CPU, which has no kernel that draws, step by step."""
    if query.device.type != "cpu" or enable_gqa or (is_causal and attn_mask is not None):
        return NotImplemented  # a GPU's kernel draws inside
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    weights = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype is torch.bool
        weights = weights.masked_fill(~attn_mask, -math.inf) if is_bool else weights + attn_mask
    return torch.dropout(weights.softmax(-1), dropout_p, True) @ value


@rule_of_rows("lstm gru rnn_tanh rnn_relu")
def _recurrent(func: Any, rows: Rows, others: Any, kwargs: Any) -> Any:
    """Others: states, parameters, has_biases, num_layers, dropout, train, bidirectional, batch_first."""
    if len(others) != 8 or isinstance(others[1], T) or (others[4] and others[5] and others[3] > 1):
        return NotImplemented
    states, parameters, *options = others
    if rows.dim() != 3 or rows.dimension != (0 if options[-1] else 1) or rows.part.outer > 1:
        raise Mixed
    every = states if isinstance(states, (list, tuple)) else [states]
    if any(type(state) is Rows and (state.dimension, state.part) != (1, rows.part) for state in every):
        raise Mixed
    inside = [meeting(state, rows.part, 2) for state in every]
    given = inside if isinstance(states, (list, tuple)) else inside[0]
    out = func(rows.block, given, used_by_rows(parameters), *options)
    return (made(out[0], rows), *(Rows(state, 1, rows.part) for state in out[1:]))


@rule_if_alike("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def _recurrent_cell(func: Any, args: Any, kwargs: Any) -> Any:
    part, place = place_of(args[:2])
    if place != 2 or kwargs:
        raise Mixed
    out = func(*(meeting(x, part, 2) for x in args[:2]), *map(used_by_rows, args[2:]))
    return Rows(out, 0, part) if isinstance(out, T) else tuple(Rows(one, 0, part) for one in out)


def _elementwise_loss(position: int) -> Rule:
    """Return the rule of a loss whose argument `position` is the kind of reduction: 0 none, 1 mean, 2 sum."""

    def loss(func: Any, args: Any, kwargs: Any) -> Any:
        kind = argument(args, kwargs, position, "reduction")
        if kind not in (0, 1, 2) or (kind and current().part(State).is_in_piece):
            return NotImplemented
        part, place = place_of((*args, *kwargs.values()))
        if len(args) > position:
            args = (*args[:position], 0, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "reduction": 0}
        rows = row_tensor(met(func, args, kwargs, part, place), place, part)
        return total(rows, T.mean if kind == 1 else T.sum, func.__name__) if kind else rows

    return loss


NN = torch._C._nn
rule_if_alike(NN.mse_loss, NN.l1_loss, NN.smooth_l1_loss, NN.huber_loss, torch.kl_div)(_elementwise_loss(2))
rule_if_alike(NN.binary_cross_entropy)(_elementwise_loss(3))
rule_if_alike(torch.binary_cross_entropy_with_logits)(_elementwise_loss(4))


@rule_if_alike(NN.cross_entropy_loss, NN.nll_loss_nd)
def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """Args: logits (B, C, ...), classes (B, ...) or probabilities (B, C, ...), weights, reduction, ignored class."""
    if kwargs or len(args) < 5 or args[3] not in (0, 1, 2):
        return NotImplemented
    if args[3] and (current().part(State).is_in_piece or args[2] is not None):
        return NotImplemented
    (logits, target), kind = args[:2], args[3]
    rows = next((x for x in args[:2] if type(x) is Rows), None)
    if rows is None or logits.dim() < 2:
        raise Mixed
    for x in (logits, target):
        if type(x) is Rows:
            x.memory.pull()
            if (x.dimension, x.part) != (0, rows.part):
                raise Mixed
    inside = [meeting(x, rows.part, x.dim()) for x in (logits, target)]
    out = func(*inside, used_by_rows(args[2]), 0, *args[4:])
    losses = row_tensor(out, out.dim(), rows.part)
    if not kind:
        return losses
    has_classes = not target.is_floating_point()
    out = total(losses, T.sum if has_classes or kind == 2 else T.mean, func.__name__)
    if kind == 2 or not has_classes:
        return out
    num = ((target.block if type(target) is Rows else target) != args[4]).sum()
    return out / (added_up(num) if type(target) is Rows else num)
