"""Holds the rules about keys of what is saved and loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpshim.tools.doctor.rules import Case, Hit, rule, text_of
from ddpshim.tools.doctor.source import Unit, argument, constant, identifiers, last_name


@rule("DDP701")
def wrapped_keys(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls("state_dict"):
        if not isinstance(call.func, ast.Attribute) or call.args or _is_handled(call, unit):
            continue
        if case.meaning.kinds(call.func.value, unit) & {"ddp", "dp", "holds-wrapped"}:
            yield Hit(
                unit,
                call,
                f"{text_of(call)} is of the wrapper: its keys have module. in them, which a bare network refuses.",
            )


def _is_handled(node: ast.AST, unit: Unit) -> bool:
    for above in unit.source.above(node):
        if isinstance(above, (ast.If, ast.IfExp)) and identifiers(above.test) & {"hasattr", "isinstance", "module"}:
            return True
    return False


@rule("DDP702")
def replace_module(case: Case) -> Iterator[Hit]:
    for unit, call in _replacements(case):
        if len(call.args) < 2 or constant(call.args[1]) != "" or "module." not in _texts(call.args[0], unit, case):
            continue
        if len(call.args) == 3 and constant(call.args[2]) == 1 and _asks_prefix(call, unit):
            continue
        yield Hit(
            unit,
            call,
            f'{text_of(call, 40)} also eats the middle of a key: "prior_module.weight" becomes "prior_weight".',
        )


def _replacements(case: Case) -> Iterator[tuple[Unit, ast.Call]]:
    """Each `replace` in the tree's files about torch: scripts that only load are hurt by it as well."""
    for source in case.tree.sources:
        if any(origin.partition(".")[0] == "torch" for origin in source.names.values()) and not case.tree.is_test(
            source
        ):
            for unit in source.units:
                for call in unit.all(ast.Call) if "replace" in unit.attributes else ():
                    if isinstance(call.func, ast.Attribute) and call.func.attr == "replace":
                        yield unit, call


def _texts(node: ast.expr, unit: Unit, case: Case) -> set[object]:
    """The literals that an expression may be, those that callers pass included."""
    if isinstance(node, ast.Constant):
        return {node.value}
    found = {constant(b.value) for _, b in case.meaning.reaching(node, unit)}
    if isinstance(node, ast.Name) and node.id in unit.parameters:
        position = unit.parameters.index(node.id) - (unit.owner is not None)
        sites = [c for u in unit.source.units for c in u.all(ast.Call) if last_name(c.func) == unit.name]
        found |= {constant(argument(site, node.id, position)) for site in sites}
    return found


def _asks_prefix(node: ast.AST, unit: Unit) -> bool:
    for above in unit.source.above(node):
        tests = [above.test] if isinstance(above, (ast.If, ast.IfExp)) else []
        tests += [t for c in getattr(above, "generators", []) for t in c.ifs]
        if any(last_name(c.func) == "startswith" for t in tests for c in ast.walk(t) if isinstance(c, ast.Call)):
            return True
    return False
