"""Reads all files below a path, finds the trainers among them, and the functions that each trainer may run."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable, Optional, TypeVar, Union

from ddpshim.reading import read_bytes
from ddpshim.tools.check.reading.source import Source, Unit, constant, entered, key_of, last_name

T = TypeVar("T", Source, Unit)
Class = tuple[Source, ast.ClassDef]
TRAINING_CALLS = {"backward", "train_on_batch", "manual_backward"}
_DISTRIBUTED = {"init_process_group", "DistributedDataParallel", "DistributedSampler", "init_distributed"}
_VARIABLES = {"LOCAL_RANK", "WORLD_SIZE", "RANK", "SLURM_PROCID"}
# Methods that Python or torch may call on any object; not __del__ and __exit__, in which recorders close their files.
_BY_PYTHON = re.compile(r"__(init|new|call|iter|next|getitem|len|enter)__|forward")
_NO_TRAINER = re.compile(r"^(test|eval|conftest|infer|bench)|_(test|eval)$")
_SAVES = re.compile(r"(?i)^_?(save\w*|dump|log_model|push_to_hub)$")  # a one-process trainer keeps something
_COMMANDS = {"wrap", "main", "command", "cli", "hydra_main"}  # decorators of command-line functions
_SKIPPED = {".git", ".hg", ".tox", ".nox", "__pycache__", "node_modules", "site-packages", ".eggs", "tests", "test"}
# Rules skip programs that use a framework with the fix built in.
_FRAMEWORKS = {
    "accelerate": r"accelerate\.Accelerator|deepspeed\.initialize|horovod\.torch\.init",
    "trainer": r"(pytorch_lightning|lightning|lightning\.pytorch)\.(Trainer|Lightning\w+|Fabric|cli\.LightningCLI)"
    r"|lightning(_|\.)fabric\.Fabric|transformers\.(Seq2Seq)?Trainer|trl\.\w+Trainer",
    "ddpshim": r"ddpshim\.(setup|wrap_parallel|make_loader|robomimic\w*)",
}


class Trainer:
    """A script that trains, the files that it imports, and the units that it may run."""

    def __init__(self, entry: Source, files: list[Source], units: list[Unit]) -> None:
        self.entry, self.files = entry, files
        self.units = sorted(units, key=lambda unit: (unit.source.path, getattr(unit.node, "lineno", 0)))
        self.words = set[str]().union(*(unit.words for unit in units))
        self.origins = frozenset[str]().union(*(unit.origins for unit in units))
        self.frameworks = {n for n, mark in _FRAMEWORKS.items() if any(re.fullmatch(mark, o) for o in self.origins)}
        named = {origin.rpartition(".")[2] for origin in self.origins}
        asked = {constant(text) for unit in units if "environ" in unit.words for text in unit.all(ast.Constant)}
        self.is_distributed = bool(self.frameworks or named & _DISTRIBUTED or asked & _VARIABLES)
        # Somebody would start it on several ranks: it loads data, and saves something.
        loads = "DataLoader" in self.words or "train" in entry.path.stem
        self.may_be_launched = self.is_distributed or (loads and any(map(_SAVES.match, self.words)))

    def calls(self, *names: str) -> Iterator[tuple[Unit, ast.Call]]:
        """Yield calls of functions or methods with these names, also if imported under others; without names all."""
        for unit in self.units:
            known = unit.source.names.items() if names else ()
            wanted = {*names, *(own for own, origin in known if origin.rpartition(".")[2] in names)}
            if not names or wanted & unit.words:
                yield from ((unit, c) for c in unit.all(ast.Call) if not names or last_name(c.func) in wanted)


class Tree:
    """The files below `root`, or the file and what it imports from its project, and the trainers among them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unreadable: list[tuple[Path, int, str]] = []
        self._by_path: dict[Path, Optional[Source]] = {}
        self._top = root if root.is_dir() else _project_of(root)
        self._module = functools.cache(self._find_module)
        self.imports = functools.cache(self._imports)
        self._direct = functools.cache(self._named_in)
        for path in _files_below(root):
            self._parse(path)
        if root.is_file():
            _all_from(self.sources, self.imports)
        self.trainers = sorted(self._find_trainers(), key=lambda trainer: not trainer.is_distributed)
        self.training = self._find_training()

    @property
    def sources(self) -> list[Source]:
        return [source for source in self._by_path.values() if source is not None]

    def _parse(self, path: Path) -> Optional[Source]:
        """Return the parsed file; an unreadable one is noted, but an unreadable root raises OSError."""
        if path not in self._by_path:
            self._by_path[path] = None
            try:
                self._by_path[path] = Source(path, read_bytes(path))
            except OSError as error:
                if path == self.root:
                    raise
                self.unreadable.append((path, 1, f"it cannot be opened: {error.strerror}"))
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                line, why = getattr(error, "lineno", None) or 1, getattr(error, "msg", "") or str(error)
                self.unreadable.append((path, line, why))
        return self._by_path[path]

    def _find_module(self, dotted: str, folder: Path) -> Optional[Source]:
        """Return the file that `import dotted` in `folder` refers to: nearest first, then in other packages."""
        stem, above = dotted.lstrip("."), [folder, *folder.parents]
        level, above = len(dotted) - len(stem), above[: above.index(self._top) + 1]
        packages = [*above, *(path.parent for path in self._by_path if path.name == "setup.py")]
        starts = above[level - 1 : level] if level else [start for each in packages for start in (each, each / "src")]
        for path in (start / stem.replace(".", "/") for start in starts if not stem.startswith("ddpshim")):
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file in self._by_path or (self.root.is_file() and file.is_file()):
                    return self._parse(file)
        return None

    def defined(self, node: ast.AST, source: Source) -> Union[Unit, Class, None]:
        """Return the definition of a name in `source`: a function, a class, or None if it is not in the tree."""
        return self.definition(source.qualified(node), source)

    def definition(self, dotted: str, source: Source, depth: int = 0) -> Union[Unit, Class, None]:
        """Return the definition of a dotted name, through the files that import it."""
        if dotted in source.functions:
            return source.functions[dotted]
        if dotted in source.classes:
            return source, source.classes[dotted]
        base, _, name = dotted.rpartition(".")
        base = base or "." if dotted.startswith(".") else base  # `from . import name`
        found = self._module(base, source.path.parent) if base and name and depth < 5 else None
        if found is None or found is source:
            return None
        return self.definition(found.names.get(name, name), found, depth + 1)

    def bases(self, source: Source, node: ast.ClassDef, depth: int = 0) -> Iterator[Union[Class, str]]:
        """Yield the class and all its bases; those outside the tree by their names."""
        yield source, node
        for base in node.bases if depth < 8 else ():
            found = self.defined(base, source)
            if isinstance(found, tuple):
                yield from self.bases(*found, depth + 1)
            else:
                yield source.qualified(base)

    def method_of(self, node: ast.expr, unit: Unit) -> Optional[Unit]:
        """Return the method that `x.name` is, if the unit or its class shows the class of `x`."""
        owner = self.visible_class(node.value, unit) if isinstance(node, ast.Attribute) else None
        for found in self.bases(*owner) if owner is not None else ():
            if isinstance(found, tuple) and (found[1], last_name(node)) in found[0].methods:
                return found[0].methods[found[1], last_name(node)]
        return None

    def _imports(self, source: Source) -> list[Source]:
        found = (self._module(dotted, source.path.parent) for dotted in source.imported)
        return list(dict.fromkeys(s for s in found if s is not None and s is not source))

    def _find_trainers(self) -> Iterator[Trainer]:
        trains = {s for s in self.sources if any(map(trains_in, s.units))}
        imported = {i for s in self.sources for i in self.imports(s)} if trains else set()
        for entry in self.sources[:1] if self.root.is_file() else self.sources:
            is_script = bool(entry.main.by_type) or entry not in imported or self.root.is_file()
            files = _all_from([entry], self.imports) if is_script and not _NO_TRAINER.search(entry.path.stem) else []
            if trains.isdisjoint(files):
                continue
            start = [s.module for s in files]
            start += entry.units if self.root.is_file() or entry in trains else [entry.main]
            start += [u for u in entry.functions.values() if u.name == "main" or _COMMANDS & {*entered(u.node)}]
            start += [u for s in files for u in s.functions.values() if any("regist" in d for d in entered(u.node))]
            trainer = Trainer(entry, files, self._reach(start))
            if (self.root.is_file() or trainer.may_be_launched) and any(map(trains_in, trainer.units)):
                yield trainer

    def _find_training(self) -> set[Unit]:
        """Return the functions that train, and all that call one of them, directly or indirectly."""
        callers: dict[Unit, list[Unit]] = {}
        units = {u: None for trainer in self.trainers for u in trainer.units}
        for unit in units:
            for called in self._direct(unit)[0]:
                callers.setdefault(called, []).append(unit)
        return set(_all_from((u for u in units if trains_in(u)), lambda unit: callers.get(unit, [])))

    def _reach(self, start: Iterable[Unit]) -> list[Unit]:
        """Return what `start` may run: functions, methods of visible classes, and what torch or Python calls."""

        def follow(unit: Unit) -> list[Unit]:
            functions, classes = self._direct(unit)
            classes = [*classes, (unit.source, unit.owner)] if unit.owner is not None else classes
            line = [base for one in classes for base in self.bases(*one) if isinstance(base, tuple)]
            live = [(name, u) for source, node in line for (owner, name), u in source.methods.items() if owner is node]
            named = set[str]().union(*(u.words for _, u in live if u.name == "__init__"))
            return [*functions, *(u for name, u in live if name in named or _BY_PYTHON.fullmatch(name))]

        return _all_from(start, follow)

    def visible_class(self, node: ast.expr, unit: Unit) -> Optional[Class]:
        """Return the class of an object if the unit or its class shows it: self, super(), or `name = Class(...)`."""
        key = key_of(node)
        if unit.owner is not None and (key in ("self", "cls") or last_name(node) == "super"):
            return unit.source, unit.owner
        where = [unit, unit.source.module, *(unit.mates if key.startswith("self.") else ())]
        values = [b.value for u in where for b in u.bindings.get(key, [])]
        for value in [node, *values]:
            found = self.defined(value.func, unit.source) if isinstance(value, ast.Call) else None
            if isinstance(found, tuple):
                return found
        return None

    def _named_in(self, unit: Unit) -> tuple[list[Unit], list[Class]]:
        """Return the functions, the methods of visible classes, and the classes that `unit` names."""
        found = [self.definition(dotted, unit.source) for dotted in unit.origins - {""}]
        methods = (self.method_of(node, unit) for node in unit.all(ast.Attribute) if isinstance(node.ctx, ast.Load))
        functions = [each for each in (*found, *methods) if isinstance(each, Unit)]
        return functions, [each for each in found if isinstance(each, tuple)]


def trains_in(unit: Unit) -> bool:
    """Whether a unit makes a training step, or a framework does: through its Trainer or `training_step`."""
    if unit.name == "forward":  # backward() in forward() computes a gradient penalty
        return False
    called = [c.func for c in unit.all(ast.Call) if isinstance(c.func, ast.Attribute)]
    if any(f.attr in TRAINING_CALLS for f in called) or "ddpshim.robomimic.run_epoch" in unit.origins:
        return True
    if any({"loss", "optimizer"} <= {*map(last_name, c.args)} for c in unit.all(ast.Call)):
        return True  # timm's scaler(loss, optimizer) runs backward and steps
    knows = any(re.match(r"(pytorch_)?lightning|transformers|trl\b", origin) for origin in unit.source.names.values())
    fits = any(f.attr in ("fit", "train") and "trainer" in key_of(f.value).lower() for f in called)
    return knows and (fits or (unit.name == "training_step" and unit.owner is not None))


def _all_from(start: Iterable[T], follow: Callable[[T], Iterable[T]]) -> list[T]:
    """Return all items that `follow` reaches from `start`, including `start`."""
    seen = dict.fromkeys(start)
    queue = list(seen)
    while queue:
        new = [each for each in follow(queue.pop()) if each not in seen]
        seen.update(dict.fromkeys(new))
        queue += new
    return list(seen)


def _files_below(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and not Path(folder, f, "pyvenv.cfg").exists())
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _project_of(file: Path) -> Path:
    """Return the folder of the project that a file is in: a near one with pyproject.toml, else that of its package."""
    marks = ("pyproject.toml", "setup.py", ".git")
    marked = (folder for folder in list(file.parents)[:5] if any((folder / mark).exists() for mark in marks))
    return next(marked, next(folder for folder in file.parents if not (folder / "__init__.py").exists()))
