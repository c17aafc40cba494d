"""Holds the rules about statements that not all ranks reach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional, Union

from ddpshim.tools.doctor.meaning import MAIN, OTHER, is_evaluation, leaves
from ddpshim.tools.doctor.rules import Case, Hit, rule, text_of
from ddpshim.tools.doctor.source import FUNCTIONS, Unit, argument, constant, identifiers, key_of, last_name

_COLLECTIVES = {
    *[
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "reduce",
    ],
    *[
        "gather",
        "gather_object",
        "scatter",
        "scatter_object_list",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
    ],
    *["all_to_all_single", "monitored_barrier", "new_group", "destroy_process_group", "init_process_group"],
}
_FRAMEWORK_COLLECTIVES = {"wait_for_everyone", "gather_for_metrics"}
_REDUCES = re.compile(
    r"(?i)all_?reduce|gather|synchroni[sz]e|^reduce$|reduce_(?!on_plateau|lr)|^sync_dist|torchmetrics|concat$"
)


@rule("DDP501")
def bound_on_rank_0(case: Case) -> Iterator[Hit]:
    test = case.meaning.test
    for unit in case.program.units:
        for branch in unit.all(ast.If):
            if branch.orelse or leaves(branch.body) or test(branch.test, unit) != MAIN:
                continue
            bound = {
                key: b
                for key, bs in unit.bindings.items()
                if key.isidentifier()
                for b in bs
                if _is_inside(b.statement, branch, unit)
            }
            for name, binding in bound.items():
                elsewhere = [b for b in unit.bindings[name] if not _is_inside(b.statement, branch, unit)]
                if (
                    name in unit.parameters
                    or any(_polarity(b.statement, unit, case) != MAIN for b in elsewhere)
                    or _is_global(name, unit)
                ):
                    continue
                use = _use_outside(name, branch, unit, case)
                if use is not None:
                    yield Hit(
                        unit,
                        binding.target,
                        f"{name} is bound on the main rank only, and line {use.lineno} uses it on all: NameError.",
                    )


def _is_inside(node: ast.AST, branch: ast.If, unit: Unit) -> bool:
    return branch in unit.source.above(node)


def _is_global(name: str, unit: Unit) -> bool:
    """Whether the name is one of the file's, or is bound by an import, def, except, del or comprehension."""
    declared = [n for g in unit.all(ast.Global) for n in g.names] + [n for g in unit.all(ast.Nonlocal) for n in g.names]
    if name in declared:
        return True
    for comprehension in unit.all(ast.comprehension):
        if name in identifiers(comprehension.target):
            return True
    if any(h.name == name for h in unit.all(ast.ExceptHandler)) or any(
        f.name == name for f in unit.all(ast.FunctionDef)
    ):
        return True
    if name in unit.source.names:
        return True
    return not unit.is_module and name in unit.source.module.bindings


def _use_outside(name: str, branch: ast.If, unit: Unit, case: Case) -> Optional[ast.Name]:
    uses = [
        n
        for n in unit.all(ast.Name)
        if n.id == name and isinstance(n.ctx, ast.Load) and n.lineno > (branch.end_lineno or 0)
    ]
    for use in sorted(uses, key=lambda n: n.lineno):
        nested = any(isinstance(a, (*FUNCTIONS, ast.Lambda)) and a is not unit.node for a in unit.source.above(use))
        if (
            not nested
            and case.meaning.guard(use, unit) is None
            and not _asks_same(use, branch, unit)
            and _shares_path(use, branch, unit)
        ):
            return use
    return None


def _shares_path(use: ast.AST, branch: ast.If, unit: Unit) -> bool:
    """Whether both stand on one path: not in the two branches of one `if`."""
    own = list(unit.source.above(branch))
    for above in unit.source.above(use):
        if isinstance(above, ast.If) and above in own:
            first = next(s for s in (above.body, above.orelse) if any(s_ in [branch, *own] for s_ in s))
            second = next(
                (
                    s
                    for s in (above.body, above.orelse)
                    if any(s_ is use or s_ in list(unit.source.above(use)) for s_ in s)
                ),
                first,
            )
            return first is second
    return True


def _asks_same(use: ast.AST, branch: ast.If, unit: Unit) -> bool:
    """Whether the use stands under a test with the same text, which may not look like one of ranks."""
    text = ast.dump(branch.test)
    words = identifiers(branch.test)
    return any(
        isinstance(a, (ast.If, ast.IfExp, ast.While)) and (ast.dump(a.test) == text or words <= identifiers(a.test))
        for a in unit.source.above(use)
    )


@rule("DDP502")
def collective_under_rank_test(case: Case) -> Iterator[Hit]:
    reached = _units_with_collectives(case)
    for unit in case.program.units:
        for call in unit.all(ast.Call):
            name = _collective(call, unit, case)
            is_inner = False
            if name is None and reached:
                called = case.tree.defined(call.func, unit.source)
                if isinstance(called, Unit) and called in reached:
                    name, is_inner = reached[called], True
            if name is None:
                continue
            guard = case.meaning.guard(call, unit)
            if guard is None or _is_balanced(call, guard, unit, case) or isinstance(guard, (ast.With, ast.AsyncWith)):
                continue
            what = f"{text_of(call.func)} reaches {name}" if is_inner else f"{text_of(call.func)} is reached"
            yield Hit(
                unit,
                call,
                f"{what} by some ranks only ({_describe(guard)}): they wait for the others until the timeout.",
            )


def _collective(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    """The name of a collective of the whole group, else None."""
    name = last_name(call.func)
    if name in _FRAMEWORK_COLLECTIVES:
        return name
    if name not in _COLLECTIVES or argument(call, "group") is not None:
        return None
    origin = unit.source.qualified(call.func)
    return name if origin.startswith("torch.distributed.") else None


def _units_with_collectives(case: Case) -> dict[Unit, str]:
    """Functions that run a collective on whichever ranks call them, two calls deep."""
    found: dict[Unit, str] = {}
    for unit in case.program.units:
        for call in unit.all(ast.Call):
            name = _collective(call, unit, case)
            if name is not None and name not in ("destroy_process_group",) and case.meaning.guard(call, unit) is None:
                found[unit] = name
    direct = dict(found)
    for unit in case.program.units:
        if unit in found or unit.is_module:
            continue
        for call in unit.all(ast.Call):
            called = case.tree.defined(call.func, unit.source)
            if isinstance(called, Unit) and called in direct and case.meaning.guard(call, unit) is None:
                found[unit] = direct[called]
    return found


def _is_balanced(call: ast.Call, guard: ast.AST, unit: Unit, case: Case) -> bool:
    """Whether the other ranks run the same collective in another branch (rank 0 first, then the rest)."""
    name = last_name(call.func)
    scope = [c for c in unit.all(ast.Call) if c is not call and last_name(c.func) == name]
    mine = _polarity(call, unit, case)
    for other in scope:
        theirs = _polarity(other, unit, case)
        if mine is not None and theirs is not None and mine != theirs:
            return True
    return isinstance(guard, ast.If) and any(
        last_name(c.func) == name
        for s in guard.orelse
        for c in ast.walk(s)
        if isinstance(c, ast.Call) and c is not call
    )


def _polarity(node: ast.AST, unit: Unit, case: Case) -> Optional[str]:
    guard = case.meaning.guard(node, unit)
    if not isinstance(guard, (ast.If, ast.IfExp)):
        return None
    found = case.meaning.test(guard.test, unit)
    if isinstance(guard, ast.If) and any(s is node or s in unit.source.above(node) for s in guard.body):
        return found
    return {MAIN: OTHER, OTHER: MAIN}.get(found or "")


def _describe(guard: ast.AST) -> str:
    if isinstance(guard, (ast.If, ast.IfExp, ast.While)):
        return f"`{text_of(guard.test, 40)}` in line {guard.lineno}"
    return f"line {getattr(guard, 'lineno', '?')}"


@rule("DDP503")
def swallowed_exception(case: Case) -> Iterator[Hit]:
    for unit in case.program.units:
        for statement in unit.all(ast.Try):
            trained = _training_in(statement.body, unit, case)
            if trained is None:
                continue
            for handler in statement.handlers:
                if _catches_all(handler) and not _ends(handler.body):
                    yield Hit(
                        unit,
                        handler,
                        f"An exception in {trained} ends here: the rank goes on or exits with 0, and the others wait.",
                    )


def _training_in(body: list[ast.stmt], unit: Unit, case: Case) -> Optional[str]:
    """A call in `body` that trains, directly or through a function of the project."""
    for statement in body:
        for call in ast.walk(statement):
            if not isinstance(call, ast.Call):
                continue
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "train_on_batch"):
                return text_of(call, 30)
            called = case.tree.defined(call.func, unit.source)
            if isinstance(called, Unit) and case.trains(called):
                return text_of(call, 30)
    return None


def _catches_all(handler: ast.ExceptHandler) -> bool:
    names = identifiers(handler.type) if handler.type is not None else {"BaseException"}
    return bool(names & {"Exception", "BaseException", "RuntimeError"})


def _ends(body: list[ast.stmt]) -> bool:
    """Whether a handler raises or exits with an error somewhere."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Raise):
                return True
            is_exit = isinstance(node, ast.Call) and last_name(node) in ("exit", "_exit", "abort", "kill")
            if is_exit and isinstance(node, ast.Call) and constant(argument(node, "", 0) or ast.Constant(0)) != 0:
                return True
    return False


@rule("DDP504")
def wrapped_evaluation_on_one_rank(case: Case) -> Iterator[Hit]:
    if not case.program.wraps:
        return
    kinds = case.meaning.kinds
    for unit in case.program.units:
        for call in unit.all(ast.Call):
            wrapped: Union[ast.expr, None] = None
            if isinstance(call.func, (ast.Name, ast.Attribute)) and "ddp" in kinds(call.func, unit):
                wrapped = call.func
            elif is_evaluation(last_name(call.func)):
                values = [*call.args, *(k.value for k in call.keywords)]
                wrapped = next(
                    (v for v in values if isinstance(v, (ast.Name, ast.Attribute)) and "ddp" in kinds(v, unit)), None
                )
                if wrapped is not None and _takes_module(call, unit, case):
                    wrapped = None
            if wrapped is None or "unwrapped" in kinds(wrapped, unit):
                continue
            guard = case.meaning.guard(call, unit)
            if guard is not None:
                yield Hit(
                    unit,
                    call,
                    f"{text_of(call, 40)} runs the wrapped {text_of(wrapped, 20)} on some ranks only "
                    f"({_describe(guard)}): its forward broadcasts buffers, and the others do not answer.",
                )


def _takes_module(call: ast.Call, unit: Unit, case: Case) -> bool:
    called = case.tree.defined(call.func, unit.source)
    return isinstance(called, Unit) and "module" in called.attributes


@rule("DDP505")
def unreduced_validation(case: Case) -> Iterator[Hit]:
    if case.program.frameworks:
        return
    for unit in case.program.units:
        for loop in unit.all(ast.For):
            loader = _iterated(loop.iter)
            if loader is None or not _is_split_loader(loader, unit, case) or not _is_validation(loop, unit):
                continue
            if _reduces(unit) or not case.on_every_rank(loop, unit):
                continue
            if any(
                _reduces(where)
                for where, _ in case.meaning.sites_of(unit)[:5]
                if not case.trains(where) or where is not unit
            ):
                continue
            total = _accumulates(loop)
            if total:
                yield Hit(
                    unit,
                    loop,
                    f"{total} is summed over this rank's share of {text_of(loader, 30)} and never reduced: each "
                    "rank logs and decides by a number of its own.",
                )

    for unit in case.program.units:
        if _reduces(unit):
            continue
        for call in unit.all(ast.Call):
            values = [*call.args, *(k.value for k in call.keywords)]
            loader = next(
                (v for v in values if isinstance(v, (ast.Name, ast.Attribute)) and _is_held_out(v, unit, case)), None
            )
            called = case.tree.defined(call.func, unit.source) if loader is not None else None
            if loader is None or not isinstance(called, Unit) or _reduces(called):
                continue
            decision = next(
                (
                    c
                    for c in sorted(unit.all(ast.Compare), key=lambda c: c.lineno)
                    if c.lineno > call.lineno
                    and isinstance(c.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
                    and any("best" in name.lower() for name in identifiers(c))
                ),
                None,
            )
            if decision is not None:
                yield Hit(
                    unit,
                    decision,
                    f"{text_of(decision, 50)} decides by {text_of(call.func, 30)}() over this rank's share of "
                    f"{text_of(loader, 30)}, which is never reduced.",
                )


def _is_held_out(loader: ast.expr, unit: Unit, case: Case) -> bool:
    return bool(re.search(r"(?i)(^|_)(val|valid|test|eval)", last_name(loader))) and _is_split_loader(
        loader, unit, case
    )


def _iterated(node: ast.expr) -> Optional[ast.expr]:
    """The loader in `enumerate(tqdm(loader))`."""
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return node if key_of(node) else None


def _is_split_loader(node: ast.expr, unit: Unit, case: Case, depth: int = 0) -> bool:
    """Whether a loader was made with a distributed sampler."""
    for where, binding in case.meaning.reaching(node, unit):
        call = binding.value
        if isinstance(call, ast.Call) and "loader" in case.meaning.kinds(call, where):
            sampler = argument(call, "sampler", 3)
            if sampler is not None and "dsampler" in case.meaning.kinds(sampler, where):
                return True
        elif call is not None and key_of(call) and depth < 3 and _is_split_loader(call, where, case, depth + 1):
            return True
    if isinstance(node, ast.Name) and node.id in unit.parameters and depth < 3:
        position = unit.parameters.index(node.id) - (unit.owner is not None)
        for where, call in case.meaning.sites_of(unit)[:10]:
            value = argument(call, node.id, position)
            if value is not None and key_of(value) and _is_split_loader(value, where, case, depth + 1):
                return True
    return False


def _is_validation(loop: ast.For, unit: Unit) -> bool:
    if is_evaluation(unit.name) or re.search(r"(?i)(^|_)(val|valid|test|eval)", " ".join(identifiers(loop.iter))):
        return not any(
            isinstance(c.func, ast.Attribute) and c.func.attr == "backward"
            for c in ast.walk(loop)
            if isinstance(c, ast.Call)
        )
    return False


def _reduces(unit: Unit) -> bool:
    return any(_REDUCES.search(word) for word in unit.attributes | unit.loaded)


def _accumulates(loop: ast.For) -> str:
    """What the loop sums up or collects."""
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            name = last_name(node.target)
            if re.search(r"(?i)loss|acc|correct|total|metric|err|score|sum", name):
                return name
        if (
            isinstance(node, ast.Call)
            and last_name(node.func) in ("append", "update")
            and isinstance(node.func, ast.Attribute)
        ):
            name = last_name(node.func.value)
            if re.search(r"(?i)loss|acc|correct|total|metric|err|score|meter|top1|top5", name):
                return name
    return ""
