"""Holds the rules about wrapping: which object is wrapped, calls on the wrapper, and copies and optimizers of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.kinds import UNWRAPS, WRAPPERS
from ddpshim.tools.doctor.meaning import is_without_gradients
from ddpshim.tools.doctor.nodes import argument, calls_in, constant, identifiers, key_of, last_name, values_of, words_of
from ddpshim.tools.doctor.rules import ANY_FRAMEWORK, Case, Hit, call_rule, rule, text_of
from ddpshim.tools.doctor.source import Binding, Unit

# Methods that DistributedDataParallel has itself; it hides all others of the network.
_MODULE_METHODS = words_of(
    "add_module apply bfloat16 buffers children compile cpu cuda double eval extra_repr float forward gather "
    "get_buffer get_extra_state get_parameter get_submodule half ipu join join_hook load_state_dict module modules "
    "mtia named_buffers named_children named_modules named_parameters no_sync parameters register_backward_hook "
    "register_buffer register_comm_hook register_forward_hook register_forward_pre_hook register_full_backward_hook "
    "register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook "
    "register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ "
    "scatter set_extra_state set_submodule share_memory state_dict to to_empty to_kwargs train type "
    "will_sync_module_buffers xpu zero_grad _get_ddp_logging_data _set_static_graph"
)
# Also the wrapper's own attributes, and methods of schedulers and engines, which a name may hold as well.
_ANSWERED = _MODULE_METHODS | words_of(
    "module training device device_ids output_device device_type dim process_group broadcast_buffers static_graph "
    "find_unused_parameters require_backward_grad_sync require_forward_param_sync reducer logger mixed_precision "
    "gradient_as_bucket_view parameters_to_ignore dump_patches backward step save_checkpoint load_checkpoint"
)
# Methods that do not train when called through `.module`.
_HARMLESS = re.compile(
    r"(?i)^(get_|set_|is_|has_|num_|load|save|update|log|print|reset|init|freeze|unfreeze|clip|generate|sample|predict|infer"
    r"|configure|compute_metrics|no_weight_decay|momentum|ema|export|push|encode_text|register)"
)
_TRAINING_UNIT = re.compile(r"(?i)(train|loss|step|forward|update|fit|learn|optimi[sz]e|backprop)")
_TRAINING_METHOD = re.compile(
    r"(?i)^_?(forward\w*|train\w*|\w*loss\w*|training_step|log_prob|encode\w*|decode\w*|embed\w*|extract\w*|reparam\w*)$"
)
_AVERAGES = re.compile(
    r"(DistributedDataParallel|DataParallel|DDP|FSDP|fully_shard|parallelize_module|replicate|DistributedOptimizer)$"
    r"|(?i:(average|reduce|sync)\w*_grad)"
)
_NO_SYNC = {"no_sync", "no_backward_sync"}
_SCALING = {"scale", "mean", "sum", "float", "detach", "item", "backward", "div", "mul"}  # of an existing loss
_EMA = re.compile(r"(?i)(^|_)ema($|_|[A-Z])|EMA|[Ee]maModel|ModelEma|AveragedModel|ExponentialMovingAverage")


def _calls_as(name: str, case: Case) -> Iterator[tuple[Unit, ast.Call]]:
    """Yield calls of a class by its name, and by the names under which files of the program import it."""
    origins = [item for source in case.program.files for item in source.names.items()]
    return case.calls(name, *(local for local, origin in origins if origin.endswith(name)))


@rule("DDP101")
def dataparallel_left(case: Case) -> Iterator[Hit]:
    for unit, call in _calls_as("DataParallel", case):
        if "dp" not in case.kinds(call, unit) or not call.args:
            continue
        has_both = any("ddp" in case.kinds(other, unit) for other in unit.all(ast.Call))
        if case.program.is_distributed and (has_both or case.depends_on_launch(call, unit)):
            continue  # only the branch for runs without a launcher uses DataParallel
        splits = f"DataParallel around {text_of(call.args[0], 40)} splits each batch over the GPUs of one process"
        yield Hit(unit, call, f"{splits}, and every rank would do so on the same GPUs.")


@call_rule("DDP102", wraps=True)
def trains_through_module(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    if "backward" not in unit.attributes and not _TRAINING_UNIT.search(unit.name):
        return None
    owner, method = _through_module(call, unit, case)
    if owner is None or not values_of(call) or is_without_gradients(call, unit):
        return None
    is_harmless = _HARMLESS.match(method) or method in _MODULE_METHODS - {"forward"}
    if method and (is_harmless or not _TRAINING_METHOD.search(method)):
        return None
    wrapped = "DataParallel" if "dp" in case.kinds(owner, unit) else "the wrapper"
    goes = f"{text_of(call.func)} goes around {wrapped}: its gradients are never averaged"
    return f"{goes}, and each rank trains its own model."


def _through_module(call: ast.Call, unit: Unit, case: Case) -> tuple[Optional[ast.expr], str]:
    """Return object and method of `wrapped.module.method(...)`, with "" for `wrapped.module(...)`; else None first."""
    func: ast.expr = call.func
    method = ""
    if isinstance(func, ast.Attribute) and func.attr != "module":
        method, func = func.attr, func.value
    while isinstance(func, ast.Subscript):
        func = func.value
    if isinstance(func, ast.Attribute) and func.attr == "module" and case.kinds(func.value, unit) & {"ddp", "dp"}:
        return func.value, method
    found = case.kinds(func, unit) if isinstance(func, ast.Name) else frozenset[str]()
    return (func if "unwrapped" in found and not found & {"ddp", "module"} else None), method


@rule("DDP103")
def wrapped_non_module(case: Case) -> Iterator[Hit]:
    for unit, call in _calls_as("DistributedDataParallel", case):
        inner = argument(call, "module", 0)
        if inner is None or "ddp" not in case.kinds(call, unit):
            continue
        found = case.kinds(inner, unit)
        if "plain" in found and "module" not in found:
            wraps = f"DistributedDataParallel around {text_of(inner, 40)}, which is not a torch.nn.Module"
            yield Hit(unit, call, f"{wraps}: it has no parameters to synchronise.")


@rule("DDP104", wraps=True)
def hidden_by_the_wrapper(case: Case) -> Iterator[Hit]:
    reported: set[ast.Call] = set()
    unanswered = "AttributeError, and through .module no gradient would be averaged"
    for unit in case.program.units:
        for asked in unit.all(ast.Call) if "hasattr" in unit.loaded else ():
            name = constant(asked.args[1]) if last_name(asked.func) == "hasattr" and len(asked.args) == 2 else None
            if isinstance(name, str) and name not in _ANSWERED and case.kinds(asked.args[0], unit) == {"ddp"}:
                hides = f"{text_of(asked)} is False on a DistributedDataParallel, whatever the network has"
                yield Hit(unit, asked, f"{hides}: what follows is skipped silently.")
        for read in sorted(unit.all(ast.Attribute), key=lambda n: (n.lineno, n.col_offset)):
            above = unit.source.parents.get(read)
            call = above if isinstance(above, ast.Call) and above.func is read else None
            if read.attr in _ANSWERED or read.attr.startswith("_") or not isinstance(read.ctx, ast.Load):
                continue
            is_name = isinstance(read.value, (ast.Name, ast.Attribute, ast.Subscript))
            found = case.kinds(read.value, unit) if is_name else frozenset[str]()
            if "ddp" not in found or _asks_first(read, unit) or (call is None and found != {"ddp"}):
                continue
            if any((key_of(read) or "") in other.bindings for other in case.program.units):
                continue  # the program assigns this attribute
            handed = case.handed_over(read.value, unit, "ddp")
            for where, site in handed:
                if site not in reported:
                    reported.add(site)
                    given = f"{text_of(site.func)} is given a DistributedDataParallel and asks it for {text_of(read)}"
                    yield Hit(where, site, f"{given}, which the wrapper does not have: {unanswered}.")
            if not handed:
                what = f"{text_of(read)} is asked of a DistributedDataParallel, which has no {read.attr}"
                yield Hit(unit, call or read, f"{what}: {unanswered}.")


def _asks_first(node: ast.AST, unit: Unit) -> bool:
    """Whether a test around the node checks if its network is wrapped."""
    words = {word for test in unit.source.tests_around(node) for word in identifiers(test)}
    asking = {"hasattr", "isinstance", "module", "callable", "has_method"}
    return not words.isdisjoint(asking) or any(re.search(r"(?i)distrib|ddp", word) for word in words)


@call_rule("DDP105", wraps=True)
def ema_of_wrapped(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    names = (v for v in values_of(call) if isinstance(v, (ast.Name, ast.Attribute, ast.Subscript)))
    wrapped = next((name for name in names if WRAPPERS & case.kinds(name, unit)), None)
    if wrapped is None or _asks_first(call, unit):
        return None
    name = last_name(call)
    owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    is_update = name in ("step", "update", "update_parameters") and _EMA.search(owner)
    is_average = _EMA.search(name) or (is_update and "ddp" in case.kinds(wrapped, unit))
    if name != "deepcopy" and not is_average:
        return None
    definition = case.tree.defined(call.func, unit.source)
    if _unwraps(definition, name, case) or unit.source.qualified(call.func).startswith("timm."):
        return None
    copies, averages = "copies the wrapper with its hooks", "averages the wrapper, by names with module. in front"
    what = copies if name == "deepcopy" else averages
    return f"{text_of(call)} {what}: the average may stand still, or a forward on it hangs."


def _unwraps(definition: object, name: str, case: Case) -> bool:
    """Whether the called code unwraps `.module` itself, or pairs parameters by their order."""
    if isinstance(definition, Unit):
        return _pairs_well(definition)
    files = case.program.files
    if isinstance(definition, tuple):
        classes = [definition[1]]
    else:
        classes = [u.owner for s in files for u in s.methods.get(name, []) if u.owner and _EMA.search(u.owner.name)]
    if not classes:  # from another package; diffusers' EMAModel pairs by name
        return name != "deepcopy" and not any(origin.endswith("EMAModel") for origin in case.program.origins)
    return all(any(_pairs_well(u) for s in files for u in s.units if u.owner is node) for node in classes)


def _pairs_well(unit: Unit) -> bool:
    strips = any(isinstance(c.value, str) and c.value.startswith("module") for c in unit.all(ast.Constant))
    by_name = unit.attributes & {"named_parameters", "named_modules", "modules"}
    return strips or "module" in unit.attributes or bool(unit.words & UNWRAPS) or ("zip" in unit.loaded and not by_name)


@rule("DDP110", unless=("ddpshim", "lightning", "transformers"))
def backward_alone_in_no_sync(case: Case) -> Iterator[Hit]:
    for unit, block in case.all(ast.With):
        opened = (part for item in block.items for _, part in case.made_of(item.context_expr, unit))
        if not any(not _NO_SYNC.isdisjoint(identifiers(part)) for part in opened):
            continue
        for call in calls_in(*block.body):
            if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
                continue
            losses = [*call.args[:1], call.func.value] if call.args else [call.func.value]
            if not any(_is_made_inside(loss, block, unit) for loss in losses):
                message = "The forward pass is outside no_sync(), so backward reduces gradients anyway."
                yield Hit(unit, call, message)


def _is_made_inside(node: ast.AST, block: ast.With, unit: Unit, depth: int = 0) -> bool:
    """Whether a loss is computed in the block, not only scaled there."""
    if any(last_name(call) not in _SCALING for call in calls_in(node)):
        return True
    for name in [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Subscript)) and key_of(n)]:
        for bound in unit.bindings.get(key_of(name) or "", []) if depth < 3 else ():
            inside = block in unit.source.above(bound.statement) and bound.statement not in unit.source.above(node)
            if inside and (bound.value is None or _is_made_inside(bound.value, block, unit, depth + 1)):
                return True
    return False


@rule("DDP111")
def average_walks_modules(case: Case) -> Iterator[Hit]:
    for unit, loop in case.all(ast.For):
        walked = [c for c in calls_in(loop.iter) if last_name(c) in ("modules", "named_modules", "children")]
        of_average = _EMA.search(unit.owner.name if unit.owner else "") or _EMA.search(unit.name)
        writes = any(last_name(c) in ("mul_", "lerp_", "add_", "copy_") for c in calls_in(loop))
        if len(walked) > 1 and writes and (of_average or any(map(_EMA.search, identifiers(loop.iter)))):
            pairs = f"The average pairs {text_of(walked[0], 30)} with {text_of(walked[1], 30)}"
            why = "a parameter of two modules is averaged twice, buffers are left out, and a wrapper shifts the pairs"
            yield Hit(unit, loop, f"{pairs}: {why}.")


@rule("DDP107", unless=ANY_FRAMEWORK)
def never_wrapped(case: Case) -> Iterator[Hit]:
    program = case.program
    starts = "torch.distributed.init_process_group" in program.origins
    if not starts or any(map(_AVERAGES.search, program.origins)):
        return
    if any("grad" in u.attributes and any("reduce" in word for word in u.words) for u in program.units):
        return
    calls = [(u, c) for u, c in case.calls("backward") if isinstance(c.func, ast.Attribute)]
    if calls:
        unit, call = min(calls, key=lambda each: (each[0].source is not program.entry, each[1].lineno))
        message = "A process group is started, but nothing is wrapped or reduced: each rank trains its own model."
        yield Hit(unit, call, message)


@rule("DDP106", wraps=True)
def optimizer_order(case: Case) -> Iterator[Hit]:
    for unit in case.program.units:
        made = [(key, b, b.value) for key, bs in unit.bindings.items() for b in bs if isinstance(b.value, ast.Call)]
        wraps = [(binding, call) for _, binding, call in made if "ddp" in case.kinds(call, unit)]
        parents = unit.source.parents
        optimizers = [each for each in made if "optimizer" in case.kinds(each[2], unit)]
        for key, first, optimizer in optimizers:
            trained, line = _parameters_of(optimizer), first.target.lineno
            for wrap, call in wraps:
                named = {key_of(node) for node in (wrap.target, *ast.walk(call))}
                if trained is None or wrap.target.lineno <= line or trained not in named:
                    continue
                for name, second, value in optimizers:
                    is_later = name == key and second.target.lineno > wrap.target.lineno
                    if is_later and parents.get(second.statement) is parents.get(first.statement):
                        stale = f"schedules and a loaded state still belong to the one of line {line}"
                        yield Hit(unit, value, f"{key} is made again after the wrap: {stale}.")
                        break
                moved = _move_between(trained, line, wrap, unit)
                if moved is not None:
                    early = f"{key} is made from {trained} before {text_of(moved, 40)} in line {moved.lineno}"
                    stale = "it may step parameters that the wrapped network no longer has"
                    yield Hit(unit, optimizer, f"{early}: {stale}.")


def _parameters_of(optimizer: ast.Call) -> Optional[str]:
    """Return "model" for `Adam(model.parameters())`, else None."""
    first = optimizer.args[0] if optimizer.args else None
    if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters":
        return key_of(first.func.value)
    return None


def _move_between(name: str, line: int, wrap: Binding, unit: Unit) -> Optional[ast.Call]:
    """Return a call after `line`, up to the wrap, that moves the network or replaces its modules; else None."""
    last = wrap.target.end_lineno or wrap.target.lineno
    for call in (c for c in unit.all(ast.Call) if line < c.lineno <= last):
        first, method = call.args[0] if call.args else None, last_name(call)
        is_to = method == "to" and first is not None and constant(first) != "cpu"
        is_move = is_to or method in ("cuda", "half", "double", "bfloat16")
        if is_move and isinstance(call.func, ast.Attribute) and key_of(call.func.value) == name:
            return call
        if method == "convert_sync_batchnorm" and first is not None and key_of(first) == name:
            return call
    return None
