"""Parses one file: its syntax tree, the origins of imported names, and the nodes of each function."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Optional, TypeVar, Union

Node = TypeVar("Node", bound=ast.AST)
Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_NOT_RUN = {"ctx", "annotation", "returns"}  # a class in an annotation does not count as used
_IGNORE = re.compile(r"#\s*ddpshim:\s*ignore(?:\[([A-Z0-9,\s]*)\])?")


def key_of(node: Optional[ast.AST]) -> str:
    """Return `self.nets["policy"]` as text, the key of bindings; "" for an expression without a fixed name."""
    if isinstance(node, ast.Name):
        return node.id
    inner = key_of(node.value) if isinstance(node, (ast.Attribute, ast.Subscript)) else ""
    if inner and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{inner}[{node.slice.value!r}]"
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def last_name(node: Optional[ast.AST]) -> str:
    """Return the last identifier: "b" for `a.b`, `a.b()` and `a["b"]`; "" if there is none."""
    while isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Subscript):
        return str(constant(node.slice) or "")
    return getattr(node, "attr", getattr(node, "id", ""))


def argument(call: ast.Call, name: str, position: int = -1) -> Optional[ast.expr]:
    """Return the argument with keyword `name`, else the one at `position`, else None."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is not None or not 0 <= position < len(call.args):
        return named
    return None if isinstance(call.args[position], ast.Starred) else call.args[position]


def owner_of(call: ast.Call) -> Optional[ast.expr]:
    """Return `x` of `x.method()`; None for the call of a plain name."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def values_of(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call, by position and by keyword."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def calls_in(*nodes: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in these nodes, including the nodes themselves."""
    return (inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call))


def entered(node: ast.AST) -> list[str]:
    """Return the last names of the context managers of a `with`, or of a function's decorators."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [last_name(item.context_expr) for item in node.items]
    return [last_name(decorator) for decorator in node.decorator_list] if isinstance(node, FUNCTIONS) else []


def constant(node: Optional[ast.AST]) -> object:
    """Return the value of a literal, also of a negative number; None for other expressions."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(node.operand)
        return -value if isinstance(value, (int, float)) else None
    return node.value if isinstance(node, ast.Constant) else None


def words_in(node: Optional[ast.AST]) -> set[str]:
    """Return all names, attributes and strings in an expression."""
    out: set[str] = set()
    for inner in ast.walk(node) if node is not None else ():
        text = getattr(inner, "id", None) or getattr(inner, "attr", None) or constant(inner)
        if isinstance(text, str):
            out.add(text)
    return out


def text_of(node: ast.AST, limit: int = 60) -> str:
    """Return the source of an expression as one line of at most `limit` characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def place_of(node: ast.AST) -> tuple[int, int]:
    """Return line and column of a node."""
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


class Binding(NamedTuple):
    """`target = value` in `statement`; `value` is None if it is unknown, as in a loop."""

    statement: ast.AST
    value: Optional[ast.expr]
    target: ast.expr


class Unit:
    """A function with everything nested in it, or the rest of a file: code that runs at import, or as a script."""

    def __init__(self, source: Source, node: Union[Function, ast.Module], owner: Optional[ast.ClassDef]) -> None:
        self.source, self.node, self.owner = source, node, owner
        self.name = "<module>" if isinstance(node, ast.Module) else node.name
        self.by_type: dict[type, list[ast.AST]] = defaultdict(list)

    def all(self, kind: type[Node]) -> list[Node]:
        """Return the unit's nodes of one type, in the order of the text."""
        return self.by_type.get(kind, [])  # type: ignore[return-value]

    @property
    def is_module(self) -> bool:
        return isinstance(self.node, ast.Module)

    @cached_property
    def mates(self) -> list[Unit]:
        """The methods of the unit's class, including this one."""
        return [unit for unit in self.source.units if unit.owner is not None and unit.owner is self.owner]

    @cached_property
    def parameters(self) -> list[str]:
        given = None if isinstance(self.node, ast.Module) else self.node.args
        return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)] if given is not None else []

    @cached_property
    def words(self) -> set[str]:
        """Names and attributes that are read."""
        read = (n for kind in (ast.Name, ast.Attribute) for n in self.by_type.get(kind, []))
        return {last_name(n) for n in read if isinstance(n.ctx, ast.Load)}  # type: ignore[attr-defined]

    @cached_property
    def origins(self) -> frozenset[str]:
        """Every dotted name that is read, with imported names replaced by their origins."""
        nodes: list[ast.AST] = [*self.all(ast.Name), *self.all(ast.Attribute)]
        return frozenset(self.source.qualified(n) for n in nodes if isinstance(n.ctx, ast.Load))  # type: ignore[attr-defined]

    @cached_property
    def bindings(self) -> dict[str, list[Binding]]:
        """`key_of(target)` -> its bindings, in the order of the text."""
        out: dict[str, list[Binding]] = {}

        def bind(target: ast.expr, value: Optional[ast.expr], statement: ast.AST) -> None:
            if isinstance(target, (ast.Tuple, ast.List)):
                values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value] * len(target.elts)
                for inner, each in zip(target.elts, values):
                    bind(inner, each, statement)
            elif key_of(target):
                out.setdefault(key_of(target), []).append(Binding(statement, value, target))

        for statement in (
            one for kind in (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For) for one in self.all(kind)
        ):
            for target in getattr(statement, "targets", None) or [statement.target]:  # type: ignore[attr-defined]
                bind(target, getattr(statement, "value", None), statement)
        for block in self.all(ast.With):
            for item in block.items:
                if item.optional_vars is not None:
                    bind(item.optional_vars, item.context_expr, block)
        for bindings in out.values():
            bindings.sort(key=lambda binding: place_of(binding.target))
        return out


class Source:
    """A parsed file. Raises SyntaxError, ValueError or RecursionError if Python cannot parse it."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.content = path, content
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's warnings about the user's code, e.g. invalid escapes
            self.tree = ast.parse(content)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.module, self.main = Unit(self, self.tree, None), Unit(self, self.tree, None)
        self.units = [self.module, self.main]
        self._walk()
        self.names: dict[str, str] = {}  # local name -> dotted origin; relative imports keep their dots
        self.imported: list[str] = []  # dotted names that may be modules
        for unit in self.units:
            for plain in unit.all(ast.Import):
                for alias in plain.names:
                    self.imported.append(alias.name)
                    top = alias.name.partition(".")[0]
                    self.names[alias.asname or top] = alias.name if alias.asname else top
            for from_ in unit.all(ast.ImportFrom):
                base = "." * from_.level + (from_.module or "")
                dotted = {
                    a.asname or a.name: f"{base}.{a.name}" if from_.module else base + a.name for a in from_.names
                }
                self.imported += [base, *dotted.values()]
                self.names.update(dotted)
        self.functions = {u.name: u for u in self.units if u.owner is None and not u.is_module}
        self.methods: dict[tuple[ast.ClassDef, str], Unit] = {(u.owner, u.name): u for u in self.units if u.owner}

    def _walk(self) -> None:
        """Make a unit of each function and method, and put all other nodes into the unit that they are in."""
        stack: list[tuple[ast.AST, ast.AST, Unit, Optional[ast.ClassDef]]]
        stack = [(node, self.tree, self.module, None) for node in reversed(self.tree.body)]
        while stack:
            node, parent, unit, owner = stack.pop()
            self.parents[node] = parent
            if unit.is_module and isinstance(node, FUNCTIONS):
                unit = Unit(self, node, owner)
                self.units.append(unit)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
                owner = node if unit.is_module else owner
            elif unit is self.module and isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
                unit = self.main if key_of(node.test.left) == "__name__" else unit
            if node is not unit.node:
                unit.by_type[type(node)].append(node)
            for field, value in reversed([*ast.iter_fields(node)]):
                inner = value if isinstance(value, list) else [value]
                if field not in _NOT_RUN:
                    stack += [(each, node, unit, owner) for each in reversed(inner) if isinstance(each, ast.AST)]

    def is_ignored(self, code: str, first: int, last: int) -> bool:
        """Whether a comment `# ddpshim: ignore[...]` in these lines names the code, or no code."""
        lines = self.content.decode("utf-8", "replace").split("\n")[first - 1 : last]
        return any(not found or code in found for line in lines for found in _IGNORE.findall(line))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around `node`, innermost first."""
        at = self.parents.get(node)
        while at is not None:
            yield at
            at = self.parents.get(at)

    def qualified(self, node: ast.AST) -> str:
        """Return "torch.nn.DataParallel" for `nn.DataParallel`, by the file's imports; "" if it is no dotted name."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.names.get(node.id, node.id), *reversed(parts)])
