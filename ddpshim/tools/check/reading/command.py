"""Applies all rules to the trainers in a file or a folder, and prints the findings."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpshim.process.say import count, say
from ddpshim.tools.check.reading.explanations import EXPLANATIONS
from ddpshim.tools.check.reading.meaning import Meaning
from ddpshim.tools.check.reading.rules import RULES
from ddpshim.tools.check.reading.trainers import Tree
from ddpshim.tools.progress import progress_line


@dataclass(frozen=True, order=True)
class Finding:
    """A hazard at one place; lines and columns count from 1.

    `severity` is "migration" in a trainer that is not distributed yet: it appears with the second rank.
    """

    path: str
    line: int
    column: int
    code: str
    severity: str
    message: str
    do: str


@dataclass(frozen=True)
class Report:
    """The findings below a path, in the order of files and lines, and the files and rules that could not be applied."""

    findings: Sequence[Finding]
    unreadable: Sequence[str]
    files: int
    lines: int
    trainers: int
    distributed_trainers: int

    def as_text(self) -> str:
        """Return each finding with what to do, then a summary."""
        texts = [
            f"{f.path}:{f.line}:{f.column} {f.code} {f.severity} {f.message}\n    do: {f.do}" for f in self.findings
        ]
        texts += [f"not read: {text}" for text in self.unreadable]
        if not self.trainers:
            what = "A trainer calls backward(), or fit() of a framework's Trainer; in a folder, it also saves something"
            return "\n".join([*texts, f"no trainer in {count(self.files, 'file')}: nothing was checked. {what}."])
        found = f"{len(self.findings)} found" if self.findings else "nothing found"
        trainers = f"{count(self.trainers, 'trainer')} ({self.distributed_trainers} distributed)"
        texts.append(f"{found}; {trainers} in {count(self.files, 'file')}, {count(self.lines, 'line')}")
        if self.findings:
            texts.append(f"why, with an example: python -m ddpshim check --explain {self.findings[0].code}")
        if any(finding.severity == "migration" for finding in self.findings):
            texts.append("migration: for a change by hand; `python -m ddpshim run` distributes such a trainer unedited")
        return "\n".join(texts)


def read(path: Path) -> Report:
    """Return the hazards of all trainers below `path`. Local; reads files only. Raises OSError if it cannot."""
    path.stat()
    found: dict[tuple[str, int, int, str], Finding] = {}
    with progress_line() as show:
        show("check --read: reads files")
        tree = Tree(Path(os.path.abspath(path)))
        shown = {s: str(s.path) if path.is_absolute() else os.path.relpath(s.path) for s in tree.sources}
        unreadable = [f"{os.path.relpath(file)}:{line}: {why}" for file, line, why in tree.unreadable]
        for number, trainer in enumerate(tree.trainers):
            show(f"check --read: {number} of {len(tree.trainers)} trainers")
            case = Meaning(tree, trainer)
            # In a patched robomimic, ddpshim handles writes, failing ranks and devices.
            is_patched = "ddpshim.robomimic.run_epoch" in trainer.origins
            for code, about in EXPLANATIONS.items():
                if not (trainer.is_distributed or about.in_single) or (is_patched and code > "DDP4"):
                    continue
                try:
                    hits = list(RULES[code](case))
                except RecursionError:
                    hits = []
                    unreadable.append(f"{shown[trainer.entry]}:1: for {code}, something is nested too deeply")
                for unit, node, text in hits:
                    place = shown[unit.source], node.lineno, node.col_offset + 1  # type: ignore[attr-defined]
                    last = node.lineno if isinstance(node, ast.ExceptHandler) else node.end_lineno  # type: ignore[attr-defined]
                    severity = about.severity if trainer.is_distributed else "migration"
                    if not unit.source.is_ignored(code, place[1], last):
                        message = f"{text}. {about.caused}"
                        found.setdefault((*place, code), Finding(*place, code, severity, message, about.do))
    return Report(
        findings=sorted(found.values()),
        unreadable=unreadable,
        files=len(tree.sources) + len(tree.unreadable),
        lines=sum(s.content.count(b"\n") for s in tree.sources),
        trainers=len(tree.trainers),
        distributed_trainers=sum(trainer.is_distributed for trainer in tree.trainers),
    )


def check_read(paths: Sequence[Path], is_json: bool) -> int:
    """Print the findings below each path. Return 1 if there are any, else 2 if a path has no trainer, else 0."""
    try:
        reports = [read(path) for path in paths]
    except OSError as error:
        say(f"{error}; nothing was checked. Name files and folders that can be read.")
        return 2
    if is_json:
        print(json.dumps({"schema": 1, "reports": [asdict(report) for report in reports]}, indent=2))
    else:
        print("\n".join(report.as_text() for report in reports))
    return 1 if any(r.findings for r in reports) else 0 if all(r.trainers for r in reports) else 2


def explain(code: str) -> int:
    """Print what a rule finds and causes, and what to do; for the start of a code all those rules; for "" a list."""
    wanted = [about for about in EXPLANATIONS.values() if about.code.startswith(code)]
    if not wanted:
        say(f"no code begins with {code!r}; nothing was printed. The codes are {', '.join(EXPLANATIONS)}.")
        return 2
    print("\n".join(about.as_text() if code else f"{about.code} {about.found}" for about in wanted))
    return 0
