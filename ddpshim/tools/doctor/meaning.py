"""Infers what an expression holds (a wrapped network, a sampler, a rank), and which ranks reach a statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Optional

from ddpshim.tools.doctor.source import FUNCTIONS, Binding, Unit, argument, constant, identifiers, key_of, last_name
from ddpshim.tools.doctor.tree import Program, Tree

_RANK = re.compile(r"(?i)^_*(?:(?!lora|low|matrix|full|max)\w*_|local|global|world|my)?rank(?:_?id)?$")
_RANK_WORDS = {
    "process_index",
    "local_process_index",
    "proc_id",
    "process_id",
    "gpu",
    "gpu_id",
    "device_id",
    "get_ordinal",
}
_LOCAL_RANK = re.compile(r"(?i)^_*(?:ddp_?|my_?)?local_?rank$|^local_process_index$|^get_local_rank$")
_IS_MAIN = re.compile(
    r"(?i)^_*(?:is_?|am_?|on_?|if_?|check_?)*(?:local_?|global_?|world_?|ddp_?)*"
    r"(?:(?:main|master|primary|chief|root|rank_?(?:0|zero)|global_?(?:0|zero)|zero_?rank)"
    r"(?:_?(?:process|proc|rank|node|worker|gpu))?)$"
)
# Plain words that are too common for other things, unless they ask ("is_...").
_NOT_MAIN = {"main", "root", "first", "master", "primary", "_main", "first_rank", "root_node", "on_main", "if_main"}
_MAIN_ONLY = re.compile(
    r"(?i)^(?:on_)?(?:local_|global_)?(?:rank_?(?:0|zero)|main|master|primary)_?(?:process|rank|node)?_?(?:only|first)$|on_(?:local_)?main_process$"
)
_WORLD_SIZE = re.compile(
    r"(?i)^_*(?:ddp_|global_)?(?:world_?size|num_?(?:gpus|processes|replicas|ranks|devices)|n_?gpus?|ngpus(?:_per_node)?|get_world_size|device_count|nprocs?|num_procs)$"
)
_KEEPS_KIND = {"to", "cuda", "cpu", "train", "eval", "requires_grad_", "half", "float", "double", "copy"}
_COPIES = {"deepcopy", "copy", "compile", "convert_sync_batchnorm"}
_UNWRAPS = {"unwrap_model", "unwrap", "de_parallel", "get_raw_model", "unwrap_ddp"}
_CLASS_KINDS = {
    "Module": "module",
    "LightningModule": "module",
    "IterableDataset": "iterable",
    "Sampler": "sampler",
    "DistributedSampler": "dsampler",
    "Dataset": "dataset",
}
_LAUNCH = re.compile(
    r"distrib|ddp|is_dist|world_?size|is_initialized|local_?rank|multi_?gpu|\bdist\b|num_?gpus|n_?gpus"
)
MAIN, OTHER = "main", "other"


class Meaning:
    """Answers about expressions, from the bindings of their names and the callers in one program."""

    def __init__(self, tree: Tree, program: Program) -> None:
        self.tree = tree
        self._kinds: dict[tuple[Unit, ast.AST], frozenset[str]] = {}
        self._guarded: dict[Unit, bool] = {}
        self._busy: set[object] = set()
        self.given: dict[str, list[tuple[Unit, ast.expr]]] = {}
        self.sites: dict[str, list[tuple[Unit, ast.Call]]] = {}
        for unit in program.units:
            for call in unit.all(ast.Call):
                self.sites.setdefault(last_name(call.func), []).append((unit, call))
                for value in (*call.args, *(k.value for k in call.keywords)):
                    if isinstance(value, (ast.Name, ast.Attribute)):
                        self.given.setdefault(last_name(value), []).append((unit, value))

    # What a name holds

    def reaching(self, node: ast.expr, unit: Unit) -> list[tuple[Unit, Binding]]:
        """The bindings that a name or attribute may have at `node`, the last unconditional one and those after it."""
        key = key_of(node)
        if key is None:
            return []
        own = unit.bindings.get(key, [])
        before = [b for b in own if (b.target.lineno, b.target.col_offset) < (node.lineno, node.col_offset)]
        before = [
            b
            for b in before
            if not (b.statement in set(unit.source.above(node)) and not isinstance(b.statement, (ast.With, ast.For)))
        ]
        if before:
            out = []
            above = {id(a) for a in unit.source.above(node)}
            for binding in reversed(before):
                out.append((unit, binding))
                if id(unit.source.parents.get(binding.statement)) in above and not isinstance(
                    binding.statement, ast.NamedExpr
                ):
                    return out
            return out
        if own and not unit.is_module and "." not in key and "[" not in key:
            return [(unit, b) for b in own]
        if key.startswith("self.") and unit.owner is not None:
            # What this method binds further down does not hold here yet.
            return [
                (other, b)
                for other in unit.source.units
                if other.owner is unit.owner and other is not unit
                for b in other.bindings.get(key, [])
            ]
        if key in unit.parameters:
            return []
        source = unit.source
        found = [(u, b) for u in (source.module, source.main) if u is not unit for b in u.bindings.get(key, [])]
        return found or ([(unit, b) for b in own] if unit.is_module else [])

    def kinds(self, node: Optional[ast.AST], unit: Unit) -> frozenset[str]:
        """What `node` may hold: ddp, dp, dsampler, sampler, loader, iterable, optimizer, module, unwrapped, ..."""
        if node is None:
            return frozenset()
        key = (unit, node)
        if key in self._kinds:
            return self._kinds[key]
        if key in self._busy:
            return frozenset()
        self._busy.add(key)
        try:
            found = frozenset(self._find_kinds(node, unit))
        finally:
            self._busy.discard(key)
        self._kinds[key] = found
        return found

    def _find_kinds(self, node: ast.AST, unit: Unit) -> Iterator[str]:
        if isinstance(node, ast.Call):
            yield from self._call_kinds(node, unit)
        elif isinstance(node, ast.IfExp) and "unwrapped" in self.kinds(node.body, unit) | self.kinds(node.orelse, unit):
            yield "unwrapped"  # `model.module if distributed else model`: the other branch is not wrapped
        elif isinstance(node, ast.IfExp):
            yield from self.kinds(node.body, unit) | self.kinds(node.orelse, unit)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self.kinds(value, unit)
        elif isinstance(node, ast.Constant) and node.value is None:
            yield "none"
        elif (
            isinstance(node, ast.Attribute)
            and node.attr == "module"
            and self.kinds(node.value, unit) & {"ddp", "dp", "prepared"}
        ):
            yield "unwrapped"
        elif isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            bindings = self.reaching(node, unit)
            found = frozenset[str]().union(*(self.kinds(b.value, where) for where, b in bindings))
            # Bound to `model.module` in one branch and to `model` in the other, it is bare in both.
            yield from found - {"ddp", "dp"} if "unwrapped" in found else found
            if not bindings and isinstance(node, ast.Name):
                yield from self._parameter_kinds(node.id, unit)

    def _parameter_kinds(self, name: str, unit: Unit) -> Iterator[str]:
        """What callers hand over."""
        if name not in unit.parameters:
            return
        position = unit.parameters.index(name) - (unit.owner is not None)
        for where, call in self.sites_of(unit)[:20]:
            yield from self.kinds(argument(call, name, position), where)

    def handed_over(self, node: ast.expr, unit: Unit, kind: str) -> list[tuple[Unit, ast.Call]]:
        """The calls that give `unit` what `node` names, where that is a parameter."""
        if not isinstance(node, ast.Name) or node.id not in unit.parameters or self.reaching(node, unit):
            return []
        position = unit.parameters.index(node.id) - (unit.owner is not None)
        found = []
        for where, call in self.sites_of(unit)[:20]:
            value = argument(call, node.id, position)
            if value is not None and kind in self.kinds(value, where):
                found.append((where, call))
        return found

    def sites_of(self, unit: Unit) -> list[tuple[Unit, ast.Call]]:
        """Calls that may mean `unit`, by name."""
        if unit.owner is not None and unit.name == "__init__":
            return self.constructions(unit)
        found = self.sites.get(unit.name, [])
        if unit.owner is not None:
            return [
                (u, c) for u, c in found if isinstance(c.func, ast.Attribute) and self._may_be(c.func.value, u, unit)
            ]
        return [(u, c) for u, c in found if self.tree.defined(c.func, u.source) is unit]

    def _is_given(self, value: ast.expr, where: Unit, unit: Unit) -> bool:
        """Whether an argument is the function itself, for something else to call."""
        if unit.owner is not None:
            is_public = not unit.name.startswith("__")  # `cls.__init__` may be of any class
            return is_public and isinstance(value, ast.Attribute) and self._may_be(value.value, where, unit)
        return self.tree.defined(value, where.source) is unit

    def constructions(self, unit: Unit) -> list[tuple[Unit, ast.Call]]:
        """Calls of the class that a method belongs to."""
        found = self.sites.get(unit.owner.name, []) if unit.owner is not None else []
        return [(u, c) for u, c in found if self.tree.defined(c.func, u.source) == (unit.source, unit.owner)]

    def _may_be(self, receiver: ast.expr, where: Unit, method: Unit) -> bool:
        """Whether the object in `receiver.method()` may be of the method's class, or of a relative."""
        if isinstance(receiver, ast.Name) and receiver.id in where.source.names:
            return False  # json.dump is no method
        if not (isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")) or where.owner is None:
            return True
        mine, theirs = method.owner, where.owner
        bases = {last_name(b) for c in (mine, theirs) if c is not None for b in c.bases}
        return mine is theirs or (mine is not None and bool({mine.name, theirs.name} & bases))

    def _call_kinds(self, call: ast.Call, unit: Unit) -> Iterator[str]:
        name, qualified = last_name(call.func), unit.source.qualified(call.func)
        tail = qualified.rpartition(".")[2] or name
        if tail == "DistributedDataParallel" or qualified in ("ddp", "DDP"):
            yield "ddp"
        elif tail == "DataParallel" and (qualified.startswith("torch") or qualified == "DataParallel"):
            yield "dp"
        elif tail == "DistributedSampler" or (tail.startswith("Distributed") and tail.endswith("Sampler")):
            yield "dsampler"
        elif tail == "BatchSampler":
            yield from self.kinds(argument(call, "sampler", 0), unit) or {"sampler"}
        elif tail.endswith("Sampler") and tail not in ("RandomSampler", "SequentialSampler"):
            yield from self._class_kinds(call, unit) or {"sampler"}
        elif tail in ("DataLoader", "MultiEpochsDataLoader"):
            yield "loader"
        elif qualified.startswith("torch.optim.lr_scheduler"):
            yield "scheduler"
        elif qualified.startswith("torch.optim.") and tail[:1].isupper():
            yield "optimizer"
        elif (
            tail in ("wrap_parallel", "make_loader")
            or name
            in (
                "prepare",
                "setup_module",
                "setup_dataloaders",
                "prepare_data_loader",
            )
            or (
                name == "setup"
                and isinstance(call.func, ast.Attribute)
                and call.args
                and "fabric" in last_name(call.func.value).lower()
            )
        ):
            yield "prepared"
        elif tail in _UNWRAPS or (name == "getattr" and constant(argument(call, "", 1)) == "module"):
            yield "unwrapped"
        elif name in _KEEPS_KIND and isinstance(call.func, ast.Attribute) and self.kinds(call.func.value, unit):
            yield from self.kinds(call.func.value, unit)
        elif name in _COPIES and call.args:
            yield from self.kinds(call.args[0], unit)
        elif tail in ("ModuleDict", "ModuleList", "Sequential") and call.args:
            yield "module"
            inner_calls = [c for a in call.args for c in ast.walk(a) if isinstance(c, (ast.Call, ast.Name))]
            if any(self.kinds(c, unit) & {"ddp", "dp", "holds-wrapped"} for c in inner_calls):
                yield "holds-wrapped"
        elif tail == "algo_factory":
            yield "plain"  # robomimic's algorithms hold networks and are none
        elif qualified.startswith("torch.nn.") and tail[:1].isupper():
            yield "module"
        else:
            yield from self._class_kinds(call, unit)

    def _class_kinds(self, call: ast.Call, unit: Unit) -> frozenset[str]:
        found = self.tree.defined(call.func, unit.source)
        if isinstance(found, tuple):
            return frozenset(self.bases(found[1], found[0].module))
        if isinstance(found, Unit):
            out: set[str] = set()
            for returned in found.all(ast.Return):
                if returned.value is not None and not isinstance(returned.value, ast.Tuple):
                    out |= self.kinds(returned.value, found)
            return frozenset(out)
        return frozenset()

    def bases(self, node: ast.ClassDef, unit: Unit, depth: int = 0) -> set[str]:
        """The kinds that a class inherits; `plain` where all of its bases are in sight and none is torch's."""
        out: set[str] = set()
        is_known = True
        for base in node.bases:
            tail = unit.source.qualified(base).rpartition(".")[2]
            if tail in _CLASS_KINDS:
                out.add(_CLASS_KINDS[tail])
                continue
            found = self.tree.defined(base, unit.source)
            if isinstance(found, tuple) and depth < 8:
                inherited = self.bases(found[1], found[0].module, depth + 1)
                is_known = is_known and "plain" in inherited
                out |= inherited - {"plain"}
            elif tail not in ("object", "ABC", "Generic", "Protocol"):
                is_known = False
        return out | ({"plain"} if is_known and not out else set())

    # Ranks

    def is_rank(self, node: ast.AST, unit: Unit, depth: int = 0) -> bool:
        """Whether an expression is the number of this rank."""
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in ("int", "str") and node.args:
                return self.is_rank(node.args[0], unit, depth)
            if name in ("getenv", "get", "pop") and node.args:
                return constant(node.args[0]) in (
                    "RANK",
                    "LOCAL_RANK",
                    "SLURM_PROCID",
                    "SLURM_LOCALID",
                    "OMPI_COMM_WORLD_RANK",
                )
            return name in ("get_rank", "get_local_rank", "get_global_rank", "get_node_local_rank", "get_ordinal")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self.is_rank(node.left, unit, depth)
        if isinstance(node, ast.Subscript) and last_name(node.value) == "environ":
            return constant(node.slice) in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")
        if isinstance(node, ast.NamedExpr):
            return self.is_rank(node.value, unit, depth)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            name = last_name(node)
            if _RANK.match(name) or name in _RANK_WORDS:
                return True
            if depth < 3 and isinstance(node, ast.Name):
                return any(
                    b.value is not None and self.is_rank(b.value, u, depth + 1) for u, b in self.reaching(node, unit)
                )
        return False

    def is_local_rank(self, node: ast.AST, unit: Unit, depth: int = 0) -> bool:
        """Whether an expression is the number of this rank on its node."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            if _LOCAL_RANK.match(last_name(node)):
                return True
            if depth < 3 and isinstance(node, ast.Name):
                found = [b.value for _, b in self.reaching(node, unit) if b.value is not None]
                return bool(found) and all(self.is_local_rank(value, unit, depth + 1) for value in found)
            return False
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name == "int" and node.args:
                return self.is_local_rank(node.args[0], unit, depth)
            if name in ("getenv", "get") and node.args:
                return constant(node.args[0]) in ("LOCAL_RANK", "SLURM_LOCALID")
            return name == "get_local_rank"
        return isinstance(node, ast.Subscript) and constant(node.slice) in ("LOCAL_RANK", "SLURM_LOCALID")

    def test(self, node: ast.AST, unit: Unit, depth: int = 0) -> Optional[str]:
        """MAIN where the test is true on the main rank only, OTHER where it is true on others only, else None."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            if self.is_rank(node.operand, unit) and not _looks_like_flag(node.operand):
                return MAIN
            return {MAIN: OTHER, OTHER: MAIN, None: None}[self.test(node.operand, unit, depth)]
        if isinstance(node, ast.BoolOp):
            found = [self.test(value, unit, depth) for value in node.values]
            if isinstance(node.op, ast.And) or all(found):
                return next((f for f in found if f), None)
            # `not distributed or rank == 0`: in a distributed run the rank decides.
            single = [v for v, f in zip(node.values, found) if f is None]
            return next((f for f in found if f), None) if all(map(_tests_single, single)) else None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, op, right = node.left, node.ops[0], node.comparators[0]
            if isinstance(right, ast.Constant) and right.value is None and isinstance(op, ast.IsNot):
                return MAIN if self._is_main_only(left, unit) else None
            if not self.is_rank(left, unit):
                left, right = right, left
            if not self.is_rank(left, unit):
                return None
            values = (
                {constant(e) for e in right.elts}
                if isinstance(right, (ast.Tuple, ast.List, ast.Set))
                else {constant(right)}
            )
            if (values <= {0, -1, "0"} and values & {0, "0", -1}) or (isinstance(op, ast.Lt) and values == {1}):
                if isinstance(op, (ast.Eq, ast.In, ast.LtE, ast.Is, ast.Lt)):
                    return MAIN if values != {-1} else None
                if isinstance(op, (ast.NotEq, ast.Gt, ast.NotIn, ast.IsNot)):
                    return OTHER if values != {-1} else None
            if isinstance(op, ast.Eq) and isinstance(constant(right), int) and not isinstance(constant(right), bool):
                return OTHER
            return None
        if isinstance(node, ast.NamedExpr):
            return self.test(node.value, unit, depth)
        if isinstance(node, ast.Call):
            if _is_main_word(last_name(node.func)):
                return MAIN
            found_unit = self.tree.defined(node.func, unit.source) if depth < 3 else None
            if isinstance(found_unit, Unit):
                returned = [r.value for r in found_unit.all(ast.Return) if r.value is not None]
                tests = [self.test(value, found_unit, depth + 1) for value in returned if constant(value) is not True]
                return tests[0] if tests and all(t == tests[0] for t in tests) else None
            return None
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            if _is_main_word(last_name(node)):
                return MAIN
            if depth < 3:
                found = [
                    self.test(b.value, u, depth + 1)
                    for u, b in self.reaching(node, unit)
                    if b.value is not None and constant(b.value) is not True
                ]
                if found and found[0] and all(f == found[0] for f in found):
                    return found[0]
                return MAIN if depth == 0 and self._is_main_only(node, unit) else None
        return None

    def _is_main_only(self, node: ast.expr, unit: Unit) -> bool:
        """Whether a name is None but on the main rank: `log = open(path) if rank == 0 else None`."""
        bindings = self.reaching(node, unit)
        if not bindings or (node, "main only") in self._busy:
            return False
        self._busy.add((node, "main only"))
        try:
            made = [(u, b) for u, b in bindings if not (isinstance(b.value, ast.Constant) and b.value.value is None)]
            return bool(made) and all(
                self.guard(b.statement, u) is not None
                or (
                    isinstance(b.value, ast.IfExp)
                    and isinstance(b.value.orelse, ast.Constant)
                    and b.value.orelse.value is None
                    and self.test(b.value.test, u) == MAIN
                )
                for u, b in made
            )
        finally:
            self._busy.discard((node, "main only"))

    def guard(self, node: ast.AST, unit: Unit) -> Optional[ast.AST]:
        """The test, decorator or statement around `node` in its unit that lets only some ranks through."""
        source = unit.source
        child = node
        for parent in source.above(node):
            if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is not parent.test:
                inside = child is parent.body if isinstance(parent, ast.IfExp) else child in parent.body
                # The else of `rank != 0 and x` is for every rank, that of `distributed and rank != 0` is not.
                if self.test(parent.test, unit) and (inside or self._asks_rank_alone(parent.test, unit)):
                    return parent
            elif isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
                for value in parent.values[: parent.values.index(child)] if child in parent.values else []:
                    if self.test(value, unit):
                        return parent
            elif isinstance(parent, (ast.With, ast.AsyncWith)):
                is_main_only = any(_MAIN_ONLY.search(last_name(item.context_expr)) for item in parent.items)
                if is_main_only:
                    return parent
            if isinstance(parent, FUNCTIONS) and any(
                _MAIN_ONLY.search(last_name(d)) or last_name(d) in ("on_main_process", "main_process")
                for d in parent.decorator_list
            ):
                return parent
            left = self._left_before(child, parent, unit)
            if left is not None:
                return left
            if parent is unit.node:
                break
            child = parent
        return None

    def _asks_rank_alone(self, test: ast.expr, unit: Unit) -> bool:
        """Whether a test asks for the rank and nothing else but for being distributed."""
        if not isinstance(test, ast.BoolOp):
            return True
        rest = [value for value in test.values if self.test(value, unit) is None]
        return all(_LAUNCH.search(" ".join(identifiers(value)).lower()) for value in rest)

    def depends_on_launch(self, node: ast.AST, unit: Unit) -> bool:
        """Whether a test around `node` asks if the program is distributed: one branch of two ways to run."""
        child = node
        for parent in unit.source.above(node):
            if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
                words = " ".join(identifiers(parent.test)).lower()
                if _LAUNCH.search(words):
                    return True
            child = parent
        return False

    def _left_before(self, child: ast.AST, parent: ast.AST, unit: Unit) -> Optional[ast.AST]:
        """A statement before `child` in its block by which other ranks leave: `if rank != 0: return`."""
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and child in block:
                for statement in block[: block.index(child)]:
                    if not isinstance(statement, ast.If):
                        continue
                    found = self.test(statement.test, unit)
                    if (found == OTHER and leaves(statement.body)) or (
                        found == MAIN and statement.orelse and leaves(statement.orelse)
                    ):
                        return statement
        return None

    def is_guarded(self, node: ast.AST, unit: Unit) -> bool:
        """Whether only some ranks come to `node`, the callers of its function included."""
        return self.guard(node, unit) is not None or self.unit_guarded(unit)

    def unit_guarded(self, unit: Unit) -> bool:
        if unit.is_module:
            return False
        if unit not in self._guarded:
            self._guarded[unit] = False  # while it is looked for: a recursive function guards nothing
            self._guarded[unit] = self._find_unit_guarded(unit)
        return self._guarded[unit]

    def _find_unit_guarded(self, unit: Unit) -> bool:
        given = [(u, v) for u, v in self.given.get(unit.name, []) if self._is_given(v, u, unit)]
        if all_guarded(self, [*self.sites_of(unit), *given]):
            return True
        if unit.owner is not None and unit.name != "__init__":
            return all_guarded(self, self.constructions(unit))
        return False


def all_guarded(meaning: Meaning, sites: Sequence[tuple[Unit, ast.AST]]) -> bool:
    return bool(sites) and all(meaning.is_guarded(call, where) for where, call in sites)


def is_world_size(node: ast.AST) -> bool:
    """Whether an expression speaks of the number of ranks."""
    return any(_WORLD_SIZE.match(name) or name == "WORLD_SIZE" for name in identifiers(node))


def speaks_of_rank(node: ast.AST) -> bool:
    """Whether the number of a rank is in an expression, as in a file's name."""
    return any(
        _RANK.match(name) or name in _RANK_WORDS - {"gpu"} or name in ("get_rank", "RANK") for name in identifiers(node)
    )


def leaves(body: list[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise)):
        return True
    return (
        isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and last_name(last.value) in ("exit", "_exit")
    )


def _is_main_word(name: str) -> bool:
    return bool(_IS_MAIN.match(name)) and name.lower() not in _NOT_MAIN


def _looks_like_flag(node: ast.AST) -> bool:
    return _is_main_word(last_name(node))


def _tests_single(node: ast.AST) -> bool:
    """`not distributed`, `world_size == 1`, `args.local_rank == -1`: true only without other ranks."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return True
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.LtE, ast.Lt, ast.Is))


_WITHOUT_GRADIENTS = {"no_grad", "inference_mode"}
_EVALUATION = re.compile(
    r"(?i)(^|_)(eval\w*|val|valid\w*|test|infer\w*|sample|rollout\w*|predict|generate|get_action|visuali[sz]e)($|_)"
)


def is_evaluation(name: str) -> bool:
    """Whether a function's name says that it evaluates."""
    return bool(_EVALUATION.search(name)) and "train" not in name


def is_without_gradients(node: ast.AST, unit: Unit) -> bool:
    """Whether a node runs under no_grad, or in a function that evaluates."""
    if is_evaluation(unit.name):
        return True
    for above in [*unit.source.above(node)]:
        if isinstance(above, (ast.With, ast.AsyncWith)) and any(
            last_name(item.context_expr) in _WITHOUT_GRADIENTS for item in above.items
        ):
            return True
        if isinstance(above, FUNCTIONS) and (
            any(last_name(d) in _WITHOUT_GRADIENTS for d in above.decorator_list) or is_evaluation(above.name)
        ):
            return True
    return False
