"""Defines a rule, and holds all rules: about networks, losses, data, files, devices, and what not all ranks reach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Callable, Optional

from ddpshim.tools.check.reading import meaning, source
from ddpshim.tools.check.reading.meaning import Meaning, is_without_gradients, speaks_of_rank
from ddpshim.tools.check.reading.source import Unit, argument, constant, key_of, last_name, text_of, values_of, words_in
from ddpshim.tools.check.reading.trainers import TRAINING_CALLS

Hit = tuple[Unit, ast.AST, str]  # a hazard at a node, and what was found there, with names from the trainer
CallRule = Callable[[ast.Call, Unit, Meaning], Optional[str]]
Rule = Callable[[Meaning], Iterator[Hit]]
RULES: dict[str, Rule] = {}
_HIDDEN_METHOD = re.compile(
    r"(?i)^_?(forward\w*|train_\w*|\w*loss\w*|training_step|log_prob|encode\w*|decode\w*|embed\w*|extract\w*|reparam\w*)$"
)
_TRAINING_UNIT = re.compile(r"(?i)(train|loss|step|forward|update|fit|learn|optimi[sz]e|backprop|objective|criterion)")
_AVERAGES = re.compile(
    r"(DataParallel|DDP|FSDP|fully_shard|parallelize_module|replicate|DistributedOptimizer|wrap_parallel|robomimic\w*)$"
    r"|(?i:(average|reduce|sync)\w*_grad)|(^|\.)deepspeed|apex"
)
_FIXED_SHARE = re.compile(r"(?i)mask(ing)?_ratio|num_mask|len_keep")
_MASK = re.compile(r"(?i)mask|valid|is_?pad|non_?pad|present|visible|observed")
_NO_LOSS = re.compile(r"(?i)weight|acc|correct|hits?($|_)|recall|precision|iou")  # metrics, and normalised weights
_OVER_RANKS = re.compile("whole_batch|mean_over|all_gather|all_reduce|reduce_mean|num_items_in_batch|GatherLayer")
_NOISE = re.compile(
    r"(rand|randn|randint)(_like)?|normal_?|bernoulli_?|[dD]ropout(2d)?|rsample|multinomial|uniform_|DropPath|randperm"
    r"|Random(Crop|ResizedCrop|HorizontalFlip)|Normal"
)
_SEED = re.compile(
    r"torch(\.random|\.cuda)?\.manual_seed(_all)?|(numpy\.)?random\.seed|(pytorch_lightning|lightning)\.seed_everything"
    r"|(accelerate\.utils|transformers)\.set_seed"
)
_HELD_OUT = re.compile(
    r"(?i)(?<![a-z])(val|valid|validation|test|eval|evaluation|dev|held_?out|infer\w*|demo)(?![a-z])"
    r"|(val|valid|test|eval)_?(loader|set|dataset|data|sampler|dataloader)|^(val|test|eval)"
)
_SHARES = re.compile(
    r"(?i)(?:\b|_)(rank|world_?size|num_?replicas|process_index|process_count|split_by_node|split_dataset_by_node"
    r"|nodesplitter)(?:\b|_)|get_rank|get_world_size|shard"
)
_WRITES_FIRST = re.compile(
    r"numpy\.save(z|z_compressed|txt)?|matplotlib\.pyplot\.savefig|imageio\.(imwrite|mimsave|mimwrite|get_writer)"
    r"|cv2\.(imwrite|VideoWriter)|os\.(mkdir|rename|replace|remove|unlink|rmdir|removedirs)|shutil\.rmtree"
    r"|(torch\.utils\.tensorboard(\.writer)?|tensorboardX)\.SummaryWriter"
)
_WRITES_SECOND = re.compile(
    r"torch\.save|(json|pickle|yaml|joblib)\.dump|yaml\.safe_dump|shutil\.(copy|copyfile|copy2|copytree|move)|os\.symlink"
    r"|omegaconf\.OmegaConf\.save|torchvision\.utils\.save_image|safetensors\.torch\.save_file"
)
_RUNS = re.compile(
    r"wandb\.init|mlflow\.start_run|comet_ml\.(Experiment|start)|neptune\.init(_run)?|aim\.Run|swanlab\.init"
)
_WRITER_KEYWORDS = {"f", "dst", "fname", "path", "filename", "stream", "fp", "log_dir", "logdir", "name"}
_OPENER = re.compile(r"open|BytesIO|StringIO|NamedTemporaryFile|TemporaryFile|mkstemp")
_NOT_SHARED = re.compile(r"getpid|tempfile|mkdtemp|mkstemp|uuid4|gettempdir|TemporaryDirectory|/?dev/?null|stdout")
_OF_ALL = re.compile(r"(?i)(^|_)(cache|caches|cached|tmp|temp|download\w*)($|_|\.)|\.lock$")
_COLLECTIVES = re.compile(
    r"torch\.distributed\.(all_(reduce|gather(_into_tensor|_object)?|to_all(_single)?)|(monitored_)?barrier|new_group"
    r"|broadcast(_object_list)?|gather(_object)?|init_process_group|reduce(_scatter(_tensor)?)?|scatter(_object_list)?)"
)
_OUR_COLLECTIVES = {"barrier", "gather", "broadcast", "sum", "mean", "mean_over", "all_gather", "run_on_main"}
_MEASURES = re.compile(r"(?i)profil|benchmark|flops|auto_?batch|measure")  # of speed or memory, not training


def rule(code: str, unless: str = "") -> Callable[[Rule], Rule]:
    """Register a function under a code; it skips trainers that use a framework in `unless`."""

    def register(function: Rule) -> Rule:
        RULES[code] = lambda case: function(case) if case.trainer.frameworks.isdisjoint(unless.split()) else iter(())
        return function

    return register


def call_rule(code: str, *names: str, unless: str = "") -> Callable[[CallRule], CallRule]:
    """Register a function that returns what is wrong with one call of `names` (default: any), or None."""

    def register(function: CallRule) -> CallRule:
        def hits(case: Meaning) -> Iterator[Hit]:
            found = ((unit, call, function(call, unit, case)) for unit, call in case.trainer.calls(*names))
            return ((unit, call, text) for unit, call, text in found if text is not None)

        rule(code, unless)(hits)
        return function

    return register


@call_rule("DDP101", "DataParallel")
def dataparallel_left(call: ast.Call, unit: Unit, case: Meaning) -> Optional[str]:
    # It may be in the branch for runs without a launcher.
    is_used = not case.trainer.is_distributed or not case.depends_on_launch(call, unit)
    is_torch = "dp" in case.kinds(call, unit) and call.args
    return f"DataParallel wraps {text_of(call.args[0], 40)}" if is_torch and is_used else None


@call_rule("DDP102", unless="ddpshim")
def trains_through_module(call: ast.Call, unit: Unit, case: Meaning) -> Optional[str]:
    owner, name = source.owner_of(call), last_name(call.func)
    network = call.func if owner is None or name == "module" else owner
    if case.kinds(network, unit) != {"unwrapped"} or (network is owner and not _HIDDEN_METHOD.match(name)):
        return None
    trains = not is_without_gradients(call, unit) and not case.is_guarded(call, unit)
    return f"{text_of(call.func)} goes around the wrapper" if trains else None


@rule("DDP107", unless="accelerate trainer")
def never_wrapped(case: Meaning) -> Iterator[Hit]:
    entry = case.trainer.entry
    origins = {origin for file in case.trainer.files for unit in file.units for origin in unit.origins}
    starts = {"torch.distributed.init_process_group", "ddpshim.setup", "ddpshim.make_loader"} & case.trainer.origins
    reduces = any("grad" in u.words and any("reduce" in word for word in u.words) for u in case.trainer.units)
    calls = list(case.trainer.calls("backward"))
    if starts and calls and not reduces and not any(map(_AVERAGES.search, origins)):
        unit, call = min(calls, key=lambda each: (each[0].source is not entry, each[1].lineno))
        yield unit, call, f"{sorted(starts)[0]} is called, but no network is wrapped and no gradient reduced"


@rule("DDP108")
def masked_mean(case: Meaning) -> Iterator[Hit]:
    for unit in case.trainer.units:
        if not (_TRAINING_UNIT.search(unit.name) or "backward" in unit.words) or _is_over_ranks(unit, case):
            continue
        if any(map(_FIXED_SHARE.search, {*case.trainer.words, *unit.parameters})):
            continue  # the same number of entries is masked in each sample
        found: list[tuple[ast.AST, Optional[ast.AST]]] = []
        for division in (d for d in unit.all(ast.BinOp) if isinstance(d.op, ast.Div)):
            is_total = _summed(division.left, unit, case) is not None
            found.append((division, _summed(division.right, unit, case) if is_total else None))
        for call in unit.all(ast.Call):
            taken = source.owner_of(call) if last_name(call.func) == "mean" else None
            found.append((call, taken.slice if isinstance(taken, ast.Subscript) and not values_of(call) else None))
        for node, mask in found:
            is_loss = not any(map(_NO_LOSS.search, words_in(node))) and not is_without_gradients(node, unit)
            if mask is not None and is_loss and _is_mask(mask, unit, case):
                yield unit, node, f"{text_of(node)} is a mean over the {text_of(mask, 30)} of a rank's own samples"


def _summed(node: ast.expr, unit: Unit, case: Meaning) -> Optional[ast.AST]:
    """Return what is summed up in an expression or in the values of its names: `x` in `x.sum()`; else None."""
    values = [node, *(v for n in ast.walk(node) if isinstance(n, ast.Name) for _, v in case.values(n, unit))]
    for call in source.calls_in(*values):
        owner = source.owner_of(call)
        if any(constant(keyword.value) == "sum" for keyword in call.keywords):
            return call
        is_whole = not any(keyword.arg in ("dim", "axis") for keyword in call.keywords)
        if is_whole and last_name(call.func) in ("sum", "count_nonzero"):
            return call.args[0] if last_name(owner) in ("torch", "np", "numpy") and call.args else owner
    return None


def _is_mask(node: ast.AST, unit: Unit, case: Meaning) -> bool:
    """Whether an expression is a mask: a comparison, or a name such as `valid`."""
    inner = [n for value in [node, *(v for _, v in case.values(node, unit))] for n in ast.walk(value)]
    return any(isinstance(n, ast.Compare) or _MASK.search(last_name(n)) for n in inner)


def _is_over_ranks(unit: Unit, case: Meaning) -> bool:
    """Whether the unit gathers or reduces over ranks itself, or is an argument of whole_batch."""
    given = (last_name(v) for _, call in case.trainer.calls("whole_batch") for v in values_of(call))
    return any(map(_OVER_RANKS.search, (*unit.words, *source.entered(unit.node)))) or unit.name in given


@call_rule("DDP109", "cross_entropy", "CrossEntropyLoss")
def compares_samples(call: ast.Call, unit: Unit, case: Meaning) -> Optional[str]:
    target = call.args[1] if len(call.args) > 1 else None
    values = [target, *(value for _, value in case.values(target, unit))] if target is not None else []
    count = r"torch\.arange\((len\(.+\)|.+\.shape\[0\]|.+\.size\(0\)|(batch_size|bs|B)\b).*"
    is_of_batch = any(re.match(count, ast.unparse(value)) for value in values)
    if not is_of_batch or _is_over_ranks(unit, case) or is_without_gradients(call, unit):
        return None
    return f"{text_of(call)} compares each sample of a rank with the others of that rank alone"


@rule("DDP301", unless="ddpshim trainer")
def one_seed(case: Meaning) -> Iterator[Hit]:
    entry = case.trainer.entry
    seeds = [(u, c) for u, c in case.trainer.calls() if _SEED.fullmatch(u.source.qualified(c.func))]
    seeds = [(u, c) for u, c in seeds if "spawn" not in u.words]  # spawned ranks do not inherit the seed
    parts = (part for u, c in seeds for value in values_of(c) for _, part in case.made_of(value, u))
    if not seeds or any(map(_differs, parts)):
        return
    of_torch = [(u, c) for u, c in seeds if u.source.qualified(c.func).startswith("torch")]
    unit, call = min(of_torch or seeds, key=lambda seed: (seed[0].source is not entry, seed[1].lineno))
    trains = [unit for unit in case.trainer.units if unit in case.tree.training]
    called = {word for unit in trains for word in unit.words}  # `policy.forward_train` draws for the step that calls it
    drawn_in = (_draw_in(u, u in trains or (u.owner is not None and u.name in called)) for u in case.trainer.units)
    drawn = next(filter(None, drawn_in), None)
    if drawn is not None and not case.is_guarded(call, unit):
        yield unit, call, f"{text_of(call)} is the same on every rank and stays so, and {drawn} draws"


def _draw_in(unit: Unit, trains: bool) -> Optional[str]:
    """Return a layer that draws (Dropout), or a function that does where the unit trains; at a file's top in a loop."""
    for named in (*unit.all(ast.Attribute), *unit.all(ast.Name)):
        name, is_initial = last_name(named), last_name(getattr(named, "value", None)) == "init"
        in_loop = any(isinstance(above, source.LOOPS) for above in unit.source.above(named))
        is_drawn = name[0].isupper() or (trains and (in_loop or not unit.is_module))
        if _NOISE.fullmatch(name) and not is_initial and is_drawn:
            return text_of(named, 40)
    return None


def _differs(node: ast.AST) -> bool:
    """Whether a seed depends on the rank or the data worker, or accelerate makes it do so."""
    words = words_in(node)
    return speaks_of_rank(node) or any("worker" in word or word == "initial_seed" for word in words)


def _target(call: ast.AST, unit: Unit) -> str:
    """Return the name that a call's value is bound to, or ""; it distinguishes training from validation."""
    statement = next((above for above in unit.source.above(call) if isinstance(above, ast.stmt)), None)
    return " ".join(map(key_of, getattr(statement, "targets", [getattr(statement, "target", None)])))


def _is_held_out(call: ast.Call, unit: Unit) -> bool:
    """Whether a loader or sampler is for validation, judged by the names around it."""
    names = {_target(call, unit), *words_in(argument(call, "dataset", 0))}
    return not any("train" in name.lower() for name in names) and any(map(_HELD_OUT.search, names | {unit.name}))


@rule("DDP201")
def sampler_lost(case: Meaning) -> Iterator[Hit]:
    for unit, (key, bindings) in ((u, item) for u in case.trainer.units for item in u.bindings.items()):
        made = [(b, b.value, case.kinds(b.value, unit)) for b in bindings if isinstance(b.value, ast.Call)]
        custom = [(b, v) for b, v, kinds in made if "sampler" in kinds or last_name(v) == "get_dataset_sampler"]
        uncut = [f"{text_of(v, 40)} in line {b.target.lineno}" for b, v in custom if not _splits(v, unit, case)]
        for _, call, kinds in made if uncut else ():
            is_built_on = any("sampler" in case.kinds(a, unit) or key_of(a) == key for a in call.args)
            if kinds == {"dsampler"} and not is_built_on:
                yield unit, call, f"A DistributedSampler takes the place of {key} = {uncut[0]}"


@call_rule("DDP202", "DataLoader", unless="trainer")
def one_order(call: ast.Call, unit: Unit, case: Meaning) -> Optional[str]:
    sampler = argument(call, "sampler", 3)
    made = next((v for v in (sampler, *(v for _, v in case.values(sampler, unit))) if isinstance(v, ast.Call)), None)
    if made is None or "dsampler" not in case.kinds(made, unit) or _is_held_out(call, unit):
        return None
    shuffle = argument(made, "shuffle", 3)
    asks = isinstance(shuffle, ast.Compare) and "sampler" in last_name(shuffle.left)  # `train_sampler is None`
    return f"{text_of(made)} in line {made.lineno} does not shuffle" if asks or constant(shuffle) is False else None


@call_rule("DDP203", unless="trainer ddpshim accelerate")
def no_set_epoch(call: ast.Call, unit: Unit, case: Meaning) -> Optional[str]:
    if not unit.source.qualified(call.func).endswith("Sampler") or "dsampler" not in case.kinds(call, unit):
        return None
    shuffle = argument(call, "shuffle", 3)
    is_handed = isinstance(shuffle, ast.Name) and shuffle.id in unit.parameters
    calls = list(case.trainer.calls("set_epoch"))
    if is_handed or constant(shuffle) is False or _is_held_out(call, unit):
        return None
    if any(_advances(each, where, case) for where, each in calls):
        return None
    return f"set_epoch is never {'reached with another epoch' if calls else 'called'} for {_target(call, unit)}"


def _advances(call: ast.Call, unit: Unit, case: Meaning) -> bool:
    """Whether every rank makes this call of set_epoch for the training data, in each epoch with another number."""
    owner = last_name(source.owner_of(call))
    is_held_out = bool(_HELD_OUT.search(owner)) and "train" not in owner
    path = [call, *unit.source.above(call)]
    loops = [loop for loop in unit.all(ast.For) if any("epoch" in name.lower() for name in words_in(loop.target))]
    is_outside = bool(loops) and not any(isinstance(above, source.LOOPS) for above in path)
    bodies = [(child, above.body) for child, above in zip(path, path[1:]) if isinstance(above, source.LOOPS)]
    before = [s for child, body in bodies if child in body for s in body[: body.index(child)]]
    is_cut_off = any(isinstance(s, (ast.Continue, ast.Break, ast.Return, ast.Raise)) for s in before)
    is_constant = isinstance(argument(call, "epoch", 0), ast.Constant)
    return not (is_held_out or is_outside or is_cut_off or is_constant or case.is_guarded(call, unit))


@call_rule("DDP204", "DataLoader", unless="trainer accelerate")
def loader_without_share(call: ast.Call, unit: Unit, case: Meaning) -> Optional[str]:
    dataset = argument(call, "dataset", 0)
    if dataset is None or any(k.arg is None for k in call.keywords) or _is_held_out(call, unit):
        return None
    is_named = any("train" in name.lower() for name in {_target(call, unit), *words_in(dataset)})
    trains = is_named or constant(argument(call, "shuffle", 2)) is True or case.tree.root.is_file()
    shares = {word for _, value in [(unit, dataset), *case.values(dataset, unit)] for word in words_in(value)}
    if not trains or "iterable" in case.kinds(dataset, unit) or _SHARES.search(" ".join(shares)):
        return None
    if case.is_guarded(call, unit) or case.depends_on_launch(call, unit) or _is_given_to_ddpshim(call, unit, case):
        return None
    sampler = argument(call, "sampler", 3)
    sampler = argument(call, "batch_sampler", 4) if sampler is None or ast.unparse(sampler) == "None" else sampler
    found = case.kinds(sampler, unit) or frozenset({"none"} if sampler is None else ())
    if sampler is None or found == {"none"}:
        return f"No sampler splits {text_of(dataset, 40)}"
    is_unknown = case.trainer.is_distributed and not found & {"sampler", "none"}
    is_split = bool(found & {"dsampler"}) or _splits(sampler, unit, case)
    return f"The sampler {text_of(sampler, 40)} draws for one process" if not is_split and not is_unknown else None


def _is_given_to_ddpshim(call: ast.Call, unit: Unit, case: Meaning) -> bool:
    """Whether ddpshim splits the loader, or the data that it reads: by make_loader, shard_iterable or an adapter."""
    names = {_target(call, unit), unit.name}
    for where, given in case.trainer.calls("make_loader", "shard_iterable", "shard_tfdata", "prepare"):
        made = (part for value in values_of(given) for _, part in case.made_of(value, where))
        if given in unit.source.above(call) or any(part is call or last_name(part) in names for part in made):
            return True
    return any(name.startswith("ddpshim.robomimic") for name in case.trainer.origins)


def _splits(sampler: ast.expr, unit: Unit, case: Meaning, depth: int = 0) -> bool:
    """Whether a sampler of the project, or its arguments, depend on the rank or the number of ranks."""
    for where, value in [(unit, sampler), *case.values(sampler, unit)]:
        found = case.tree.defined(value.func, where.source) if isinstance(value, ast.Call) else None
        words = words_in(value) | (words_in(found[1]) if isinstance(found, tuple) else set())
        first = value.args[:1] if isinstance(value, ast.Call) and depth < 3 else []
        if _SHARES.search(" ".join(words)) or any(_splits(each, where, case, depth + 1) for each in first):
            return True
    return False


@call_rule("DDP401")
def every_rank_writes(call: ast.Call, unit: Unit, case: Meaning) -> Optional[str]:
    target = _written(call, unit)
    if target is None or _is_open(target, unit, case) or _is_own(target, unit, case) or case.is_guarded(call, unit):
        return None
    asks = any(speaks_of_rank(v) or case.test(v, unit) for v in values_of(call))
    return f"Every rank runs {text_of(call)}" if not asks else None  # save(path, is_main_process=...) asks itself


def _written(call: ast.Call, unit: Unit) -> Optional[ast.expr]:
    """Return the path (or file) that the call writes or deletes; None if it does neither."""
    name, tail = unit.source.qualified(call.func), last_name(call.func)
    owner = source.owner_of(call)
    if name in ("open", "io.open", "gzip.open", "h5py.File"):
        mode = constant(argument(call, "mode", 1))
        return argument(call, "file", 0) if isinstance(mode, str) and re.search("[wax]", mode) else None
    if _RUNS.fullmatch(name) or (tail == "init" and any(k.arg == "project" for k in call.keywords)):
        return call.func if argument(call, "group") is None else None
    if _WRITES_FIRST.fullmatch(name) or _WRITES_SECOND.fullmatch(name):
        named = next((k.value for k in call.keywords if k.arg in _WRITER_KEYWORDS), None)
        target = named or argument(call, "", 1 if _WRITES_SECOND.fullmatch(name) else 0)
        return target or (call.func if name.endswith("SummaryWriter") else None)
    if tail in ("makedirs", "mkdir"):
        made = argument(call, "name", 0) if name == "os.makedirs" else owner
        return made if constant(argument(call, "exist_ok", 2)) is not True else None
    wanted = {"write_text": 1, "write_bytes": 1, "symlink_to": 1, "unlink": 0, "rmdir": 0}
    return owner if len(call.args) == wanted.get(tail) else None


def _is_open(target: ast.expr, unit: Unit, case: Meaning) -> bool:
    """Whether the target is an open file or buffer: then the call that opened it is reported, not this one."""
    bindings = [b for _, b in case.reaching(target, unit)]
    is_opened = any(_OPENER.fullmatch(last_name(b.value)) or isinstance(b.statement, ast.With) for b in bindings)
    return is_opened or last_name(target) in ("f", "file", "open")


def _is_own(target: ast.expr, unit: Unit, case: Meaning) -> bool:
    """Whether each rank has its own path, or it is a cache or a temporary file."""
    near = {word for _, value in [(unit, target), *case.values(target, unit)] for word in words_in(value)}
    if any(map(_OF_ALL.search, (*near, unit.name))):
        return True
    items = {name for loop in unit.all(ast.For) for name in words_in(loop.target)}  # one file for each sample of a rank
    is_of_sample = any(items & words_in(part) for part in ast.walk(target) if isinstance(part, ast.Subscript))
    made = [value for _, value in case.made_of(target, unit)]
    return is_of_sample or any(speaks_of_rank(v) or any(map(_NOT_SHARED.fullmatch, words_in(v))) for v in made)


@rule("DDP502")
def collective_under_rank_test(case: Meaning) -> Iterator[Hit]:
    for unit, call in case.trainer.calls():
        guard = case.guard(call, unit) if _is_collective(call, unit, case) else None
        if isinstance(guard, (ast.If, ast.IfExp, ast.While)) and not _is_balanced(call, unit, case):
            what = f"{text_of(call.func)} is reached on some ranks only"
            yield unit, call, f"{what} (`{text_of(guard.test, 40)}` in line {guard.lineno})"


def _is_collective(call: ast.Call, unit: Unit, case: Meaning) -> bool:
    """Whether a call is a collective of the whole group, of torch or ddpshim's World."""
    name, owner = last_name(call.func), source.owner_of(call)
    if _COLLECTIVES.fullmatch(unit.source.qualified(call.func)) and argument(call, "group") is None:
        return True
    if name not in _OUR_COLLECTIVES or "ddpshim" not in case.trainer.frameworks or owner is None:
        return False
    made = [owner, *(value for _, value in [*case.values(owner, unit), *case.passed(owner, unit)])]
    return last_name(owner) == "world" or any(last_name(v) == "setup" for v in made if isinstance(v, ast.Call))


def _is_balanced(call: ast.Call, unit: Unit, case: Meaning) -> bool:
    """Whether the other ranks run the same collective in another branch (rank 0 first, then the rest)."""
    opposite = meaning.OPPOSITE.get(_only(call, unit, case) or "")
    others = [c for c in unit.all(ast.Call) if c is not call and last_name(c.func) == last_name(call.func)]
    return opposite is not None and any(_only(other, unit, case) == opposite for other in others)


def _only(node: ast.AST, unit: Unit, case: Meaning) -> Optional[str]:
    """Return MAIN or OTHER if a test lets only the main rank, or only the others, reach a node; else None."""
    guard = case.guard(node, unit)
    if not isinstance(guard, (ast.If, ast.IfExp)):
        return None
    found = case.test(guard.test, unit)
    is_inside = isinstance(guard, ast.If) and any(s is node or s in unit.source.above(node) for s in guard.body)
    return found if is_inside else meaning.OPPOSITE.get(found or "")


@rule("DDP503")
def swallowed_exception(case: Meaning) -> Iterator[Hit]:
    for unit in (u for u in case.trainer.units if not _MEASURES.search(u.name)):
        for statement in unit.all(ast.Try):
            trained = next((c for c in source.calls_in(*statement.body) if _trains(c, unit, case)), None)
            for handler in statement.handlers if trained is not None else ():
                caught = words_in(handler.type) if handler.type is not None else {"BaseException"}
                inner = source.calls_in(*handler.body)
                exits = [c for c in inner if last_name(c.func) in ("exit", "_exit", "abort", "kill")]
                ends = any(constant(argument(c, "", 0) or ast.Constant(0)) != 0 for c in exits)
                ends = ends or any(isinstance(n, ast.Raise) for s in handler.body for n in ast.walk(s))
                if caught & {"Exception", "BaseException", "RuntimeError"} and not ends and trained is not None:
                    yield unit, handler, f"An exception in {text_of(trained, 30)} ends here"


def _trains(call: ast.Call, unit: Unit, case: Meaning) -> bool:
    """Whether a call trains, directly or through a function of the project."""
    called = case.function(call, unit)
    is_direct = isinstance(call.func, ast.Attribute) and call.func.attr in TRAINING_CALLS
    return is_direct or (called in case.tree.training and not _MEASURES.search(last_name(call.func)))


@rule("DDP601")
def hard_coded_device(case: Meaning) -> Iterator[Hit]:
    trainer, files = case.trainer, set[source.Source]()
    binds = bool(trainer.frameworks) or any("set_device" in u.words for s in case.tree.sources for u in s.units)
    for unit, call in trainer.calls("device", "to", "cuda", "load", "set_device"):
        device = _device_named(call, unit)
        is_chosen = not trainer.is_distributed and last_name(call.func) == "device"  # an index may follow
        is_default = binds or is_chosen or unit.source in files or meaning.is_evaluation(unit.name)
        if device is None or (device == "cuda" and is_default) or case.depends_on_launch(call, unit):
            continue
        if not case.is_guarded(call, unit):
            files |= {unit.source} if device == "cuda" else set()  # one of its calls is enough
            because = ", because no torch.cuda.set_device comes before" if device == "cuda" else ""
            yield unit, call, f"{text_of(call, 50)} means GPU {device[5:] or 0} on every rank{because}"


def _device_named(call: ast.Call, unit: Unit) -> Optional[str]:
    """Return "cuda:0" or "cuda" if the call names a device by a literal, else None."""
    tail = last_name(call.func)
    value = argument(call, "map_location", 1) if tail == "load" else argument(call, "device", 0)
    if tail in ("cuda", "set_device") and (value is None or isinstance(constant(value), int)):
        return "cuda" if value is None else f"cuda:{constant(value)}"
    # The keys of a dictionary for map_location are the tensors' old devices, so only its values count.
    for inner in (n for v in (value.values if isinstance(value, ast.Dict) else [value]) if v for n in ast.walk(v)):
        text, above = str(constant(inner)), unit.source.parents.get(inner)
        # In torch.device("cuda", index) the index decides.
        is_part = isinstance(above, ast.Compare) or (
            isinstance(above, ast.Call) and len(above.args) > 1 and tail != "load"
        )
        if re.fullmatch(r"cuda(:\d+)?", text) and not is_part:
            return text
    return None
