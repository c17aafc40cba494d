"""Finds where a program multiplies a number that it reads from a tensor by the rows of its batch, or counts rows.

`running += loss.item() * x.size(0)`: on several ranks the first factor is the mean over the whole batch, the second is
the number of this rank's rows. Only the source shows that a factor is a number of rows, not a constant of equal value.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Iterator, Sequence
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import nn

_READS = ("item", "tolist", "numpy")
_Scope = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.Module]


class Product(NamedTuple):
    """A product of a number that is read and a number of rows, in the source of a program."""

    text: str  # the expression, such as "loss.item() * x.size(0)"
    size: ast.expr  # the number of rows in it
    is_tallied: bool  # whether the program only adds such products up, so that a sum may carry its rows
    is_in_a_call: bool = False  # the product is in a function that has both: meter.update(loss.item(), x.size(0))


class _Read(NamedTuple):
    """What the source shows of one place that reads a number."""

    products: Sequence[Product] = ()
    counted: Optional[ast.expr] = None  # the tensor of which a sum is added up; None: this is not a count
    counts_as: type = int  # float: a quotient, such as 100.0 * count / seen, would lose the rows of an int


class Sources:
    """The syntax trees of the program's files."""

    def __init__(self) -> None:
        self._files: dict[str, Optional[ast.Module]] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        self._found: dict[tuple[CodeType, int], _Read] = {}
        self._lengths: dict[tuple[CodeType, int], list[ast.expr]] = {}

    def product(self, line: FrameType, num_rows: int) -> Optional[Product]:
        """Return the product of what `line` now reads and a size of a tensor that has `num_rows` rows; None if there is
        no such product, or no source. Local."""
        products = self._read(line).products
        return next((each for each in products if _number_of(each.size, line) in (num_rows, None)), None)

    def count(self, line: FrameType, num_rows: int) -> Optional[tuple[type, list[torch.Tensor]]]:
        """Return (class for the count that `line` now reads, tensors of `num_rows` rows of which it is a sum); None if
        it reads something else, or does not only add it to others. Local."""
        counted = self._read(line).counted
        inside = [] if counted is None else [*ast.walk(counted)]
        parts = [node for node in inside if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Tuple)]
        if any(not isinstance(_value(part.value, line), (dict, list, tuple)) for part in parts):
            return None  # x[0] and x[:4] are not all rows
        values = [_value(node, line) for node in inside if isinstance(node, (ast.Name, ast.Subscript))]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)]
        of_rows = [tensor for tensor in tensors if tensor.dim() and tensor.shape[0] == num_rows]
        return (self._read(line).counts_as, of_rows) if of_rows else None

    def is_a_length(self, line: FrameType) -> bool:
        """Whether `line` now divides by a constant, or by a length that is not a tensor's. Local."""
        key = line.f_code, line.f_lasti
        if key not in self._lengths:
            tree = self._tree(line)
            divided = [] if tree is None else _at_place([node for node in ast.walk(tree) if _divisor(node)], line)
            self._lengths[key] = [*filter(None, map(_divisor, divided))]
        divisors = self._lengths[key]  # before Python 3.11 all those of the line
        return bool(divisors) and all(self._is_a_length(divisor, line) for divisor in divisors)

    def _is_a_length(self, node: ast.expr, line: FrameType) -> bool:
        if isinstance(node, ast.Name):
            scope = self._scope(node)
            counted = [each for each in ast.walk(scope) if isinstance(each, ast.AugAssign)]
            values = [value for name, value in _assigned(scope) if name == node.id]
            is_counted = any(isinstance(each.target, ast.Name) and each.target.id == node.id for each in counted)
            return (
                bool(values)
                and not is_counted
                and all(_is_len(value) and not _is_of_a_tensor(value, line) for value in values)
            )
        return isinstance(node, ast.Constant) or (_is_len(node) and not _is_of_a_tensor(node, line))

    def _read(self, line: FrameType) -> _Read:
        key = line.f_code, line.f_lasti
        if key not in self._found:
            tree = self._tree(line)
            found = [] if tree is None else _at_place([node for node in ast.walk(tree) if _is_read(node)], line)
            # Before Python 3.11, of several reads in a line it is not known which one this is.
            is_clear = tree is not None and len(found) == 1
            self._found[key] = self._of(found[0], tree) if is_clear and tree is not None else _Read()
        return self._found[key]

    def _of(self, read: ast.Call, tree: ast.Module) -> _Read:
        scope, above = self._scope(read), self._parents[read]
        is_item = isinstance(read.func, ast.Attribute) and read.func.attr == "item"
        products = []
        for node in self._above(read):
            products += [
                Product(*found, is_item and self._is_added_up(node, tree)) for found in _with_a_size(node, read, scope)
            ]
        for inside in ast.walk(read):
            products += [Product(*found, False) for found in _with_a_size(inside, read, scope)]
        if is_item and isinstance(above, ast.Call) and read in above.args and not _is_pythons(above.func):
            sizes = [each for each in (*above.args, *(word.value for word in above.keywords)) if _is_size(each, scope)]
            products += [Product(ast.unparse(above), size, True, True) for size in sizes]
        assigned = self._parents[[read, *self._above(read)][-1]]
        targets = assigned.targets if isinstance(assigned, ast.Assign) else []
        for name in [target.id for target in targets if isinstance(target, ast.Name)]:
            uses = [used for used in ast.walk(scope) if isinstance(used, ast.Name) and used.id == name]
            pairs = [
                (used, node, found)
                for used in uses
                for node in self._above(used)
                for found in _with_a_size(node, used, scope)
            ]
            added = {used for used, node, _ in pairs if self._is_added_up(node, tree)}
            # The number itself must not be kept: a checkpoint would hold its class.
            is_safe = is_item and all(
                used in added or self._is_shown(used) for used in uses if isinstance(used.ctx, ast.Load)
            )
            products += [Product(*found, is_safe) for _, _, found in pairs]
        counted = _summed(read, scope) if is_item else None
        for kind in (int, float):
            if counted is not None and self._is_added_up(read, tree, kind):
                return _Read(products, counted, kind)
        return _Read(products)

    def _is_shown(self, used: ast.AST) -> bool:
        above = self._parents[used]
        is_print = isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id == "print"
        return is_print or isinstance(above, (ast.FormattedValue, ast.Compare))

    def _is_added_up(self, node: Any, tree: ast.Module, counts_as: Optional[type] = None) -> bool:
        """Whether `node` is only added to a sum, and no quotient of that sum in the program would lose its rows."""
        scope = self._scope(node)
        above = self._parents[node]
        kinds = (ast.Add,) if counts_as else (ast.Add, ast.Mult)
        while isinstance(above, ast.BinOp) and isinstance(above.op, kinds):
            node, above = above, self._parents[above]
        into: Optional[ast.expr] = None
        if isinstance(above, ast.AugAssign) and isinstance(above.op, ast.Add):
            into = above.target
        elif isinstance(above, ast.Assign) and _has(node, ast.unparse(above.targets[0])):
            into = above.targets[0]
        elif counts_as is None and isinstance(above, ast.Call) and isinstance(above.func, ast.Attribute):
            into = above.func.value if above.func.attr == "append" else None
        if into is None:
            return False
        text = ast.unparse(into)
        is_passed_on = any(isinstance(each, ast.Return) and _has(each, text) for each in ast.walk(scope))
        seen_in = scope if isinstance(into, ast.Name) and not is_passed_on else tree
        return not any(_loses(each, text, counts_as is int) for each in ast.walk(seen_in))

    def _tree(self, line: FrameType) -> Optional[ast.Module]:
        path = line.f_code.co_filename
        if path not in self._files:
            try:
                self._files[path] = tree = ast.parse("".join(linecache.getlines(path, line.f_globals)))
            except (SyntaxError, ValueError):
                self._files[path] = tree = None
            nodes = () if tree is None else ast.walk(tree)
            self._parents.update((child, node) for node in nodes for child in ast.iter_child_nodes(node))
        return self._files[path]

    def _scope(self, node: ast.AST) -> _Scope:
        while not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            node = self._parents[node]
        return node

    def _above(self, node: ast.AST) -> Iterator[ast.BinOp]:
        """Yield the products, and quotients by other numbers, of which `node` is a factor."""
        above = self._parents[node]
        while isinstance(above, (ast.BinOp, ast.UnaryOp)):
            if isinstance(above, ast.BinOp):
                if not (isinstance(above.op, ast.Mult) or (isinstance(above.op, ast.Div) and above.left is node)):
                    return
                yield above
            node, above = above, self._parents[above]


def _with_a_size(node: ast.AST, read: ast.AST, scope: _Scope) -> Iterator[tuple[str, ast.expr]]:
    """Yield `node` and the size in it if it is a product with a size of a tensor."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else ()
    for side in sides:
        if side is not read and _is_size(side, scope):
            yield ast.unparse(node), side


def _at_place(nodes: list[Any], line: FrameType) -> list[Any]:
    """Return those of `nodes` that `line` may run now."""
    found = [node for node in nodes if node.lineno <= line.f_lineno <= (node.end_lineno or node.lineno)]
    if hasattr(line.f_code, "co_positions"):  # Python 3.11 and later
        _, end_line, _, end = next(islice(line.f_code.co_positions(), line.f_lasti // 2, None))
        found = [node for node in found if (node.end_lineno, node.end_col_offset) == (end_line, end)]
    return found


def _is_pythons(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and hasattr(builtins, function.id)


def _is_read(call: ast.AST) -> bool:
    if not isinstance(call, ast.Call):
        return False
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _READS and not call.args
    return isinstance(call.func, ast.Name) and call.func.id == "float" and len(call.args) == 1


def _divisor(node: ast.AST) -> Optional[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.right
    return node.value if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) else None


def _summed(read: ast.Call, scope: _Scope) -> Optional[ast.expr]:
    """Return x for x.sum().item(), torch.sum(x).item() and s.item() where s is one of these; None for all else."""
    summed: ast.expr = read.func.value if isinstance(read.func, ast.Attribute) else read
    if isinstance(summed, ast.Name):
        values = [value for name, value in _assigned(scope) if name == summed.id]
        summed = values[0] if len(values) == 1 else summed
    if not isinstance(summed, ast.Call) or not isinstance(summed.func, ast.Attribute) or summed.keywords:
        return None
    if summed.func.attr not in ("sum", "count_nonzero"):
        return None
    owner = summed.func.value
    is_torchs = isinstance(owner, ast.Name) and owner.id == "torch"
    if len(summed.args) != is_torchs:
        return None
    return summed.args[0] if is_torchs else owner


def _loses(node: ast.AST, text: str, is_count: bool) -> bool:
    """Whether `node` divides the sum `text` in a way that does not see the rows that it carries."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = [(node.left, node.right), (node.right, node.left)]
        return any(
            _has(side, text) and any(map(_divisor, ast.walk(other))) for side, other in sides if not _has(other, text)
        )
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div) or not _has(node.left, text):
        return False
    return not _is_len(node.right) and not _keeps(node.left, text, is_count)


def _keeps(node: ast.expr, text: str, is_count: bool) -> bool:
    if ast.unparse(node) in (text, f"sum({text})"):
        return True
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
        return False
    # The product of a float and an int is Python's own float, whatever the class of the int.
    numbers = (int,) if is_count else (int, float)
    is_first = isinstance(node.left, ast.Constant) and type(node.left.value) in numbers
    return _keeps(node.left, text, is_count) or (is_first and _keeps(node.right, text, is_count))


def _has(node: ast.AST, text: str) -> bool:
    parts = [part for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))]
    return any(ast.unparse(part) == text for part in parts)


def _assigned(scope: _Scope) -> list[tuple[str, ast.expr]]:
    """Return each name that `scope` assigns, and its value."""
    found = [each for each in ast.walk(scope) if isinstance(each, ast.Assign)]
    return [(to.id, each.value) for each in found for to in each.targets if isinstance(to, ast.Name)]


def _is_len(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _is_of_a_tensor(size: ast.expr, line: FrameType) -> bool:
    sized = _sized(size)
    return sized is not None and isinstance(_value(sized[0], line), torch.Tensor)


def _is_size(node: ast.expr, scope: _Scope) -> bool:
    """Whether `node` looks like a size of a tensor, or is a name that `scope` assigns from one."""
    if isinstance(node, ast.Name):
        of_it = [value for name, value in _assigned(scope) if name == node.id]
        assigned = [each for each in ast.walk(scope) if isinstance(each, ast.Assign)]
        pairs = [(to, each.value) for each in assigned for to in each.targets]
        unpacked = [value for to, value in pairs if isinstance(to, ast.Tuple) and node.id in _names_of(to)]
        is_size = any(not isinstance(value, ast.Name) and _is_size(value, scope) for value in of_it)
        return is_size or any(".shape" in text or ".size()" in text for text in map(ast.unparse, unpacked))
    return _sized(node) is not None


def _names_of(node: ast.Tuple) -> list[str]:
    return [each.id for each in node.elts if isinstance(each, ast.Name)]


def _sized(node: ast.expr) -> Optional[tuple[ast.expr, int]]:
    """Return (tensor, dimension) for len(x), x.size(0), x.size()[0] and x.shape[0]; None for all else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
        return node.args[0], 0
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size" and node.args:
        return _at(node.func.value, node.args[0])
    if isinstance(node, ast.Subscript):
        sizes = node.value.func if isinstance(node.value, ast.Call) else node.value
        if isinstance(sizes, ast.Attribute) and sizes.attr in ("shape", "size"):
            return _at(sizes.value, node.slice)
    return None


def _at(tensor: ast.expr, dimension: ast.expr) -> Optional[tuple[ast.expr, int]]:
    is_number = isinstance(dimension, ast.Constant) and isinstance(dimension.value, int)
    return (tensor, dimension.value) if is_number else None  # type: ignore[attr-defined]


def _number_of(size: ast.expr, line: FrameType) -> Optional[int]:
    """Return the value of `size` in `line`; None if it is unknown, -1 if it is not that of a tensor."""
    sized = _sized(size)
    if sized is None:
        value = _value(size, line)
        return value if isinstance(value, int) or value is None else -1
    tensor, dimension = _value(sized[0], line), sized[1]
    if isinstance(tensor, torch.Tensor):
        return tensor.shape[dimension] if dimension < tensor.dim() else -1
    return -1 if _is_len(size) or tensor is not None else None  # also a loader or a dataset has a length


def _value(node: ast.expr, line: FrameType) -> object:
    """Return the value of a name or of an item of a batch, without running code of the program; None if unknown."""
    if isinstance(node, ast.Name):
        return line.f_locals.get(node.id, line.f_globals.get(node.id))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        held, key = _value(node.value, line), node.slice.value
        if type(held) in (dict, list, tuple):
            try:
                return held[key]  # type: ignore[index]
            except (LookupError, TypeError):
                return None
    return None
