"""Applies a patch set to a loaded module, so that its functions do what the patched file's would.

The file stays as it is, and so do the line numbers in tracebacks.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Optional

from ddpshim.errors import HookError
from ddpshim.trainers.patching.patchset import PatchSet, read, sha256, transform


@dataclass
class PatchedCode:
    """What was exchanged in `module`, to be taken back by `revert`."""

    name: str
    module: ModuleType
    functions: list[tuple[FunctionType, CodeType]]
    new_names: list[str]

    def revert(self) -> None:
        """Have the module's functions do again what its file says. Local."""
        for function, code in self.functions:
            function.__code__ = code
        for name in self.new_names:
            vars(self.module).pop(name, None)


def fitting(sets: tuple[PatchSet, ...], package: Path) -> tuple[PatchSet, ...]:
    """Of `sets`, those that most files of the installed `package` belong to; none where no file does. Local."""
    counts = {}
    for patch_set in sets:
        files = {name: package.parent / name for name in patch_set.files}
        counts[patch_set.name] = sum(
            path.is_file() and sha256(read(path)) in patch_set.files[name] for name, path in files.items()
        )
    most = max(counts.values(), default=0)
    return tuple(patch_set for patch_set in sets if most and counts[patch_set.name] == most)


def patch_module(module: ModuleType, name: str, sets: tuple[PatchSet, ...]) -> Optional[PatchedCode]:
    """Apply to `module` what the one of `sets` says of its file `name`; None if that is done in the file, or no set
    mentions it. Local.

    Raises HookError where sets mention it and it is the file of none of them.
    """
    concerned = [patch_set for patch_set in sets if name in patch_set.files]
    if not concerned:
        return None
    path = Path(str(module.__file__))
    content = read(path)
    found = sha256(content)
    for patch_set in concerned:
        if found == patch_set.files[name].patched:
            return None
        if found == patch_set.files[name].original:
            return _exchange(module, content, transform(patch_set.patches, name, content, "patched"))
    known = ", ".join(sorted({f"{s.files[name].original[:12]} ({s.name})" for s in concerned}))
    raise HookError(
        f"{path} has the content {found[:12]}, not that of a release that is known: {known}. What has to change in it "
        "to train on several ranks could not be applied, and the ranks would train another model than one process. "
        "Put the released file back, or carry the change over by hand: see `patches` and MIGRATION.md."
    )


def _exchange(module: ModuleType, content: bytes, patched: bytes) -> PatchedCode:
    where = str(module.__file__)
    before, after = ast.parse(content), _at_lines_of(content, patched)
    old, new = (_codes(compile(tree, where, "exec")) for tree in (before, after))
    functions = []
    for function in _functions(vars(module), module.__name__):
        path = tuple(function.__qualname__.split("."))
        if path in new and new[path] != old.get(path):
            functions.append((function, function.__code__))
            function.__code__ = new[path]
    imports = [node for node in after.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    known = {ast.dump(node) for node in before.body}
    added = [node for node in imports if ast.dump(node) not in known]
    exec(compile(ast.Module([*added], []), where, "exec"), vars(module))
    names = [alias.asname or alias.name for node in added for alias in node.names]
    return PatchedCode(module.__name__, module, functions, names)


def _at_lines_of(content: bytes, patched: bytes) -> ast.Module:
    """The program `patched`, each line of which claims to stand where it came from in `content`."""
    lines = {}
    texts = [text.decode().splitlines() for text in (content, patched)]
    for _, old_start, old_end, start, end in difflib.SequenceMatcher(None, texts[0], texts[1], False).get_opcodes():
        for number in range(start, end):
            lines[number + 1] = max(1, min(old_start + number - start + 1, old_end))
    tree = ast.parse(patched)
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt, ast.excepthandler, ast.arg, ast.keyword, ast.alias)):
            if not hasattr(node, "lineno"):
                continue  # Python 3.9: aliases stand nowhere
            node.lineno, node.end_lineno = lines[node.lineno], lines[node.end_lineno or node.lineno]
            if node.lineno == node.end_lineno and (node.end_col_offset or 0) < node.col_offset:
                node.end_col_offset = node.col_offset
    return tree


def _codes(code: CodeType, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], CodeType]:
    """The code of every function and class body in `code`, by the names one has to go through to it."""
    out = {}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            path = (*above, part.co_name)
            out[path] = part
            out.update(_codes(part, path))
    return out


def _functions(scope: Any, module: str) -> Iterator[FunctionType]:
    """The functions that the module of that name defines, and those of its classes."""
    for value in list(scope.values()):
        value = getattr(value, "__func__", value)  # static and class methods
        for held in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(held, FunctionType) and held.__module__ == module:
                yield held
            elif isinstance(held, type) and held.__module__ == module:
                yield from _functions(vars(held), module)
