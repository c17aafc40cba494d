"""Holds the rules about what is wrapped, and what is called on it or made from it before and after."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.meaning import is_without_gradients
from ddpshim.tools.doctor.rules import Case, Hit, rule, text_of
from ddpshim.tools.doctor.source import Binding, Unit, argument, constant, identifiers, key_of, last_name

# What DistributedDataParallel answers itself; everything else of the network it hides.
_MODULE_METHODS = {
    *[
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "children",
        "compile",
        "cpu",
        "cuda",
        "double",
        "eval",
        "extra_repr",
        "float",
        "forward",
        "get_buffer",
    ],
    *[
        "get_extra_state",
        "get_parameter",
        "get_submodule",
        "half",
        "ipu",
        "load_state_dict",
        "modules",
        "mtia",
        "named_buffers",
        "named_children",
    ],
    *[
        "named_modules",
        "named_parameters",
        "parameters",
        "register_backward_hook",
        "register_buffer",
        "register_forward_hook",
    ],
    *["register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook", "register_module"],
    *[
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_parameter",
        "requires_grad_",
    ],
    *[
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "set_extra_state",
        "set_submodule",
        "share_memory",
    ],
    *[
        "state_dict",
        "to",
        "to_empty",
        "train",
        "type",
        "xpu",
        "zero_grad",
        "no_sync",
        "join",
        "join_hook",
        "register_comm_hook",
        "scatter",
        "gather",
    ],
    *[
        "to_kwargs",
        "will_sync_module_buffers",
        "named_parameters",
        "module",
        "_set_static_graph",
        "_get_ddp_logging_data",
    ],
}
_DEEPSPEED = {"backward", "step", "save_checkpoint", "load_checkpoint"}  # its engine is what a wrapper may also be
# Reached through `.module`, these train nothing.
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
_EMA = re.compile(r"(?i)(^|_)ema($|_|[A-Z])|EMA|[Ee]maModel|ModelEma|AveragedModel|ExponentialMovingAverage")


@rule("DDP101")
def dataparallel_left(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls("DataParallel", *_aliases(case, "DataParallel")):
        if "dp" not in case.meaning.kinds(call, unit) or not call.args:
            continue
        has_both = any("ddp" in case.meaning.kinds(other, unit) for other in unit.all(ast.Call))
        if case.is_distributed and (has_both or case.meaning.depends_on_launch(call, unit)):
            continue  # the branch without a launcher
        yield Hit(
            unit,
            call,
            f"DataParallel around {text_of(call.args[0], 40)} splits each batch over the GPUs of one process, and "
            "every rank would do so on the same GPUs.",
        )


def _aliases(case: Case, name: str) -> set[str]:
    return {local for s in case.program.files for local, origin in s.names.items() if origin.endswith(name)}


@rule("DDP102")
def trains_through_module(case: Case) -> Iterator[Hit]:
    if not case.program.wraps:
        return
    kinds = case.meaning.kinds
    for unit in case.program.units:
        if not {"backward"} & unit.attributes and not _TRAINING_UNIT.search(unit.name):
            continue
        for call in unit.all(ast.Call):
            owner, method = _through_module(call, unit, case)
            if owner is None or (method and (_HARMLESS.match(method) or method in _MODULE_METHODS - {"forward"})):
                continue
            if (not call.args and not call.keywords) or (method and not _TRAINING_METHOD.search(method)):
                continue
            if is_without_gradients(call, unit):
                continue
            wrapped = "DataParallel" if "dp" in kinds(owner, unit) else "the wrapper"
            yield Hit(
                unit,
                call,
                f"{text_of(call.func)} goes around {wrapped}: its gradients are never averaged, and each rank trains a "
                "model of its own.",
            )


def _through_module(call: ast.Call, unit: Unit, case: Case) -> tuple[Optional[ast.expr], str]:
    """The wrapped object and the method of `wrapped.module.method(...)` or `wrapped.module(...)`, else None."""
    func: ast.expr = call.func
    method = ""
    if isinstance(func, ast.Attribute) and func.attr != "module":
        method, func = func.attr, func.value
    while isinstance(func, ast.Subscript):
        func = func.value
    if isinstance(func, ast.Attribute) and func.attr == "module":
        found = case.meaning.kinds(func.value, unit)
        return (func.value, method) if found & {"ddp", "dp"} else (None, "")
    if isinstance(func, ast.Name) and "unwrapped" in case.meaning.kinds(func, unit):
        return (None, "") if case.meaning.kinds(func, unit) & {"ddp", "module"} else (func, method)
    return None, ""


@rule("DDP103")
def wrapped_non_module(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls("DistributedDataParallel", *_aliases(case, "DistributedDataParallel")):
        inner = argument(call, "module", 0)
        if inner is None or "ddp" not in case.meaning.kinds(call, unit):
            continue
        found = case.meaning.kinds(inner, unit)
        if "plain" in found and "module" not in found:
            yield Hit(
                unit,
                call,
                f"DistributedDataParallel around {text_of(inner, 40)}, which is no torch.nn.Module: it has no "
                "parameters to synchronise.",
            )


@rule("DDP104")
def method_on_wrapped(case: Case) -> Iterator[Hit]:
    if not case.program.wraps:
        return
    told: set[ast.Call] = set()
    for unit in case.program.units:
        for call in sorted(unit.all(ast.Call), key=lambda c: (c.lineno, c.col_offset)):
            func = call.func
            if (
                not isinstance(func, ast.Attribute)
                or func.attr in _MODULE_METHODS | _DEEPSPEED
                or func.attr.startswith("__")
            ):
                continue
            if not isinstance(func.value, (ast.Name, ast.Attribute, ast.Subscript)):
                continue
            if "ddp" not in case.meaning.kinds(func.value, unit) or _asks_first(call, unit):
                continue
            handed = case.meaning.handed_over(func.value, unit, "ddp")
            for where, site in handed:
                if site not in told:
                    told.add(site)
                    yield Hit(
                        where,
                        site,
                        f"{text_of(site.func)} is given a DistributedDataParallel and calls {text_of(func)}, which the "
                        "wrapper does not have: AttributeError, and through .module no gradient would be averaged.",
                    )
            if not handed:
                yield Hit(
                    unit,
                    call,
                    f"{text_of(func)} is called on a DistributedDataParallel, which has no {func.attr}: "
                    "AttributeError, and through .module no gradient would be averaged.",
                )


def _asks_first(node: ast.AST, unit: Unit) -> bool:
    """Whether a test around the node looks at whether it is wrapped."""
    for above in unit.source.above(node):
        if isinstance(above, (ast.If, ast.IfExp)):
            names = identifiers(above.test)
            if names & {"hasattr", "isinstance", "module", "callable", "has_method"} or any(
                "distrib" in name.lower() or "ddp" in name.lower() for name in names
            ):
                return True
    return False


@rule("DDP105")
def ema_of_wrapped(case: Case) -> Iterator[Hit]:
    if not case.program.wraps:
        return
    kinds = case.meaning.kinds
    wrappers = {"ddp", "dp", "holds-wrapped"}
    for unit in case.program.units:
        for call in unit.all(ast.Call):
            name = last_name(call.func)
            values = [*call.args, *(k.value for k in call.keywords)]
            wrapped = next(
                (
                    v
                    for v in values
                    if isinstance(v, (ast.Name, ast.Attribute, ast.Subscript)) and wrappers & kinds(v, unit)
                ),
                None,
            )
            if wrapped is None or _asks_first(call, unit):
                continue
            is_copy = name == "deepcopy"
            owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            is_average = _EMA.search(name) or (
                "ddp" in kinds(wrapped, unit) and _EMA.search(owner) and name in ("step", "update", "update_parameters")
            )
            if not is_copy and not is_average:
                continue
            definition = case.tree.defined(call.func, unit.source)
            if _unwraps(definition, name, case) or unit.source.qualified(call.func).startswith("timm."):
                continue
            what = (
                "copies the wrapper with its hooks"
                if is_copy
                else "averages the wrapper, by names with module. in front"
            )
            yield Hit(unit, call, f"{text_of(call)} {what}: the average may stand still, or a forward on it hangs.")


def _unwraps(definition: object, name: str, case: Case) -> bool:
    """Whether the code that is called looks into `.module` itself, or pairs parameters by their order."""
    if isinstance(definition, Unit):
        return _pairs_well(definition)
    files = case.program.files
    classes = (
        [definition[1]]
        if isinstance(definition, tuple)
        else [u.owner for s in files for u in s.methods.get(name, []) if u.owner and _EMA.search(u.owner.name)]
    )
    if not classes:  # of another package: diffusers' pairs by name
        return name != "deepcopy" and not any(origin.endswith("EMAModel") for origin in case.program.origins)
    return all(any(_pairs_well(u) for s in files for u in s.units if u.owner is node) for node in classes)


def _pairs_well(unit: Unit) -> bool:
    strips = any(isinstance(c.value, str) and c.value.startswith("module") for c in unit.all(ast.Constant))
    by_name = unit.attributes & {"named_parameters", "named_modules", "modules"}
    return strips or "module" in unit.attributes or ("zip" in unit.loaded and not by_name)


@rule("DDP107")
def never_wrapped(case: Case) -> Iterator[Hit]:
    program = case.program
    starts = "torch.distributed.init_process_group" in program.origins
    if program.frameworks or not starts or any(_AVERAGES.search(name) for name in program.origins):
        return
    if any("grad" in u.attributes and any("reduce" in name for name in u.attributes | u.loaded) for u in program.units):
        return
    calls = [(u, c) for u, c in case.calls("backward") if isinstance(c.func, ast.Attribute)]
    if calls:
        unit, call = min(calls, key=lambda each: (each[0].source is not program.entry, each[1].lineno))
        yield Hit(
            unit,
            call,
            "A process group is started, but nothing is wrapped or reduced: each rank trains its own model.",
        )


@rule("DDP106")
def optimizer_order(case: Case) -> Iterator[Hit]:
    if not case.program.wraps:
        return
    kinds = case.meaning.kinds
    for unit in case.program.units:
        wraps = [
            (key, binding)
            for key, bindings in unit.bindings.items()
            for binding in bindings
            if "ddp" in kinds(binding.value, unit) and isinstance(binding.value, ast.Call)
        ]
        optimizers = [
            (key, binding)
            for key, bindings in unit.bindings.items()
            for binding in bindings
            if isinstance(binding.value, ast.Call) and "optimizer" in kinds(binding.value, unit)
        ]
        for key, made in optimizers:
            trained = _parameters_of(made.value)
            if trained is None:
                continue
            for _, wrap in wraps:
                if not isinstance(wrap.value, ast.Call) or wrap.target.lineno <= made.target.lineno:
                    continue
                if key_of(wrap.target) != trained and trained not in map(key_of, ast.walk(wrap.value)):
                    continue
                again = next(
                    (
                        b
                        for k, b in optimizers
                        if k == key
                        and b.target.lineno > wrap.target.lineno
                        and _same_block(b.statement, made.statement, unit)
                    ),
                    None,
                )
                if again is not None and again.value is not None:
                    yield Hit(
                        unit,
                        again.value,
                        f"{key} is made again after the wrap: schedules and a loaded state still belong to the one of "
                        f"line {made.target.lineno}.",
                    )
                moved = _move_between(trained, made.target.lineno, wrap, unit)
                if moved is not None and made.value is not None:
                    yield Hit(
                        unit,
                        made.value,
                        f"{key} is made from {trained} before {text_of(moved, 40)} in line {moved.lineno}: it may step "
                        "parameters that the wrapped network no longer has.",
                    )


def _same_block(one: ast.AST, other: ast.AST, unit: Unit) -> bool:
    return unit.source.parents.get(one) is unit.source.parents.get(other)


def _parameters_of(value: Optional[ast.expr]) -> Optional[str]:
    """`model` of `Adam(model.parameters())`."""
    first = value.args[0] if isinstance(value, ast.Call) and value.args else None
    if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters":
        return key_of(first.func.value)
    return None


def _move_between(name: str, line: int, wrap: Binding, unit: Unit) -> Optional[ast.Call]:
    """A move or replacement of the network after `line`, up to the wrap."""
    last = wrap.target.end_lineno or wrap.target.lineno
    for call in unit.all(ast.Call):
        if not line < call.lineno <= last:
            continue
        func = call.func
        is_method = isinstance(func, ast.Attribute) and key_of(func.value) == name
        is_to = last_name(func) == "to" and bool(call.args) and constant(call.args[0]) != "cpu"
        if is_method and (is_to or last_name(func) in ("cuda", "half", "double", "bfloat16")):
            return call
        if last_name(func) == "convert_sync_batchnorm" and call.args and key_of(call.args[0]) == name:
            return call
    return None
