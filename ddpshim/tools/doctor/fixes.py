"""Writes the fixes that need no judgement as exact edits, and the unified diff of them.

An edit replaces bytes between two places of a file; whatever it does not name stays as it is, byte for byte.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Callable, NamedTuple, Optional

from ddpshim.tools.doctor.rules import Case, Hit
from ddpshim.tools.doctor.source import Source, Unit, argument, constant, key_of, last_name


class Edit(NamedTuple):
    """Bytes `start` to `end` of a file become `text`."""

    start: int
    end: int
    text: bytes


Fix = Callable[[Hit, Case], list[Edit]]
FIXES: dict[str, Fix] = {}


def fix(code: str) -> Callable[[Fix], Fix]:
    def register(function: Fix) -> Fix:
        FIXES[code] = function
        return function

    return register


def edits_for(code: str, hit: Hit, case: Case) -> list[Edit]:
    """The edits that remove a finding, none where it takes a person."""
    source = hit.unit.source
    # Python counts columns in UTF-8; in a file of another encoding they would point elsewhere.
    has_odd_lines = b"\r" in source.content.replace(b"\r\n", b"")
    if code not in FIXES or has_odd_lines or not _is_utf8(source.content):
        return []
    return FIXES[code](hit, case)


def unified_diff(path: Path, root: Path, before: bytes, edits: Iterable[Edit]) -> bytes:
    """The diff of one file that `patch -p1` applies in `root` (or beside the file that `root` is)."""
    after = apply(before, edits)
    name = path.relative_to(root if root.is_dir() else root.parent).as_posix().encode()
    lines = difflib.diff_bytes(
        difflib.unified_diff, _lines(before), _lines(after), b"a/" + name, b"b/" + name, lineterm=b"\n"
    )
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def apply(content: bytes, edits: Iterable[Edit]) -> bytes:
    """The content after all edits; one that overlaps an earlier one is left out, for a second run."""
    out, position = b"", 0
    for edit in sorted(set(edits)):
        if edit.start >= position:
            out += content[position : edit.start] + edit.text
            position = edit.end
    return out + content[position:]


@fix("DDP102")
def _call_the_wrapper(hit: Hit, case: Case) -> list[Edit]:
    call = hit.node
    if not isinstance(call, ast.Call):
        return []
    func: ast.expr = call.func
    if isinstance(func, ast.Attribute) and func.attr == "forward":
        func = func.value
    if not (isinstance(func, ast.Attribute) and func.attr == "module"):
        return []
    return [_between(hit.unit.source, func.value, call.func, b"")]


@fix("DDP105")
@fix("DDP504")
@fix("DDP701")
def _unwrap(hit: Hit, case: Case) -> list[Edit]:
    call = hit.node
    if not isinstance(call, ast.Call):
        return []
    candidates = [*call.args, *(k.value for k in call.keywords), call.func]
    if isinstance(call.func, ast.Attribute):
        candidates.append(call.func.value)
    wrapped = [
        c
        for c in candidates
        if isinstance(c, (ast.Name, ast.Attribute)) and case.meaning.kinds(c, hit.unit) & {"ddp", "holds-wrapped", "dp"}
    ]
    if len(wrapped) != 1 or case.meaning.kinds(wrapped[0], hit.unit) != {"ddp"}:
        return []  # which is wrapped is not the same on every path
    return [_after(hit.unit.source, wrapped[0], b".module")]


@fix("DDP202")
def _shuffle(hit: Hit, case: Case) -> list[Edit]:
    sampler = argument(hit.node, "sampler") if isinstance(hit.node, ast.Call) else None
    for where, binding in case.meaning.reaching(sampler, hit.unit) if sampler is not None else ():
        asked = argument(binding.value, "shuffle", 3) if isinstance(binding.value, ast.Call) else None
        if asked is not None and constant(asked) is False and where.source is hit.unit.source:
            return [_replace(where.source, asked, b"True")]
    return []


@fix("DDP203")
def _set_epoch(hit: Hit, case: Case) -> list[Edit]:
    source, unit = hit.unit.source, hit.unit
    statement = _statement(hit.node, source)
    if not isinstance(statement, ast.Assign) or statement.value is not hit.node:
        return []
    name = key_of(statement.targets[0])
    loops = [
        loop
        for loop in unit.all(ast.For)
        if isinstance(loop.target, ast.Name) and "epoch" in loop.target.id.lower() and loop.lineno > statement.lineno
    ]
    is_always = name is not None and len(unit.bindings.get(name, [])) == 1
    if not is_always or len(loops) != 1 or source.parents.get(statement) is not source.parents.get(loops[0]):
        return []
    epoch = loops[0].target
    return (
        []
        if not isinstance(epoch, ast.Name)
        else [_line_before(source, loops[0].body[0], f"{name}.set_epoch({epoch.id})")]
    )


@fix("DDP401")
def _write_once(hit: Hit, case: Case) -> list[Edit]:
    call, source = hit.node, hit.unit.source
    if not isinstance(call, ast.Call):
        return []
    if last_name(call.func) in ("makedirs", "mkdir") and source.qualified(call.func) != "os.mkdir":
        given = argument(call, "exist_ok")
        if given is not None:
            return [_replace(source, given, b"True")] if constant(given) is False else []
        return [] if not _is_plain(call) else [_last_argument(source, call, b"exist_ok=True")]
    statement, rank = _statement(call, source), _rank_call(hit.unit)
    if rank is None or not isinstance(statement, ast.Expr) or statement.value is not call:
        return []
    return _under_test(source, statement, f"if {rank} == 0:")


@fix("DDP503")
def _raise_again(hit: Hit, case: Case) -> list[Edit]:
    handler, source = hit.node, hit.unit.source
    if not isinstance(handler, ast.ExceptHandler) or handler.body[0].lineno == handler.lineno:
        return []
    last = handler.body[-1]
    if isinstance(last, (ast.Return, ast.Continue, ast.Break)):
        return []
    if len(handler.body) == 1 and isinstance(last, ast.Pass):
        return [_replace(source, last, b"raise")]
    return [_line_after(source, last, "raise")]


@fix("DDP603")
def _global_rank(hit: Hit, case: Case) -> list[Edit]:
    rank, node = _rank_call(hit.unit), hit.node
    if rank is None:
        return []
    if isinstance(node, ast.Call):
        found = argument(node, "rank", 2)
    else:
        compared = node if isinstance(node, ast.Compare) else None
        found = compared.left if compared is not None else None
    return [] if found is None else [_replace(hit.unit.source, found, rank.encode())]


@fix("DDP604")
def _delete(hit: Hit, case: Case) -> list[Edit]:
    source, node = hit.unit.source, hit.node
    parent = source.parents.get(node)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return []
    blocks = [getattr(parent, name, []) for name in ("body", "orelse", "finalbody")]
    if any(isinstance(b, list) and b == [node] for b in blocks):
        return [_replace(source, node, b"pass")]
    start, end = _line_start(source, node.lineno), _line_start(source, (node.end_lineno or node.lineno) + 1)
    line = source.content[start:end]
    is_alone = line.strip() == source.content[_start(source, node) : _end(source, node)].strip() or b"#" in line
    return [Edit(start, end, b"")] if is_alone and b";" not in line else []


@fix("DDP702")
def _strip_prefix(hit: Hit, case: Case) -> list[Edit]:
    call = hit.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return []
    if not isinstance(call.func.value, ast.Name) or constant(call.args[0]) != "module.":
        return []
    key = call.func.value.id
    text = f'{key}[len("module.") :] if {key}.startswith("module.") else {key}'
    parent = hit.unit.source.parents.get(call)
    is_whole = isinstance(parent, (ast.Assign, ast.DictComp, ast.keyword, ast.Return)) or (
        isinstance(parent, ast.Subscript) and parent.slice is call
    )
    return [_replace(hit.unit.source, call, (text if is_whole else f"({text})").encode())]


# Places


def _rank_call(unit: Unit) -> Optional[str]:
    """`dist.get_rank()` by the name that the function already knows torch.distributed by."""
    for call in unit.all(ast.Call):
        if isinstance(call.func, ast.Attribute) and unit.source.qualified(call.func.value) == "torch.distributed":
            return f"{ast.unparse(call.func.value)}.get_rank()"
    return None


def _statement(node: ast.AST, source: Source) -> ast.AST:
    return node if isinstance(node, ast.stmt) else next(a for a in source.above(node) if isinstance(a, ast.stmt))


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"coding" not in b"".join(content.split(b"\n", 2)[:2]) or b"utf-8" in content[:200].lower()


def _lines(content: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _line_start(source: Source, line: int) -> int:
    position = 0
    for _ in range(line - 1):
        found = source.content.find(b"\n", position)
        if found < 0:
            return len(source.content)
        position = found + 1
    return position


def _mark(source: Source) -> int:
    """Bytes of a byte order mark, which Python's columns leave out."""
    return 3 if source.content.startswith(b"\xef\xbb\xbf") else 0


def _start(source: Source, node: ast.AST) -> int:
    line: int = node.lineno  # type: ignore[attr-defined]
    column: int = node.col_offset  # type: ignore[attr-defined]
    return _line_start(source, line) + column + (_mark(source) if line == 1 else 0)


def _end(source: Source, node: ast.AST) -> int:
    line: int = node.end_lineno  # type: ignore[attr-defined]
    column: int = node.end_col_offset  # type: ignore[attr-defined]
    return _line_start(source, line) + column + (_mark(source) if line == 1 else 0)


def _replace(source: Source, node: ast.AST, text: bytes) -> Edit:
    return Edit(_start(source, node), _end(source, node), text)


def _after(source: Source, node: ast.AST, text: bytes) -> Edit:
    return Edit(_end(source, node), _end(source, node), text)


def _between(source: Source, first: ast.AST, last: ast.AST, text: bytes) -> Edit:
    return Edit(_end(source, first), _end(source, last), text)


def _newline(source: Source) -> bytes:
    return b"\r\n" if b"\r\n" in source.content else b"\n"


def _indent(source: Source, node: ast.AST) -> Optional[bytes]:
    """The white space before a statement, None where something else stands before it in its line."""
    before = source.content[_line_start(source, node.lineno) : _start(source, node)]  # type: ignore[attr-defined]
    return None if before.strip() else before


def _line_before(source: Source, node: ast.stmt, text: str) -> Edit:
    indent, start = _indent(source, node), _start(source, node)
    if indent is None:
        return Edit(start, start, f"{text}; ".encode())
    return Edit(start, start, text.encode() + _newline(source) + indent)


def _line_after(source: Source, node: ast.stmt, text: str) -> Edit:
    """A statement behind another, after what stands in its line (a comment)."""
    indent = _indent(source, node)
    end = _line_start(source, (node.end_lineno or node.lineno) + 1)
    has_newline = source.content[end - 1 : end] == b"\n"
    line = (indent or b"") + text.encode()
    return Edit(end, end, line + _newline(source) if has_newline else _newline(source) + line)


def _under_test(source: Source, statement: ast.stmt, test: str) -> list[Edit]:
    """The statement indented below a test; none where it shares its line, or a string in it spans lines."""
    indent = _indent(source, statement)
    strings = [n for n in ast.walk(statement) if isinstance(n, (ast.Constant, ast.JoinedStr))]
    if indent is None or any(n.lineno != n.end_lineno for n in strings):
        return []
    step = b"\t" if b"\t" in indent else b"    "
    first = _start(source, statement)
    edits = [Edit(first, first, test.encode() + _newline(source) + indent + step)]
    for line in range(statement.lineno + 1, (statement.end_lineno or statement.lineno) + 1):
        start = _line_start(source, line)
        edits.append(Edit(start, start, step))
    rest = source.content[_end(source, statement) : _line_start(source, (statement.end_lineno or 0) + 1)]
    return [] if rest.strip().startswith(b";") else edits


def _is_plain(call: ast.Call) -> bool:
    return all(k.arg is not None for k in call.keywords) and not any(isinstance(a, ast.Starred) for a in call.args)


def _last_argument(source: Source, call: ast.Call, text: bytes) -> Edit:
    given = [*call.args, *(k.value for k in call.keywords)]
    if not given:
        end = _end(source, call) - 1
        return Edit(end, end, text)
    last = max(given, key=lambda node: _end(source, node))
    return _after(source, last, b", " + text)
