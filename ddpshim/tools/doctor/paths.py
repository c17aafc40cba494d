"""Finds the files to read: all files below a folder, the imports of a single file, and configs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ddpshim.tools.doctor.source import Source

_SKIPPED_FOLDERS = {".git", ".hg", ".tox", ".nox", "__pycache__", "node_modules", "site-packages", ".eggs"}
_INSTALLED = {"site-packages", "dist-packages"}
_TARGET = re.compile(rb"_target_:\s*['\"]?([A-Za-z_][\w.]*)")


def targets(configs: dict[Path, bytes]) -> dict[str, list[tuple[str, Path]]]:
    """Return class name -> [(dotted name, config)] for the classes that hydra's configs instantiate."""
    out: dict[str, list[tuple[str, Path]]] = {}
    for path, content in configs.items():
        for match in _TARGET.findall(content):
            dotted = match.decode()
            out.setdefault(dotted.rpartition(".")[2], []).append((dotted, path))
    return out


def clocks(configs: dict[Path, bytes]) -> Iterator[tuple[Path, int]]:
    """Yield (config, line number) of configs that put the current time into the name of a folder."""
    for path, content in configs.items():
        for number, line in enumerate(content.split(b"\n"), 1):
            if b"${now:" in line and re.match(rb"\s*(dir|\w*_dir|\w*path|output\w*)\s*:", line):
                yield path, number
                break


def above_package(folder: Path) -> Path:
    """Return the folder above the package that `folder` is in, where the names of its modules start; else `folder`.

    A folder of scripts directly in a package belongs to it, also without __init__.py.
    """
    while folder != folder.parent and any((f / "__init__.py").exists() for f in (folder, folder.parent)):
        folder = folder.parent
    return folder


def project_of(file: Path) -> Path:
    """Return the folder where a file's absolute imports start: its project, else the folder above its package."""
    top = above_package(file.parent)
    marks = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
    above = [top, *list(top.parents)[:3]] if top.name not in _INSTALLED else []
    return next((folder for folder in above if any((folder / mark).exists() for mark in marks)), top)


def imported_files(source: Source, top: Path) -> Iterator[Path]:
    """Yield the project's files that `source` imports: absolute ones from its folder, one above, or src.

    Of installed packages only the one that `source` is in belongs to the project.
    """
    own = source.path.relative_to(top).parts[0]
    folders = [f for f in source.path.parents if f == top or top in f.parents]
    for dotted in source.imported:
        stem = dotted.lstrip(".")
        level = len(dotted) - len(stem)
        if stem.partition(".")[0] == "ddpshim":
            continue
        starts = folders[level - 1 : level] if level else [*folders, top / "src"]
        for start in starts:
            if start.name in _INSTALLED and stem.partition(".")[0] != own:
                continue
            path = start.joinpath(*stem.split(".")) if stem else start
            found = next((p for p in (path.with_name(path.name + ".py"), path / "__init__.py") if p.is_file()), None)
            if found is not None:
                yield found
                break


def config_files(root: Path, exclude: set[str]) -> Iterator[Path]:
    """Yield the YAML files below a folder; for a file, those in its folder and in the "conf*" folders there."""
    if root.is_dir():
        yield from files_below(root, exclude, (".yaml", ".yml"))
        return
    for pattern in ("*.y*ml", "conf*/**/*.y*ml"):
        yield from (path for path in sorted(root.parent.glob(pattern)) if path.name not in exclude)


def files_below(root: Path, exclude: set[str], endings: tuple[str, ...]) -> Iterator[Path]:
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
