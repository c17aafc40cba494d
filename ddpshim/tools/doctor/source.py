"""Parses one file: its syntax tree, the origins of imported names, and the nodes of each function."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Optional, TypeVar, Union

from ddpshim.tools.doctor.nodes import CONDITIONALS, FUNCTIONS, Function, key_of

Node = TypeVar("Node", bound=ast.AST)
# Fields that are not walked: contexts contain nothing, and a class in an annotation does not count as used.
_NOT_RUN = {"ctx", "annotation", "returns"}
_MOST_NESTED = 500  # levels of an expression; rules recurse into each
_IGNORE = re.compile(r"#\s*ddpshim:\s*ignore(?:\[([A-Z0-9,\s]*)\])?")


class Unreadable(Exception):
    """The file cannot be parsed; has the line of the error and the reason."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class Binding:
    """`target = value` in `statement`; `value` is None if it is unknown, as in a loop."""

    def __init__(self, statement: ast.AST, value: Optional[ast.expr], target: ast.expr) -> None:
        self.statement, self.value, self.target = statement, value, target


class Unit:
    """A function with everything nested in it, or the rest of a file: code that runs at import or as a script."""

    def __init__(self, source: Source, node: Union[Function, ast.Module], owner: Optional[ast.ClassDef]) -> None:
        self.source, self.node, self.owner = source, node, owner
        self.name = "<module>" if isinstance(node, ast.Module) else node.name
        self.by_type: dict[type, list[ast.AST]] = defaultdict(list)

    def all(self, kind: type[Node]) -> list[Node]:
        """Return the unit's nodes of one type, in no particular order."""
        return self.by_type.get(kind, [])  # type: ignore[return-value]

    @property
    def is_module(self) -> bool:
        return isinstance(self.node, ast.Module)

    @cached_property
    def parameters(self) -> list[str]:
        if isinstance(self.node, ast.Module):
            return []
        arguments = self.node.args
        return [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]

    def position(self, parameter: str) -> int:
        """Return the position of the parameter in a call, not counting `self`."""
        return self.parameters.index(parameter) - (self.owner is not None)

    @cached_property
    def loaded(self) -> set[str]:
        """Names that are read."""
        return {n.id for n in self.all(ast.Name) if isinstance(n.ctx, ast.Load)}

    @cached_property
    def attributes(self) -> set[str]:
        """Attributes that are read."""
        return {n.attr for n in self.all(ast.Attribute) if isinstance(n.ctx, ast.Load)}

    @cached_property
    def words(self) -> set[str]:
        """Names and attributes that are read."""
        return self.loaded | self.attributes

    def uses(self, name: str) -> list[ast.Name]:
        """Return the nodes that read a name."""
        return [n for n in self.all(ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]

    @cached_property
    def _dotted(self) -> list[ast.AST]:
        names = [n for n in self.all(ast.Name) if isinstance(n.ctx, ast.Load)]
        return [*names, *(n for n in self.all(ast.Attribute) if type(n.value) in (ast.Name, ast.Attribute))]

    @cached_property
    def origins(self) -> frozenset[str]:
        """Every dotted name that is read, with imported names replaced by their origins."""
        return frozenset(map(self.source.qualified, self._dotted))

    @cached_property
    def used(self) -> frozenset[str]:
        """The origins without plain aliases at module level: `Net = models.Net` does not count as a use."""
        if not self.is_module:
            return self.origins
        source = self.source
        kept = (n for n in self._dotted if not isinstance(source.parents.get(n), (ast.Assign, ast.AnnAssign)))
        return frozenset(map(source.qualified, kept))

    @cached_property
    def bindings(self) -> dict[str, list[Binding]]:
        """`key_of(target)` -> its bindings, in the order of the text."""
        out: dict[str, list[Binding]] = {}

        def bind(target: ast.expr, value: Optional[ast.expr], statement: ast.AST) -> None:
            if isinstance(target, (ast.Tuple, ast.List)):
                values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value] * len(target.elts)
                for inner, each in zip(target.elts, values):
                    bind(inner, each, statement)
            elif isinstance(target, ast.Starred):
                bind(target.value, None, statement)
            else:
                key = key_of(target)
                if key is not None:
                    out.setdefault(key, []).append(Binding(statement, value, target))

        for assign in self.all(ast.Assign):
            for target in assign.targets:
                bind(target, assign.value, assign)
        for annotated in self.all(ast.AnnAssign):
            if annotated.value is not None:
                bind(annotated.target, annotated.value, annotated)
        for walrus in self.all(ast.NamedExpr):
            bind(walrus.target, walrus.value, walrus)
        loops: list[Union[ast.For, ast.AsyncFor]] = [*self.all(ast.For), *self.all(ast.AsyncFor)]
        for loop in loops:
            bind(loop.target, None, loop)
        withs: list[Union[ast.With, ast.AsyncWith]] = [*self.all(ast.With), *self.all(ast.AsyncWith)]
        for with_ in withs:
            for item in with_.items:
                if item.optional_vars is not None:
                    bind(item.optional_vars, item.context_expr, with_)
        for bindings in out.values():
            bindings.sort(key=lambda b: (b.target.lineno, b.target.col_offset))
        return out


class Source:
    """A parsed file. Raises Unreadable if Python cannot parse it."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.content = path, content
        self.folder = str(path.parent)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's warnings about the user's code, e.g. invalid escapes
                self.tree = ast.parse(content)
        except SyntaxError as error:
            raise Unreadable(error.lineno or 1, f"{error.msg}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise Unreadable(1, str(error) or type(error).__name__) from error
        self.parents: dict[ast.AST, ast.AST] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.module, self.main = Unit(self, self.tree, None), Unit(self, self.tree, None)
        self.main.name = "<main>"
        self.units = [self.module, self.main]
        self._index(self.tree.body, self.tree, self.module, None)
        self.names: dict[str, str] = {}  # local name -> dotted origin; relative imports keep their dots
        self.imported: list[str] = []  # dotted names that may be modules
        self._read_imports()
        self.functions = {u.name: u for u in self.units if u.owner is None and not u.is_module}
        self.methods: dict[str, list[Unit]] = {}
        for unit in self.units:
            if unit.owner is not None:
                self.methods.setdefault(unit.name, []).append(unit)

    def _index(self, body: Sequence[ast.AST], parent: ast.AST, unit: Unit, owner: Optional[ast.ClassDef]) -> None:
        """Make a unit of each function and method, and put all other nodes into `unit`."""
        for statement in body:
            self.parents[statement] = parent
            if isinstance(statement, FUNCTIONS):
                inner = Unit(self, statement, owner)
                self.units.append(inner)
                self._walk(statement.body, statement, inner)
                defaults = (*statement.args.defaults, *statement.args.kw_defaults)
                self._walk([*statement.decorator_list, *(d for d in defaults if d is not None)], statement, unit)
            elif isinstance(statement, ast.ClassDef):
                self.classes[statement.name] = statement
                unit.by_type[ast.ClassDef].append(statement)
                self._walk([*statement.keywords, *statement.decorator_list], statement, unit)  # bases: once it is used
                self._index(statement.body, statement, unit, statement)
            elif isinstance(statement, (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.ExceptHandler)):
                test = statement.test if unit is self.module and isinstance(statement, ast.If) else None
                is_main = isinstance(test, ast.Compare) and key_of(test.left) == "__name__"
                self._compound(statement, self.main if is_main else unit, owner)
            else:
                self._walk([statement], parent, unit)

    def _compound(self, node: ast.AST, unit: Unit, owner: Optional[ast.ClassDef]) -> None:
        unit.by_type[type(node)].append(node)
        for value in vars(node).values():
            inner = value if isinstance(value, list) else [value]
            if inner and isinstance(inner[0], (ast.stmt, ast.ExceptHandler)):
                self._index(inner, node, unit, owner)
            else:
                self._walk([each for each in reversed(inner) if isinstance(each, ast.AST)], node, unit)

    def _walk(self, nodes: Sequence[ast.AST], parent: ast.AST, unit: Unit) -> None:
        parents, by_type = self.parents, unit.by_type
        stack: list[tuple[ast.AST, ast.AST, int]] = [(node, parent, 0) for node in nodes]
        while stack:
            node, above, depth = stack.pop()
            if depth > _MOST_NESTED:
                raise Unreadable(getattr(node, "lineno", 1), "an expression is nested too deeply")
            parents[node] = above
            by_type[type(node)].append(node)
            for field, value in node.__dict__.items():
                if isinstance(value, ast.AST):
                    if field not in _NOT_RUN:
                        stack.append((value, node, depth + 1))
                elif isinstance(value, list):
                    for item in value:
                        if isinstance(item, ast.AST):
                            stack.append((item, node, depth + 1))

    def _read_imports(self) -> None:
        for unit in self.units:
            for plain in unit.all(ast.Import):
                for alias in plain.names:
                    self.imported.append(alias.name)
                    top = alias.name.partition(".")[0]
                    self.names[alias.asname or top] = alias.name if alias.asname else top
            for from_ in unit.all(ast.ImportFrom):
                base = "." * from_.level + (from_.module or "")
                self.imported.append(base)
                for alias in from_.names:
                    dotted = f"{base}.{alias.name}" if from_.module else base + alias.name
                    self.imported.append(dotted)
                    self.names[alias.asname or alias.name] = dotted

    @cached_property
    def ignores(self) -> dict[int, frozenset[str]]:
        """Line -> the codes of its comment `# ddpshim: ignore[...]`; an empty set ignores all."""
        if b"ddpshim:" not in self.content:
            return {}
        out = {}
        with contextlib.suppress(tokenize.TokenError, SyntaxError):  # tokenize is stricter than the parser
            for token in tokenize.tokenize(io.BytesIO(self.content).readline):
                match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
                if match is not None:
                    codes = (match.group(1) or "").split(",")
                    out[token.start[0]] = frozenset(code.strip() for code in codes if code.strip())
        return out

    @property
    def is_script(self) -> bool:
        return bool(self.main.by_type)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around `node`, innermost first."""
        at = self.parents.get(node)
        while at is not None:
            yield at
            at = self.parents.get(at)

    def tests_around(self, node: ast.AST, *kinds: type[ast.AST]) -> Iterator[ast.expr]:
        """Yield the tests of the conditionals of these kinds (default: if, if-else) around or with `node`."""
        for above in self.above(node):
            if isinstance(above, CONDITIONALS) and isinstance(above, kinds or (ast.If, ast.IfExp)):
                yield above.test

    def qualified(self, node: ast.AST) -> str:
        """Return "torch.nn.DataParallel" for `nn.DataParallel`, by the file's imports; "" if it is no dotted name."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        parts.append(self.names.get(node.id, node.id))
        return ".".join(reversed(parts))
