"""Defines a rule: a function from one program to its hits, registered under a code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, NamedTuple

from ddpshim.tools.doctor.meaning import Meaning
from ddpshim.tools.doctor.source import Unit
from ddpshim.tools.doctor.tree import Program, Tree


class Hit(NamedTuple):
    """A hazard at a node. `message` is one sentence, with the names that were found."""

    unit: Unit
    node: ast.AST
    message: str


@dataclass(frozen=True)
class Case:
    """One program to look at, and what is known about the tree that it stands in."""

    program: Program
    tree: Tree
    meaning: Meaning

    def calls(self, *names: str) -> Iterator[tuple[Unit, ast.Call]]:
        return self.program.calls(*names)

    def on_every_rank(self, node: ast.AST, unit: Unit) -> bool:
        return not self.meaning.is_guarded(node, unit)

    @property
    def is_distributed(self) -> bool:
        return self.program.is_distributed

    def trains(self, unit: Unit) -> bool:
        """Whether a function trains, itself or through what it calls."""
        return unit in self.tree.training

    def is_handled_by(self, *frameworks: str) -> bool:
        return not self.program.frameworks.isdisjoint(frameworks)


Rule = Callable[[Case], Iterator[Hit]]
RULES: dict[str, Rule] = {}


def rule(code: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES[code] = function
        return function

    return register


def text_of(node: ast.AST, limit: int = 60) -> str:
    """The source of an expression in one short line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
