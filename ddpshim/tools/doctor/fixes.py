"""Writes fixes that need no human decision as exact edits, and their unified diff."""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Callable, NamedTuple, Optional

from ddpshim.tools.doctor.kinds import WRAPPERS
from ddpshim.tools.doctor.nodes import argument, constant, key_of, last_name, spreads, values_of
from ddpshim.tools.doctor.rules import Case, Hit
from ddpshim.tools.doctor.source import Source, Unit


class Edit(NamedTuple):
    """Replaces the bytes from `start` to `end` of a file by `text`."""

    start: int
    end: int
    text: bytes


_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def edits_for(code: str, hit: Hit, case: Case) -> list[Edit]:
    """Return the edits that remove a finding; [] if a person has to decide."""
    content = hit.unit.source.content
    # ast counts columns in UTF-8 bytes, which would be wrong offsets in a file of another encoding.
    has_odd_lines = b"\r" in content.replace(b"\r\n", b"")
    if code not in _FIXES or has_odd_lines or not _is_utf8(content):
        return []
    return _FIXES[code](hit.node, hit.unit, case)


def unified_diff(path: Path, root: Path, before: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the diff of one file for `patch -p1` in `root` (or in its folder, if `root` is a file)."""
    old, new = (_LINE.findall(content) for content in (before, apply(before, edits)))
    name = path.relative_to(root if root.is_dir() else root.parent).as_posix().encode()
    lines = difflib.diff_bytes(difflib.unified_diff, old, new, b"a/" + name, b"b/" + name, lineterm=b"\n")
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def apply(content: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the content after all edits. An edit that overlaps an earlier one is skipped; a second run makes it."""
    out, position = b"", 0
    for edit in sorted(set(edits)):
        if edit.start >= position:
            out += content[position : edit.start] + edit.text
            position = edit.end
    return out + content[position:]


def _call_the_wrapper(call: ast.Call, unit: Unit, case: Case) -> list[Edit]:
    func: ast.expr = call.func
    if isinstance(func, ast.Attribute) and func.attr == "forward":
        func = func.value
    if not (isinstance(func, ast.Attribute) and func.attr == "module"):
        return []
    return [Edit(_end(unit.source, func.value), _end(unit.source, call.func), b"")]


def _unwrap(call: ast.Call, unit: Unit, case: Case) -> list[Edit]:
    receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    names = [c for c in (*values_of(call), call.func, *receiver) if isinstance(c, (ast.Name, ast.Attribute))]
    wrapped = [name for name in names if case.kinds(name, unit) & WRAPPERS]
    if len(wrapped) != 1 or case.kinds(wrapped[0], unit) != {"ddp"}:
        return []  # it is unclear which name is wrapped, or whether it always is
    return [_insert(_end(unit.source, wrapped[0]), b".module")]


def _shuffle(call: ast.Call, unit: Unit, case: Case) -> list[Edit]:
    for where, value in case.values(argument(call, "sampler"), unit):
        asked = argument(value, "shuffle", 3) if isinstance(value, ast.Call) else None
        if asked is not None and constant(asked) is False and where.source is unit.source:
            return [_replace(where.source, asked, b"True")]
    return []


def _set_epoch(call: ast.Call, unit: Unit, case: Case) -> list[Edit]:
    source = unit.source
    statement = _statement(call, source)
    if not isinstance(statement, ast.Assign) or statement.value is not call:
        return []
    name = key_of(statement.targets[0])
    loops = [
        (loop, loop.target.id)
        for loop in unit.all(ast.For)
        if isinstance(loop.target, ast.Name) and "epoch" in loop.target.id.lower() and loop.lineno > statement.lineno
    ]
    if name is None or len(unit.bindings.get(name, [])) != 1 or len(loops) != 1:
        return []
    loop, epoch = loops[0]
    if source.parents.get(statement) is not source.parents.get(loop):
        return []
    first = loop.body[0]
    indent, text = _indent(source, first), f"{name}.set_epoch({epoch})".encode()
    return [_insert(_start(source, first), text + (b"; " if indent is None else _newline(source) + indent))]


def _write_once(call: ast.Call, unit: Unit, case: Case) -> list[Edit]:
    source = unit.source
    if last_name(call) in ("makedirs", "mkdir") and source.qualified(call.func) != "os.mkdir":
        given = argument(call, "exist_ok")
        if given is not None:
            return [_replace(source, given, b"True")] if constant(given) is False else []
        if spreads(call):
            return []
        ends = [_end(source, value) for value in values_of(call)]
        return [_insert(max(ends), b", exist_ok=True") if ends else _insert(_end(source, call) - 1, b"exist_ok=True")]
    statement, rank = _statement(call, source), _rank_call(unit)
    if rank is None or not isinstance(statement, ast.Expr) or statement.value is not call:
        return []
    return _under_test(source, statement, f"if {rank} == 0:")


def _raise_again(handler: ast.ExceptHandler, unit: Unit, case: Case) -> list[Edit]:
    last = handler.body[-1]
    if handler.body[0].lineno == handler.lineno or isinstance(last, (ast.Return, ast.Continue, ast.Break)):
        return []
    if len(handler.body) == 1 and isinstance(last, ast.Pass):
        return [_replace(unit.source, last, b"raise")]
    end = _line_start(unit.source, (last.end_lineno or last.lineno) + 1)  # after a comment on the same line
    newline, line = _newline(unit.source), (_indent(unit.source, last) or b"") + b"raise"
    return [_insert(end, line + newline if unit.source.content[end - 1 : end] == b"\n" else newline + line)]


def _global_rank(node: ast.AST, unit: Unit, case: Case) -> list[Edit]:
    rank = _rank_call(unit)
    found = argument(node, "rank", 2) if isinstance(node, ast.Call) else getattr(node, "left", None)
    return [_replace(unit.source, found, rank.encode())] if rank is not None and found is not None else []


def _delete(node: ast.Assign, unit: Unit, case: Case) -> list[Edit]:
    source = unit.source
    if len(node.targets) != 1:
        return []
    blocks = [getattr(source.parents.get(node), name, []) for name in ("body", "orelse", "finalbody")]
    if any(isinstance(b, list) and b == [node] for b in blocks):
        return [_replace(source, node, b"pass")]
    start, end = _line_start(source, node.lineno), _line_start(source, (node.end_lineno or node.lineno) + 1)
    line = source.content[start:end]
    is_alone = line.strip() == source.content[_start(source, node) : _end(source, node)].strip() or b"#" in line
    return [Edit(start, end, b"")] if is_alone and b";" not in line else []


def _strip_prefix(call: ast.Call, unit: Unit, case: Case) -> list[Edit]:
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return []
    if constant(call.args[0]) != "module.":
        return []
    key, parent = call.func.value.id, unit.source.parents.get(call)
    text = f'{key}[len("module.") :] if {key}.startswith("module.") else {key}'
    is_whole = isinstance(parent, (ast.Assign, ast.DictComp, ast.keyword, ast.Return)) or (
        isinstance(parent, ast.Subscript) and parent.slice is call
    )
    return [_replace(unit.source, call, (text if is_whole else f"({text})").encode())]


def _rank_call(unit: Unit) -> Optional[str]:
    """Return `dist.get_rank()`, with the unit's own name for torch.distributed; None if it does not use it."""
    for call in unit.all(ast.Call):
        if isinstance(call.func, ast.Attribute) and unit.source.qualified(call.func.value) == "torch.distributed":
            return f"{ast.unparse(call.func.value)}.get_rank()"
    return None


def _statement(node: ast.AST, source: Source) -> ast.AST:
    return node if isinstance(node, ast.stmt) else next(a for a in source.above(node) if isinstance(a, ast.stmt))


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
        return tokenize.detect_encoding(io.BytesIO(content).readline)[0].startswith("utf-8")
    except (UnicodeDecodeError, SyntaxError):
        return False


def _line_start(source: Source, line: int) -> int:
    """Return the offset of the start of a line; the end of the file for a line after the last."""
    rest = source.content.split(b"\n", line - 1)
    return len(source.content) - (len(rest[-1]) if len(rest) == line else 0)


def _place(source: Source, line: int, column: int) -> int:
    """Return an offset in the file; ast's columns do not count a byte order mark."""
    mark = 3 if line == 1 and source.content.startswith(b"\xef\xbb\xbf") else 0
    return _line_start(source, line) + column + mark


def _start(source: Source, node: ast.AST) -> int:
    return _place(source, node.lineno, node.col_offset)  # type: ignore[attr-defined]


def _end(source: Source, node: ast.AST) -> int:
    return _place(source, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _replace(source: Source, node: ast.AST, text: bytes) -> Edit:
    return Edit(_start(source, node), _end(source, node), text)


def _insert(place: int, text: bytes) -> Edit:
    return Edit(place, place, text)


def _newline(source: Source) -> bytes:
    return b"\r\n" if b"\r\n" in source.content else b"\n"


def _indent(source: Source, node: ast.AST) -> Optional[bytes]:
    """Return the white space before a statement; None if other code precedes it on the line."""
    before = source.content[_line_start(source, node.lineno) : _start(source, node)]  # type: ignore[attr-defined]
    return None if before.strip() else before


def _under_test(source: Source, statement: ast.stmt, test: str) -> list[Edit]:
    """Return edits that indent the statement below `test`; [] if it shares its line or has a multi-line string."""
    indent = _indent(source, statement)
    strings = [n for n in ast.walk(statement) if isinstance(n, (ast.Constant, ast.JoinedStr))]
    if indent is None or any(n.lineno != n.end_lineno for n in strings):
        return []
    step = b"\t" if b"\t" in indent else b"    "
    after = (statement.end_lineno or statement.lineno) + 1
    if source.content[_end(source, statement) : _line_start(source, after)].strip().startswith(b";"):
        return []
    first = _insert(_start(source, statement), test.encode() + _newline(source) + indent + step)
    return [first, *(_insert(_line_start(source, line), step) for line in range(statement.lineno + 1, after))]


# Functions of (a hit's node, its unit, the case) that return edits.
_FIXES: dict[str, Callable[..., list[Edit]]] = {
    "DDP102": _call_the_wrapper,
    "DDP105": _unwrap,
    "DDP202": _shuffle,
    "DDP203": _set_epoch,
    "DDP401": _write_once,
    "DDP503": _raise_again,
    "DDP504": _unwrap,
    "DDP603": _global_rank,
    "DDP604": _delete,
    "DDP701": _unwrap,
    "DDP702": _strip_prefix,
}
