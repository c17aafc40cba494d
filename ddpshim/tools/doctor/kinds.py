"""Infers the kind of an expression's value: a wrapped network, a sampler, an iterable dataset."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.nodes import argument, constant, is_none, key_of, last_name, values_of
from ddpshim.tools.doctor.source import Binding, Unit
from ddpshim.tools.doctor.tree import Program, Tree

WRAPPERS = {"ddp", "dp", "holds-wrapped"}
_KEEPS_KIND = {"to", "cuda", "cpu", "train", "eval", "requires_grad_", "half", "float", "double", "copy"}
_COPIES = {"deepcopy", "copy", "compile", "convert_sync_batchnorm"}
_PREPARES = {"prepare", "setup_module", "setup_dataloaders", "prepare_data_loader"}
UNWRAPS = {"unwrap_model", "unwrap", "de_parallel", "get_raw_model", "unwrap_ddp"}
_CLASS_KINDS = {
    **{"Module": "module", "LightningModule": "module", "IterableDataset": "iterable"},
    **{"Sampler": "sampler", "DistributedSampler": "dsampler", "Dataset": "dataset"},
}


class Kinds:
    """Infers the kinds of values in one program, from bindings of names and from callers."""

    def __init__(self, tree: Tree, program: Program) -> None:
        self.tree, self.program = tree, program
        self._kinds: dict[tuple[Unit, ast.AST], frozenset[str]] = {}
        self._guarded: dict[Unit, bool] = {}
        self._busy: set[ast.AST] = set()
        self._inner: dict[ast.AST, Optional[ast.AST]] = {}
        self._sites: dict[Unit, list[tuple[Unit, ast.Call]]] = {}
        self.given: dict[str, list[tuple[Unit, ast.expr]]] = {}
        self.sites: dict[str, list[tuple[Unit, ast.Call]]] = {}
        for unit in program.units:
            for call in unit.all(ast.Call):
                self.sites.setdefault(last_name(call.func), []).append((unit, call))
                for value in values_of(call):
                    if isinstance(value, (ast.Name, ast.Attribute)):
                        self.given.setdefault(last_name(value), []).append((unit, value))

    def reaching(self, node: ast.expr, unit: Unit) -> list[tuple[Unit, Binding]]:
        """Return the bindings that may hold at `node`: the last unconditional one before it, and all after that one."""
        key = key_of(node)
        if key is None:
            return []
        own = unit.bindings.get(key, [])
        above = set(unit.source.above(node))
        before = [
            b
            for b in own
            if (b.target.lineno, b.target.col_offset) < (node.lineno, node.col_offset)
            and (b.statement not in above or isinstance(b.statement, (ast.With, ast.For)))
        ]
        for binding in reversed(before):
            is_last = unit.source.parents.get(binding.statement) in above
            if is_last and not isinstance(binding.statement, ast.NamedExpr):
                before = before[before.index(binding) :]
                break
        if before:
            return [(unit, b) for b in reversed(before)]
        if own and not unit.is_module and "." not in key and "[" not in key:
            return [(unit, b) for b in own]
        if key.startswith("self.") and unit.owner is not None:
            # Bindings further down in this method do not hold here yet.
            mates = [mate for mate in unit.source.units if mate.owner is unit.owner and mate is not unit]
            return [(mate, b) for mate in mates for b in mate.bindings.get(key, [])]
        if key in unit.parameters:
            return []
        source = unit.source
        found = [(u, b) for u in (source.module, source.main) if u is not unit for b in u.bindings.get(key, [])]
        return found or ([(unit, b) for b in own] if unit.is_module else [])

    def values(self, node: Optional[ast.expr], unit: Unit) -> list[tuple[Unit, ast.expr]]:
        """Return the known values that a name may have at `node`, each with its unit."""
        found = self.reaching(node, unit) if node is not None else []
        return [(where, b.value) for where, b in found if b.value is not None]

    def kinds(self, node: Optional[ast.AST], unit: Unit) -> frozenset[str]:
        """Return the possible kinds: ddp, dp, dsampler, sampler, loader, iterable, optimizer, module, unwrapped, ..."""
        if node is None:
            return frozenset()
        key = (unit, node)
        if key not in self._kinds:
            self._kinds[key] = frozenset()  # ends the recursion if a name is bound to itself
            self._kinds[key] = frozenset(self._find_kinds(node, unit))
        return self._kinds[key]

    def _find_kinds(self, node: ast.AST, unit: Unit) -> Iterator[str]:
        if isinstance(node, ast.Call):
            yield from self._call_kinds(node, unit)
        elif isinstance(node, ast.IfExp):
            found = self.kinds(node.body, unit) | self.kinds(node.orelse, unit)
            # `model.module if distributed else model`: the other branch is not wrapped.
            yield from {"unwrapped"} if "unwrapped" in found else found
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self.kinds(value, unit)
        elif is_none(node):
            yield "none"
        elif isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            of = self.kinds(node.value, unit) if isinstance(node, ast.Attribute) and node.attr == "module" else set()
            if of & {"ddp", "dp", "prepared"}:
                yield "unwrapped"
                return
            bindings = self.reaching(node, unit)
            found = frozenset[str]().union(*(self.kinds(b.value, where) for where, b in bindings))
            # A name bound to `model.module` in one branch and to `model` in the other is not wrapped in either.
            yield from found - {"ddp", "dp"} if "unwrapped" in found else found
            if not bindings and isinstance(node, ast.Name):
                for where, _, value in self.passed(node.id, unit):
                    yield from self.kinds(value, where)

    def passed(self, name: str, unit: Unit, most: Optional[int] = 20) -> Iterator[tuple[Unit, ast.Call, ast.expr]]:
        """Yield (unit, call, value) for each call that passes the parameter `name`; none if it is not a parameter."""
        for where, call in self.sites_of(unit)[:most] if name in unit.parameters else ():
            value = argument(call, name, unit.position(name))
            if value is not None:
                yield where, call, value

    def handed_over(self, node: ast.expr, unit: Unit, kind: str) -> list[tuple[Unit, ast.Call]]:
        """Return the calls that pass a value of this kind for `node`, if it is a parameter of `unit`; else []."""
        if not isinstance(node, ast.Name) or self.reaching(node, unit):
            return []
        return [(where, call) for where, call, value in self.passed(node.id, unit) if kind in self.kinds(value, where)]

    def sites_of(self, unit: Unit) -> list[tuple[Unit, ast.Call]]:
        """Return the calls that may call `unit`, judged by name."""
        if unit.owner is not None and unit.name == "__init__":
            return self.constructions(unit)
        if unit not in self._sites:
            found = self.sites.get(unit.name, [])
            self._sites[unit] = [(where, call) for where, call in found if self._may_mean(call.func, where, unit)]
        return self._sites[unit]

    def constructions(self, unit: Unit) -> list[tuple[Unit, ast.Call]]:
        """Return the calls that construct the class of a method."""
        found = self.sites.get(unit.owner.name, []) if unit.owner is not None else []
        return [(u, c) for u, c in found if self.tree.defined(c.func, u.source) == (unit.source, unit.owner)]

    def _may_mean(self, name: ast.expr, where: Unit, unit: Unit) -> bool:
        """Whether a name may refer to `unit`; for a method, whether the object may be of its class or a related one."""
        if unit.owner is None:
            return self.tree.defined(name, where.source) is unit
        if not isinstance(name, ast.Attribute):
            return False
        receiver = name.value
        if isinstance(receiver, ast.Name) and receiver.id in where.source.names:
            return False  # an imported module, as in json.dump
        if not (isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")) or where.owner is None:
            return self.tree.may_have(unit, name, where, self.program.files)
        mine, theirs = unit.owner, where.owner
        bases = {last_name(base) for base in (*mine.bases, *theirs.bases)}
        return mine is theirs or bool({mine.name, theirs.name} & bases)

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
        elif tail in ("wrap_parallel", "make_loader") or name in _PREPARES or _is_fabric_setup(call):
            yield "prepared"
        elif tail in UNWRAPS or (name == "getattr" and constant(argument(call, "", 1)) == "module"):
            yield "unwrapped"
        elif name in _KEEPS_KIND and isinstance(call.func, ast.Attribute) and self.kinds(call.func.value, unit):
            yield from self.kinds(call.func.value, unit)
        elif name in _COPIES and call.args:
            yield from self.kinds(call.args[0], unit)
        elif tail in ("ModuleDict", "ModuleList", "Sequential") and call.args:
            yield "module"
            inner_calls = [c for a in call.args for c in ast.walk(a) if isinstance(c, (ast.Call, ast.Name))]
            if any(self.kinds(c, unit) & WRAPPERS for c in inner_calls):
                yield "holds-wrapped"
        elif tail == "algo_factory":
            yield "plain"  # robomimic's algorithms hold networks but are not Modules
        elif qualified.startswith("torch.nn.") and tail[:1].isupper():
            yield "module"
        else:
            yield from self._class_kinds(call, unit)

    def _class_kinds(self, call: ast.Call, unit: Unit) -> frozenset[str]:
        found = self.tree.defined(call.func, unit.source)
        if isinstance(found, tuple):
            return frozenset(self.bases(found[1], found[0].module))
        if isinstance(found, Unit):
            values = [r.value for r in found.all(ast.Return) if not isinstance(r.value, ast.Tuple)]
            return frozenset[str]().union(*(self.kinds(value, found) for value in values))
        return frozenset()

    def bases(self, node: ast.ClassDef, unit: Unit, depth: int = 0) -> set[str]:
        """Return the kinds that a class inherits; {"plain"} if all its bases are known and none is torch's."""
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


def _is_fabric_setup(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "setup" or not call.args:
        return False
    return "fabric" in last_name(call.func.value).lower()
