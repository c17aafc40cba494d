"""Applies all rules to all trainers below a path."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Optional

from ddpshim.job.say import count
from ddpshim.tools.doctor import checkpoints, control, data, devices, files, losses, training
from ddpshim.tools.doctor.findings import CODES, SEVERITIES, Finding
from ddpshim.tools.doctor.fixes import Edit, edits_for, unified_diff
from ddpshim.tools.doctor.rules import RULES, Case
from ddpshim.tools.doctor.source import Source
from ddpshim.tools.doctor.tree import OUR_EPOCH, TRAINING_CALLS, Tree
from ddpshim.tools.progress import progress_line

# Importing a module registers its rules.
FAMILIES = (training, losses, data, files, control, devices, checkpoints)


@dataclass(frozen=True)
class Report:
    """The findings below a path, ordered by file and line, and the edits that remove some of them."""

    root: Path
    findings: tuple[Finding, ...]
    num_files: int
    num_lines: int
    num_programs: int
    num_distributed: int
    num_ignored: int
    edits: Mapping[Source, Sequence[Edit]]

    def diff(self) -> bytes:
        """Return all edits as one unified diff, for `patch -p1` in the checked folder."""
        edits = {s: e for s, e in self.edits.items() if self.root in (s.path, *s.path.parents)}
        return b"".join(unified_diff(s.path, self.root, s.content, each) for s, each in edits.items())

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints; `schema` changes with every change that a program reading it could notice."""
        return {
            "schema": 1,
            "files": self.num_files,
            "lines": self.num_lines,
            "programs": self.num_programs,
            "distributed_programs": self.num_distributed,
            "ignored": self.num_ignored,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def as_text(self) -> str:
        """Return each finding with its fix, then a summary line."""
        lines = [finding.as_text() for finding in self.findings]
        if not self.num_programs:
            lines.append(
                f"no trainer in {count(self.num_files, 'file')}, {count(self.num_lines, 'line')}: nothing was "
                f"checked. A trainer calls {', '.join(sorted(TRAINING_CALLS))}, or fit or train of Lightning's or "
                "Transformers' Trainer, and is not a test; in a folder, a one-process trainer must also save "
                "something. Name its file, or the folder that it is in."
            )
            return "\n".join(lines)
        counts = [(severity, sum(f.severity == severity for f in self.findings)) for severity in SEVERITIES]
        found = ", ".join(f"{number} {severity}" for severity, number in counts if number) or "nothing found"
        ignored = f", {self.num_ignored} ignored" if self.num_ignored else ""
        programs = f"{count(self.num_programs, 'trainer')} ({self.num_distributed} distributed)"
        lines.append(f"{found}{ignored}; {programs} in {self.num_files} files, {self.num_lines} lines")
        if self.findings:
            lines.append(f"why, with an example: python -m ddpshim doctor --explain {self.findings[0].code}")
        migrating = next((finding for finding in self.findings if finding.severity == "migration"), None)
        if migrating is not None:
            trainer = migrating.path if self.root.is_file() else "train.py"
            lines.append(
                f"migration: only to change the trainer by hand; `python -m ddpshim run --nproc N {trainer}` needs "
                "none of it: it distributes a one-process trainer unedited, or names the line that it cannot"
            )
        return "\n".join(lines)


def check(
    path: Path, *, select: Collection[str] = (), ignore: Collection[str] = (), exclude: Collection[str] = ()
) -> Report:
    """Return the hazards of all trainers below `path`. Local; reads files only.

    `select` and `ignore` are codes or prefixes of codes (`DDP4`); `exclude` has names of files and folders to skip.
    Raises OSError if `path` cannot be read.
    """
    path.stat()  # raises if it does not exist
    with progress_line() as show:
        return _check(path, Tree(Path(os.path.abspath(path)), exclude, show), select, ignore, show)


def _check(
    path: Path, tree: Tree, select: Collection[str], ignore: Collection[str], show: Callable[[str], None]
) -> Report:
    chosen = [c for c in CODES if (not select or c.startswith(tuple(select))) and not c.startswith(tuple(ignore))]
    shown = Path if path.is_absolute() else lambda file: Path(os.path.relpath(file))
    # (path, line, column, code) -> the finding in the first program that has it, its file and its edits.
    found: dict[tuple[str, int, int, str], tuple[Finding, Optional[Source], list[Edit]]] = {}
    for file, error in tree.unreadable if "DDP001" in chosen else ():
        message = f"The file cannot be parsed ({error}), so nothing in it was checked."
        finding = _finding("DDP001", shown(file), (error.line, 1, error.line), message, True)
        found[finding.path, finding.line, 1, "DDP001"] = finding, None, []
    for number, program in enumerate(tree.programs):
        show(f"doctor: checked {number} of {len(tree.programs)} trainers")
        case = Case(tree, program)
        # In a patched robomimic, ddpshim handles writes, failing ranks and devices, so DDP4, DDP5 and DDP6 are skipped.
        of_program = [
            c for c in chosen if OUR_EPOCH not in program.origins or not c.startswith(("DDP4", "DDP5", "DDP6"))
        ]
        for code, apply in RULES.items():
            if code not in of_program or not (program.is_distributed or CODES[code].in_single):
                continue
            try:
                hits = [(hit, edits_for(code, hit, case)) for hit in apply(case)]
            except RecursionError:
                message = f"{code} was not looked for: something in this program is nested too deeply."
                finding = _finding("DDP001", shown(program.entry.path), (1, 1, 1), message, program.is_distributed)
                found.setdefault((finding.path, 1, 1, "DDP001"), (finding, None, []))
                continue
            for hit, edits in hits:
                if code.startswith("DDP4") and hit.unit not in program.sure:
                    continue  # found only by a method's name, which may be another class's
                source = hit.unit.source
                finding = _finding(
                    code, shown(source.path), _place(hit.node), hit.message, program.is_distributed, edits
                )
                found.setdefault((finding.path, finding.line, finding.column, code), (finding, source, edits))
    kept: list[Finding] = []
    edits_of: dict[Source, list[Edit]] = defaultdict(list)
    for _, (finding, of, edits) in sorted(found.items(), key=lambda item: item[0]):
        lines = range(finding.line, finding.end_line + 1)
        ignored = [of.ignores[line] for line in lines if line in of.ignores] if of is not None else []
        if not any(not codes or finding.code in codes for codes in ignored):
            kept.append(finding)
            if of is not None and edits:
                edits_of[of] += edits
    return Report(
        root=tree.root,
        findings=tuple(kept),
        num_files=len(tree.sources) + len(tree.unreadable),
        num_lines=sum(s.content.count(b"\n") for s in tree.sources),
        num_programs=len(tree.programs),
        num_distributed=sum(p.is_distributed for p in tree.programs),
        num_ignored=len(found) - len(kept),
        edits=edits_of,
    )


def _finding(
    code: str, path: Path, place: tuple[int, int, int], message: str, is_distributed: bool, edits: Sequence[Edit] = ()
) -> Finding:
    known = CODES[code]
    severity = known.severity if is_distributed or known.severity == "note" else "migration"
    return Finding(str(path), *place, code, known.name, severity, message, known.fix, bool(edits))


def _place(node: ast.AST) -> tuple[int, int, int]:
    """Return (line, column, last line); for a compound statement the last line is its first."""
    line: int = node.lineno  # type: ignore[attr-defined]
    column: int = node.col_offset  # type: ignore[attr-defined]
    is_compound = isinstance(node, (ast.stmt, ast.ExceptHandler)) and hasattr(node, "body")
    return line, column + 1, line if is_compound else getattr(node, "end_lineno", None) or line
