"""Holds small functions on single nodes of a syntax tree: their names, values and arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Optional, Union

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONDITIONALS = (ast.If, ast.IfExp, ast.While)


def key_of(node: ast.AST) -> Optional[str]:
    """Return `self.nets["policy"]` as text, the key of bindings; None for an expression without a fixed name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = key_of(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inner = key_of(node.value)
        return None if inner is None else f"{inner}[{node.slice.value!r}]"
    return None


def last_name(node: ast.AST) -> str:
    """Return the last identifier: "b" for `a.b`, `a.b()` and `a["b"]`; "" if there is none."""
    while isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    return ""


def argument(call: ast.Call, name: str, position: Optional[int] = None) -> Optional[ast.expr]:
    """Return the argument with keyword `name`, else the one at `position`, else None."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and 0 <= position < len(call.args):
        found = call.args[position]
        return None if isinstance(found, ast.Starred) else found
    return None


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


def values_of(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call, by position and by keyword."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def spreads(call: ast.Call) -> bool:
    """Whether a call passes `*args` or `**kwargs`."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def calls_in(*nodes: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in these nodes, including the nodes themselves."""
    return (inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call))


def entered(node: ast.AST) -> list[str]:
    """Return the last names of the context managers of a `with`, or of a function's decorators."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [last_name(item.context_expr) for item in node.items]
    return [last_name(decorator) for decorator in node.decorator_list] if isinstance(node, FUNCTIONS) else []


def is_none(node: Optional[ast.AST]) -> bool:
    """Whether an expression is the literal None."""
    return isinstance(node, ast.Constant) and node.value is None


def constant(node: Optional[ast.AST]) -> object:
    """Return the value of a literal, also of a negative number; None for other expressions."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, (int, float)) else None
    return node.value if isinstance(node, ast.Constant) else None


def identifiers(node: ast.AST) -> set[str]:
    """Return all names, attributes and strings in an expression."""
    out: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            out.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            out.add(inner.attr)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            out.add(inner.value)
    return out
