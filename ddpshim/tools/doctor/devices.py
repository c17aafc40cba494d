"""Holds the rules about hard-coded devices, local ranks used as global ones, and launcher variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.meaning import is_evaluation, literals
from ddpshim.tools.doctor.nodes import (
    FUNCTIONS,
    argument,
    calls_in,
    constant,
    identifiers,
    key_of,
    last_name,
    values_of,
)
from ddpshim.tools.doctor.rules import Case, Hit, call_rule, rule, text_of
from ddpshim.tools.doctor.source import Source, Unit

_FIXED = re.compile(r"^cuda:\d+$")
_CONFIG_DEVICE = re.compile(r"^\s*(\w*device)\s*:\s*[\"']?(cuda:\d+)\b")
_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
_FACTORIES = {"zeros", "ones", "tensor", "randn", "rand", "empty", "arange", "full", "eye", "linspace", "as_tensor"}
_SHARED_WRITES = {"torch.save", "wandb.init", "shutil.rmtree", "shutil.copyfile", "json.dump"}
_SHARED_WRITERS = {"SummaryWriter", "save_pretrained", "save_checkpoint", "save_model"}
_SPAWNING = re.compile(r"(?i)slurm|distrib|ddp|debug|single|launcher|spawn|none|rank|world")


def _device_named(call: ast.Call, unit: Unit) -> Optional[str]:
    """Return "cuda:0" or "cuda" if the call names a device by a literal, else None."""
    name, tail = unit.source.qualified(call.func), last_name(call)
    values = [argument(call, "device"), argument(call, "map_location")]
    is_method = isinstance(call.func, ast.Attribute)
    if tail == "device" and name.startswith("torch."):
        values.append(argument(call, "type", 0))
        given = argument(call, "index", 1) if name == "torch.device" else None
        if given is not None:
            is_fixed = isinstance(constant(given), int) and constant(values[-1]) == "cuda"
            return f"cuda:{constant(given)}" if is_fixed else None
    if tail == "load" and name.startswith("torch."):
        values.append(argument(call, "map_location", 1))
    if tail == "to" and is_method and call.args:
        values.append(call.args[0])
    if tail == "cuda" and is_method and not name.startswith("torch.cuda"):
        given = argument(call, "device", 0)
        index = constant(given)
        return "cuda" if given is None else f"cuda:{index}" if isinstance(index, int) else None
    if name == "torch.cuda.set_device":
        index = constant(argument(call, "device", 0))
        if isinstance(index, int) or _FIXED.match(str(index)):
            return f"cuda:{str(index).rpartition(':')[2]}"
    # The keys of a dictionary for map_location are the tensors' old devices, so only its values count.
    parts = [part for value in values for part in (value.values if isinstance(value, ast.Dict) else [value])]
    for inner in (inner for part in parts if part is not None for inner in ast.walk(part)):
        text = constant(inner)
        is_device = isinstance(text, str) and (text == "cuda" or _FIXED.match(text))
        if is_device and not isinstance(unit.source.parents.get(inner), ast.Compare):
            return str(text)
    return None


@rule("DDP601")
def hard_coded_device(case: Case) -> Iterator[Hit]:
    stored = (constant(s.slice) for _, s in case.all(ast.Subscript) if isinstance(s.ctx, ast.Store))
    if case.program.is_distributed and "CUDA_VISIBLE_DEVICES" in stored:
        return  # each rank sees only its own GPU, as cuda:0
    binds = bool(case.program.frameworks) or case.program.uses("set_device")
    for unit, call in case.calls():
        device = _device_named(call, unit)
        if device is None or _is_at_import(call, unit, case) or _is_unused(call, unit, case):
            continue
        is_chosen = not case.program.is_distributed and last_name(call) == "device"  # an index may follow
        if device == "cuda" and (binds or is_chosen or is_evaluation(unit.name)):
            continue
        if not case.is_guarded(call, unit) and not case.depends_on_launch(call, unit):
            because = ", because no torch.cuda.set_device comes before" if device == "cuda" else ""
            means = f"{text_of(call, 50)} means GPU {device[5:] or 0} on every rank{because}"
            why = "they share its memory and its time, and NCCL refuses two ranks on one GPU"
            yield Hit(unit, call, f"{means}: {why}.")
    yield from _device_in_config(case)


def _device_in_config(case: Case) -> Iterator[Hit]:
    """Yield lines of the program's configs that name one GPU, if the program uses a device from its config."""
    asked = [
        (unit.source, value)
        for unit, call in case.calls("device", "to", "set_device")
        for value in values_of(call)
        if isinstance(value, (ast.Attribute, ast.Subscript)) and "device" in last_name(value)
    ]
    readers = {source for source, value in asked if not (key_of(value) or "self.device").startswith("self.device")}
    for path, content in case.configs().items() if readers else ():
        made = {name for name, places in case.tree.targets.items() if any(config == path for _, config in places)}
        trainers = {s for s in case.program.files if made & s.classes.keys() and _goes_backward(s)}
        if trainers and trainers.isdisjoint(readers):
            continue  # the trainer of this config does not read its device from a config
        for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), 1):
            match = _CONFIG_DEVICE.match(line)
            if match is not None:
                place = ast.Constant(match[2], lineno=number, col_offset=match.start(2), end_lineno=number)
                message = f"{match[2]} is the device of every rank: they share its memory and its time."
                yield Hit(Source(path, b"").module, place, message)


def _goes_backward(source: Source) -> bool:
    return any("backward" in unit.attributes for unit in source.units)


def _is_unused(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether a call at module level makes a device that the program does not use."""
    statement = unit.source.parents.get(call)
    if not unit.is_module or not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    name = statement.targets[0].id
    users = (u for u in case.program.units if name in u.words)
    return not any(u.source is unit.source or name in u.source.names or name in u.attributes for u in users)


@call_rule("DDP602")
def device_at_import(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    if not _is_at_import(call, unit, case) or _device_named(call, unit) is None:
        return None
    runs = f"{text_of(call, 50)} runs when {unit.source.path.name} is imported, before a rank chose its GPU"
    return f"{runs}: all of them load it on GPU 0."


def _is_at_import(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether a call puts a tensor or network on a device when its file is imported."""
    source, tail = unit.source, last_name(call)
    if unit.name != "<module>" or not (tail in ("to", "cuda", "load") or tail in _FACTORIES):
        return False
    has_loops = any(isinstance(s, (ast.For, ast.While)) for s in source.tree.body)
    if source is case.program.entry and (not source.functions or has_loops):
        return False
    return not any(isinstance(a, (*FUNCTIONS, ast.Lambda, ast.arguments)) for a in source.above(call))


@rule("DDP603")
def local_rank_as_global(case: Case) -> Iterator[Hit]:
    if case.program.spawns:
        return
    for unit, call in case.calls("DistributedSampler", "init_process_group", "split_dataset_by_node", "shard"):
        position = 2 if last_name(call) == "DistributedSampler" else None
        rank = argument(call, "rank", position) or argument(call, "index")
        if rank is not None and case.is_local_rank(rank, unit):
            counts = f"{text_of(rank, 40)} counts from 0 on every node"
            yield Hit(unit, call, f"{counts}: on a second one {text_of(call.func)} repeats the first.")
    for unit, branch in case.all(ast.If):
        names = ((last_name(c), unit.source.qualified(c.func), c) for c in calls_in(*branch.body))
        written = next((c for tail, name, c in names if tail in _SHARED_WRITERS or name in _SHARED_WRITES), None)
        if written is not None and _asks_local_rank(branch.test, unit, case):
            true = f"`{text_of(branch.test, 40)}` is true once on every node"
            yield Hit(unit, branch.test, f"{true}: {text_of(written, 40)} runs on each of them, in one shared folder.")


def _asks_local_rank(test: ast.expr, unit: Unit, case: Case) -> bool:
    """Whether a test depends on the local rank (or a local main flag) and not on the global rank."""
    if last_name(test) in ("is_local_main_process", "is_local_main"):
        return True
    found = False
    for each in test.values if isinstance(test, ast.BoolOp) else [test]:
        if isinstance(each, ast.Compare) and len(each.ops) == 1 and isinstance(each.ops[0], (ast.Eq, ast.In)):
            values = each.comparators[0]
            is_first = not isinstance(values, ast.Set) and 0 in literals(values)
            if is_first and case.is_local_rank(each.left, unit):
                found = True
                continue
        if case.test(each, unit):
            return False
    return found


@rule("DDP604")
def launcher_variable_overwritten(case: Case) -> Iterator[Hit]:
    for unit, assign in case.all(ast.Assign) if not case.program.spawns else ():
        for target in assign.targets:
            if not isinstance(target, ast.Subscript) or last_name(target.value) != "environ":
                continue
            variable = constant(target.slice)
            if variable in _VARIABLES and _is_forced(assign, unit):
                sets = f"os.environ[{variable!r}] = {text_of(assign.value, 30)} replaces what the launcher set"
                yield Hit(unit, assign, f"{sets}: ranks look for each other at an address that nothing serves.")


def _is_forced(assign: ast.Assign, unit: Unit) -> bool:
    """Whether the assignment sets a literal without a check for a launcher (or for Slurm's or MPI's variables)."""
    if constant(assign.value) is None and not (
        identifiers(assign.value) <= {"str"} and last_name(assign.value) == "str"
    ):
        return False
    tested = {word for test in unit.source.tests_around(assign) for word in identifiers(test)}
    if tested & (_VARIABLES | {"environ", "getenv"}) or any(map(_SPAWNING.search, tested)):
        return False
    strings = (c.value for c in unit.all(ast.Constant) if isinstance(c.value, str))
    return not any(s.startswith(("SLURM", "OMPI", "PMI")) for s in strings)
