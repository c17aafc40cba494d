"""Defines a rule: a function that yields the hits in one program, registered under a code."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Callable, NamedTuple, Optional

from ddpshim.tools.doctor.meaning import Meaning
from ddpshim.tools.doctor.nodes import argument, constant, identifiers
from ddpshim.tools.doctor.source import Node, Unit
from ddpshim.tools.doctor.tree import FRAMEWORKS

ANY_FRAMEWORK = frozenset(FRAMEWORKS)


class Hit(NamedTuple):
    """A hazard at a node. `message` is one sentence with names from the program."""

    unit: Unit
    node: ast.AST
    message: str


class Case(Meaning):
    """One program, and all that is known about it and its tree."""

    def calls(self, *names: str) -> Iterator[tuple[Unit, ast.Call]]:
        """Yield calls of functions or methods with one of these last names; without names, all calls."""
        return self.program.calls(*names) if names else self.all(ast.Call)

    def all(self, kind: type[Node]) -> Iterator[tuple[Unit, Node]]:
        """Yield the program's nodes of one type."""
        return ((unit, node) for unit in self.program.units for node in unit.all(kind))

    def configs(self) -> dict[Path, bytes]:
        """Return the YAML files that the program reads: those of hydra.main, and those whose names it mentions.

        If it reads YAML without a name of a file, all of them.
        """
        entry, configs = self.program.entry, self.tree.configs
        texts = {str(c.value) for unit in self.program.units for c in unit.all(ast.Constant)}
        named = {path for path in configs if any(text.endswith(path.name) for text in texts)}
        for unit in (entry.module, entry.main):
            for call in unit.all(ast.Call):
                if entry.qualified(call.func) == "hydra.main":
                    wanted = named | self._of_hydra(argument(call, "config_name", 1))
                    return {path: content for path, content in configs.items() if path in wanted}
        reads = any(origin.partition(".")[0] in ("yaml", "omegaconf") for origin in self.program.origins)
        named |= set(configs) if reads and not named else set()
        return {path: content for path, content in configs.items() if path in named}

    def _of_hydra(self, name: Optional[ast.expr]) -> set[Path]:
        """Return the config with this name, else those that name a class of the script, else all (if it has none)."""
        entry, configs = self.program.entry, self.tree.configs
        is_own = name is not None and "__file__" in identifiers(name)
        stem = entry.path.stem if is_own else str(constant(name)).rpartition("/")[2].partition(".")[0]
        named = {c for c in configs if c.stem == stem}
        targeted = {c for each in entry.classes for _, c in self.tree.targets.get(each, [])}
        return named or targeted or (set() if entry.classes else set(configs))

    def function(self, call: ast.Call, unit: Unit) -> Optional[Unit]:
        """Return the called function, if it is defined in the tree."""
        found = self.tree.defined(call.func, unit.source)
        return found if isinstance(found, Unit) else None


Rule = Callable[[Case], Iterator[Hit]]
CallRule = Callable[[ast.Call, Unit, Case], Optional[str]]
RULES: dict[str, Rule] = {}


def rule(code: str, *, unless: Collection[str] = (), wraps: bool = False) -> Callable[[Rule], Rule]:
    """Register a function under a code; it skips programs that use a framework in `unless`.

    With `wraps` it also skips programs that name neither DistributedDataParallel nor DataParallel.
    """

    def register(function: Rule) -> Rule:
        def apply(case: Case) -> Iterator[Hit]:
            if case.program.frameworks.isdisjoint(unless) and (case.program.wraps or not wraps):
                yield from function(case)

        RULES[code] = apply
        return function

    return register


def call_rule(
    code: str, *names: str, unless: Collection[str] = (), wraps: bool = False
) -> Callable[[CallRule], CallRule]:
    """Register a function that returns what is wrong with one call, or None; for calls of `names`, default all."""

    def register(function: CallRule) -> CallRule:
        @rule(code, unless=unless, wraps=wraps)
        def apply(case: Case) -> Iterator[Hit]:
            for unit, call in case.calls(*names):
                message = function(call, unit, case)
                if message is not None:
                    yield Hit(unit, call, message)

        return function

    return register


def text_of(node: ast.AST, limit: int = 60) -> str:
    """Return the source of an expression as one line of at most `limit` characters."""
    try:
        text = " ".join(ast.unparse(node).split())
    except RecursionError:
        return "…"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
