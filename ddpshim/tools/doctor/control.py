"""Holds the rules about statements that not all ranks reach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.meaning import MAIN, OPPOSITE, is_evaluation, leaves, speaks_of_launch
from ddpshim.tools.doctor.nodes import (
    CONDITIONALS,
    FUNCTIONS,
    argument,
    calls_in,
    constant,
    identifiers,
    key_of,
    last_name,
    values_of,
    words_of,
)
from ddpshim.tools.doctor.rules import ANY_FRAMEWORK, Case, Hit, call_rule, rule, text_of
from ddpshim.tools.doctor.source import Unit

_COLLECTIVES = words_of(
    "all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single barrier broadcast "
    "broadcast_object_list destroy_process_group gather gather_object init_process_group monitored_barrier new_group "
    "reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list"
)
_FRAMEWORK_COLLECTIVES = {"wait_for_everyone", "gather_for_metrics"}
_REDUCES = re.compile(
    r"(?i)all_?reduce|gather|synchroni[sz]e|^reduce$|reduce_(?!on_plateau|lr)|^sync_dist|torchmetrics|concat$"
)
_BEST_FEW = re.compile(r"(?i)top_?k|nlargest|nsmallest|heappush")
_MEASURES = re.compile(r"(?i)profil|benchmark|flops|auto_?batch|measure")  # of speed or memory, not training
_VALIDATION = re.compile(r"(?i)(^|_)(val|valid|test|eval)")


@rule("DDP501")
def bound_on_rank_0(case: Case) -> Iterator[Hit]:
    for unit, branch in case.all(ast.If):
        if branch.orelse or leaves(branch.body) or case.test(branch.test, unit) != MAIN:
            continue
        before = (i for i in unit.all(ast.If) if i.lineno < branch.lineno and leaves(i.body))
        if any(case.test(each.test, unit) for each in before):
            continue  # ranks have left on a condition that may also decide whether the name is used
        for name, bindings in unit.bindings.items():
            inside = [b for b in bindings if branch in unit.source.above(b.statement)]
            if not inside or not name.isidentifier() or name in unit.parameters or _is_global(name, unit):
                continue
            if any(_polarity(b.statement, unit, case) != MAIN for b in bindings if b not in inside):
                continue
            use = _use_outside(name, branch, unit, case)
            if use is not None:
                message = f"{name} is bound on the main rank only, and line {use.lineno} uses it on all: NameError."
                yield Hit(unit, inside[-1].target, message)


def _is_global(name: str, unit: Unit) -> bool:
    """Whether the name is global or nonlocal, or bound by an import, def, except or comprehension."""
    declared = {n for g in unit.all(ast.Global) for n in g.names} | {n for g in unit.all(ast.Nonlocal) for n in g.names}
    looped = {n for comprehension in unit.all(ast.comprehension) for n in identifiers(comprehension.target)}
    defined = {f.name for f in unit.all(ast.FunctionDef)} | {h.name for h in unit.all(ast.ExceptHandler)}
    if name in declared | looped | defined or name in unit.source.names:
        return True
    return not unit.is_module and name in unit.source.module.bindings


def _use_outside(name: str, branch: ast.If, unit: Unit, case: Case) -> Optional[ast.Name]:
    """Return the first place after the branch that reads the name and that every rank reaches."""
    uses = [use for use in unit.uses(name) if use.lineno > (branch.end_lineno or 0)]
    for use in sorted(uses, key=lambda n: n.lineno):
        nested = any(isinstance(a, (*FUNCTIONS, ast.Lambda)) and a is not unit.node for a in unit.source.above(use))
        is_reached = not nested and case.guard(use, unit) is None
        if is_reached and not _asks_same(use, branch, unit) and _shares_path(use, branch, unit):
            return use
    return None


def _shares_path(use: ast.AST, branch: ast.If, unit: Unit) -> bool:
    """Whether one run can reach both: they are not in the two branches of one `if`."""
    own, others = [branch, *unit.source.above(branch)], [use, *unit.source.above(use)]
    common = next((above for above in others[1:] if isinstance(above, ast.If) and above in own[1:]), None)
    if common is None:
        return True
    first = next(block for block in (common.body, common.orelse) if any(s in own for s in block))
    second = next((block for block in (common.body, common.orelse) if any(s in others for s in block)), first)
    return first is second


def _asks_same(use: ast.AST, branch: ast.If, unit: Unit) -> bool:
    """Whether the use is under the same test as the branch, or under one with all its names."""
    text, words = ast.dump(branch.test), identifiers(branch.test)
    tests = unit.source.tests_around(use, *CONDITIONALS)
    return any(ast.dump(test) == text or words <= identifiers(test) for test in tests)


@rule("DDP502")
def collective_under_rank_test(case: Case) -> Iterator[Hit]:
    reached = _units_with_collectives(case)
    for unit, call in case.calls():
        name = _collective(call, unit)
        called = case.function(call, unit) if name is None and reached else None
        inner = reached.get(called) if called is not None else None
        guard = case.guard(call, unit) if name or inner else None
        if guard is None or isinstance(guard, (ast.With, ast.AsyncWith)) or _is_balanced(call, guard, unit, case):
            continue
        what = f"reaches {inner}" if inner else "is reached"
        reach = f"{text_of(call.func)} {what} by some ranks only ({_describe(guard)})"
        yield Hit(unit, call, f"{reach}: those ranks wait for the others until the timeout.")


def _collective(call: ast.Call, unit: Unit) -> Optional[str]:
    """Return the name of a collective of the whole group, else None."""
    name = last_name(call)
    is_whole = name in _COLLECTIVES and argument(call, "group") is None
    is_known = is_whole and unit.source.qualified(call.func).startswith("torch.distributed.")
    return name if is_known or name in _FRAMEWORK_COLLECTIVES else None


def _units_with_collectives(case: Case) -> dict[Unit, str]:
    """Return function -> collective that it always runs, directly or through one more function."""
    direct: dict[Unit, str] = {}
    for unit, call in case.calls():
        name = _collective(call, unit)
        is_asked = any(not speaks_of_launch(test) for test in unit.source.tests_around(call))
        if name is not None and name != "destroy_process_group" and not is_asked and case.guard(call, unit) is None:
            direct[unit] = name
    found = dict(direct)
    for unit, call in case.calls() if direct else ():
        called = case.function(call, unit) if unit not in direct and not unit.is_module else None
        if called is not None and called in direct and case.guard(call, unit) is None:
            found[unit] = direct[called]
    return found


def _is_balanced(call: ast.Call, guard: ast.AST, unit: Unit, case: Case) -> bool:
    """Whether the other ranks run the same collective in another branch (rank 0 first, then the rest)."""
    name, opposite = last_name(call), OPPOSITE.get(_polarity(call, unit, case) or "")
    others = [c for c in unit.all(ast.Call) if c is not call and last_name(c) == name]
    if opposite is not None and any(_polarity(other, unit, case) == opposite for other in others):
        return True
    return isinstance(guard, ast.If) and any(last_name(c) == name for c in calls_in(*guard.orelse) if c is not call)


def _polarity(node: ast.AST, unit: Unit, case: Case) -> Optional[str]:
    """Return MAIN or OTHER if a test lets only the main rank, or only the others, reach a node; else None."""
    guard = case.guard(node, unit)
    if not isinstance(guard, (ast.If, ast.IfExp)):
        return None
    found = case.test(guard.test, unit)
    is_inside = isinstance(guard, ast.If) and any(s is node or s in unit.source.above(node) for s in guard.body)
    return found if is_inside else OPPOSITE.get(found or "")


def _describe(guard: ast.AST) -> str:
    if isinstance(guard, CONDITIONALS):
        return f"`{text_of(guard.test, 40)}` in line {guard.lineno}"
    return f"line {getattr(guard, 'lineno', '?')}"


@rule("DDP503")
def swallowed_exception(case: Case) -> Iterator[Hit]:
    for unit, statement in case.all(ast.Try):
        if _MEASURES.search(unit.name):
            continue
        trained = _training_in(statement.body, unit, case)
        for handler in statement.handlers if trained is not None else ():
            caught = identifiers(handler.type) if handler.type is not None else {"BaseException"}
            if caught & {"Exception", "BaseException", "RuntimeError"} and not _ends(handler.body):
                message = f"An exception in {trained} ends here: the rank goes on or exits with 0, and the others wait."
                yield Hit(unit, handler, message)


def _training_in(body: list[ast.stmt], unit: Unit, case: Case) -> Optional[str]:
    """Return a call in `body` that trains, directly or through a function of the project; else None."""
    for call in calls_in(*body):
        is_direct = isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "train_on_batch")
        called = case.function(call, unit)
        trains = called is not None and called in case.tree.training and not _MEASURES.search(called.name)
        if is_direct or trains:
            return text_of(call, 30)
    return None


def _ends(body: list[ast.stmt]) -> bool:
    """Whether a handler raises, or exits with an error code."""
    if any(isinstance(node, ast.Raise) for statement in body for node in ast.walk(statement)):
        return True
    exits = (call for call in calls_in(*body) if last_name(call) in ("exit", "_exit", "abort", "kill"))
    return any(constant(argument(call, "", 0) or ast.Constant(0)) != 0 for call in exits)


@call_rule("DDP504", wraps=True)
def wrapped_evaluation_on_one_rank(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    wrapped = _first_wrapped([call.func], unit, case)
    if wrapped is None and is_evaluation(last_name(call)):
        called = case.function(call, unit)
        takes_module = called is not None and "module" in called.attributes
        wrapped = _first_wrapped(values_of(call), unit, case) if not takes_module else None
    guard = case.guard(call, unit) if wrapped is not None else None
    if wrapped is None or guard is None or "unwrapped" in case.kinds(wrapped, unit):
        return None
    runs = f"{text_of(call, 40)} runs the wrapped {text_of(wrapped, 20)} on some ranks only ({_describe(guard)})"
    return f"{runs}: its forward broadcasts buffers, and the others do not answer."


def _first_wrapped(nodes: list[ast.expr], unit: Unit, case: Case) -> Optional[ast.expr]:
    names = (node for node in nodes if isinstance(node, (ast.Name, ast.Attribute)))
    return next((name for name in names if "ddp" in case.kinds(name, unit)), None)


@rule("DDP506", unless=("lightning", "transformers", "ddpshim"))
def decides_alone(case: Case) -> Iterator[Hit]:
    for unit, test in case.all(ast.If):
        loop = next((a for a in unit.source.above(test) if isinstance(a, (ast.For, ast.While))), None)
        leaving = next((block for block in (test.body, test.orelse) if leaves(block)), None)
        if loop is None or leaving is None or _is_checked(leaving[-1]) or unit not in case.program.sure:
            continue
        trained = [c for c in calls_in(*loop.body) if _trains_here(c, unit, case)]
        if isinstance(leaving[-1], ast.Continue):  # calls above it have already run in this iteration
            trained = [c for c in trained if c.lineno > (test.end_lineno or test.lineno)]
        why = _own_reason(test.test, unit, case) if trained else None
        if why is not None:
            verb = type(leaving[-1]).__name__.lower()
            others = f"the others wait for it in {text_of(trained[0], 30)}"
            yield Hit(unit, test, f"`{verb}` where {text_of(test.test, 40)}: {why}, and {others}.")
    for unit, call in case.calls("step"):
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        made = [value for _, value in case.values(receiver, unit) if isinstance(value, ast.Call)]
        is_plateau = any(last_name(value) == "ReduceLROnPlateau" for value in made)
        if is_plateau and call.args and _is_own_number(call.args[0], unit, case):
            lowers = f"{text_of(call)} lowers the learning rate by this rank's own {text_of(call.args[0], 30)}"
            yield Hit(unit, call, f"{lowers}: ranks continue with different rates, and their weights diverge.")


def _is_checked(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Raise, ast.Expr))


def _trains_here(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether a call waits for all ranks: a collective, or a backward pass."""
    if _collective(call, unit):
        return True
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "train_on_batch"):
        return case.program.wraps or bool(case.program.frameworks)
    called = case.function(call, unit)
    return called is not None and called in case.tree.training and case.program.is_distributed


def _own_reason(test: ast.expr, unit: Unit, case: Case) -> Optional[str]:
    """Return the reason why a test may have different results on different ranks, else None."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    if any(case.test(part, unit) for part in parts):
        return "some ranks leave"
    if _is_own_number(test, unit, case):
        return "each rank decides by its own number"
    for name in identifiers(test):
        bindings = unit.bindings.get(name, [])
        guarded = [b for b in bindings if case.guard(b.statement, unit) is not None]
        others = [b for b in bindings if b not in guarded]
        if guarded and others and all(isinstance(b.value, ast.Constant) for b in others) and not _is_sent(name, unit):
            return f"{name} is set on some ranks only (line {guarded[0].target.lineno})"
    return None


def _is_sent(name: str, unit: Unit) -> bool:
    """Whether a name is an argument of a call that reduces, gathers or broadcasts it."""
    sending = [c for c in unit.all(ast.Call) if _REDUCES.search(last_name(c)) or "broadcast" in last_name(c).lower()]
    sent = {word for call in sending for word in identifiers(call)}
    values = (b.value for word in sent for b in unit.bindings.get(word, []) if b.value is not None)
    return name in sent or any(name in identifiers(value) for value in values)


def _is_own_number(node: ast.expr, unit: Unit, case: Case) -> bool:
    """Whether a value is computed from this rank's share of the data and is never reduced over ranks."""
    made = list(case.made_of(node, unit))
    words = {word for _, part in made for word in identifiers(part)}
    if any(_REDUCES.search(word) or "broadcast" in word for word in words):
        return False
    names = {(where, key_of(n)) for where, part in made for n in ast.walk(part) if key_of(n)}
    if any(name is not None and _is_sent(name, where) for where, name in names):
        return False
    for where, part in made:
        for call in calls_in(part):
            if case.kinds(call.func, where) & {"ddp", "prepared"} and isinstance(call.func, (ast.Name, ast.Attribute)):
                return True
            called = case.function(call, where)
            loaders = (v for v in values_of(call) if isinstance(v, (ast.Name, ast.Attribute)))
            if called is not None and not _reduces(called) and any(_is_split_loader(v, where, case) for v in loaders):
                return True
    return False


@rule("DDP505", unless=ANY_FRAMEWORK)
def unreduced_validation(case: Case) -> Iterator[Hit]:
    for unit, loop in case.all(ast.For):
        loader = _iterated(loop.iter)
        is_named = is_evaluation(unit.name) or bool(_VALIDATION.search(" ".join(identifiers(loop.iter))))
        if loader is None or not is_named or not _is_split_loader(loader, unit, case):
            continue
        if any(isinstance(c.func, ast.Attribute) and c.func.attr == "backward" for c in calls_in(loop)):
            continue
        callers = [u for u, _ in case.sites_of(unit)[:5] if u is not unit or u not in case.tree.training]
        if any(map(_reduces, [unit, *callers])) or case.is_guarded(loop, unit):
            continue
        total = _accumulates(loop)
        if total:
            summed = f"{total} is summed over this rank's share of {text_of(loader, 30)} and never reduced"
            yield Hit(unit, loop, f"{summed}: each rank logs and decides by its own number.")
    for unit, call in case.calls():
        names = [v for v in values_of(call) if isinstance(v, (ast.Name, ast.Attribute))]
        held_out = (name for name in names if _VALIDATION.search(last_name(name)))
        loader = next((name for name in held_out if _is_split_loader(name, unit, case)), None)
        called = case.function(call, unit) if loader is not None else None
        if loader is None or called is None or _reduces(called) or _reduces(unit):
            continue
        decision = _decision_after(call, unit)
        if decision is not None:
            decides = f"{text_of(decision, 50)} decides by {text_of(call.func, 30)}()"
            share = f"this rank's share of {text_of(loader, 30)}"
            yield Hit(unit, decision, f"{decides} over {share}, which is never reduced.")


def _decision_after(call: ast.Call, unit: Unit) -> Optional[ast.expr]:
    """Return the first comparison with a best value after a call, or a choice of the best few; else None."""
    for chosen in unit.all(ast.Call):
        if chosen.lineno > call.lineno and _BEST_FEW.search(ast.unparse(chosen.func)):
            return chosen
    for compared in sorted(unit.all(ast.Compare), key=lambda c: c.lineno):
        is_order = isinstance(compared.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
        if compared.lineno > call.lineno and is_order and any("best" in n.lower() for n in identifiers(compared)):
            return compared
    return None


def _iterated(node: ast.expr) -> Optional[ast.expr]:
    """Return `loader` for `enumerate(tqdm(loader))`."""
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return node if key_of(node) else None


def _is_split_loader(node: ast.expr, unit: Unit, case: Case, depth: int = 0) -> bool:
    """Whether a loader was made with a distributed sampler."""
    values = case.values(node, unit)
    if isinstance(node, ast.Name):
        values += [(where, value) for where, _, value in case.passed(node.id, unit, 10) if key_of(value)]
    for where, value in values:
        if isinstance(value, ast.Call) and "loader" in case.kinds(value, where):
            if "dsampler" in case.kinds(argument(value, "sampler", 3), where):
                return True
        elif key_of(value) and depth < 3 and _is_split_loader(value, where, case, depth + 1):
            return True
    return False


def _reduces(unit: Unit) -> bool:
    return any(map(_REDUCES.search, unit.words))


def _accumulates(loop: ast.For) -> str:
    """Return the name of the result that the loop sums or collects, or ""."""
    results = "(?i)loss|acc|correct|total|metric|err|score"
    for node in ast.walk(loop):
        func = node.func if isinstance(node, ast.Call) else None
        name = ""
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            name, pattern = last_name(node.target), f"{results}|sum"
        elif isinstance(func, ast.Attribute) and func.attr in ("append", "update"):
            name, pattern = last_name(func.value), f"{results}|meter|top1|top5"
        if name and re.search(pattern, name):
            return name
    return ""
