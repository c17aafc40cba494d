"""Holds the rules about samplers, loaders, batch sizes, schedules and seeds."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Optional

from ddpshim.tools.doctor.meaning import is_world_size, speaks_of_rank
from ddpshim.tools.doctor.nodes import argument, constant, identifiers, is_none, key_of, last_name, values_of, words_of
from ddpshim.tools.doctor.rules import ANY_FRAMEWORK, Case, Hit, call_rule, rule, text_of
from ddpshim.tools.doctor.source import Unit

_HELD_OUT = re.compile(
    r"(?i)(?<![a-z])(val|valid|validation|test|eval|evaluation|dev|held_?out|infer\w*|demo)(?![a-z])"
    r"|(val|valid|test|eval)_?(loader|set|dataset|data|sampler|dataloader)|^(val|test|eval)"
)
_SHARES = re.compile(
    r"(?i)(?:\b|_)(rank|world_?size|num_?replicas|process_index|process_count|split_by_node|split_dataset_by_node"
    r"|nodesplitter)(?:\b|_)|get_rank|get_world_size|shard"
)
_PER_RANK = re.compile(
    r"(?i)per_?(gpu|rank|device|process|proc|replica|worker|card)|local_?(batch|bs)|micro_?(batch|bs)|device_?batch"
    r"|(batch|bs)_?(size)?_?(gpu|rank|device)|mini_?batch_?per"
)
_UNIT = r"(gpu|rank|process|device|card|replica|worker)"
_SAYS_PER_RANK = re.compile(
    rf"(?i)batch[^.]{{0,60}}(per|each|on every|/)[ -]*{_UNIT}|(per|each)[ -]?{_UNIT}[^.]{{0,30}}batch"
    r"|(effective|global|total) batch"
)
_SCALED = re.compile(r"(?i)batch|^bs$|(^|_)lr($|_)|learning_?rate|accum")
_STEPS = re.compile(r"(?i)(steps|batches|iters|iterations|updates)")
_PRINTING = {"print", "format", "info", "range", "debug", "write", "log"}
_DATASET = re.compile(r"(train|training)_?(set|data|dataset|ds)$|^dataset$|train_dataset")
_NOISE = words_of(
    "randn randn_like rand rand_like randint randint_like normal_ bernoulli bernoulli_ dropout Dropout Dropout2d "
    "rsample multinomial uniform_ DropPath normal randperm RandomCrop RandomResizedCrop RandomHorizontalFlip Normal"
)
_NAMING = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
_NODE = re.compile(r"(?i)node_?(rank|id)|group_rank|hostname")
_SEEDS = words_of("manual_seed manual_seed_all seed seed_everything set_seed seed_all set_random_seed fix_seed")
_GLOBAL_SEEDS = words_of(
    "torch.manual_seed torch.random.manual_seed torch.cuda.manual_seed torch.cuda.manual_seed_all numpy.random.seed "
    "random.seed pytorch_lightning.seed_everything lightning.seed_everything accelerate.utils.set_seed "
    "transformers.set_seed"
)


def _samplers(case: Case) -> Iterator[tuple[Unit, ast.Call]]:
    """Yield the calls that construct a distributed sampler."""
    for unit, call in case.calls():
        is_named = last_name(call.func).endswith("Sampler") or unit.source.qualified(call.func).endswith("Sampler")
        if is_named and "dsampler" in case.kinds(call, unit):
            yield unit, call


def _target(call: ast.AST, unit: Unit) -> str:
    """Return the name that a call's value is bound to, or ""; it distinguishes training from validation."""
    for above in unit.source.above(call):
        if isinstance(above, ast.Assign):
            return " ".join(filter(None, (key_of(t) for t in above.targets)))
        if isinstance(above, ast.AnnAssign):
            return key_of(above.target) or ""
        if isinstance(above, ast.keyword) and above.arg:
            return above.arg
        if isinstance(above, ast.stmt):
            break
    return ""


def _dataset_words(call: ast.Call) -> set[str]:
    dataset = argument(call, "dataset", 0)
    return identifiers(dataset) if dataset is not None else set()


def _is_held_out(call: ast.Call, unit: Unit) -> bool:
    """Whether a loader or sampler is for validation, judged by the names around it."""
    names = {_target(call, unit), *_dataset_words(call)}
    return not any("train" in name.lower() for name in names) and any(map(_HELD_OUT.search, names | {unit.name}))


@rule("DDP201")
def sampler_lost(case: Case) -> Iterator[Hit]:
    for unit in case.program.units:
        for key, bindings in unit.bindings.items():
            custom = [b for b in bindings if _is_custom_sampler(b.value, unit, case)]
            if all(b.value is not None and _splits(b.value, unit, case) for b in custom):
                continue
            for call in [b.value for b in bindings if b not in custom]:
                if not isinstance(call, ast.Call) or "dsampler" not in case.kinds(call, unit):
                    continue
                if any("sampler" in case.kinds(a, unit) or key_of(a) == key for a in call.args):
                    continue
                first = f"{key} is {text_of(custom[0].value or call, 40)} in line {custom[0].target.lineno}"
                lost = "its order and weights are lost on several ranks"
                yield Hit(unit, call, f"{first}, and here a DistributedSampler takes its place: {lost}.")


def _is_custom_sampler(value: Optional[ast.expr], unit: Unit, case: Case) -> bool:
    if not isinstance(value, ast.Call):
        return False
    return last_name(value.func) == "get_dataset_sampler" or "sampler" in case.kinds(value, unit)


@rule("DDP202", unless=("lightning", "fabric", "transformers"))
def shuffle_from_sampler(case: Case) -> Iterator[Hit]:
    for unit, call in _samplers(case):
        asked = argument(call, "shuffle", 3)
        name = key_of(asked.left) if isinstance(asked, ast.Compare) and _is_none_test(asked) else None
        bindings = unit.bindings.get(name, []) if name else []
        if asked is not None and any(_is_custom_sampler(b.value, unit, case) for b in bindings):
            still = f"shuffle={text_of(asked, 40)} is False where the dataset has a sampler of its own"
            yield Hit(unit, call, f"{still}, which is not used either: the order is fixed.")
    for unit, call in case.calls("DataLoader"):
        sampler, shuffle = argument(call, "sampler"), argument(call, "shuffle", 2)
        if sampler is None or "dsampler" not in case.kinds(sampler, unit) or _is_held_out(call, unit):
            continue
        made = _maker(sampler, unit, case)
        is_still = made is not None and constant(argument(made, "shuffle", 3)) is False
        if constant(shuffle) is True:
            message = "shuffle=True together with a sampler is refused by DataLoader: ValueError on every rank."
            yield Hit(unit, call, message)
        elif is_still and made is not None and (shuffle is None or _is_none_test(shuffle)):
            made_still = f"The sampler of line {made.lineno} is made with shuffle=False"
            yield Hit(unit, call, f"{made_still}, so the training data keeps one order in every epoch.")


def _maker(node: ast.expr, unit: Unit, case: Case, depth: int = 0) -> Optional[ast.Call]:
    """Return the call that constructed a sampler."""
    if isinstance(node, ast.Call):
        return node
    for where, value in case.values(node, unit) if depth < 4 else ():
        found = _maker(value, where, case, depth + 1) if "dsampler" in case.kinds(value, where) else None
        if found is not None:
            return found
    return None


def _is_none_test(node: ast.expr) -> bool:
    return isinstance(node, ast.Compare) and constant(node.comparators[0]) is None


@rule("DDP203", unless=("lightning", "fabric", "transformers", "ddpshim"))
def no_set_epoch(case: Case) -> Iterator[Hit]:
    for unit, call in _samplers(case) if not _advances(case) else ():
        asked = argument(call, "shuffle", 3)
        is_handed = isinstance(asked, ast.Name) and asked.id in unit.parameters
        if _is_held_out(call, unit) or is_handed or constant(asked) is False:
            continue
        if "accelerate" in case.program.frameworks and "torch" not in unit.source.qualified(call.func):
            continue
        if not isinstance(case.tree.defined(call.func, unit.source), tuple):  # the project's classes may count epochs
            name = _target(call, unit) or text_of(call.func)
            never = "is never reached with another epoch" if case.program.uses("set_epoch") else "is never called"
            yield Hit(unit, call, f"set_epoch {never} for {name}: every epoch replays the order of the first.")


def _advances(case: Case) -> bool:
    """Whether every rank calls set_epoch for the training data, in each epoch and with the epoch's number."""
    for unit, call in case.program.calls("set_epoch"):
        owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        number = argument(call, "epoch", 0)
        is_held_out = bool(_HELD_OUT.search(owner)) and "train" not in owner
        above = list(unit.source.above(call))
        loops = [
            loop for loop in unit.all(ast.For) if any("epoch" in name.lower() for name in identifiers(loop.target))
        ]
        is_outside = bool(loops) and not any(isinstance(a, (ast.For, ast.While)) for a in above)
        is_cut_off = any(
            isinstance(a, (ast.For, ast.While)) and _follows_an_exit(child, a)
            for child, a in zip([call, *above], above)
        )
        never = any(isinstance(t, ast.Constant) and not t.value for t in unit.source.tests_around(call))
        is_lost = isinstance(number, ast.Constant) or is_held_out or is_outside or is_cut_off or never
        if not is_lost and not case.is_guarded(call, unit):
            return True
    return False


def _follows_an_exit(child: ast.AST, loop: ast.AST) -> bool:
    """Whether a statement of a loop follows a continue, break, return or raise in the same block."""
    body = getattr(loop, "body", [])
    before = body[: body.index(child)] if child in body else []
    return any(isinstance(s, (ast.Continue, ast.Break, ast.Return, ast.Raise)) for s in before)


@call_rule("DDP204", "DataLoader", unless=("lightning", "fabric", "transformers", "accelerate", "deepspeed"))
def loader_without_share(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    if "ddpshim" in case.program.frameworks and _splits_by_ddpshim(case):
        return None
    if (case.program.is_distributed and any(k.arg is None for k in call.keywords)) or _is_held_out(call, unit):
        return None
    is_named = any("train" in name.lower() for name in {_target(call, unit), *_dataset_words(call)})
    trains = is_named or constant(argument(call, "shuffle", 2)) is True or case.tree.root.is_file()
    dataset = argument(call, "dataset", 0)
    if dataset is None or "iterable" in case.kinds(dataset, unit) or not trains:
        return None
    if _SHARES.search(" ".join(identifiers(dataset) | _bound_words(dataset, unit, case))):
        return None
    what = f"No sampler splits {text_of(dataset, 40)}"
    sampler = argument(call, "sampler", 3) or argument(call, "batch_sampler", 4)
    if sampler is not None and constant(sampler) is None and not is_none(sampler):
        found = case.kinds(sampler, unit)
        if found & {"dsampler", "prepared"} or _splits(sampler, unit, case):
            return None
        if case.program.is_distributed and not found & {"sampler", "none"}:
            return None  # unknown kind of sampler
        what = f"The sampler {text_of(sampler, 40)} draws for one process"
    if case.is_guarded(call, unit) or case.depends_on_launch(call, unit):
        return None
    return f"{what}: every rank reads all of the data, and an epoch costs as long as on one."


def _splits_by_ddpshim(case: Case) -> bool:
    """Whether a program of ddpshim splits its data: it may pass a DataLoader to make_loader, or an adapter does it."""
    origins = case.program.origins
    is_wrapped = not origins.isdisjoint({"ddpshim.setup", "ddpshim.wrap_parallel"})
    is_adapted = any(name.startswith("ddpshim.robomimic") for name in origins)
    return not is_wrapped or is_adapted or case.program.uses("make_loader", "shard_iterable", "shard_tfdata")


def _bound_words(node: ast.expr, unit: Unit, case: Case) -> set[str]:
    return {word for _, value in case.values(node, unit) for word in identifiers(value)}


def _splits(sampler: ast.expr, unit: Unit, case: Case, depth: int = 0) -> bool:
    """Whether a sampler of the project, or its arguments, depend on the rank or the number of ranks."""
    for where, value in [(unit, sampler), *case.values(sampler, unit)]:
        if speaks_of_rank(value) or is_world_size(value):
            return True
        if not isinstance(value, ast.Call):
            continue
        first = value.args[0] if value.args and depth < 3 else None
        if isinstance(first, (ast.Name, ast.Call)) and _splits(first, where, case, depth + 1):
            return True
        found = case.tree.defined(value.func, where.source)
        if isinstance(found, tuple) and _SHARES.search(" ".join(identifiers(found[1]))):
            return True
    return False


@rule("DDP205", unless=("ddpshim", "accelerate"))
def iterable_unsharded(case: Case) -> Iterator[Hit]:
    iterating = [unit for source in case.program.files for unit in source.methods.get("__iter__", [])]
    knowing = [unit.owner for unit in iterating if _SHARES.search(" ".join(unit.words))]
    for source in case.program.files:
        for name, node in source.classes.items():
            if name not in case.sites or "iterable" not in case.bases(node, source.module):
                continue
            # It may only forward the samples of another object, which splits them by rank.
            is_fed = any(owner is not node for owner in knowing)
            if not is_fed and not _SHARES.search(" ".join(identifiers(node))):
                yields = f"{name} yields all of its samples on every rank"
                yield Hit(source.module, node, f"{yields}: a sampler cannot split an IterableDataset.")
    for unit, call in case.calls("load_dataset"):
        if constant(argument(call, "streaming")) is True and not case.program.uses("split_dataset_by_node", "shard"):
            yield Hit(unit, call, f"{text_of(call, 40)} streams all of the data to every rank.")


@call_rule("DDP206", "DataLoader", unless=ANY_FRAMEWORK)
def batch_per_rank(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    size = argument(call, "batch_size", 1)
    if size is None or _is_held_out(call, unit) or not _has_share(call, unit, case):
        return None
    words = identifiers(size) | _bound_words(size, unit, case)
    if case.holds(size, unit, is_world_size) or any(map(_PER_RANK.search, words)) or _says_per_rank(case):
        return None
    grows = f"batch_size={text_of(size, 30)} is each rank's own: the global batch grows with the number of ranks"
    return f"{grows}, and nothing divides it or scales the learning rate."


def _has_share(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether a loader reads a share: through its sampler, or because its dataset gets the rank as an argument."""
    if "dsampler" in case.kinds(argument(call, "sampler", 3), unit):
        return True
    made = [value for _, value in case.values(argument(call, "dataset", 0), unit) if isinstance(value, ast.Call)]
    return any(k.arg in ("rank", "world_size", "num_replicas") for value in made for k in value.keywords)


def _says_per_rank(case: Case) -> bool:
    """Whether some arithmetic or help text of the program relates the batch to the number of ranks."""
    for unit, operation in case.all(ast.BinOp):
        is_scaling = isinstance(operation.op, (ast.Div, ast.FloorDiv, ast.Mult))
        is_scaled = is_scaling and any(map(_SCALED.search, identifiers(operation) | {_target(operation, unit)}))
        if is_scaled and case.holds(operation, unit, is_world_size):
            return True
    for _, grown in case.all(ast.AugAssign):
        if is_world_size(grown.value) and any(map(_SCALED.search, identifiers(grown.target))):
            return True
    texts = (text.value for _, text in case.all(ast.Constant) if isinstance(text.value, str))
    return any(len(text) > 10 and _SAYS_PER_RANK.search(text) for text in texts)


@call_rule("DDP207", "len", unless=("lightning", "transformers", "ddpshim", "accelerate"))
def schedule_arithmetic(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    name = last_name(call.args[0]).lower() if len(call.args) == 1 else ""
    target = _schedule_of(call, unit) if _DATASET.search(name) and "loader" not in name else ""
    if not target:
        return None
    above = list(itertools.takewhile(lambda a: not isinstance(a, ast.stmt), unit.source.above(call)))
    divides = any(isinstance(getattr(a, "op", None), (ast.Div, ast.FloorDiv)) for a in above)
    is_divided = divides or any(isinstance(a, ast.Call) and last_name(a) == "ceil" for a in above)
    samples = text_of(call.args[0], 30)
    if not is_divided:
        return f"{target} counts the samples of {samples}, not the optimizer steps."
    is_shared = any(is_world_size(a) or _PER_RANK.search(" ".join(identifiers(a))) for a in above)
    is_global = any(re.search(r"(?i)(global|total|effective)_?(batch|bs)", n) for a in above for n in identifiers(a))
    if not case.program.is_distributed or is_shared or is_global or not any(_samplers(case)):
        return None
    return f"{target} divides all samples of {samples} by one rank's batch: too large by the number of ranks."


def _schedule_of(call: ast.Call, unit: Unit) -> str:
    """Return the name that the count is used for, if it is a number of steps or a schedule's argument; else ""."""
    for above in unit.source.above(call):
        is_printed = isinstance(above, ast.Call) and last_name(above) in _PRINTING
        if is_printed or isinstance(above, (ast.Compare, ast.JoinedStr)):
            break
        if isinstance(above, ast.keyword) and above.arg:
            return above.arg if _STEPS.search(above.arg) or above.arg == "T_max" else ""
        if isinstance(above, (ast.Assign, ast.AnnAssign)):
            name = last_name(above.targets[0] if isinstance(above, ast.Assign) else above.target)
            return name if _STEPS.search(name) else ""
        if isinstance(above, ast.stmt):
            break
    return ""


@rule("DDP301", unless=("ddpshim", "lightning", "transformers"))
def one_seed(case: Case) -> Iterator[Hit]:
    seeds = [(u, c) for u, c in case.calls(*_SEEDS) if u.source.qualified(c.func) in _GLOBAL_SEEDS]
    seeds = [
        (u, c) for u, c in seeds if not any(u is where for where, _ in case.calls("spawn"))
    ]  # spawned ranks do not inherit the seed
    if (
        not seeds
        or case.program.uses("parallelize_module", "fully_shard")
        or any(_seed_differs(c, u, case) for u, c in seeds)
    ):
        return
    drawn = next((text for where in case.program.units if (text := _draw_in(where))), None)
    if drawn is None:
        return
    torch_seeds = [s for s in seeds if s[0].source.qualified(s[1].func).startswith("torch")] or seeds
    unit, call = min(torch_seeds, key=lambda s: (s[0].source is not case.program.entry, s[1].lineno))
    if not case.is_guarded(call, unit):
        same = f"{text_of(call)} is the same on every rank and stays so"
        yield Hit(unit, call, f"{same}: all ranks draw equal numbers, for example by {drawn}.")


def _draw_in(unit: Unit) -> Optional[str]:
    """Return a function or a layer that draws during the training, as it is named in the unit.

    Not a function that a module calls outside its loops: it draws once, usually for data.
    """
    if _NOISE.isdisjoint(unit.words):
        return None
    for named in (*unit.all(ast.Attribute), *unit.all(ast.Name)):
        is_layer = last_name(named)[:1].isupper()  # Dropout, RandomCrop: it draws later
        in_loop = any(isinstance(a, (ast.For, ast.While)) for a in unit.source.above(named))
        if last_name(named) in _NOISE and (is_layer or in_loop or not unit.is_module):
            return text_of(named, 40)
    return None


def _seed_differs(call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether the seed depends on the rank, directly or through arguments of callers."""
    is_told = constant(argument(call, "device_specific")) is True
    return is_told or any(case.holds(value, unit, _differs) for value in values_of(call))


def _differs(node: ast.AST) -> bool:
    words = identifiers(node)
    return speaks_of_rank(node) or "initial_seed" in words or any("worker" in word for word in words)


@rule("DDP303")
def seed_of_a_node(case: Case) -> Iterator[Hit]:
    for unit, call, _ in _ranked_seeds(case, is_local=True):
        same = f"{text_of(call)} seeds with a local rank, which is the same on every node"
        yield Hit(unit, call, f"{same}: one rank of each node draws the same numbers.")


@rule("DDP304")
def seed_plus_rank(case: Case) -> Iterator[Hit]:
    for unit, call, total in _ranked_seeds(case, is_local=False):
        drawn = "rank 1 of a run with seed 1 draws what rank 0 draws in one with seed 2"
        yield Hit(unit, call, f"{text_of(total, 40)} is the seed: {drawn}.")


def _ranked_seeds(case: Case, is_local: bool) -> Iterator[tuple[Unit, ast.Call, ast.BinOp]]:
    """Yield, for each function, its first call that sets a global seed to a sum with a rank.

    `is_local`: the sum has only a local rank; else only a global one.
    """
    reported: set[Unit] = set()
    for unit, call in sorted(case.calls(*_SEEDS), key=lambda each: each[1].lineno):
        if unit in reported or unit.source.qualified(call.func) not in _GLOBAL_SEEDS:
            continue
        made = [each for value in values_of(call) for each in case.made_of(value, unit)]
        names = [(where, n) for where, part in made for n in ast.walk(part) if isinstance(n, _NAMING)]
        has_local = any(case.is_local_rank(n, where) for where, n in names)
        has_global = any(case.is_rank(n, where) and not case.is_local_rank(n, where) for where, n in names)
        if any(_NODE.search(word) for _, n in names for word in identifiers(n)) or has_local is has_global:
            continue
        added = [(w, n) for w, part in made for n in ast.walk(part) if isinstance(n, ast.BinOp)]
        for where, total in added if has_local is is_local else ():
            sides = [(total.left, total.right), (total.right, total.left)] if isinstance(total.op, ast.Add) else []
            ranks = [seed for seed, rank in sides if case.is_rank(rank, where)]
            if ranks and (is_local or not _is_written_down(ranks[0], where, case)):
                reported.add(unit)
                yield unit, call, total
                break


def _is_written_down(node: ast.expr, unit: Unit, case: Case) -> bool:
    """Whether a seed is a literal or a product, so that a sweep over seeds does not reach seed + 1."""
    if constant(node) is not None or any(isinstance(n, ast.Mult) for n in ast.walk(node)):
        return True
    values = case.values(node, unit)
    return bool(values) and all(_is_written_down(value, where, case) for where, value in values)


@call_rule("DDP302", *_SEEDS)
def reseed_each_epoch(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    if unit.source.qualified(call.func) not in _GLOBAL_SEEDS - {"random.seed"} or _seed_differs(call, unit, case):
        return None
    loop = next((a for a in unit.source.above(call) if isinstance(a, ast.For)), None)
    words = identifiers(loop.target) | identifiers(loop.iter) if loop is not None else set[str]()
    owner = unit.owner if unit.name in ("__iter__", "set_epoch") else None
    is_sampler = owner is not None and (
        "Sampler" in owner.name or not case.bases(owner, unit.source.module).isdisjoint({"sampler", "dsampler"})
    )
    if not is_sampler and not any("epoch" in word.lower() for word in words):
        return None
    where = "the sampler" if is_sampler else "each epoch"
    return f"{text_of(call)} in {where} sets the global generator back, to the same numbers on every rank."
