"""Patches a package's files in memory when one of them runs as a program; nothing on disk changes.

Another program that imports the package gets the files as they are.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType
from typing import NamedTuple, Optional

from ddpshim import adapters
from ddpshim.process.launch_env import read_launch_env
from ddpshim.process.say import say
from ddpshim.trainers.patching import PatchSet, Status, load_sets, looks, read, transform, turned


class Patched(NamedTuple):
    """The patched text of each module that the set `name` changes, without those that are patched on disk."""

    name: str
    sources: dict[str, bytes]
    moved: list[str]  # files of no release, in which each hunk's lines occur exactly once, at any place
    lacking: list[str]  # a line for each hunk that has no place


def module_of(path: str) -> Optional[str]:
    """Return the module of the file `path`, if it is in an installed package that has an adapter; else None. Local."""
    file = Path(path).resolve()
    for package in adapters.packages().keys() & set(file.parts):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if Path(folder).resolve() in file.parents:
                return _module_of(str(file.relative_to(Path(folder).resolve().parent)))
    return None


def patch_program(module: str) -> bool:
    """Patch what Python loads from now on, if a set changes `module`, which is about to run as a program. Local.

    Returns False if there is none, if it is patched on disk, or if none fits the files; a line then says which.
    """
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package) if package in adapters.packages() else None
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return False
    folder = Path(next(iter(folders)))
    sets = [found for found in load_sets() if found.package == package]
    files = {folder / name.split("/", 1)[1] for found in sets for name in found.files if _module_of(name) == module}
    imports = re.compile(rb"^\s*(import|from)\s+ddpshim\b", re.MULTILINE)
    # Patched on disk, or a fork into which a set was merged.
    if not files or any(imports.search(read(file)) for file in files if file.is_file()):
        return False
    found = fit(folder, sets)
    is_main = read_launch_env(os.environ).rank == 0
    if found.lacking:
        if is_main:
            say(
                f"{folder} is not a release that ddpshim knows, and no patch set fits its lines: it is distributed as "
                f"any other program (python -m ddpshim docs run). {found.name}, the nearest, has no place for:"
                "\n  " + "\n  ".join(found.lacking)
            )
        return False
    if found.moved and is_main:
        say(
            f"{folder} is not a release that ddpshim knows; the lines of {found.name} occur once each in "
            f"{', '.join(sorted(found.moved))}, and are patched in memory"
        )
    if found.sources:
        sys.meta_path.insert(0, PatchedFiles(found.sources))
    return bool(found.sources)


def fit(folder: Path, sets: Sequence[PatchSet]) -> Patched:
    """Return the package in `folder` patched by the set that fits; if none does, by the nearest, as far as it fits.

    A set fits if the files are those of its release, or else if each hunk's lines occur exactly once; the nearest
    release is tried first.
    """
    found = looks(folder, sets)
    return next((each for each in map(_patched, found) if not each.lacking), None) or _patched(found[0])


class PatchedFiles(importlib.abc.MetaPathFinder):
    """Finds the modules that a set has patched."""

    def __init__(self, sources: Mapping[str, bytes]) -> None:
        """`sources`: the patched text of each module."""
        self._sources = sources

    def find_spec(self, name: str, path: Optional[Sequence[str]], target: object = None) -> Optional[ModuleSpec]:
        found = PathFinder.find_spec(name, path) if name in self._sources else None
        if found is not None and found.origin is not None:
            found.loader = _Loader(name, found.origin, self._sources[name])
        return found


def _module_of(name: str) -> str:
    path = name[: -len(".py")].split("/")
    return ".".join(path[:-1] if path[-1] == "__init__" else path)


def _patched(look: Status) -> Patched:
    made = Patched(look.patch_set.name, {}, [], [])
    for file in look.files:
        if file.state == "missing":
            made.lacking.append(f"{file.name}: does not exist")
        elif file.state == "original":
            made.sources[_module_of(file.name)] = turned(look.patch_set, file, "patched")
        elif file.state == "unknown":
            patches, module = look.patch_set.patches, _module_of(file.name)
            made.sources[module], odd = transform(patches, file.name, file.content, "patched", is_moved=True)
            made.lacking.extend(odd)
            made.moved.append(file.name)
    return made


class _Loader(SourceFileLoader):
    """Loads a module from its patched text; another file name in its code makes tracebacks show that text."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> Optional[CodeType]:
        code: CodeType = self.source_to_code(self._source, f"{self.path}, patched by ddpshim")
        return code

    def get_source(self, fullname: str) -> Optional[str]:
        return decode_source(self._source)
