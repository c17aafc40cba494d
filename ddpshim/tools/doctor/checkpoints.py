"""Holds the rules about the keys of saved and loaded state dicts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.kinds import WRAPPERS
from ddpshim.tools.doctor.nodes import argument, calls_in, constant, identifiers, last_name
from ddpshim.tools.doctor.rules import Case, Hit, call_rule, rule, text_of
from ddpshim.tools.doctor.source import Unit


@call_rule("DDP701", "state_dict")
def wrapped_keys(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    tests = unit.source.tests_around(call)
    is_handled = any(identifiers(test) & {"hasattr", "isinstance", "module"} for test in tests)
    if not isinstance(call.func, ast.Attribute) or call.args or is_handled:
        return None
    if not case.kinds(call.func.value, unit) & WRAPPERS:
        return None
    return f'{text_of(call)} is the wrapper\'s: its keys contain "module.", which a bare network refuses.'


@rule("DDP702")
def replace_module(case: Case) -> Iterator[Hit]:
    for source in case.tree.sources:  # all files with torch: also scripts that only load
        is_of_torch = any(origin.partition(".")[0] == "torch" for origin in source.names.values())
        for unit in source.units if is_of_torch and not case.tree.is_test(source) else ():
            for call in unit.all(ast.Call) if "replace" in unit.attributes else ():
                if not isinstance(call.func, ast.Attribute) or call.func.attr != "replace" or len(call.args) < 2:
                    continue
                if constant(call.args[1]) != "" or "module." not in _texts(call.args[0], unit, case):
                    continue
                if len(call.args) == 3 and constant(call.args[2]) == 1 and _asks_prefix(call, unit):
                    continue
                eats = f"{text_of(call, 40)} also eats the middle of a key"
                yield Hit(unit, call, f'{eats}: "prior_module.weight" becomes "prior_weight".')


def _texts(node: ast.expr, unit: Unit, case: Case) -> set[object]:
    """Return the literals that an expression may be, including those that callers pass."""
    if isinstance(node, ast.Constant):
        return {node.value}
    found = {constant(value) for _, value in case.values(node, unit)}
    if isinstance(node, ast.Name) and node.id in unit.parameters:
        sites = [c for u in unit.source.units for c in u.all(ast.Call) if last_name(c.func) == unit.name]
        found |= {constant(argument(site, node.id, unit.position(node.id))) for site in sites}
    return found


def _asks_prefix(node: ast.AST, unit: Unit) -> bool:
    comprehensions = [c for above in unit.source.above(node) for c in getattr(above, "generators", [])]
    tests = [*unit.source.tests_around(node), *(test for c in comprehensions for test in c.ifs)]
    return any(last_name(c.func) == "startswith" for c in calls_in(*tests))
