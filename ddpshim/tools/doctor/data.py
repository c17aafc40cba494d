"""Holds the rules about samplers, loaders, batch sizes, schedules and seeds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.meaning import is_world_size, speaks_of_rank
from ddpshim.tools.doctor.rules import Case, Hit, rule, text_of
from ddpshim.tools.doctor.source import Unit, argument, constant, identifiers, key_of, last_name

_HELD_OUT = re.compile(
    r"(?i)(?<![a-z])(val|valid|validation|test|eval|evaluation|dev|held_?out|infer\w*|demo)(?![a-z])|(val|valid|test|eval)_?(loader|set|dataset|data|sampler|dataloader)|^(val|test|eval)"
)
_LOADERS = ("DataLoader",)
_SHARES = re.compile(
    r"(?i)(?:\b|_)(rank|world_?size|num_?replicas|shards?|num_shards|process_index|process_count|split_by_node|split_dataset_by_node|nodesplitter)(?:\b|_)|get_rank|get_world_size|shard"
)
_PER_RANK = re.compile(
    r"(?i)per_?(gpu|rank|device|process|proc|replica|worker|card)|local_?(batch|bs)|micro_?(batch|bs)|device_?batch|(batch|bs)_?(size)?_?(gpu|rank|device)|mini_?batch_?per"
)
_UNIT = r"(gpu|rank|process|device|card|replica|worker)"
_SAYS_PER_RANK = re.compile(
    rf"(?i)batch[^.]{{0,60}}(per|each|on every|/)[ -]*{_UNIT}|(per|each)[ -]?{_UNIT}[^.]{{0,30}}batch"
    r"|(effective|global|total) batch"
)
_SCALED = re.compile(r"(?i)batch|^bs$|(^|_)lr($|_)|learning_?rate|accum")
_STEPS = re.compile(r"(?i)(steps|batches|iters|iterations|updates)")
_NOISE = {
    *[
        "randn",
        "randn_like",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "normal_",
        "bernoulli",
        "bernoulli_",
        "dropout",
        "Dropout",
        "Dropout2d",
        "rsample",
    ],
    *[
        "multinomial",
        "uniform_",
        "DropPath",
        "normal",
        "randperm",
        "RandomCrop",
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "Normal",
    ],
}
_SEEDS = {
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_everything",
    "set_seed",
    "seed_all",
    "set_random_seed",
    "fix_seed",
}
_GLOBAL_SEEDS = {
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "numpy.random.seed",
    "random.seed",
    "pytorch_lightning.seed_everything",
    "lightning.seed_everything",
    "accelerate.utils.set_seed",
    "transformers.set_seed",
}


def _samplers(case: Case) -> Iterator[tuple[Unit, ast.Call]]:
    """Each distributed sampler that is made."""
    for unit in case.program.units:
        for call in unit.all(ast.Call):
            is_named = last_name(call.func).endswith("Sampler") or unit.source.qualified(call.func).endswith("Sampler")
            if is_named and "dsampler" in case.meaning.kinds(call, unit):
                yield unit, call


def _target(call: ast.AST, unit: Unit) -> str:
    """The name that a call's value is bound to, or "": where it goes tells training from validation."""
    for above in unit.source.above(call):
        if isinstance(above, ast.Assign):
            return " ".join(filter(None, (key_of(t) for t in above.targets)))
        if isinstance(above, ast.AnnAssign):
            return key_of(above.target) or ""
        if isinstance(above, ast.keyword) and above.arg:
            return above.arg
        if isinstance(above, ast.stmt):
            return ""
    return ""


def _is_held_out(call: ast.Call, unit: Unit) -> bool:
    """Whether a loader or sampler is for validation, by the names around it."""
    first = argument(call, "dataset", 0)
    names = [_target(call, unit), unit.name, *(identifiers(first) if first is not None else ())]
    is_train = any("train" in name.lower() for name in (names[0], *names[2:]))
    return not is_train and any(_HELD_OUT.search(name) for name in names)


@rule("DDP201")
def sampler_lost(case: Case) -> Iterator[Hit]:
    kinds = case.meaning.kinds
    for unit in case.program.units:
        for key, bindings in unit.bindings.items():
            custom = [b for b in bindings if _is_custom_sampler(b.value, unit, case)]
            split = [b for b in bindings if "dsampler" in kinds(b.value, unit) and isinstance(b.value, ast.Call)]
            for binding in split:
                call = binding.value
                if not custom or not isinstance(call, ast.Call) or binding in custom:
                    continue
                if any("sampler" in kinds(a, unit) or key_of(a) == key for a in call.args):
                    continue
                if all(b.value is not None and _splits(b.value, unit, case) for b in custom):
                    continue
                yield Hit(
                    unit,
                    call,
                    f"{key} is {text_of(custom[0].value or call, 40)} in line {custom[0].target.lineno}, and here a "
                    "DistributedSampler takes its place: its order and weights are lost on several ranks.",
                )


def _is_custom_sampler(value: Optional[ast.expr], unit: Unit, case: Case) -> bool:
    if not isinstance(value, ast.Call):
        return False
    return last_name(value.func) == "get_dataset_sampler" or "sampler" in case.meaning.kinds(value, unit)


@rule("DDP202")
def shuffle_from_sampler(case: Case) -> Iterator[Hit]:
    if case.is_handled_by("lightning", "fabric", "transformers"):
        return
    for unit, call in _samplers(case):
        asked = argument(call, "shuffle", 3)
        if isinstance(asked, ast.Compare) and _is_none_test(asked) and key_of(asked.left):
            custom = [
                b for b in unit.bindings.get(key_of(asked.left) or "", []) if _is_custom_sampler(b.value, unit, case)
            ]
            if custom:
                yield Hit(
                    unit,
                    call,
                    f"shuffle={text_of(asked, 40)} is False where the dataset has a sampler of its own, which is not "
                    "used either: the order is fixed.",
                )
    for unit, call in case.calls(*_LOADERS):
        sampler, shuffle = argument(call, "sampler"), argument(call, "shuffle", 2)
        if sampler is None or "dsampler" not in case.meaning.kinds(sampler, unit) or _is_held_out(call, unit):
            continue
        made = _maker(sampler, unit, case)
        is_still = made is not None and constant(argument(made, "shuffle", 3)) is False
        if constant(shuffle) is True:
            yield Hit(
                unit, call, "shuffle=True together with a sampler is refused by DataLoader: ValueError on every rank."
            )
        elif is_still and made is not None and (shuffle is None or _is_none_test(shuffle)):
            yield Hit(
                unit,
                call,
                f"The sampler of line {made.lineno} is made with shuffle=False, so the training data keeps one order "
                "in every epoch.",
            )


def _maker(node: ast.expr, unit: Unit, case: Case, depth: int = 0) -> Optional[ast.Call]:
    """The call that made a sampler."""
    if isinstance(node, ast.Call):
        return node
    for where, binding in case.meaning.reaching(node, unit) if depth < 4 else ():
        if binding.value is not None and "dsampler" in case.meaning.kinds(binding.value, where):
            found = _maker(binding.value, where, case, depth + 1)
            if found is not None:
                return found
    return None


def _is_none_test(node: ast.expr) -> bool:
    return isinstance(node, ast.Compare) and constant(node.comparators[0]) is None


@rule("DDP203")
def no_set_epoch(case: Case) -> Iterator[Hit]:
    if case.is_handled_by("lightning", "fabric", "transformers", "ddpshim") or case.program.uses("set_epoch"):
        return
    for unit, call in _samplers(case):
        if _is_held_out(call, unit) or constant(argument(call, "shuffle", 3)) is False:
            continue
        if case.is_handled_by("accelerate") and "torch" not in unit.source.qualified(call.func):
            continue
        if not _is_own_class(call, unit, case):
            yield Hit(
                unit,
                call,
                f"set_epoch is never called for {_target(call, unit) or text_of(call.func)}: every epoch replays the "
                "order of the first.",
            )


def _is_own_class(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether the sampler's class is the project's own, which may advance by itself."""
    return isinstance(case.tree.defined(call.func, unit.source), tuple)


@rule("DDP204")
def loader_without_share(case: Case) -> Iterator[Hit]:
    if case.is_handled_by("lightning", "fabric", "transformers", "ddpshim", "accelerate", "deepspeed"):
        return
    for unit, call in case.calls(*_LOADERS):
        if (case.is_distributed and any(k.arg is None for k in call.keywords)) or _is_held_out(call, unit):
            continue
        dataset = argument(call, "dataset", 0)
        if dataset is None or "iterable" in case.meaning.kinds(dataset, unit) or not _trains_with(call, unit, case):
            continue
        if _SHARES.search(" ".join(identifiers(dataset) | _bound_words(dataset, unit, case))):
            continue
        sampler = argument(call, "sampler", 3) or argument(call, "batch_sampler", 4)
        if sampler is not None and constant(sampler) is None and not isinstance(sampler, ast.Constant):
            found = case.meaning.kinds(sampler, unit)
            if found & {"dsampler", "prepared"} or _splits(sampler, unit, case):
                continue
            if case.is_distributed and not found & {"sampler", "none"}:
                continue  # what it is cannot be said
            what = f"The sampler {text_of(sampler, 40)} draws for one process"
        else:
            what = f"No sampler shares {text_of(dataset, 40)} out"
        if not case.on_every_rank(call, unit) or case.meaning.depends_on_launch(call, unit):
            continue
        yield Hit(
            unit,
            call,
            f"{what}: every rank reads all of the data, and an epoch costs as long as on one.",
        )


def _bound_words(node: ast.expr, unit: Unit, case: Case) -> set[str]:
    out: set[str] = set()
    for _, binding in case.meaning.reaching(node, unit):
        if binding.value is not None:
            out |= identifiers(binding.value)
    return out


def _splits(sampler: ast.expr, unit: Unit, case: Case, depth: int = 0) -> bool:
    """Whether a sampler of the project's own, or its arguments, speak of ranks."""
    for where, binding in [(unit, None), *case.meaning.reaching(sampler, unit)]:
        value = sampler if binding is None else binding.value
        if value is None:
            continue
        if speaks_of_rank(value) or is_world_size(value):
            return True
        if (
            isinstance(value, ast.Call)
            and depth < 3
            and any(isinstance(a, (ast.Name, ast.Call)) and _splits(a, where, case, depth + 1) for a in value.args[:1])
        ):
            return True
        found = case.tree.defined(value.func, where.source) if isinstance(value, ast.Call) else None
        if isinstance(found, tuple) and _SHARES.search(" ".join(identifiers(found[1]))):
            return True
    return False


def _trains_with(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether a loader feeds training: by its names, or because it shuffles."""
    dataset = argument(call, "dataset", 0)
    names = {_target(call, unit), *(identifiers(dataset) if dataset is not None else ())}
    shuffle = argument(call, "shuffle", 2)
    return any("train" in name.lower() for name in names) or constant(shuffle) is True or case.tree.root.is_file()


@rule("DDP205")
def iterable_unsharded(case: Case) -> Iterator[Hit]:
    if case.is_handled_by("ddpshim", "accelerate"):
        return
    for source in case.program.files:
        for name, node in source.classes.items():
            if name not in case.meaning.sites or "iterable" not in case.meaning.bases(node, source.module):
                continue
            if _SHARES.search(" ".join(identifiers(node))) or _another_shares(node, case):
                continue
            yield Hit(
                source.module,
                node,
                f"{name} yields all of its samples on every rank: a sampler cannot share an IterableDataset out.",
            )
    for unit, call in case.calls("load_dataset"):
        if constant(argument(call, "streaming")) is True and not case.program.uses("split_dataset_by_node", "shard"):
            yield Hit(unit, call, f"{text_of(call, 40)} streams all of the data to every rank.")


def _another_shares(node: ast.ClassDef, case: Case) -> bool:
    """Whether the class only hands on what another object yields, and something that iterates here knows of ranks."""
    return any(
        unit.owner is not node and _SHARES.search(" ".join(unit.attributes | unit.loaded))
        for source in case.program.files
        for unit in source.methods.get("__iter__", [])
    )


@rule("DDP206")
def batch_per_rank(case: Case) -> Iterator[Hit]:
    if case.program.frameworks or _says_per_rank(case):
        return
    for unit, call in case.calls(*_LOADERS):
        size = argument(call, "batch_size", 1)
        if size is None or _is_held_out(call, unit) or not _has_share(call, unit, case):
            continue
        words = identifiers(size) | _bound_words(size, unit, case)
        if is_world_size(size) or any(_PER_RANK.search(word) for word in words):
            continue
        yield Hit(
            unit,
            call,
            f"batch_size={text_of(size, 30)} is each rank's own: the global batch grows with the number of ranks, and "
            "nothing divides it or scales the learning rate.",
        )


def _has_share(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether a loader reads a share: through its sampler, or a dataset that was told its rank."""
    sampler, dataset = argument(call, "sampler", 3), argument(call, "dataset", 0)
    if sampler is not None and "dsampler" in case.meaning.kinds(sampler, unit):
        return True
    for _, binding in case.meaning.reaching(dataset, unit) if dataset is not None else ():
        value = binding.value
        if isinstance(value, ast.Call) and any(k.arg in ("rank", "world_size", "num_replicas") for k in value.keywords):
            return True
    return False


def _says_per_rank(case: Case) -> bool:
    """Whether some arithmetic or help text of the program relates the batch to the number of ranks."""
    for unit in case.program.units:
        for operation in unit.all(ast.BinOp):
            if isinstance(operation.op, (ast.Div, ast.FloorDiv, ast.Mult)) and is_world_size(operation):
                names = identifiers(operation) | {_target(operation, unit)}
                if any(_SCALED.search(name) for name in names):
                    return True
        for grown in unit.all(ast.AugAssign):
            if is_world_size(grown.value) and any(map(_SCALED.search, identifiers(grown.target))):
                return True
        for text in unit.all(ast.Constant):
            if isinstance(text.value, str) and len(text.value) > 10 and _SAYS_PER_RANK.search(text.value):
                return True
    return False


@rule("DDP207")
def schedule_arithmetic(case: Case) -> Iterator[Hit]:
    if case.is_handled_by("lightning", "transformers", "ddpshim", "accelerate"):
        return
    for unit, call in case.calls("len"):
        if len(call.args) != 1 or not _is_dataset(call.args[0], unit, case):
            continue
        target = _schedule_of(call, unit)
        if not target:
            continue
        above = list(_expression_above(call, unit))
        is_divided = any(isinstance(a, ast.BinOp) and isinstance(a.op, (ast.Div, ast.FloorDiv)) for a in above) or any(
            isinstance(a, ast.Call) and last_name(a.func) == "ceil" for a in above
        )
        if not is_divided:
            yield Hit(
                unit, call, f"{target} counts the samples of {text_of(call.args[0], 30)}, not the optimizer steps."
            )
        elif case.is_distributed and not any(
            is_world_size(a) or _PER_RANK.search(" ".join(identifiers(a))) for a in above
        ):
            names = {n for a in above for n in identifiers(a)}
            if not any(re.search(r"(?i)(global|total|effective)_?(batch|bs)", n) for n in names) and any(
                True for _ in _samplers(case)
            ):
                yield Hit(
                    unit,
                    call,
                    f"{target} divides all samples of {text_of(call.args[0], 30)} by one rank's batch: too large by "
                    "the number of ranks.",
                )


def _is_dataset(node: ast.expr, unit: Unit, case: Case) -> bool:
    name = last_name(node).lower()
    return (
        bool(
            re.search(r"(train|training)_?(set|data|dataset|ds)$|^dataset$|^trainset$|^train_?ds$|train_dataset", name)
        )
        and "loader" not in name
    )


def _expression_above(node: ast.AST, unit: Unit) -> Iterator[ast.AST]:
    for above in unit.source.above(node):
        if isinstance(above, ast.stmt):
            return
        yield above


def _schedule_of(call: ast.Call, unit: Unit) -> str:
    """What the count is for: a number of steps, or an argument of a schedule."""
    for above in unit.source.above(call):
        if isinstance(above, ast.Call) and last_name(above.func) in (
            "print",
            "format",
            "info",
            "range",
            "debug",
            "write",
            "log",
        ):
            return ""
        if isinstance(above, ast.keyword) and above.arg:
            return above.arg if _STEPS.search(above.arg) or above.arg == "T_max" else ""
        if isinstance(above, (ast.Compare, ast.JoinedStr)):
            return ""
        if isinstance(above, (ast.Assign, ast.AnnAssign)):
            name = last_name(above.targets[0] if isinstance(above, ast.Assign) else above.target)
            return name if _STEPS.search(name) else ""
        if isinstance(above, ast.stmt):
            return ""
    return ""


@rule("DDP301")
def one_seed(case: Case) -> Iterator[Hit]:
    if case.is_handled_by("ddpshim", "lightning", "transformers") or case.program.uses("parallelize_module"):
        return
    seeds = [(u, c) for u, c in case.calls(*_SEEDS) if u.source.qualified(c.func) in _GLOBAL_SEEDS]
    if not seeds or any(_seed_differs(c, u, case) for u, c in seeds):
        return
    if not any(_NOISE & (u.attributes | u.loaded) for u in case.program.units):
        return
    torch_seeds = [s for s in seeds if s[0].source.qualified(s[1].func).startswith("torch")] or seeds
    unit, call = min(torch_seeds, key=lambda s: (s[0].source is not case.program.entry, s[1].lineno))
    if not case.on_every_rank(call, unit):
        return
    yield Hit(
        unit,
        call,
        f"{text_of(call)} is the same on every rank and stays so: all ranks draw equal noise, dropout and crops.",
    )


def _seed_differs(call: ast.Call, unit: Unit, case: Case, depth: int = 0) -> bool:
    """Whether the rank is in the seed, or in what callers hand over for it."""
    if constant(argument(call, "device_specific")) is True:
        return True
    return any(_has_rank(value, unit, case, 0) for value in [*call.args, *(k.value for k in call.keywords)])


def _has_rank(node: ast.AST, unit: Unit, case: Case, depth: int) -> bool:
    if speaks_of_rank(node) or "initial_seed" in identifiers(node) or "worker" in " ".join(identifiers(node)):
        return True
    if depth > 3:
        return False
    for name in [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute)) and key_of(n)]:
        for where, binding in case.meaning.reaching(name, unit):
            if binding.value is not None and _has_rank(binding.value, where, case, depth + 1):
                return True
        for augmented in unit.all(ast.AugAssign):
            if key_of(augmented.target) == key_of(name) and _has_rank(augmented.value, unit, case, depth + 1):
                return True
        if isinstance(name, ast.Name) and name.id in unit.parameters:
            position = unit.parameters.index(name.id) - (unit.owner is not None)
            for where, call in case.meaning.sites_of(unit)[:10]:
                value = argument(call, name.id, position)
                if value is not None and _has_rank(value, where, case, depth + 1):
                    return True
    return False


@rule("DDP302")
def reseed_each_epoch(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls(*_SEEDS):
        if unit.source.qualified(call.func) not in _GLOBAL_SEEDS - {"random.seed"} or _seed_differs(call, unit, case):
            continue
        loop = next((a for a in unit.source.above(call) if isinstance(a, ast.For)), None)
        is_epoch = loop is not None and "epoch" in " ".join(identifiers(loop.target) | identifiers(loop.iter)).lower()
        is_sampler = (
            unit.owner is not None
            and unit.name in ("__iter__", "set_epoch")
            and bool(
                {"sampler", "dsampler"} & case.meaning.bases(unit.owner, unit.source.module)
                or "Sampler" in unit.owner.name
            )
        )
        if is_epoch or is_sampler:
            where = "the sampler" if is_sampler else "each epoch"
            yield Hit(
                unit,
                call,
                f"{text_of(call)} in {where} sets the global generator back, to the same numbers on every rank.",
            )
