"""Infers which expressions depend on the rank, and which ranks reach a statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Callable, Optional

from ddpshim.tools.doctor.kinds import Kinds
from ddpshim.tools.doctor.nodes import (
    FUNCTIONS,
    Function,
    constant,
    entered,
    identifiers,
    is_none,
    key_of,
    last_name,
    words_of,
)
from ddpshim.tools.doctor.source import Unit

_RANK = re.compile(r"(?i)^_*(?:(?!lora|low|matrix|full|max)\w*_|local|global|world|my)?rank(?:_?id)?$")
_RANK_WORDS = words_of("process_index local_process_index proc_id process_id gpu gpu_id device_id get_ordinal")
_RANK_CALLS = {"get_rank", "get_local_rank", "get_global_rank", "get_node_local_rank", "get_ordinal"}
_LOCAL_VARIABLES = {"LOCAL_RANK", "SLURM_LOCALID"}
_RANK_VARIABLES = {"RANK", "SLURM_PROCID"} | _LOCAL_VARIABLES
_LOCAL_RANK = re.compile(r"(?i)^_*(?:ddp_?|my_?)?local_?rank$|^local_process_index$|^get_local_rank$")
_IS_MAIN = re.compile(
    r"(?i)^_*(?:is_?|am_?|on_?|if_?|check_?)*(?:local_?|global_?|world_?|ddp_?)*"
    r"(?:(?:main|master|primary|chief|root|rank_?(?:0|zero)|global_?(?:0|zero)|zero_?rank)"
    r"(?:_?(?:process|proc|rank|node|worker|gpu))?)$"
)
# These words have too many other meanings; with "is_" in front they count.
_NOT_MAIN = {"main", "root", "first", "master", "primary", "_main", "first_rank", "root_node", "on_main", "if_main"}
_MAIN_ONLY = re.compile(
    r"(?i)^(?:on_)?(?:local_|global_)?(?:rank_?(?:0|zero)|main|master|primary)_?(?:process|rank|node)?_?(?:only|first)$|on_(?:local_)?main_process$|^(?:run_on|only)_main$"
)
_WORLD_SIZE = re.compile(
    r"(?i)^_*(?:ddp_|global_)?(?:world_?size|num_?(?:gpus|processes|replicas|ranks|devices)|n_?gpus?|ngpus(?:_per_node)?|get_world_size|device_count|nprocs?|num_procs)$"
)
_LAUNCH = re.compile(
    r"distrib|ddp|is_dist|world_?size|is_initialized|local_?rank|multi_?gpu|\bdist\b|num_?gpus|n_?gpus"
)
_WITHOUT_GRADIENTS = {"no_grad", "inference_mode"}
_EVALUATION = re.compile(
    r"(?i)(^|_)(eval\w*|val|valid\w*|test|infer\w*|sample|rollout\w*|predict|generate|get_action|visuali[sz]e)($|_)"
)
MAIN, OTHER = "main", "other"
OPPOSITE = {MAIN: OTHER, OTHER: MAIN}


class Meaning(Kinds):
    """Also infers which ranks reach a statement: all, or only the main rank."""

    def is_rank(self, node: ast.AST, unit: Unit, depth: int = 0) -> bool:
        """Whether an expression is the number of this rank."""
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in ("int", "str") and node.args:
                return self.is_rank(node.args[0], unit, depth)
            if name in ("getenv", "get", "pop") and node.args:
                return constant(node.args[0]) in _RANK_VARIABLES | {"OMPI_COMM_WORLD_RANK"}
            return name in _RANK_CALLS
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self.is_rank(node.left, unit, depth)
        if isinstance(node, ast.Subscript) and last_name(node.value) == "environ":
            return constant(node.slice) in _RANK_VARIABLES
        if isinstance(node, ast.NamedExpr):
            return self.is_rank(node.value, unit, depth)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            name = last_name(node)
            if _RANK.match(name) or name in _RANK_WORDS:
                return True
            if depth < 3 and isinstance(node, ast.Name):
                return any(self.is_rank(value, where, depth + 1) for where, value in self.values(node, unit))
        return False

    def is_local_rank(self, node: ast.AST, unit: Unit, depth: int = 0) -> bool:
        """Whether an expression is the number of this rank on its node."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            if _LOCAL_RANK.match(last_name(node)):
                return True
            if depth < 3 and isinstance(node, ast.Name):
                values = [value for _, value in self.values(node, unit)]
                return bool(values) and all(self.is_local_rank(value, unit, depth + 1) for value in values)
            return False
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name == "int" and node.args:
                return self.is_local_rank(node.args[0], unit, depth)
            if name in ("getenv", "get") and node.args:
                return constant(node.args[0]) in _LOCAL_VARIABLES
            return name == "get_local_rank" and not any("mesh" in word for word in identifiers(node.func))
        return isinstance(node, ast.Subscript) and constant(node.slice) in _LOCAL_VARIABLES

    def made_of(self, node: ast.AST, unit: Unit, depth: int = 0) -> Iterator[tuple[Unit, ast.AST]]:
        """Yield an expression and all values from which its names were computed, including arguments of callers."""
        yield unit, node
        for name in [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))] if depth < 4 else ():
            key = key_of(name)
            grown = [(unit, a.value) for a in unit.all(ast.AugAssign) if key is not None and key_of(a.target) == key]
            handed = self.passed(name.id, unit, 10) if isinstance(name, ast.Name) else ()
            for where, value in [*self.values(name, unit), *grown, *((u, v) for u, _, v in handed)]:
                yield from self.made_of(value, where, depth + 1)

    def holds(self, node: ast.AST, unit: Unit, asks: Callable[[ast.AST], bool]) -> bool:
        """Whether `asks` is true for an expression or a value from which its names were computed."""
        return any(asks(part) for _, part in self.made_of(node, unit))

    def test(self, node: ast.AST, unit: Unit, depth: int = 0) -> Optional[str]:
        """Return MAIN if the test is true only on the main rank, OTHER if it is true only on other ranks, else None."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            if self.is_rank(node.operand, unit) and not _is_main_word(last_name(node.operand)):
                return MAIN
            return OPPOSITE.get(self.test(node.operand, unit, depth) or "")
        if isinstance(node, ast.BoolOp):
            found = [self.test(value, unit, depth) for value in node.values]
            # `not distributed or rank == 0`: in a distributed run only the rank decides.
            single = [_tests_single(value) for value, each in zip(node.values, found) if each is None]
            return next(filter(None, found), None) if isinstance(node.op, ast.And) or all(single) else None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, op, right = node.left, node.ops[0], node.comparators[0]
            if is_none(right) and isinstance(op, ast.IsNot):
                return MAIN if self._is_main_only(left, unit) else None
            if not self.is_rank(left, unit):
                left, right = right, left
                if not self.is_rank(left, unit):
                    return None
            values = literals(right)
            if (values and values <= {0, -1, "0"}) or (isinstance(op, ast.Lt) and values == {1}):
                is_main = isinstance(op, (ast.Eq, ast.In, ast.LtE, ast.Is, ast.Lt))
                return None if values == {-1} or isinstance(op, ast.GtE) else MAIN if is_main else OTHER
            is_number = isinstance(constant(right), int) and not isinstance(constant(right), bool)
            return OTHER if isinstance(op, ast.Eq) and is_number else None
        if isinstance(node, ast.NamedExpr):
            return self.test(node.value, unit, depth)
        if isinstance(node, ast.Call):
            if _is_main_word(last_name(node.func)):
                return MAIN
            called = self.tree.defined(node.func, unit.source) if depth < 3 else None
            if not isinstance(called, Unit):
                return None
            return self._common_test([(called, r.value) for r in called.all(ast.Return) if r.value is not None], depth)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            if _is_main_word(last_name(node)):
                return MAIN
            if depth < 3:
                common = self._common_test(self.values(node, unit), depth)
                return common or (MAIN if depth == 0 and self._is_main_only(node, unit) else None)
        return None

    def _common_test(self, values: list[tuple[Unit, ast.expr]], depth: int) -> Optional[str]:
        """Return the result of `test` for all values of a flag, if it is the same for all."""
        found = [self.test(value, unit, depth + 1) for unit, value in values if constant(value) is not True]
        return found[0] if len(set(found)) == 1 else None

    def _is_main_only(self, node: ast.expr, unit: Unit) -> bool:
        """Whether a name is None on all ranks except the main rank: `log = open(path) if rank == 0 else None`."""
        bindings = self.reaching(node, unit)
        if not bindings or node in self._busy:
            return False
        self._busy.add(node)
        made = [(where, b.statement, b.value) for where, b in bindings if not is_none(b.value)]
        is_main_only = bool(made) and all(
            self.guard(statement, where) is not None
            or (isinstance(value, ast.IfExp) and is_none(value.orelse) and self.test(value.test, where) == MAIN)
            for where, statement, value in made
        )
        self._busy.discard(node)
        return is_main_only

    def guard(self, node: ast.AST, unit: Unit) -> Optional[ast.AST]:
        """Return the test, decorator or statement in the unit because of which only some ranks reach `node`."""
        source = unit.source
        child = node
        for parent in source.above(node):
            if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is not parent.test:
                inside = child is parent.body if isinstance(parent, ast.IfExp) else child in parent.body
                # Any rank may reach the else of `rank != 0 and x`; in `distributed and rank != 0` only the main rank.
                if self.test(parent.test, unit) and (inside or self._asks_rank_alone(parent.test, unit)):
                    return parent
            elif isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
                for value in parent.values[: parent.values.index(child)] if child in parent.values else []:
                    if self.test(value, unit):
                        return parent
            elif _given_to_main(child, parent):
                return parent
            names = entered(parent)
            if any(map(_MAIN_ONLY.search, names)) or (isinstance(parent, FUNCTIONS) and "main_process" in names):
                return parent
            left = self._left_before(child, parent, unit)
            if left is not None:
                return left
            if parent is unit.node:
                break
            if isinstance(parent, FUNCTIONS):
                if parent not in self._inner:
                    self._inner[parent] = None  # ends the recursion if functions call each other
                    calls = self._calls_of_inner(parent, unit)
                    guards = [self.guard(call, unit) for call in calls if parent not in source.above(call)]
                    self._inner[parent] = guards[0] if guards and all(guards) else None
                return self._inner[parent]
            child = parent
        return None

    def _calls_of_inner(self, function: Function, unit: Unit) -> list[ast.expr]:
        """Return the calls of a nested function; for a hook of Accelerate, the calls that trigger it."""
        names = ((n, c) for c in unit.all(ast.Call) for n in c.args if isinstance(n, ast.Name))
        given = [(name, call) for name, call in names if name.id == function.name]
        hooks = {last_name(call).replace("register_", "").partition("_pre_hook")[0] for _, call in given}
        wanted = {function.name} | (hooks & {"save_state", "load_state"})
        on_main: list[ast.expr] = [name for name, call in given if _given_to_main(name, call)]
        return on_main + [c for c in unit.all(ast.Call) if last_name(c) in wanted]

    def _asks_rank_alone(self, test: ast.expr, unit: Unit) -> bool:
        """Whether a test depends only on the rank and on whether the program is distributed."""
        values = test.values if isinstance(test, ast.BoolOp) else []
        return all(speaks_of_launch(value) for value in values if self.test(value, unit) is None)

    def depends_on_launch(self, node: ast.AST, unit: Unit) -> bool:
        """Whether a test around `node` depends on whether the program is distributed: it is in one of two branches."""
        path = [node, *unit.source.above(node)]
        branches = [(at, above) for at, above in zip(path, path[1:]) if isinstance(above, (ast.If, ast.IfExp))]
        return any(at is not branch.test and speaks_of_launch(branch.test) for at, branch in branches)

    def _left_before(self, child: ast.AST, parent: ast.AST, unit: Unit) -> Optional[ast.AST]:
        """Return an earlier statement of `child`'s block where some ranks leave, such as `if rank != 0: return`."""
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and child in block:
                for statement in (s for s in block[: block.index(child)] if isinstance(s, ast.If)):
                    test, found = statement.test, self.test(statement.test, unit)
                    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):  # `if done or rank != 0: return`
                        is_left = leaves(statement.body) and OTHER in {self.test(value, unit) for value in test.values}
                    else:
                        # If the main rank leaves, only the others reach the following statements.
                        ends = leaves(statement.body) or leaves(statement.orelse)
                        is_left = bool(found) and ends and self._asks_rank_alone(test, unit)
                    if is_left:
                        return statement
        return None

    def is_guarded(self, node: ast.AST, unit: Unit) -> bool:
        """Whether only some ranks reach `node`, because of a test in its function or around all callers."""
        if self.guard(node, unit) is not None:
            return True
        if unit not in self._guarded:
            self._guarded[unit] = False  # ends the recursion if the function calls itself
            self._guarded[unit] = not unit.is_module and self._has_guarded_callers(unit)
        return self._guarded[unit]

    def _has_guarded_callers(self, unit: Unit) -> bool:
        # The function may also be an argument that other code calls. Names such as `__init__` may be of any class.
        is_own = unit.owner is None or not unit.name.startswith("__")
        given = [(u, v) for u, v in self.given.get(unit.name, []) if is_own and self._may_mean(v, u, unit)]
        made = self.constructions(unit) if unit.name != "__init__" else []
        for sites in ([*self.sites_of(unit), *given], made):
            surely = [(where, node) for where, node in sites if where in self.program.sure]
            if sites and all(self.is_guarded(node, where) for where, node in surely or sites):
                return True
        return False


def _given_to_main(child: ast.AST, parent: ast.AST) -> bool:
    """Whether `child` is a function that only the main rank calls: `write` in `run_on_main(write, path)`."""
    if not isinstance(child, (ast.Name, ast.Attribute, ast.Lambda)) or not isinstance(parent, ast.Call):
        return False
    return child in parent.args and bool(_MAIN_ONLY.search(last_name(parent.func)))


def is_world_size(node: ast.AST) -> bool:
    """Whether an expression contains the number of ranks."""
    return any(map(_WORLD_SIZE.match, identifiers(node)))


def speaks_of_rank(node: ast.AST) -> bool:
    """Whether an expression contains the number of a rank, as in a file's name."""
    return any(_RANK.match(name) or name in _RANK_WORDS - {"gpu"} for name in identifiers(node))


def literals(node: ast.expr) -> set[object]:
    """Return the values of a literal collection, or of one literal."""
    elements = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return {constant(element) for element in elements}


def leaves(body: list[ast.stmt]) -> bool:
    """Whether code after these statements is never reached."""
    last = body[-1] if body else None
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return last_name(last.value) in ("exit", "_exit")
    return isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise))


def _is_main_word(name: str) -> bool:
    return bool(_IS_MAIN.match(name)) and name.lower() not in _NOT_MAIN


def speaks_of_launch(test: ast.AST) -> bool:
    return bool(_LAUNCH.search(" ".join(identifiers(test)).lower()))


def _tests_single(node: ast.AST) -> bool:
    """Whether a test is true only without other ranks: `not distributed`, `world_size == 1`, `local_rank == -1`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return True
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.LtE, ast.Lt, ast.Is))


def is_evaluation(name: str) -> bool:
    """Whether a function evaluates, judged by its name."""
    return bool(_EVALUATION.search(name)) and "train" not in name


def is_without_gradients(node: ast.AST, unit: Unit) -> bool:
    """Whether a node runs under no_grad or inference_mode, or in a function that evaluates."""
    return is_evaluation(unit.name) or any(
        not _WITHOUT_GRADIENTS.isdisjoint(entered(above))
        or (isinstance(above, FUNCTIONS) and is_evaluation(above.name))
        for above in unit.source.above(node)
    )
