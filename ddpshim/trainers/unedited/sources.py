"""Finds out before a program runs whether it distributes itself: reads its file and the local modules it imports.

Modules that only a configuration names are found while the program runs: `hand_back.py`.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Optional

_MOST_FILES = 2000
# Packages that distribute a program, if its own file imports them.
_DISTRIBUTORS = {
    *("lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "horovod", "colossalai"),
    *("composer", "mpi4py", "torch_xla"),
}
_JOINS = {"init_process_group", "init_device_mesh"}
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}


@dataclass
class Source:
    """The imports and names of one file."""

    path: str
    imports: list[tuple[str, int]] = field(default_factory=list)  # (name of a module, line)
    names: set[str] = field(default_factory=set)  # functions, attributes and texts that it uses
    joins: Optional[str] = None  # a function that makes a process group, called under no condition


class Sources:
    """The files of a program.

    Attributes:
        own_way: how the program distributes itself, with file and line; None if it does not seem to.
        by_ddpshim: whether it does so through ddpshim.
        joins: whether its own file calls a function that makes a process group, perhaps only under a launcher.
        imports_torch, asks_for_rank: whether an import statement imports torch; whether it names a rank's variable.
    """

    def __init__(self, program: Optional[str]) -> None:
        """`program`: its file; None if there is no file to read."""
        self.own_way: Optional[str] = None
        self.by_ddpshim = False
        self.joins = self.imports_torch = self.asks_for_rank = False
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
            source = read(path)
            if source is not None:
                self.own_way = _by_ddpshim(source)
                self.by_ddpshim = self.own_way is not None
                if len(seen) == 1:  # the program
                    self.own_way = self.own_way or _by_others(source)
                    self.joins = not _JOINS.isdisjoint(source.names)
                self.asks_for_rank |= not _OF_RANKS.isdisjoint(source.names)
                for name, _ in source.imports:
                    top = name.partition(".")[0]
                    self.imports_torch |= top == "torch"
                    if top not in sys.builtin_module_names:
                        pending += self._files_of(name)

    def _files_of(self, name: str) -> Iterator[str]:
        """Return the files that `import name` executes, without installed packages."""
        for root in self._roots:
            found = [*_files_below(root, name.split("."))]
            if found:
                yield from found
                return


def _files_below(root: str, parts: Sequence[str]) -> Iterator[str]:
    folder = root
    for part in parts:
        folder = os.path.join(folder, part)
        if os.path.isfile(f"{folder}.py"):
            yield f"{folder}.py"
            return
        if not os.path.isdir(folder):
            return
        if os.path.isfile(os.path.join(folder, "__init__.py")):
            yield os.path.join(folder, "__init__.py")


def _is_installed(folder: str) -> bool:
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    inside = any(os.path.join(folder, "").startswith(os.path.join(path, "")) for path in installed)
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(folder.split(os.sep)) or folder.endswith(".zip")


def read(path: str) -> Optional[Source]:
    """Return the imports and names of a file; None if it is not Python. Local."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    source = Source(path)
    conditional = {inside for node in ast.walk(tree) if _depends(node) for inside in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            source.imports += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            source.names.update(alias.name for alias in node.names)
            source.imports += [(f"{module}.{alias.name}".strip("."), node.lineno) for alias in node.names]
        elif isinstance(node, (ast.Attribute, ast.Constant)):
            source.names.add(node.attr if isinstance(node, ast.Attribute) else str(node.value))
        elif isinstance(node, ast.Call) and node not in conditional:
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            source.joins = name if name in _JOINS else source.joins
    return source


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


def _by_ddpshim(source: Source) -> Optional[str]:
    where = os.path.basename(source.path)
    for name, line in source.imports:
        top = name.partition(".")[0]
        if top == "ddpshim" and name != "ddpshim.auto":
            return f"{where}:{line} imports ddpshim"
    return None


def _by_others(source: Source) -> Optional[str]:
    where = os.path.basename(source.path)
    for name, line in source.imports:
        top = name.partition(".")[0]
        if top in _DISTRIBUTORS:
            return f"{where}:{line} imports {top}"
    return None if source.joins is None else f"{where} calls {source.joins}"
