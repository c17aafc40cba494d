"""Patches the files of a package in memory when Python loads them; nothing on disk changes.

If a file of the package is run as a program, it is patched, and so is each file of its patch set that it imports. If
another program imports the package, only the files that its adapter names are patched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Callable, NamedTuple, Optional

from ddpshim.errors import HookError
from ddpshim.job.launch_env import read_launch_env
from ddpshim.job.say import say
from ddpshim.trainers.patching.files import FileStatus, look_at, status, turned
from ddpshim.trainers.patching.patchset import PatchSet, load_sets, transform_moved


class Patched(NamedTuple):
    """The patched text of each module that the set `name` changes, without those that are patched on disk.

    `moved`: files of no release, in which each hunk's lines occur exactly once, at any place.
    """

    name: str
    sources: dict[str, bytes]
    moved: tuple[str, ...]


class PatchedFiles(importlib.abc.MetaPathFinder):
    """Finds the modules of the package in `folder` that a patch set changes.

    Modules with `is_library(name)` are patched for every program, independently of each other; if no set fits such a
    file, it is loaded unpatched and `refused` has the reason. The others are patched together, when one of them is run
    as a program.
    """

    def __init__(
        self, folder: Path, patches_root: Optional[Path] = None, is_library: Callable[[str], bool] = lambda name: False
    ) -> None:
        self.folder = folder
        self._sets = [found for found in load_sets(patches_root) if found.package == folder.name]
        self._patches_root, self._is_library = patches_root, is_library
        self._files = {_module_of(name): name for patch_set in self._sets for name in patch_set.files}
        self._program: Optional[Patched] = None
        self.set_name: Optional[str] = None  # of the set that has patched a module in memory
        self.refused: dict[str, HookError] = {}

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name not in self._files:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or not isinstance(found.loader, SourceFileLoader) or found.origin is None:
            return found
        return importlib.util.spec_from_file_location(name, found.origin, loader=_Loader(name, found.origin, self))

    def module_at(self, path: Path) -> Optional[str]:
        """Return the module name of the file `path` (without symlinks) if a set changes it; else None. Local."""
        names = {(self.folder / file.split("/", 1)[1]).resolve(): name for name, file in self._files.items()}
        return names.get(path)

    def begin_program(self) -> None:
        """Patch every module that is loaded from now on: one of them is about to run as a program. Local.

        Raises HookError if no set fits, or if one of the modules is already loaded.
        """
        libraries = {name for name in self._files if self._is_library(name)}
        try:
            found = self._fit(self._files.keys() - libraries)
        except HookError as error:
            raise HookError(
                f"{error} Or run a copy of the trainer from outside the package (python -m ddpshim run "
                "my_train.py): its calls are hooked, and none of its lines need to be known."
            ) from None
        for name in sorted(libraries):
            try:
                own = self._fit({name})
            except HookError as error:
                self.refused[name] = error
                continue
            found = Patched(found.name, {**found.sources, **own.sources}, (*found.moved, *own.moved))
        too_early = [n for n in found.sources if n in sys.modules and patched_source(sys.modules[n]) is None]
        if too_early:
            raise HookError(_IMPORTED_TOO_EARLY.format(", ".join(too_early)))
        self._tell(found)
        self._program = found

    def source(self, name: str) -> Optional[bytes]:
        """Return the patched text of the module `name`; None if it is loaded as it is on disk. Local.

        Raises HookError if a set changes the module, but no set fits its file.
        """
        if self._program is not None:
            return self._program.sources.get(name)
        if name not in self._files or not self._is_library(name):
            return None
        found = self._fit({name})
        self._tell(found)
        return found.sources.get(name)

    def refuse(self, module: ModuleType) -> Optional[HookError]:
        """Return the error if `module`, which is loaded, should be patched but is not; else None. Local."""
        name = module.__name__
        if name not in self.refused and name in self._files and patched_source(module) is None:
            try:
                if self.source(name) is not None:
                    self.refused[name] = HookError(_IMPORTED_TOO_EARLY.format(name))
            except HookError as error:
                self.refused[name] = error
        return self.refused.get(name)

    def report(self) -> list[str]:
        """Return a line for each module that was loaded patched. Local."""
        loaders = [_loader_of(module) for module in [*sys.modules.values()]]
        return [f"{loader.name}: patched in memory" for loader in loaders if loader and loader.source is not None]

    def _tell(self, found: Patched) -> None:
        if found.sources:
            self.set_name = found.name
        if found.moved and read_launch_env(os.environ).rank == 0:
            say(
                f"{self.folder} is not a release that ddpshim knows; the lines of {found.name} occur once each in "
                f"{', '.join(sorted(found.moved))}, and are patched in memory"
            )

    @functools.cached_property
    def _nearest(self) -> PatchSet:
        return status(str(self.folder), patches_root=self._patches_root).patch_set

    def _fit(self, modules: set[str]) -> Patched:
        """Patch the files of these modules with the set that fits. Raises HookError if none does.

        A set fits if the files are those of its release, or else if each hunk's lines occur exactly once; the nearest
        release is tried first.
        """
        nearest = self._nearest.name
        wanted = {name for name in self._nearest.files if _module_of(name) in modules}
        candidates = []
        for patch_set in self._sets:
            if wanted <= patch_set.files.keys():
                files = [file for file in look_at(patch_set, self.folder).files if _module_of(file.name) in modules]
                is_release = all(file.state in ("original", "patched") for file in files)
                candidates.append((not is_release, patch_set.name != nearest, patch_set, files))
        refused: list[str] = []
        for _, is_other, patch_set, files in sorted(candidates, key=lambda candidate: candidate[:2]):
            found, lacking = _patched(patch_set, files)
            if not lacking:
                return found
            if not is_other or not refused:
                refused = lacking
        raise HookError(
            f"{self.folder} is not a release that ddpshim knows, and no patch set fits its lines. The nearest, "
            f"{nearest}, has no place for:\n  " + "\n  ".join(refused) + "\nWithout these the ranks would train a "
            "different model than one process. Restore the released files, or merge the set into yours (python "
            "-m ddpshim docs MIGRATION, section 2)."
        )


_IMPORTED_TOO_EARLY = (
    "{}: imported before ddpshim.auto, so it could not be patched, and ranks would train a different model than "
    "one process. Move `import ddpshim.auto` above that import."
)


def patched_source(module: Any) -> Optional[bytes]:
    """Return the patched text that `module` was loaded from; None if it was loaded from its file. Local."""
    loader = _loader_of(module)
    return loader.source if loader else None


def _loader_of(module: Any) -> Optional[_Loader]:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return loader if isinstance(loader, _Loader) else None


def _module_of(name: str) -> str:
    path = name[: -len(".py")].split("/")
    return ".".join(path[:-1] if path[-1] == "__init__" else path)


def _patched(patch_set: PatchSet, files: Sequence[FileStatus]) -> tuple[Patched, list[str]]:
    """Return these files patched by the set, and a line for each hunk that has no place in them."""
    sources, moved, lacking = {}, [], []
    for file in files:
        if file.state == "missing":
            lacking.append(f"{file.name}: does not exist")
        elif file.state == "original":
            sources[_module_of(file.name)] = turned(patch_set, file, "patched")
        elif file.state == "unknown":
            as_unix = file.content.replace(b"\r\n", b"\n")  # hunks have LF; Python reads both
            content, _, odd = transform_moved(patch_set.patches, file.name, as_unix)
            sources[_module_of(file.name)] = content
            moved.append(file.name)
            lacking += [f"{file.name}, {problem}" for problem in odd]
    return Patched(patch_set.name, sources, tuple(moved)), lacking


class _Loader(SourceFileLoader):
    """Loads a module from its patched text; another file name in its code makes tracebacks show that text."""

    def __init__(self, name: str, path: str, files: PatchedFiles) -> None:
        super().__init__(name, path)
        self.source: Optional[bytes] = None
        self._files = files

    def get_code(self, fullname: str) -> Optional[CodeType]:
        # Python calls `get_code` for a module that it runs as a program, and `exec_module` for an imported one.
        self._files.begin_program()
        return self._code()

    def exec_module(self, module: ModuleType) -> None:
        code = self._code()
        assert code is not None
        exec(code, vars(module))

    def get_source(self, fullname: str) -> Optional[str]:
        # The module of a program is called __main__, so `fullname` may differ from `self.name`.
        return super().get_source(self.name) if self.source is None else decode_source(self.source)

    def _code(self) -> Optional[CodeType]:
        with contextlib.suppress(HookError):  # users of the module get this error from `refuse`
            self.source = self._files.source(self.name)
        if self.source is None:
            return super().get_code(self.name)
        code: CodeType = self.source_to_code(self.source, f"{self.path}, patched by ddpshim")
        return code
