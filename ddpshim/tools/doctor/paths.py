"""Finds the files to read: those below a folder, what a file alone imports, and what configs name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ddpshim.tools.doctor.source import Source

_SKIPPED_FOLDERS = {".git", ".hg", ".tox", ".nox", "__pycache__", "node_modules", "site-packages", ".eggs"}
_TARGET = re.compile(rb"_target_:\s*['\"]?([A-Za-z_][\w.]*)")


def targets(configs: dict[Path, bytes]) -> dict[str, list[tuple[str, Path]]]:
    """Classes that hydra's configs instantiate, by their last name: the dotted one and the config."""
    out: dict[str, list[tuple[str, Path]]] = {}
    for path, content in configs.items():
        for match in _TARGET.findall(content):
            dotted = match.decode()
            out.setdefault(dotted.rpartition(".")[2], []).append((dotted, path))
    return out


def clocks(configs: dict[Path, bytes]) -> Iterator[tuple[Path, int]]:
    """Configs that put the time into a folder's name, and the line."""
    for path, content in configs.items():
        for number, line in enumerate(content.split(b"\n"), 1):
            if b"${now:" in line and re.match(rb"\s*(dir|\w*_dir|\w*path|output\w*)\s*:", line):
                yield path, number
                break


def project_of(file: Path) -> Path:
    """The folder that a file's absolute imports start from: of its project, else above its package."""
    top = file.parent
    while (top / "__init__.py").exists() and top.parent != top:
        top = top.parent
    marks = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
    above = [top, *list(top.parents)[:3]]
    return next((folder for folder in above if any((folder / mark).exists() for mark in marks)), top)


def imported_files(source: Source, top: Path) -> Iterator[Path]:
    """The files of the project that a source imports, by where Python would look: beside it, or from a folder above."""
    folders = [f for f in source.path.parents if f == top or top in f.parents]
    for dotted in source.imported:
        stem = dotted.lstrip(".")
        level = len(dotted) - len(stem)
        if stem.partition(".")[0] == "ddpshim":
            continue
        starts = folders[level - 1 : level] if level else [*folders, top / "src"]
        for start in starts:
            path = start.joinpath(*stem.split(".")) if stem else start
            found = next((p for p in (path.with_name(path.name + ".py"), path / "__init__.py") if p.is_file()), None)
            if found is not None:
                yield found
                break


def config_files(root: Path, exclude: set[str]) -> Iterator[Path]:
    """The YAML files below a folder, or beside a file and in the folders of configs there."""
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
