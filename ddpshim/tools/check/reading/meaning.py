"""Infers what a name holds (a wrapped network, a sampler), and which ranks reach a statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.check.reading import source
from ddpshim.tools.check.reading.source import Unit, argument, constant, key_of, last_name, values_of, words_in
from ddpshim.tools.check.reading.trainers import Trainer, Tree

_CLASS_KINDS = {"IterableDataset": "iterable", "Sampler": "sampler", "DistributedSampler": "dsampler"}
_RANK = re.compile(r"(?i)^_*(?:(?!lora|low|matrix|full|max)\w*_|local|global|world|my)?rank(?:_?id)?$")
_RANK_WORDS = {"process_index", "local_process_index", "proc_id", "process_id", "gpu", "gpu_id", "device_id"}
_RANK_CALLS = {"get_rank", "get_local_rank", "get_global_rank", "get_node_local_rank"}
_RANK_VARIABLES = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK", "SLURM_LOCALID"}
_MAIN = re.compile(  # not the words alone, which have too many other meanings
    r"(?i)^(?!_?(?:main|root|master|primary|root_node)$)_*(?:is_?|am_?|on_?|if_?|check_?)*(?:local_?|global_?|world_?|ddp_?)*(?:main|master|primary|chief|root"
    r"|rank_?(?:0|zero)|global_?(?:0|zero)|zero_?rank)(?:_?(?:process|proc|rank|node|worker|gpu))?$"
)
_MAIN_ONLY = re.compile(
    r"(?i)^(?:on_)?(?:local_|global_)?(?:rank_?(?:0|zero)|main|master|primary)_?(?:process|rank|node)?_?(?:only|first)$"
    r"|on_(?:local_)?main_process$|^(?:run_on|only)_main$"
)
_LAUNCH = re.compile(r"distrib|ddp|world_?size|is_initialized|local_?rank|multi_?gpu|\bdist\b|num_?gpus|n_?gpus")
_EVALUATION = re.compile(
    r"(?i)(^|_)(eval\w*|val|valid\w*|test|infer\w*|sample|rollout\w*|predict|generate|get_action|visuali[sz]e)($|_)"
)
MAIN, OTHER = "main", "other"
OPPOSITE = {MAIN: OTHER, OTHER: MAIN}


class Meaning:
    """Infers, within one trainer, the kinds of values and the ranks that reach a node."""

    def __init__(self, tree: Tree, trainer: Trainer) -> None:
        self.tree, self.trainer = tree, trainer
        self._kinds: dict[tuple[Unit, ast.AST], frozenset[str]] = {}
        self._guarded: dict[Unit, bool] = {}
        self._busy: set[ast.AST] = set()
        self._given: dict[str, list[tuple[Unit, ast.expr]]] = {}
        self._sites: dict[str, list[tuple[Unit, ast.Call]]] = {}
        for unit, call in trainer.calls():
            self._sites.setdefault(last_name(call.func), []).append((unit, call))
            for value in values_of(call):
                self._given.setdefault(last_name(value), []).append((unit, value))

    def function(self, call: ast.Call, unit: Unit) -> Optional[Unit]:
        """Return the called function or method, if the tree shows which it is."""
        found = self.tree.defined(call.func, unit.source)
        return found if isinstance(found, Unit) else self.tree.method_of(call.func, unit)

    def sites_of(self, unit: Unit) -> list[tuple[Unit, ast.Call]]:
        """Return the calls that may call `unit`: by its name."""
        return [(u, c) for u, c in self._sites.get(unit.name, []) if self._may_mean(c.func, u, unit)]

    def _may_mean(self, name: ast.expr, where: Unit, unit: Unit) -> bool:
        """Whether a name may refer to `unit`; for a method, whether the object may be of its class or a related one."""
        if unit.owner is None:
            return self.tree.defined(name, where.source) is unit
        if not isinstance(name, ast.Attribute) or key_of(name.value) in where.source.names:
            return False  # an imported module, as in json.dump
        owner = self.tree.visible_class(name.value, where)
        own = [*self.tree.bases(unit.source, unit.owner)]
        return owner is None or owner in own or (unit.source, unit.owner) in [*self.tree.bases(*owner)]

    def passed(self, node: ast.expr, unit: Unit) -> Iterator[tuple[Unit, ast.expr]]:
        """Yield (unit, value) for each call that passes a value for `node`; none if it is not a parameter of `unit`."""
        name = key_of(node)
        for where, call in self.sites_of(unit)[:20] if name in unit.parameters else ():
            value = argument(call, name, unit.parameters.index(name) - (unit.owner is not None))
            if value is not None:
                yield where, value

    def reaching(self, node: Optional[ast.AST], unit: Unit) -> list[tuple[Unit, source.Binding]]:
        """Return the bindings that may hold at `node`, the last one first; a loop's target holds in its body."""
        key = key_of(node)
        if node is None:
            return []
        own, above = unit.bindings.get(key, []), set(unit.source.above(node))
        before = [b for b in own if b.statement not in above or isinstance(b.statement, (ast.With, ast.For))]
        before = [b for b in before if source.place_of(b.target) < source.place_of(node)]
        if before or (own and not unit.is_module and "." not in key and "[" not in key):
            return [(unit, b) for b in reversed(before or own)]
        if key.startswith("self.") and unit.mates:  # bindings further down in this method do not hold here yet
            return [(mate, b) for mate in unit.mates if mate is not unit for b in mate.bindings.get(key, [])]
        outside = (unit.source.module, unit.source.main)
        found = [(u, b) for u in outside if u is not unit for b in u.bindings.get(key, [])]
        return found or ([(unit, b) for b in own] if unit.is_module else [])

    def values(self, node: Optional[ast.AST], unit: Unit) -> list[tuple[Unit, ast.expr]]:
        """Return the known values that a name may have at `node`, each with its unit."""
        return [(where, b.value) for where, b in self.reaching(node, unit) if b.value is not None]

    def made_of(self, node: ast.AST, unit: Unit, depth: int = 0) -> Iterator[tuple[Unit, ast.AST]]:
        """Yield an expression and all values from which its names were computed, including arguments of callers."""
        yield unit, node
        for name in [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))] if depth < 4 else ():
            grown = [(unit, a.value) for a in unit.all(ast.AugAssign) if key_of(a.target) == (key_of(name) or None)]
            for where, value in [*self.values(name, unit), *grown, *self.passed(name, unit)]:
                yield from self.made_of(value, where, depth + 1)

    def kinds(self, node: Optional[ast.AST], unit: Unit) -> frozenset[str]:
        """Return the possible kinds: ddp, dp, dsampler, sampler, iterable, unwrapped, none."""
        if node is None:
            return frozenset()
        if (unit, node) not in self._kinds:
            self._kinds[unit, node] = frozenset()  # ends the recursion if a name is bound to itself
            self._kinds[unit, node] = self._find_kinds(node, unit)
        return self._kinds[unit, node]

    def _of_all(self, found: list[tuple[Unit, ast.expr]]) -> frozenset[str]:
        kinds = frozenset[str]().union(*(self.kinds(value, where) for where, value in found))
        # A name bound to `model.module` in one branch and to `model` in the other is not wrapped in either.
        return kinds - {"ddp", "dp"} if "unwrapped" in kinds else kinds

    def _find_kinds(self, node: ast.AST, unit: Unit) -> frozenset[str]:
        if isinstance(node, ast.Call):
            return self._call_kinds(node, unit)
        if isinstance(node, ast.IfExp):
            return self._of_all([(unit, node.body), (unit, node.orelse)])
        if isinstance(node, ast.Attribute) and node.attr == "module" and self.kinds(node.value, unit) & {"ddp", "dp"}:
            return frozenset({"unwrapped"})
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            return self._of_all(self.values(node, unit) or [*self.passed(node, unit)])
        return frozenset({"none"} if ast.unparse(node) == "None" else ())

    def _call_kinds(self, call: ast.Call, unit: Unit) -> frozenset[str]:
        qualified = unit.source.qualified(call.func)
        tail = qualified.rpartition(".")[2] or last_name(call.func)
        if tail == "DistributedDataParallel" or qualified in ("ddp", "DDP"):
            return frozenset({"ddp"})
        if tail == "DataParallel" and (qualified.startswith("torch") or qualified == "DataParallel"):
            return frozenset({"dp"})
        if tail.startswith("Distributed") and tail.endswith("Sampler"):
            return frozenset({"dsampler"})
        found = self.tree.defined(call.func, unit.source)
        if isinstance(found, Unit):
            return self._of_all([(found, r.value) for r in found.all(ast.Return) if r.value is not None])
        bases = self.tree.bases(*found) if found is not None else ()
        tails = {base.rpartition(".")[2] for base in bases if isinstance(base, str)}
        kinds = {kind for base, kind in _CLASS_KINDS.items() if base in tails}
        is_sampler = tail.endswith("Sampler") and tail not in ("RandomSampler", "SequentialSampler")
        return frozenset(kinds or ({"sampler"} if is_sampler else ()))

    def is_rank(self, node: ast.AST, unit: Unit, depth: int = 0) -> bool:
        """Whether an expression is the number of this rank."""
        if isinstance(node, ast.Call):
            return not words_in(node).isdisjoint(_RANK_CALLS | _RANK_VARIABLES)  # also int(os.environ.get("RANK"))
        name = last_name(node)
        if _RANK.match(name) or name in _RANK_WORDS or name in _RANK_VARIABLES:
            return True
        return depth < 3 and any(self.is_rank(value, where, depth + 1) for where, value in self.values(node, unit))

    def test(self, node: ast.AST, unit: Unit, depth: int = 0) -> Optional[str]:
        """Return MAIN if the test is true only on the main rank, OTHER if it is true only on other ranks, else None."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            if self.is_rank(node.operand, unit) and not _MAIN.match(last_name(node.operand)):
                return MAIN
            return OPPOSITE.get(self.test(node.operand, unit, depth) or "")
        if isinstance(node, ast.BoolOp):
            found = [self.test(value, unit, depth) for value in node.values]
            # `not distributed or rank == 0`: in a distributed run only the rank decides.
            rest = [value for value, each in zip(node.values, found) if each is None]
            is_single = all(isinstance(value, (ast.UnaryOp, ast.Compare)) for value in rest)
            return next(filter(None, found), None) if isinstance(node.op, ast.And) or is_single else None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, op, right = node.left, node.ops[0], node.comparators[0]
            left, right = (left, right) if self.is_rank(left, unit) else (right, left)
            if not self.is_rank(left, unit):
                return None
            values = {constant(element) for element in getattr(right, "elts", [right])}
            if values & {0, "0"} and not isinstance(op, ast.GtE):
                return MAIN if isinstance(op, (ast.Eq, ast.In, ast.LtE, ast.Is)) else OTHER
            return OTHER if isinstance(op, ast.Eq) and str(constant(right)).isdigit() else None
        if isinstance(node, (ast.Call, ast.Name, ast.Attribute, ast.Subscript)):
            if _MAIN.match(last_name(node)):
                return MAIN
            flags = [(u, v) for u, v in self.values(node, unit) if constant(v) is not True] if depth < 3 else []
            kinds = {self.test(value, where, depth + 1) for where, value in flags}
            return kinds.pop() if len(kinds) == 1 else None
        return None

    def guard(self, node: ast.AST, unit: Unit) -> Optional[ast.AST]:
        """Return the test, decorator or statement in the unit because of which only some ranks reach `node`."""
        child = node
        for parent in unit.source.above(node):
            if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is not parent.test:
                inside = child is parent.body if isinstance(parent, ast.IfExp) else child in parent.body
                # Any rank may reach the else of `rank != 0 and x`; in `distributed and rank != 0` only the main rank.
                if self.test(parent.test, unit) and (inside or self._asks_rank_alone(parent.test, unit)):
                    return parent
            elif isinstance(parent, ast.Call) and child in parent.args and _MAIN_ONLY.search(last_name(parent.func)):
                return parent  # `write` in `run_on_main(write, path)`
            if any(map(_MAIN_ONLY.search, source.entered(parent))):
                return parent
            left = self._left_before(child, parent, unit)
            if left is not None or parent is unit.node:
                return left
            if isinstance(parent, source.FUNCTIONS):  # a nested function: where it is called or given
                uses = [n for n in unit.all(ast.Name) if n.id == parent.name and parent not in unit.source.above(n)]
                busy, self._busy = parent in self._busy, self._busy | {parent}
                guards = [self.guard(use, unit) for use in uses] if not busy else []
                self._busy -= set() if busy else {parent}
                return guards[0] if guards and all(guards) else None
            child = parent
        return None

    def _asks_rank_alone(self, test: ast.expr, unit: Unit) -> bool:
        """Whether a test depends only on the rank and on whether the trainer is distributed."""
        values = test.values if isinstance(test, ast.BoolOp) else []
        return all(speaks_of_launch(value) for value in values if self.test(value, unit) is None)

    def _left_before(self, child: ast.AST, parent: ast.AST, unit: Unit) -> Optional[ast.AST]:
        """Return an earlier statement of `child`'s block where some ranks leave, such as `if rank != 0: return`."""
        blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
        block = next((b for b in blocks if isinstance(b, list) and child in b), [])
        for statement in (s for s in block[: block.index(child)] if isinstance(s, ast.If)) if block else ():
            test, found = statement.test, self.test(statement.test, unit)
            # If the main rank leaves, only the others reach the following statements.
            if found and (leaves(statement.body) or leaves(statement.orelse)) and self._asks_rank_alone(test, unit):
                return statement
        return None

    def is_guarded(self, node: ast.AST, unit: Unit) -> bool:
        """Whether only some ranks reach `node`, because of a test in its function or around all callers."""
        if self.guard(node, unit) is not None:
            return True
        if unit not in self._guarded:
            self._guarded[unit] = False  # ends the recursion if the function calls itself
            # The function may also be an argument that other code calls, or a method of a class that one rank makes.
            given = [(u, v) for u, v in self._given.get(unit.name, []) if self._may_mean(v, u, unit)]
            made = self._sites.get(unit.owner.name, []) if unit.owner is not None else []
            for sites in ([*self.sites_of(unit), *given], made):
                self._guarded[unit] |= bool(sites) and all(self.is_guarded(node, where) for where, node in sites)
        return self._guarded[unit]

    def depends_on_launch(self, node: ast.AST, unit: Unit) -> bool:
        """Whether a test around `node` depends on whether the trainer is distributed: it is in one of two branches."""
        path = [node, *unit.source.above(node)]
        branches = [(at, above) for at, above in zip(path, path[1:]) if isinstance(above, (ast.If, ast.IfExp))]
        return any(at is not branch.test and speaks_of_launch(branch.test) for at, branch in branches)


def speaks_of_rank(node: ast.AST) -> bool:
    """Whether an expression contains the number of a rank, as in a file's name."""
    return any(_RANK.match(name) or name in _RANK_WORDS - {"gpu"} for name in words_in(node))


def speaks_of_launch(test: ast.AST) -> bool:
    """Whether a test asks if the trainer is distributed."""
    return bool(_LAUNCH.search(" ".join(words_in(test)).lower()))


def leaves(body: list[ast.stmt]) -> bool:
    """Whether code after these statements is never reached."""
    last = body[-1] if body else None
    is_exit = isinstance(last, ast.Expr) and last_name(last.value) in ("exit", "_exit")
    return is_exit or isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise))


def is_evaluation(name: str) -> bool:
    """Whether a function evaluates, judged by its name."""
    return bool(_EVALUATION.search(name)) and "train" not in name


def is_without_gradients(node: ast.AST, unit: Unit) -> bool:
    """Whether a node runs under no_grad or inference_mode, or in a function that evaluates."""
    entered = {name for above in unit.source.above(node) for name in source.entered(above)}
    return is_evaluation(unit.name) or not entered.isdisjoint({"no_grad", "inference_mode"})
