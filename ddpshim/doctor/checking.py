"""`check`: every rule on every trainer below a path.

It reads the files below a path with `ast`, finds the trainers among them, and applies every rule to what each of
them runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ddpshim.doctor import checkpoints, control, data, devices, files, training
from ddpshim.doctor.findings import CODES, Finding
from ddpshim.doctor.meaning import Meaning
from ddpshim.doctor.rules import RULES, Case
from ddpshim.doctor.source import Source
from ddpshim.doctor.tree import Tree

FAMILIES = (training, data, files, control, devices, checkpoints)  # each registers its rules when it is imported


@dataclass(frozen=True)
class Report:
    """The findings below a path, in the order of files and lines."""

    findings: tuple[Finding, ...]
    num_files: int
    num_lines: int
    num_programs: int
    num_distributed: int
    num_ignored: int


def check(
    path: Path, *, select: Collection[str] = (), ignore: Collection[str] = (), exclude: Collection[str] = ()
) -> Report:
    """The hazards of every trainer below `path`. Local; reads files only.

    `select` and `ignore` are codes or their beginnings (`DDP4`); `exclude` names files and folders to leave out.
    Raises OSError where `path` cannot be read.
    """
    path.stat()  # a path that is not there is the caller's mistake
    tree = Tree(path, exclude)
    found: dict[tuple[str, int, int, str], tuple[Finding, Source | None]] = {}
    for file, error in tree.unreadable:
        message = f"The file cannot be parsed ({error}), so nothing in it was checked."
        finding = _finding("DDP001", str(file), (error.line, 1, error.line), message, True)
        found[finding.path, finding.line, 1, "DDP001"] = finding, None
    for program in tree.programs:
        case = Case(program, tree, Meaning(tree, program))
        for code, apply in RULES.items():
            if not program.is_distributed and not CODES[code].in_single:
                continue
            for unit, node, message in apply(case):
                place = node.lineno, node.col_offset + 1, getattr(node, "end_lineno", None) or node.lineno  # type: ignore[attr-defined]
                finding = _finding(code, str(unit.source.path), place, message, program.is_distributed)
                found.setdefault((finding.path, finding.line, finding.column, code), (finding, unit.source))
    chosen = [f for f in found.values() if _is_chosen(f[0].code, select, ignore)]
    kept = [f for f, source in chosen if source is None or not _is_ignored(f, source)]
    return Report(
        tuple(sorted(kept, key=lambda f: (f.path, f.line, f.column, f.code))),
        len(tree.sources) + len(tree.unreadable),
        sum(s.content.count(b"\n") for s in tree.sources),
        len(tree.programs),
        sum(p.is_distributed for p in tree.programs),
        len(chosen) - len(kept),
    )


def _finding(code: str, path: str, place: tuple[int, int, int], message: str, is_distributed: bool) -> Finding:
    line, column, end_line = place
    known = CODES[code]
    return Finding(path, line, column, code, known.severity_in(is_distributed), message, known.fix, end_line)


def _is_chosen(code: str, select: Collection[str], ignore: Collection[str]) -> bool:
    return (not select or code.startswith(tuple(select))) and not code.startswith(tuple(ignore) or ("-",))


def _is_ignored(finding: Finding, source: Source) -> bool:
    for line in range(finding.line, finding.end_line + 1):
        codes = source.ignores.get(line)
        if codes is not None and (not codes or finding.code in codes):
            return True
    return False
