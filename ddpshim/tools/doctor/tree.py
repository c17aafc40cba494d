"""Finds all files below a path, which of them are trainers, and what each trainer runs."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable, Optional, TypeVar, Union

from ddpshim.reading import read_bytes
from ddpshim.tools.doctor.nodes import FUNCTIONS, argument, entered, key_of, last_name
from ddpshim.tools.doctor.source import Source, Unit, Unreadable

T = TypeVar("T", Source, Unit)
Class = tuple[Source, ast.ClassDef]
_SKIPPED_FOLDERS = {".git", ".hg", ".tox", ".nox", "__pycache__", "node_modules", "site-packages", ".eggs"}
TRAINING_CALLS = {"backward", "train_on_batch", "manual_backward"}
OUR_EPOCH = "ddpshim.robomimic.run_epoch"  # which the patches put in the place of robomimic's
_DISTRIBUTED = {"init_process_group", "DistributedDataParallel", "DistributedSampler", "init_distributed"}
_DISTRIBUTED_VARIABLES = {"LOCAL_RANK", "WORLD_SIZE", "RANK", "SLURM_PROCID"}
# Their subclasses are called by a framework, through methods that the program does not name.
_CALLED_BACK = {"LightningModule", "LightningDataModule", "Callback", "Trainer", "TrainerCallback"}
_TARGET = re.compile(rb"_target_:\s*['\"]?([A-Za-z_][\w.]*)")
_SAVES = re.compile(r"(?i)^_?(save\w*|dump|log_model|push_to_hub)$")
_COMMANDS = {"wrap", "main", "command", "cli", "hydra_main", "draccus"}  # decorators of what a terminal calls
_FEW = 3  # a method name that more unrelated classes share says nothing about whose method is called
# What is built in by a framework is not looked for in programs that use it.
FRAMEWORKS = {
    "accelerate": {"accelerate.Accelerator"},
    "fabric": {"lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric", "lightning.pytorch.Fabric"},
    "lightning": {"pytorch_lightning.Trainer", "lightning.Trainer", "lightning.pytorch.Trainer"},
    "transformers": {"transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer"},
    "deepspeed": {"deepspeed.initialize"},
    "horovod": {"horovod.torch.init", "horovod.torch.DistributedOptimizer"},
    "ddpshim": {"ddpshim.setup", "ddpshim.wrap_parallel", "ddpshim.make_loader", "ddpshim.robomimic"},
}


class Program:
    """A trainer: its script and everything that it may run, by the names that are used."""

    def __init__(self, entry: Source, files: list[Source], units: list[Unit]) -> None:
        self.entry, self.files, self.units = entry, files, units
        self.frameworks = {name for name, marks in FRAMEWORKS.items() if marks & self.origins}
        self.is_distributed = bool(self.frameworks) or any(map(_is_distributed, units))
        self.spawns = any(_spawns(*made) for made in self.calls("spawn", "Process"))

    @functools.cached_property
    def origins(self) -> frozenset[str]:
        """Every dotted name that the program reads."""
        return frozenset[str]().union(*(unit.origins for unit in self.units))

    @functools.cached_property
    def wraps(self) -> bool:
        """Whether DistributedDataParallel or DataParallel is named at all."""
        return any(name.endswith(("DistributedDataParallel", "DataParallel", "DDP")) for name in self.origins)

    @property
    def may_be_launched(self) -> bool:
        """Whether several ranks are worth it for a program of one process: it keeps its result and serves nobody."""
        own = (name for unit in self.entry.units for name in unit.origins)
        serves = any(name.startswith("grpc.") or name.endswith("multiprocessing.Process") for name in own)
        return not serves and any(_SAVES.match(name) for unit in self.units for name in unit.words)

    def calls(self, *names: str) -> Iterator[tuple[Unit, ast.Call]]:
        """Calls of functions or methods whose last name is one of these."""
        wanted = set(names)
        for unit in self.units:
            if wanted & unit.words or any(w in unit.source.names for w in wanted):
                yield from ((unit, call) for call in unit.all(ast.Call) if last_name(call) in wanted)

    def uses(self, *names: str) -> bool:
        return any(self.calls(*names))


class Tree:
    """The parsed files below `root`, and the trainers among them."""

    def __init__(self, root: Path, exclude: Iterable[str] = ()) -> None:
        self.root = root
        self.sources: list[Source] = []
        self.unreadable: list[tuple[Path, Unreadable]] = []
        for path, content in self._read(exclude, ".py"):
            try:
                self.sources.append(Source(path, content))
            except Unreadable as error:
                self.unreadable.append((path, error))
            except RecursionError:  # an `if` of a thousand branches, each of which is inside the one before
                self.unreadable.append((path, Unreadable(1, "it is nested too deeply")))
        base = root if root.is_dir() else root.parent
        self._parts: dict[Source, tuple[str, ...]] = {}
        self._by_last: dict[str, list[Source]] = {}
        for source in self.sources:
            parts = source.path.relative_to(base).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            self._parts[source] = parts
            if parts:
                self._by_last.setdefault(parts[-1], []).append(source)
        self._found: dict[tuple[str, str], Optional[Source]] = {}
        self.imports = functools.cache(self._find_imports)
        self._direct = functools.cache(self._find_direct)
        self._lines: dict[ast.ClassDef, tuple[ast.ClassDef, ...]] = {}
        configs = dict(self._read(exclude, ".yaml", ".yml")) if root.is_dir() else {}
        self.configs = list(configs)
        self.targets = _targets(configs)
        self.clocks = list(_clocks(configs))
        self.programs = self._find_programs()
        self.training = self._find_training()

    def _read(self, exclude: Iterable[str], *endings: str) -> Iterator[tuple[Path, bytes]]:
        """The files with these endings; one below the root that cannot be opened is one of many, and noted."""
        for path in _files(self.root, set(exclude), endings):
            try:
                yield path, read_bytes(path)
            except OSError as error:
                if path == self.root:
                    raise
                self.unreadable.append((path, Unreadable(1, f"it cannot be opened: {error.strerror}")))

    def is_test(self, source: Source) -> bool:
        """Whether a file below the root is a test: nobody launches it for what it trains."""
        if not self.root.is_dir():
            return False
        inside, name = source.path.relative_to(self.root), source.path.stem
        is_named = name.startswith("test_") or name.endswith("_test") or name == "conftest"
        return is_named or not {"tests", "test"}.isdisjoint(inside.parts[:-1])

    def module(self, dotted: str, importer: Source) -> Optional[Source]:
        """The file in the tree that `import dotted` in `importer` means."""
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
            found = [s for s in found if len(self._parts[s]) == 1]
        return min(found, key=lambda s: len(self._parts[s]), default=None)

    def definition(self, dotted: str, importer: Source, depth: int = 0) -> Union[Unit, Class, None]:
        """The function or class that a dotted origin names, through re-exports."""
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
        """What a (dotted) name in the text of `source` was defined as."""
        name = source.qualified(node)
        return self.definition(name, source) if name else None

    def classes(self, nodes: Iterable[Optional[ast.AST]], source: Source) -> list[Class]:
        """The classes of the tree that these names in the text of `source` mean."""
        found = (self.defined(node, source) for node in nodes if node is not None)
        return [each for each in found if isinstance(each, tuple)]

    def _find_imports(self, source: Source) -> list[Source]:
        found = (self.module(dotted, source) for dotted in source.imported)
        return list(dict.fromkeys(s for s in found if s is not None and s is not source))

    def closure(self, entry: Source) -> list[Source]:
        """The entry and all that it imports, directly or not."""
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
        for entry in self.sources if trains else ():
            if not (entry.is_script or entry not in imported) or self.is_test(entry):
                continue
            files = self.closure(entry)
            reached = self._reach([entry.module, entry.main], files) if not trains.isdisjoint(files) else []
            if any(_trains(unit) for unit in reached) and not any("init_rpc" in unit.attributes for unit in reached):
                units = self._reach([*reached, *_run_at_import(files, entry)], files)
                program = Program(entry, files, units)
                if program.is_distributed or self.root.is_file() or program.may_be_launched:
                    programs.append(program)
                covered.update(u.source for u in units if _trains(u))
        for entry in self.sources:  # a trainer that is reached through a string in a config, or by other code
            is_named = self.root.is_file() or not self.targets.keys().isdisjoint(entry.classes)
            if not is_named or entry not in trains - covered or self.is_test(entry):
                continue
            if not any("init_rpc" in u.attributes for u in entry.units):
                files = self.closure(entry)
                units = self._reach([*entry.units, *_run_at_import(files, entry)], files)
                programs.append(Program(entry, files, units))
        return sorted(programs, key=lambda p: not p.is_distributed)

    def _find_training(self) -> set[Unit]:
        """Functions that train, and those that name one of them."""
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

    def _reach(self, start: Iterable[Unit], files: list[Source]) -> list[Unit]:
        """The units that `start` may run: functions by name, methods by name where their class is used somewhere."""
        methods: dict[str, list[Unit]] = {}
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
                if is_called_back or unit.name in asked or unit.name[:2] == "__" or unit.name == "forward":
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
                # A parser makes its arguments from the command line.
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
                # How many unrelated classes have a method of this name?
                families = {self._line(u.source, u.owner)[-1] for u in methods[name] if u.owner is not None}
                if len(families) <= _FEW:
                    asked.add(name)
                    for method in methods[name]:
                        if method.owner in live:
                            add(method)
                else:
                    for owner in self._receivers(name, unit):
                        for method in methods[name]:
                            if method.owner in owner or owner[0] in self._line(method.source, method.owner or owner[0]):
                                add(method)
        return list(seen)

    def _line(self, source: Source, node: ast.ClassDef) -> tuple[ast.ClassDef, ...]:
        """A class and its bases in the tree, the first of each."""
        if node not in self._lines:
            self._lines[node] = (node,)  # while it is looked for: a class that seems to be its own base
            bases = self.classes(node.bases, source)
            self._lines[node] = (node, *self._line(*bases[0])) if bases else (node,)
        return self._lines[node]

    def _receivers(self, name: str, unit: Unit) -> Iterator[tuple[ast.ClassDef, ...]]:
        """The classes of the objects whose method `name` is used in `unit`, where that can be seen."""
        for attribute in unit.all(ast.Attribute):
            if attribute.attr != name:
                continue
            receiver = attribute.value
            key = key_of(receiver) if not isinstance(receiver, ast.Call) else ""
            if unit.owner is not None and (key in ("self", "cls") or last_name(receiver) == "super"):
                yield self._line(unit.source, unit.owner)
                continue
            mates = [u for u in unit.source.units if unit.owner is not None and u.owner is unit.owner]
            values: list[Optional[ast.expr]] = [receiver] if isinstance(receiver, ast.Call) else []
            values += [b.value for u in [unit, unit.source.module, *mates] for b in u.bindings.get(key or "", [])]
            made = [value.func for value in values if isinstance(value, ast.Call)]
            yield from (self._line(*found) for found in self.classes(made, unit.source))

    def _find_direct(self, unit: Unit) -> tuple[list[Unit], list[Class]]:
        """Functions and classes that `unit` names."""
        found = [self.definition(dotted, unit.source) for dotted in unit.used - {""}]
        return [each for each in found if isinstance(each, Unit)], [each for each in found if isinstance(each, tuple)]


def _all_from(start: Iterable[T], follow: Callable[[T], Iterable[T]]) -> list[T]:
    """All that is reached from `start`, itself included."""
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
    """Whether one of them puts something into a registry, from where it is called by a name in a config."""
    return any("regist" in name.lower() for name in decorators)


def _trains(unit: Unit) -> bool:
    return OUR_EPOCH in unit.origins or (
        not TRAINING_CALLS.isdisjoint(unit.attributes)
        and any(isinstance(c.func, ast.Attribute) and c.func.attr in TRAINING_CALLS for c in unit.all(ast.Call))
    )


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


def _targets(configs: dict[Path, bytes]) -> dict[str, list[tuple[str, Path]]]:
    """Classes that hydra's configs instantiate, by their last name: the dotted one and the config."""
    out: dict[str, list[tuple[str, Path]]] = {}
    for path, content in configs.items():
        for match in _TARGET.findall(content):
            dotted = match.decode()
            out.setdefault(dotted.rpartition(".")[2], []).append((dotted, path))
    return out


def _clocks(configs: dict[Path, bytes]) -> Iterator[tuple[Path, int]]:
    """Configs that put the time into a folder's name, and the line."""
    for path, content in configs.items():
        for number, line in enumerate(content.split(b"\n"), 1):
            if b"${now:" in line and re.match(rb"\s*(dir|\w*_dir|\w*path|output\w*)\s*:", line):
                yield path, number
                break


def _files(root: Path, exclude: set[str], endings: tuple[str, ...]) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            f for f in folders if f not in _SKIPPED_FOLDERS | exclude and not (Path(folder) / f / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            if name.endswith(endings) and name not in exclude:
                yield Path(folder) / name
