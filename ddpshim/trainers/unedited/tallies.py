"""Finds where a program multiplies a number that it reads from a tensor by the rows of its batch.

`running += loss.item() * x.size(0)`: on several ranks the first factor is the mean over the whole batch, the second is
the number of this rank's rows. Only the source shows that a factor is a number of rows, not a constant of equal value.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple, Optional, Union

import torch

_READS = ("item", "tolist", "numpy")
_Scope = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.Module]


class Product(NamedTuple):
    """A product of a number that is read and a number of rows, in the source of a program."""

    text: str  # the expression, such as "loss.item() * x.size(0)"
    size: ast.expr  # the number of rows in it


class Sources:
    """The products in the program's files."""

    def __init__(self) -> None:
        self._files: dict[str, Optional[ast.Module]] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        self._found: dict[tuple[CodeType, int], list[Product]] = {}

    def product(self, line: FrameType, num_rows: int) -> Optional[Product]:
        """Return the product of what `line` now reads and a size of a tensor that has `num_rows` rows; None if there is
        no such product, or no source. Local."""
        key = line.f_code, line.f_lasti
        if key not in self._found:
            self._found[key] = [*self._products(line)]
        return next((each for each in self._found[key] if _number_of(each.size, line) in (num_rows, None)), None)

    def _products(self, line: FrameType) -> Iterator[Product]:
        tree = self._tree(line)
        read = None if tree is None else _read_at(tree, line)
        if tree is None or read is None:
            return
        scope = self._scope(read)
        inside = [node for node in ast.walk(read) if isinstance(node, ast.BinOp)]
        for node in [*self._above(read), *inside]:
            yield from _with_a_size(node, read, scope)
        assigned = self._parents[read]
        targets = assigned.targets if isinstance(assigned, ast.Assign) else []
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        for used in ast.walk(scope):
            if isinstance(used, ast.Name) and used.id in names:
                for node in self._above(used):
                    yield from _with_a_size(node, used, scope)

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


def _with_a_size(node: ast.BinOp, read: ast.AST, scope: _Scope) -> Iterator[Product]:
    """Yield `node` if it is a product with a size of a tensor."""
    sides = (node.left, node.right) if isinstance(node.op, ast.Mult) else ()
    for side in sides:
        if side is not read and _is_size(side, scope):
            yield Product(ast.unparse(node), side)


def _read_at(tree: ast.Module, line: FrameType) -> Optional[ast.Call]:
    """Return the call with which `line` now reads a number; None if its line has several and Python does not know."""
    number = line.f_lineno
    found = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and _is_read(call)]
    found = [call for call in found if call.lineno <= number <= (call.end_lineno or call.lineno)]
    if hasattr(line.f_code, "co_positions"):  # Python 3.11 and later
        _, end_line, _, end = next(islice(line.f_code.co_positions(), line.f_lasti // 2, None))
        found = [call for call in found if (call.end_lineno, call.end_col_offset) == (end_line, end)]
    return found[0] if len(found) == 1 else None


def _is_read(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _READS and not call.args
    return isinstance(call.func, ast.Name) and call.func.id == "float" and len(call.args) == 1


def _is_size(node: ast.expr, scope: _Scope) -> bool:
    """Whether `node` looks like a size of a tensor, or is a name that `scope` assigns from one."""
    if isinstance(node, ast.Name):
        assigned = [each for each in ast.walk(scope) if isinstance(each, ast.Assign)]
        pairs = [(to, each.value) for each in assigned for to in each.targets]
        of_it = [value for to, value in pairs if isinstance(to, ast.Name) and to.id == node.id]
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
    is_len = isinstance(size, ast.Call) and isinstance(size.func, ast.Name)  # also of a loader or a dataset
    return -1 if is_len or tensor is not None else None


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
