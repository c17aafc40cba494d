"""Parses all files below a path, finds the trainers among them, and the functions that each trainer may run."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable, Optional, TypeVar, Union

from ddpshim.reading import read_bytes
from ddpshim.tools.doctor.nodes import FUNCTIONS, argument, entered, key_of, last_name, words_of
from ddpshim.tools.doctor.paths import above_package, config_files, files_below, imported_files, project_of, targets
from ddpshim.tools.doctor.source import Source, Unit, Unreadable

T = TypeVar("T", Source, Unit)
Class = tuple[Source, ast.ClassDef]
TRAINING_CALLS = {"backward", "train_on_batch", "manual_backward"}
_STEPPING = {"step", "fit", "train", "DDP", "DistributedDataParallel"}  # a program also needs one of these to train
_FITTING_CALLS = {"fit", "train"}  # methods of a framework's Trainer
_FITTING_PACKAGES = {"pytorch_lightning", "lightning", "transformers", "trl"}
OUR_EPOCH = "ddpshim.robomimic.run_epoch"  # patches call it in place of robomimic's run_epoch
_DISTRIBUTED = {"init_process_group", "DistributedDataParallel", "DistributedSampler", "init_distributed"}
_DISTRIBUTED_VARIABLES = {"LOCAL_RANK", "WORLD_SIZE", "RANK", "SLURM_PROCID"}
# A framework calls methods of their subclasses that the program itself does not name.
_CALLED_BACK = {"LightningModule", "LightningDataModule", "Callback", "Trainer", "TrainerCallback"}
_SAVES = re.compile(r"(?i)^_?(save\w*|dump|log_model|push_to_hub)$")
# Methods that Python or torch may call on any object; not __del__ and __exit__, in which recorders close their files.
_BY_PYTHON = words_of(
    "__init__ __new__ __post_init__ __call__ __iter__ __next__ __getitem__ __len__ __enter__ __getattr__ forward"
)
_COMMANDS = {"wrap", "main", "command", "cli", "hydra_main", "draccus"}  # decorators of command-line functions
_FEW = 3  # if more unrelated classes share a method's name, the name does not tell whose method is called
# Rules skip programs that use a framework with the fix built in.
FRAMEWORKS = {
    "accelerate": {"accelerate.Accelerator"},
    "fabric": {"lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric", "lightning.pytorch.Fabric"},
    "lightning": {
        f"{package}.{name}"
        for package in ("pytorch_lightning", "lightning", "lightning.pytorch")
        for name in ("Trainer", "LightningModule", "LightningDataModule", "cli.LightningCLI")
    },
    "transformers": {"transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer"},
    "deepspeed": {"deepspeed.initialize"},
    "horovod": {"horovod.torch.init", "horovod.torch.DistributedOptimizer"},
    "ddpshim": {"ddpshim.setup", "ddpshim.wrap_parallel", "ddpshim.make_loader", "ddpshim.robomimic"},
}


class Program:
    """A trainer: its script and the units that it may run; `sure` are those found without guessing a method's class."""

    def __init__(self, entry: Source, files: list[Source], units: list[Unit], sure: Iterable[Unit]) -> None:
        self.entry, self.files, self.units, self.sure = entry, files, units, set(sure)
        sources = {unit.source for unit in self.sure}
        bases = {s.qualified(base) for s in sources for node in s.classes.values() for base in node.bases}
        self.frameworks = {name for name, marks in FRAMEWORKS.items() if marks & (self.origins | bases)}
        self.is_distributed = bool(self.frameworks) or any(map(_is_distributed, units))
        self.spawns = any(_spawns(*made) for made in self.calls("spawn", "Process"))

    @functools.cached_property
    def origins(self) -> frozenset[str]:
        """Every dotted name that the program uses."""
        return frozenset[str]().union(*(unit.origins for unit in self.units))

    @functools.cached_property
    def wraps(self) -> bool:
        """Whether DistributedDataParallel or DataParallel is named at all."""
        return any(name.endswith(("DistributedDataParallel", "DataParallel", "DDP")) for name in self.origins)

    @property
    def may_be_launched(self) -> bool:
        """Whether somebody would start this one-process program on several ranks: it saves results and is no server."""
        own = (name for unit in self.entry.units for name in unit.origins)
        serves = any(name.startswith("grpc.") or name.endswith("multiprocessing.Process") for name in own)
        return not serves and any(_SAVES.match(name) for unit in self.units for name in unit.words)

    def calls(self, *names: str) -> Iterator[tuple[Unit, ast.Call]]:
        """Yield calls of functions or methods with one of these last names."""
        wanted = set(names)
        for unit in self.units:
            if wanted & unit.words or any(w in unit.source.names for w in wanted):
                yield from ((unit, call) for call in unit.all(ast.Call) if last_name(call) in wanted)

    def uses(self, *names: str) -> bool:
        return any(self.calls(*names))


class Tree:
    """The parsed files below `root`, and the trainers among them."""

    def __init__(self, root: Path, exclude: Iterable[str], show: Callable[[str], None]) -> None:
        self.root, self._show = root, show
        self.sources: list[Source] = []
        self.unreadable: list[tuple[Path, Unreadable]] = []
        top = above_package(root) if root.is_dir() else project_of(root)
        pending = list(files_below(root, set(exclude), (".py",)))
        asked = set(pending)
        while pending:
            path = pending.pop(0)
            show(f"doctor: read {len(asked) - len(pending)} of {len(asked)} files")
            for _, content in self._read([path]):
                try:
                    self.sources.append(Source(path, content))
                except Unreadable as error:
                    self.unreadable.append((path, error))
                except RecursionError:  # an `if` with a thousand `elif`, which are nested in the syntax tree
                    self.unreadable.append((path, Unreadable(1, "it is nested too deeply")))
            if root.is_file() and self.sources:  # also read what a single file imports from its project
                found = (p for p in imported_files(self.sources[-1], top) if p.name not in exclude)
                pending += (new := [path for path in dict.fromkeys(found) if path not in asked])
                asked.update(new)
        self._num_above = len(root.relative_to(top).parts) if root.is_dir() else 0  # scripts in the root import here
        self._parts: dict[Source, tuple[str, ...]] = {}
        self._by_last: dict[str, list[Source]] = {}
        for source in self.sources:
            parts = source.path.relative_to(top).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            self._parts[source] = parts
            if parts:
                self._by_last.setdefault(parts[-1], []).append(source)
        self._found: dict[tuple[str, str], Optional[Source]] = {}
        self.imports = functools.cache(self._find_imports)
        self._direct = functools.cache(self._find_direct)
        self._lines: dict[ast.ClassDef, tuple[ast.ClassDef, ...]] = {}
        self.configs = dict(self._read(config_files(root, set(exclude))))
        self.targets = targets(self.configs)
        self.programs = self._find_programs()
        self.training = self._find_training()

    def _read(self, paths: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
        """Yield each path and its content. An unreadable file is noted; only an unreadable root raises."""
        for path in paths:
            try:
                yield path, read_bytes(path)
            except OSError as error:
                if path == self.root:
                    raise
                self.unreadable.append((path, Unreadable(1, f"it cannot be opened: {error.strerror}")))

    def is_test(self, source: Source) -> bool:
        """Whether a file below the root is a test, which is not a trainer even if it trains."""
        if not self.root.is_dir():
            return False
        inside, name = source.path.relative_to(self.root), source.path.stem
        is_named = name.startswith("test_") or name.endswith("_test") or name == "conftest"
        return is_named or not {"tests", "test"}.isdisjoint(inside.parts[:-1])

    def module(self, dotted: str, importer: Source) -> Optional[Source]:
        """Return the file in the tree that `import dotted` in `importer` refers to, else None."""
        key = (dotted, importer.folder)
        if key not in self._found:
            self._found[key] = self._find_module(dotted, importer)
        return self._found[key]

    def _find_module(self, dotted: str, importer: Source) -> Optional[Source]:
        stem = dotted.lstrip(".")
        parts = tuple(stem.split(".")) if stem else ()
        level = len(dotted) - len(stem)
        if level:
            here = self._parts[importer]
            package = here if importer.path.name == "__init__.py" else here[:-1]
            package = package[: len(package) - level + 1]
            wanted = (*package, *parts)
            named = self._by_last.get(wanted[-1], []) if wanted else []
            return next((s for s in named if self._parts[s] == wanted), None)
        found = [s for s in self._by_last.get(parts[-1], []) if self._parts[s][-len(parts) :] == parts]
        beside = [s for s in found if self._parts[s][: -len(parts)] == self._parts[importer][:-1]]
        if beside:
            return beside[0]
        if len(parts) == 1:
            found = [s for s in found if len(self._parts[s]) in (1, self._num_above + 1)]
        return min(found, key=lambda s: len(self._parts[s]), default=None)

    def definition(self, dotted: str, importer: Source, depth: int = 0) -> Union[Unit, Class, None]:
        """Return the function or class that a dotted name refers to, following re-exports."""
        module, _, name = dotted.rpartition(".")
        if dotted.startswith(".") and not module.strip("."):
            module = "." * (len(dotted) - len(dotted.lstrip(".")))
        source = self.module(module, importer) if module else importer
        if source is None or depth > 4:
            return None
        if name in source.functions:
            return source.functions[name]
        if name in source.classes:
            return source, source.classes[name]
        origin = source.names.get(name)
        return self.definition(origin, source, depth + 1) if origin is not None else None

    def defined(self, node: ast.AST, source: Source) -> Union[Unit, Class, None]:
        """Return the definition of a name in `source`: a function, a class, or None if it is not in the tree."""
        name = source.qualified(node)
        return self.definition(name, source) if name else None

    def classes(self, nodes: Iterable[Optional[ast.AST]], source: Source) -> list[Class]:
        """Return the classes of the tree that these names in `source` refer to."""
        found = (self.defined(node, source) for node in nodes if node is not None)
        return [each for each in found if isinstance(each, tuple)]

    def _find_imports(self, source: Source) -> list[Source]:
        found = (self.module(dotted, source) for dotted in source.imported)
        return list(dict.fromkeys(s for s in found if s is not None and s is not source))

    def closure(self, entry: Source) -> list[Source]:
        """Return the entry and all files that it imports, directly or indirectly, or through hydra's configs."""
        start = [entry]
        if any(name.partition(".")[0] == "hydra" for name in entry.names.values()):
            targets = {dotted for places in self.targets.values() for dotted, _ in places if "." in dotted}
            modules = (self.module(dotted.rpartition(".")[0], entry) for dotted in targets)
            start += [module for module in modules if module is not None and not module.is_script]
        return _all_from(start, self.imports)

    def _find_programs(self) -> list[Program]:
        trains = {s for s in self.sources if any(_trains(u) for u in s.units)}
        imported = {i for s in self.sources for i in self.imports(s)} if trains else set()
        programs: list[Program] = []
        covered: set[Source] = set()
        candidates = self.sources[:1] if self.root.is_file() else self.sources
        scripts = [s for s in candidates if (s.is_script or s not in imported) and not self.is_test(s)]
        for few in (0, _FEW):  # first scripts that certainly train, then those that may, judged by names of methods
            for entry in scripts if trains else ():
                self._show(f"doctor: looks for trainers, {entry.path.name}")
                files = self.closure(entry)
                if trains.isdisjoint(files) or any(program.entry is entry for program in programs):
                    continue
                start = entry.units if self.root.is_file() else [entry.module, entry.main]
                reached = self._reach(start, files, few)
                training = {u.source for u in reached if _trains(u)}
                steps = entry in training or any(not _STEPPING.isdisjoint(u.words) for u in reached)
                if (
                    training <= (covered if few else set())
                    or not steps
                    or any("init_rpc" in u.attributes for u in reached)
                ):
                    continue
                program = self._program(entry, files, reached)
                if program.is_distributed or self.root.is_file() or program.may_be_launched:
                    programs.append(program)
                covered |= training
        for entry in candidates:  # trainers that are started through a string in a config, or by other code
            is_named = self.root.is_file() or not self.targets.keys().isdisjoint(entry.classes)
            if entry not in trains - covered or self.is_test(entry) or not (is_named or entry not in imported):
                continue
            is_rpc = any("init_rpc" in u.attributes for u in entry.units)
            program = self._program(entry, self.closure(entry), entry.units)
            if not is_rpc and (is_named or program.is_distributed):
                programs.append(program)
        return sorted(programs, key=lambda p: not p.is_distributed)

    def _program(self, entry: Source, files: list[Source], start: Iterable[Unit]) -> Program:
        start = [*start, *_run_at_import(files, entry)]
        return Program(entry, files, self._reach(start, files), self._reach(start, files, few=0))

    def _find_training(self) -> set[Unit]:
        """Return the functions that train, and all that call one of them, directly or indirectly."""
        units = {u: None for program in self.programs for u in program.units}
        callers: dict[Unit, list[Unit]] = {}
        names: dict[str, list[Unit]] = {}
        for unit in units:
            for called in self._direct(unit)[0]:
                callers.setdefault(called, []).append(unit)
            for attribute in unit.attributes:
                names.setdefault(attribute, []).append(unit)

        def callers_of(unit: Unit) -> list[Unit]:
            is_method = unit.owner is not None and not unit.name.startswith("__")
            return [*callers.get(unit, []), *(names.get(unit.name, []) if is_method else [])]

        return set(_all_from((u for u in units if _trains(u)), callers_of))

    def _reach(self, start: Iterable[Unit], files: list[Source], few: int = _FEW) -> list[Unit]:
        """Return the units that `start` may run: functions by name, and methods by name if their class is used.

        If more than `few` unrelated classes have a method of that name, only methods of the object's visible class.
        """
        methods: dict[str, list[Unit]] = {}
        families: dict[str, int] = {}
        by_class: dict[Optional[ast.ClassDef], list[Unit]] = {}
        for source in files:
            for name, units in source.methods.items():
                methods.setdefault(name, []).extend(units)
                for unit in units:
                    by_class.setdefault(unit.owner, []).append(unit)
        names, asked = methods.keys(), set[str]()
        live: set[ast.ClassDef] = set()
        seen = dict.fromkeys(start)
        queue = list(seen)

        def add(unit: Unit) -> None:
            if unit not in seen:
                seen[unit] = None
                queue.append(unit)

        def use(source: Source, node: ast.ClassDef) -> None:
            if node in live:
                return
            live.add(node)
            is_called_back = any(last_name(base) in _CALLED_BACK for base in node.bases)
            for unit in by_class.get(node, []):
                if is_called_back or unit.name in asked or unit.name in _BY_PYTHON:
                    add(unit)
            for base in self.classes(node.bases, source):
                use(*base)

        for source in files:
            for name, node in source.classes.items():
                if _is_registered(map(last_name, node.decorator_list)) or name in self.targets:
                    use(source, node)
        for unit in list(seen):
            if unit.owner is not None:
                live.add(unit.owner)
            if isinstance(unit.node, FUNCTIONS) and unit.node.decorator_list:
                # A parser of the command line may build these arguments.
                for found in self.classes((a.annotation for a in unit.node.args.args), unit.source):
                    use(*found)
        while queue:
            unit = queue.pop()
            functions, classes = self._direct(unit)
            for function in functions:
                add(function)
            for found in classes:
                use(*found)
            named = unit.attributes | (TRAINING_CALLS if OUR_EPOCH in unit.origins else set())
            for name in (named & names) - asked:
                if name not in families:  # how many unrelated classes have a method of this name
                    families[name] = len({self._line(u.source, u.owner)[-1] for u in methods[name] if u.owner})
                if families[name] <= few:
                    asked.add(name)
                    for method in methods[name]:
                        if method.owner in live:
                            add(method)
                else:
                    for method in methods[name] if unit.source is files[0] else ():
                        if method.owner in live and method.owner is not None and method.owner.name in self.targets:
                            add(method)  # the script's config may build this object
                    for owner in self._receivers(name, unit):
                        for method in methods[name]:
                            if method.owner in owner or owner[0] in self._line(method.source, method.owner or owner[0]):
                                add(method)
        return list(seen)

    def _line(self, source: Source, node: ast.ClassDef) -> tuple[ast.ClassDef, ...]:
        """Return a class, its first base in the tree, that one's first base, and so on."""
        if node not in self._lines:
            self._lines[node] = (node,)  # ends the recursion if a class appears to be its own base
            bases = self.classes(node.bases, source)
            self._lines[node] = (node, *self._line(*bases[0])) if bases else (node,)
        return self._lines[node]

    def may_have(self, method: Unit, attribute: ast.Attribute, unit: Unit, files: list[Source]) -> bool:
        """Whether `attribute` may be this method: its object's class is visible and fits, or no other class has it."""
        lines = list(self._receivers(method.name, unit, attribute))
        own = self._line(method.source, method.owner) if method.owner else ()
        if lines:
            return any(line[0] in own or method.owner in line for line in lines)
        others = (u for source in files for u in source.methods.get(method.name, []) if u.owner is not None)
        return all(self._line(other.source, other.owner)[-1] is own[-1] for other in others if other.owner)

    def _receivers(
        self, name: str, unit: Unit, only: Optional[ast.Attribute] = None
    ) -> Iterator[tuple[ast.ClassDef, ...]]:
        """Yield the visible classes (with bases) of objects whose method `name` is used in `unit`."""
        for attribute in unit.all(ast.Attribute):
            if attribute.attr != name or (only is not None and attribute is not only):
                continue
            receiver = attribute.value
            key = key_of(receiver) if not isinstance(receiver, ast.Call) else ""
            if unit.owner is not None and (key in ("self", "cls") or last_name(receiver) == "super"):
                yield self._line(unit.source, unit.owner)
                continue
            mates = [u for u in unit.source.units if unit.owner is not None and u.owner is unit.owner]
            values: list[Optional[ast.expr]] = [receiver] if isinstance(receiver, ast.Call) else []
            values += [b.value for u in [unit, unit.source.module, *mates] for b in u.bindings.get(key or "", [])]
            made: list[Optional[ast.AST]] = [value.func for value in values if isinstance(value, ast.Call)]
            if isinstance(unit.node, FUNCTIONS):
                given = [*unit.node.args.posonlyargs, *unit.node.args.args, *unit.node.args.kwonlyargs]
                made += [a.annotation for a in given if a.arg == key]
            yield from (self._line(*found) for found in self.classes(made, unit.source))

    def _find_direct(self, unit: Unit) -> tuple[list[Unit], list[Class]]:
        """Return the functions and the classes that `unit` names."""
        found = [self.definition(dotted, unit.source) for dotted in unit.used - {""}]
        return [each for each in found if isinstance(each, Unit)], [each for each in found if isinstance(each, tuple)]


def _all_from(start: Iterable[T], follow: Callable[[T], Iterable[T]]) -> list[T]:
    """Return all items that `follow` reaches from `start`, including `start`."""
    seen = dict.fromkeys(start)
    queue = list(seen)
    while queue:
        for each in follow(queue.pop()):
            if each not in seen:
                seen[each] = None
                queue.append(each)
    return list(seen)


def _run_at_import(files: list[Source], entry: Source) -> list[Unit]:
    registered = [u for s in files for u in s.units if u.owner is None and _is_registered(entered(u.node))]
    own = [u for u in entry.functions.values() if u.name == "main" or not _COMMANDS.isdisjoint(entered(u.node))]
    return [*(s.module for s in files), entry.main, *registered, *own]


def _is_registered(decorators: Iterable[str]) -> bool:
    """Whether a decorator registers its function or class, so that a name in a config may call it."""
    return any("regist" in name.lower() for name in decorators)


def _trains(unit: Unit) -> bool:
    """Whether a unit makes a training step, or a framework does: through its Trainer or `training_step`."""
    if OUR_EPOCH in unit.origins or unit.name == "forward":  # backward() in forward() computes a gradient penalty
        return unit.name != "forward"
    if not (TRAINING_CALLS | _FITTING_CALLS).isdisjoint(unit.attributes):
        called = [c.func for c in unit.all(ast.Call) if isinstance(c.func, ast.Attribute)]
        if any(f.attr in TRAINING_CALLS or (f.attr in _FITTING_CALLS and _is_trainer(f.value, unit)) for f in called):
            return True
    if any("optimizer" in name for name in unit.words):  # timm's scaler(loss, optimizer) runs backward and steps
        given = [" ".join(map(last_name, call.args)) for call in unit.all(ast.Call)]
        if any("loss" in names and "optimizer" in names for names in given):
            return True
    is_asked = unit.name == "training_step" and unit.owner is not None
    return (is_asked or "LightningCLI" in unit.words) and _knows_a_framework(unit.source)


def _knows_a_framework(source: Source) -> bool:
    return any(origin.partition(".")[0] in _FITTING_PACKAGES for origin in source.names.values())


def _is_trainer(node: ast.expr, unit: Unit) -> bool:
    """Whether an expression is a Trainer of Lightning or Transformers, judged by its name, class or base class."""
    made = [b.value for b in unit.bindings.get(key_of(node) or "", []) if isinstance(b.value, ast.Call)]
    names = [last_name(node), *map(last_name, made)]
    own = [node for name in names for node in [unit.source.classes.get(name)] if node is not None]
    names += [last_name(base) for node in own for base in node.bases]
    return any(name.lower().endswith("trainer") for name in names) and _knows_a_framework(unit.source)


def _spawns(unit: Unit, call: ast.Call) -> bool:
    if unit.source.qualified(call.func) in ("torch.multiprocessing.spawn", "torch.multiprocessing.Process"):
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr == "spawn" and argument(call, "nprocs") is not None


def _is_distributed(unit: Unit) -> bool:
    named = (unit.source.names.get(name, name).rpartition(".")[2] for name in unit.loaded)
    if not _DISTRIBUTED.isdisjoint(unit.attributes) or not _DISTRIBUTED.isdisjoint(named):
        return True
    texts = (c.value for c in unit.all(ast.Constant) if isinstance(c.value, str))
    return "environ" in unit.attributes and not _DISTRIBUTED_VARIABLES.isdisjoint(texts)
