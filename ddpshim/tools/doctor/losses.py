"""Holds the rules about losses that are not means over samples: the mean over ranks differs from the whole batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.meaning import is_without_gradients
from ddpshim.tools.doctor.nodes import constant, entered, identifiers, last_name, values_of
from ddpshim.tools.doctor.rules import Case, Hit, rule, text_of
from ddpshim.tools.doctor.source import Unit

_LOSS_UNIT = re.compile(r"(?i)(loss|train|step|forward|objective|criterion|backprop|learn)")
_FIXED_SHARE = re.compile(r"(?i)mask(ing)?_ratio|num_mask|len_keep")
_MASK = re.compile(r"(?i)mask|valid|is_?pad|non_?pad|present|visible|observed")
_NO_LOSS = re.compile(r"(?i)weight|acc|correct|hits?($|_)|recall|precision|iou")  # metrics, and normalised weights
_COMPARING = {"ne", "eq", "gt", "lt", "ge", "le", "not_equal", "logical_and", "logical_not", "isfinite"}
_BOUNDING = {"clamp", "clamp_min", "clip", "max", "maximum", "item", "float", "to"}
# Names that show that the loss is already computed over all ranks, by ddpshim or otherwise.
_KEPT_IN_MIND = ("whole_batch", "mean_over", "all_gather", "all_reduce", "reduce_mean", "num_items_in_batch")


def _trains(unit: Unit) -> bool:
    return bool(_LOSS_UNIT.search(unit.name)) or "backward" in unit.attributes


def _is_mended(unit: Unit, case: Case) -> bool:
    """Whether the unit gathers or reduces over ranks itself, or is an argument of whole_batch."""
    if any(any(mark in word for mark in _KEPT_IN_MIND) for word in (*unit.words, *entered(unit.node))):
        return True
    return any(last_name(value) == unit.name for _, call in case.calls(*_KEPT_IN_MIND[:1]) for value in values_of(call))


@rule("DDP108")
def masked_mean(case: Case) -> Iterator[Hit]:
    if any(_FIXED_SHARE.search(word) for unit in case.program.units for word in (*unit.words, *unit.parameters)):
        return  # the same number of entries is masked in each sample
    for unit, division in case.all(ast.BinOp):
        if not isinstance(division.op, ast.Div) or not _trains(unit) or is_without_gradients(division, unit):
            continue
        total, count = _sum_of(division.left, unit, case), _sum_of(division.right, unit, case)
        if total is None or count is None or _is_mended(unit, case):
            continue
        factors = [total.left, total.right] if isinstance(total, ast.BinOp) and isinstance(total.op, ast.Mult) else []
        if ast.dump(count) not in map(ast.dump, factors) and not _marks(count, unit, case):
            continue
        if any(_NO_LOSS.search(word) for word in identifiers(division)):
            continue
        divides = f"{text_of(division)} divides by the {text_of(count, 30)} of a rank's own samples"
        yield Hit(
            unit, division, f"{divides}, whose number differs between ranks: the mean over ranks is a different loss."
        )

    for unit, call in case.calls("mean"):
        taken = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(taken, ast.Subscript) or values_of(call) or not _marks(taken.slice, unit, case):
            continue
        if _trains(unit) and not is_without_gradients(call, unit) and not _is_mended(unit, case):
            kept = f"{text_of(call)} is the mean over the {text_of(taken.slice, 30)} of a rank's own samples"
            yield Hit(
                unit, call, f"{kept}, whose number differs between ranks: the mean over ranks is a different loss."
            )


def _marks(node: ast.AST, unit: Unit, case: Case) -> bool:
    """Whether an expression is a mask: a comparison, or a name such as `valid`."""
    while isinstance(node, ast.Call) and last_name(node) in ("float", "to", "bool", "int", "long", "type_as"):
        node = node.func.value if isinstance(node.func, ast.Attribute) else node
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
            break
    if isinstance(node, ast.UnaryOp):
        return _marks(node.operand, unit, case)
    if isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and last_name(node) in _COMPARING):
        return True
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        if _MASK.search(last_name(node)):
            return True
        return any(_marks(v, u, case) for u, v in case.values(node, unit)[:2] if not isinstance(v, type(node)))
    return False


def _sum_of(node: ast.expr, unit: Unit, case: Case) -> Optional[ast.expr]:
    """Return the expression that is summed up in `node`, or in the value of its name; else None."""
    found = _summed(node)
    if found is not None or not isinstance(node, (ast.Name, ast.Call)):
        return found
    if isinstance(node, ast.Call):
        is_sum = any(k.arg == "reduction" and constant(k.value) == "sum" for k in node.keywords)
        inner = [node.func.value, *node.args] if isinstance(node.func, ast.Attribute) else node.args
        is_bounded = last_name(node) in _BOUNDING
        return node if is_sum else next(filter(None, (_sum_of(i, unit, case) for i in inner if is_bounded)), None)
    return next(filter(None, (_summed(v) or _sum_called(v) for _, v in case.values(node, unit))), None)


def _sum_called(node: ast.expr) -> Optional[ast.expr]:
    is_sum = isinstance(node, ast.Call) and any(constant(k.value) == "sum" for k in node.keywords)
    return node if is_sum else None


def _summed(node: ast.expr) -> Optional[ast.expr]:
    """Return `x` of `x.sum()` or `torch.sum(x)`, also inside a clamp, a maximum or an addition; else None."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _summed(node.left) or _summed(node.right)
    if not isinstance(node, ast.Call):
        return None
    name = last_name(node.func)
    if name in _BOUNDING:
        inner = [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *node.args]
        return next((found for found in map(_summed, inner) if found is not None), None)
    if name == "count_nonzero":
        return node.args[0] if node.args else None
    if name != "sum" or any(keyword.arg in ("dim", "axis") for keyword in node.keywords):
        return None
    if isinstance(node.func, ast.Attribute) and last_name(node.func.value) not in ("torch", "np", "numpy"):
        return None if node.args else node.func.value
    return node.args[0] if len(node.args) == 1 else None


@rule("DDP109")
def compares_samples(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls("cross_entropy", "CrossEntropyLoss"):
        if len(call.args) < 2 or _is_mended(unit, case) or is_without_gradients(call, unit):
            continue
        target = call.args[1]
        bound = unit.bindings.get(target.id, []) if isinstance(target, ast.Name) else []
        values = [target, *(binding.value for binding in bound if binding.value is not None)]
        if any(_counts_the_batch(value) for value in values):
            compares = f"{text_of(call)} compares each sample of a rank with the others of that rank alone"
            yield Hit(
                unit,
                call,
                f"{compares}: with more ranks each sample is compared with fewer, which is a different loss.",
            )


def _counts_the_batch(node: ast.AST) -> bool:
    """Whether this is torch.arange of `len(x)`, `x.shape[0]` or `x.size(0)`, possibly moved to a device."""
    while isinstance(node, ast.Call) and last_name(node.func) in ("to", "cuda", "long"):
        if not isinstance(node.func, ast.Attribute):
            return False
        node = node.func.value
    if not isinstance(node, ast.Call) or last_name(node.func) != "arange" or not node.args:
        return False
    size = ast.unparse(node.args[0])
    return bool(re.fullmatch(r"len\(.+\)|.+\.shape\[0\]|.+\.size\(0\)|batch_size|bs|B", size))
