"""Finds out before a program runs whether it distributes itself: reads its file and the local modules it imports.

Modules that only a configuration names are found while the program runs: `hand_back.py`.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence, Set
from importlib.machinery import PathFinder
from typing import Optional

_MOST_FILES = 2000
# Packages that distribute a program, if its own file imports them.
_DISTRIBUTORS = {
    *("lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "horovod", "colossalai"),
    *("composer", "mpi4py", "torch_xla"),
}
_JOINS = {"init_process_group", "init_device_mesh"}
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}


class Sources:
    """What the files of a program say: its own, and the local modules that they import.

    Attributes:
        own_way: how the program distributes itself, with file and line; None if it does not seem to.
        by_ddpshim: whether it does so through ddpshim.
        joins: whether its own file calls a function that makes a process group, perhaps only under a launcher.
        packages: what they import, by the first part of the name.
        asks_for_rank: whether one names a variable of a rank.
    """

    def __init__(self, program: Optional[str]) -> None:
        """`program`: its file; None if there is no file to read."""
        self.own_way: Optional[str] = None
        self.by_ddpshim = self.joins = self.asks_for_rank = False
        self.packages = set[str]()
        if program is None or not program.endswith(".py"):
            return
        roots = [os.path.dirname(os.path.abspath(program)), *(path or os.getcwd() for path in sys.path)]
        self._roots = [root for root in dict.fromkeys(roots) if not _is_installed(root)]
        pending = [os.path.abspath(program)]
        seen: set[str] = set()
        while pending and len(seen) < _MOST_FILES and self.own_way is None:
            path = pending.pop(0)
            if path in seen:
                continue
            seen.add(path)
            tree = _parsed(path)
            if tree is not None:
                imports, names = [*_imports(path, tree)], {*_names(tree)}
                self.own_way = _first_of({"ddpshim"}, path, imports)
                self.by_ddpshim = self.own_way is not None
                if len(seen) == 1:  # the program
                    self.own_way = self.own_way or _first_of(_DISTRIBUTORS, path, imports) or _joins(path, tree)
                    self.joins = not _JOINS.isdisjoint(names)
                self.asks_for_rank |= not _OF_RANKS.isdisjoint(names)
                self.packages |= {name.partition(".")[0] for name, _ in imports}
                for name, _ in imports:
                    if name.partition(".")[0] not in sys.builtin_module_names:
                        pending += self._files_of(name)

    def _files_of(self, name: str) -> Iterator[str]:
        """Yield the files that `import name` executes, without installed packages."""
        folders = self._roots
        for part in name.split("."):
            spec = PathFinder.find_spec(part, folders)
            if spec is not None and str(spec.origin).endswith(".py"):
                yield str(spec.origin)
            if spec is None or not spec.submodule_search_locations:
                return
            folders = [*spec.submodule_search_locations]


def _is_installed(folder: str) -> bool:
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    inside = any(os.path.join(folder, "").startswith(os.path.join(path, "")) for path in installed)
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(folder.split(os.sep)) or folder.endswith(".zip")


def _parsed(path: str) -> Optional[ast.Module]:
    """Return the syntax of a file; None if it is not Python."""
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the modules that a file imports, and the lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            yield from ((f"{module}.{alias.name}".strip("."), node.lineno) for alias in node.names)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the functions, attributes and texts that a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, (ast.Attribute, ast.Constant)):
            yield node.attr if isinstance(node, ast.Attribute) else str(node.value)


def _joins(path: str, tree: ast.Module) -> Optional[str]:
    """Say which function a file calls, under no condition, that makes a process group; None if there is none."""
    conditional = {inside for node in ast.walk(tree) if _depends(node) for inside in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in conditional:
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if name in _JOINS:
                return f"{os.path.basename(path)} calls {name}"
    return None


def _first_of(packages: Set[str], path: str, imports: Sequence[tuple[str, int]]) -> Optional[str]:
    """Say where a file first imports one of `packages`; None if it does not."""
    for name, line in imports:
        if name.partition(".")[0] in packages and name != "ddpshim.auto":
            return f"{os.path.basename(path)}:{line} imports {name.partition('.')[0]}"
    return None


def _depends(node: ast.AST) -> bool:
    """Whether what is inside runs under a condition: not `if __name__ == "__main__"`."""
    if not isinstance(node, (ast.If, ast.IfExp)):
        return False
    return not any(isinstance(name, ast.Name) and name.id == "__name__" for name in ast.walk(node.test))


def _absolute(path: str, node: ast.ImportFrom) -> str:
    """Return the module of a `from` import; a relative one is resolved from the outermost folder with __init__.py."""
    if not node.level:
        return node.module or ""
    parts: list[str] = []
    folder = os.path.dirname(path)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, name = os.path.split(folder)
        parts.insert(0, name)
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])
