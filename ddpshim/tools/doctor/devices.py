"""Holds the rules about devices by number, local ranks used as global ones, and launcher variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.meaning import is_evaluation, speaks_of_rank
from ddpshim.tools.doctor.rules import Case, Hit, rule, text_of
from ddpshim.tools.doctor.source import Unit, argument, constant, identifiers, last_name

_FIXED = re.compile(r"^cuda:\d+$")
_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
_FACTORIES = {"zeros", "ones", "tensor", "randn", "rand", "empty", "arange", "full", "eye", "linspace", "as_tensor"}


def _device_named(call: ast.Call, unit: Unit) -> Optional[str]:
    """ "cuda:0" or "cuda" where the call names a device by a literal, else None."""
    name, tail = unit.source.qualified(call.func), last_name(call.func)
    values: list[Optional[ast.expr]] = [argument(call, "device"), argument(call, "map_location")]
    if tail in ("device", "load") and name.startswith("torch."):
        values.append(argument(call, "type" if tail == "device" else "map_location", 0 if tail == "device" else 1))
        if tail == "device" and name == "torch.device" and isinstance(constant(argument(call, "index", 1)), int):
            return (
                f"cuda:{constant(argument(call, 'index', 1))}"
                if constant(argument(call, "type", 0)) == "cuda"
                else None
            )
    if isinstance(call.func, ast.Attribute) and tail == "to":
        values.append(call.args[0] if call.args else None)
    if isinstance(call.func, ast.Attribute) and tail == "cuda" and not name.startswith("torch.cuda"):
        index = argument(call, "device", 0)
        if index is None:
            return "cuda"
        return f"cuda:{constant(index)}" if isinstance(constant(index), int) else None
    if name == "torch.cuda.set_device":
        index = argument(call, "device", 0)
        if isinstance(constant(index), int) or _FIXED.match(str(constant(index))):
            return f"cuda:{str(constant(index)).rpartition(':')[2]}"
    for value in values:
        for inner in ast.walk(value) if value is not None else ():
            text = inner.value if isinstance(inner, ast.Constant) else None
            if (
                isinstance(text, str)
                and (text == "cuda" or _FIXED.match(text))
                and not isinstance(unit.source.parents.get(inner), ast.Compare)
            ):
                return text
    return None


@rule("DDP601")
def hard_coded_device(case: Case) -> Iterator[Hit]:
    binds = case.program.uses("set_device") or bool(case.program.frameworks) or _limits_visible(case)
    for unit in case.program.units:
        for call in unit.all(ast.Call):
            device = _device_named(call, unit)
            if device is None or _is_at_import(call, unit, case) or _is_unused(call, unit, case):
                continue
            is_chosen = not case.is_distributed and last_name(call.func) == "device"  # and may be chosen with an index
            if device == "cuda" and (binds or is_chosen or is_evaluation(unit.name)):
                continue
            if not case.on_every_rank(call, unit) or case.meaning.depends_on_launch(call, unit):
                continue
            what = f"{text_of(call, 50)} means GPU {device[5:] or 0} on every rank"
            why = ": they share its memory and its time, and NCCL refuses two ranks on one GPU."
            yield Hit(
                unit,
                call,
                what + (why if device != "cuda" else ", because no torch.cuda.set_device comes before" + why),
            )


def _is_unused(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether a call at the top of a file makes a device that nothing in this program uses."""
    statement = unit.source.parents.get(call)
    if not unit.is_module or not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    name = statement.targets[0].id
    return not any(
        name in u.loaded | u.attributes and (u.source is unit.source or name in u.source.names or name in u.attributes)
        for u in case.program.units
    )


def _limits_visible(case: Case) -> bool:
    """Whether each process sets which GPUs it sees."""
    return any(
        constant(s.slice) == "CUDA_VISIBLE_DEVICES" and isinstance(s.ctx, ast.Store)
        for u in case.program.units
        for s in u.all(ast.Subscript)
    )


@rule("DDP602")
def device_at_import(case: Case) -> Iterator[Hit]:
    for unit in case.program.units:
        for call in unit.all(ast.Call) if unit.is_module else ():
            if _is_at_import(call, unit, case) and _device_named(call, unit) is not None:
                yield Hit(
                    unit,
                    call,
                    f"{text_of(call, 50)} runs when {unit.source.path.name} is imported, before a rank chose its GPU: "
                    "all of them load it on GPU 0.",
                )


def _is_at_import(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether a call puts something on a device when its file is imported."""
    if unit.name != "<module>" or (unit.source is case.program.entry and not unit.source.functions):
        return False
    if unit.source is case.program.entry and any(isinstance(s, (ast.For, ast.While)) for s in unit.source.tree.body):
        return False
    tail = last_name(call.func)
    if any(
        isinstance(a, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.arguments))
        for a in unit.source.above(call)
    ):
        return False
    return tail in ("to", "cuda", "load") or tail in _FACTORIES


@rule("DDP603")
def local_rank_as_global(case: Case) -> Iterator[Hit]:
    is_local = case.meaning.is_local_rank
    if case.program.spawns:
        return
    for unit, call in case.calls("DistributedSampler", "init_process_group", "split_dataset_by_node", "shard"):
        rank = argument(call, "rank", 2 if last_name(call.func) == "DistributedSampler" else None) or argument(
            call, "index"
        )
        if rank is not None and is_local(rank, unit):
            yield Hit(
                unit,
                call,
                f"{text_of(rank, 40)} counts from 0 on every node: on a second one {text_of(call.func)} repeats the "
                "first.",
            )
    for unit in case.program.units:
        for branch in unit.all(ast.If):
            rank = _local_test(branch.test, unit, case)
            if rank is None:
                continue
            written = next(
                (c for s in branch.body for c in ast.walk(s) if isinstance(c, ast.Call) and _is_shared_write(c, unit)),
                None,
            )
            if written is not None:
                yield Hit(
                    unit,
                    branch.test,
                    f"`{text_of(branch.test, 40)}` is true once on every node: {text_of(written, 40)} runs on each of "
                    "them, in one shared folder.",
                )


def _local_test(test: ast.expr, unit: Unit, case: Case) -> Optional[ast.expr]:
    """The local rank (or flag) that a test asks for, where it does not ask for the global one too."""
    if last_name(test) in ("is_local_main_process", "is_local_main"):
        return test
    tests = test.values if isinstance(test, ast.BoolOp) else [test]
    found = None
    for each in tests:
        if isinstance(each, ast.Compare) and len(each.ops) == 1 and isinstance(each.ops[0], (ast.Eq, ast.In)):
            values = each.comparators[0]
            known = (
                {constant(e) for e in values.elts} if isinstance(values, (ast.Tuple, ast.List)) else {constant(values)}
            )
            if 0 in known and case.meaning.is_local_rank(each.left, unit):
                found = each.left
                continue
        if case.meaning.test(each, unit):
            return None
    return found


def _is_shared_write(call: ast.Call, unit: Unit) -> bool:
    name = unit.source.qualified(call.func)
    return name in ("torch.save", "wandb.init", "shutil.rmtree", "shutil.copyfile", "json.dump") or last_name(
        call.func
    ) in (
        "SummaryWriter",
        "save_pretrained",
        "save_checkpoint",
        "save_model",
    )


@rule("DDP604")
def launcher_variable_overwritten(case: Case) -> Iterator[Hit]:
    if case.program.spawns:
        return
    for unit in case.program.units:
        for assign in unit.all(ast.Assign):
            for target in assign.targets:
                if not isinstance(target, ast.Subscript) or last_name(target.value) != "environ":
                    continue
                variable = constant(target.slice)
                if variable not in _VARIABLES or not _is_forced(assign, unit):
                    continue
                yield Hit(
                    unit,
                    assign,
                    f"os.environ[{variable!r}] = {text_of(assign.value, 30)} replaces what the launcher set: ranks "
                    "look for each other at a place that nobody serves.",
                )


def _is_forced(assign: ast.Assign, unit: Unit) -> bool:
    """Whether the value comes from nowhere, without asking whether the launcher has set it or which one it was."""
    words = identifiers(assign.value)
    if words & {"environ", "getenv", "subprocess", "rank", "local_rank", "world_size"} or speaks_of_rank(assign.value):
        return False
    for above in unit.source.above(assign):
        if isinstance(above, (ast.If, ast.IfExp, ast.Try)):
            tested = identifiers(above.test) if not isinstance(above, ast.Try) else set()
            if tested & (_VARIABLES | {"environ", "getenv"}) or any(
                re.search(r"(?i)slurm|distrib|ddp|debug|single|launcher|spawn|none|rank|world", w) for w in tested
            ):
                return False
    strings = {c.value for c in unit.all(ast.Constant) if isinstance(c.value, str)}
    return not any(s.startswith(("SLURM", "OMPI", "PMI")) for s in strings)
