"""Measures how often `python -m ddpshim doctor` is right, on public trainers that a person has read.

Run it: python -m tests.doctor_trees --trees DIR [--write docs/doctor/trees.md] [--only NAME,...] [--unjudged]

DIR holds one folder for each entry of tests/doctor_trees.json (`folder`): the repository at that commit, without its
history. The entry lists the files that were read, the hazards in them, and a verdict on each finding outside of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

from tests import pages

LABELS = Path(__file__).with_suffix(".json")
NEAR = 3  # lines: a call and its arguments, an assignment and its use
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Finding:
    """The doctor's finding at one line."""

    code: str
    file: str
    line: int
    message: str = ""

    @property
    def place(self) -> str:
        return f"{self.code} {self.file}:{self.line}"


@dataclass(frozen=True)
class Hazard:
    """A reader's label of one place. `also`: other lines at which a finding would be equally right.

    An optional hazard is real, but a checker that does not report it misses nothing: either it is a hazard only after
    the move to DDP, or the fix of another label fixes it, too.
    """

    code: str
    file: str
    first: int
    last: int
    why: str
    also: tuple[tuple[str, int], ...] = ()
    optional: bool = False

    def is_meant_by(self, finding: Finding) -> bool:
        places = [(self.file, self.first, self.last), *((file, line, line) for file, line in self.also)]
        return finding.code == self.code and any(
            finding.file == file and first - NEAR <= finding.line <= last + NEAR for file, first, last in places
        )


@dataclass
class Score:
    """The doctor's findings in one tree, sorted."""

    true: list[Finding] = field(default_factory=list)
    false: list[tuple[Finding, str]] = field(default_factory=list)
    debatable: list[tuple[Finding, str]] = field(default_factory=list)
    unjudged: list[Finding] = field(default_factory=list)
    found: list[Hazard] = field(default_factory=list)
    missed: list[Hazard] = field(default_factory=list)

    def __add__(self, other: Score) -> Score:
        return Score(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def num_findings(self) -> int:
        return len(self.true) + len(self.false) + len(self.debatable) + len(self.unjudged)

    def only(self, wanted: Callable[[Union[Finding, Hazard]], bool]) -> Score:
        """Return the part of the score for wanted findings and labels."""
        return Score(
            list(filter(wanted, self.true)),
            [(f, why) for f, why in self.false if wanted(f)],
            [(f, why) for f, why in self.debatable if wanted(f)],
            list(filter(wanted, self.unjudged)),
            list(filter(wanted, self.found)),
            list(filter(wanted, self.missed)),
        )

    def of(self, code: str) -> Score:
        return self.only(lambda one: one.code == code)


@dataclass(frozen=True)
class Run:
    tree: Mapping[str, Any]
    score: Score
    num_lines: int
    seconds: float


def read_hazards(tree: Mapping[str, Any]) -> list[Hazard]:
    return [
        Hazard(
            code=entry["code"],
            file=entry["file"],
            first=entry["lines"][0],
            last=entry["lines"][1],
            why=entry["why"],
            also=tuple((file, line) for file, line in entry.get("also", ())),
            optional=entry.get("optional", False),
        )
        for entry in tree["hazards"]
    ]


def judge(findings: Iterable[Finding], tree: Mapping[str, Any]) -> Score:
    """Sort findings by the labels, and those outside of labels by the verdicts."""
    hazards = read_hazards(tree)
    verdicts = {(entry["code"], entry["file"], entry["line"]): entry for entry in tree["verdicts"]}
    score, met = Score(), set()
    for finding in findings:
        meant = {hazard for hazard in hazards if hazard.is_meant_by(finding)}
        met |= meant
        verdict = verdicts.get((finding.code, finding.file, finding.line))
        if meant or (verdict and verdict["true"]):
            score.true.append(finding)
        elif verdict is None:
            score.unjudged.append(finding)
        elif verdict["true"] is None:
            score.debatable.append((finding, verdict["why"]))
        else:
            score.false.append((finding, verdict["why"]))
    needed = [hazard for hazard in hazards if not hazard.optional]
    score.found = [hazard for hazard in needed if hazard in met]
    score.missed = [hazard for hazard in needed if hazard not in met]
    return score


def examine(tree: Mapping[str, Any], trees: Path) -> Run:
    """Run the doctor over one tree."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "ddpshim", "doctor", "--json", str(trees / tree["folder"])],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    seconds = time.perf_counter() - started
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"the doctor ended with {done.returncode} on {tree['folder']}: {done.stderr[-2000:]}")
    report = json.loads(done.stdout)
    findings = [_read(entry, trees / tree["folder"]) for entry in report["findings"]]
    return Run(tree, judge(findings, tree), report["lines"], seconds)


def _read(entry: Mapping[str, Any], root: Path) -> Finding:
    path = Path(entry["path"])
    file = path.relative_to(root) if path.is_relative_to(root) else path
    return Finding(entry["code"], file.as_posix(), entry["line"], entry["message"])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "–"


def _numbers(score: Score) -> list[str]:
    right, wrong, labels = len(score.true), len(score.false), len(score.found) + len(score.missed)
    neither = len(score.debatable) + len(score.unjudged)
    counts = [score.num_findings, right, wrong, neither, labels, len(score.found)]
    return [*map(str, counts), _share(right, right + wrong), _share(len(score.found), labels)]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int) -> list[str]:
    rule = ["---"] * num_texts + ["---:"] * (len(head) - num_texts)
    return [_row(head), "|" + "|".join(rule) + "|", *map(_row, rows), ""]


COUNTS = ["findings", "true", "false", "neither", "labels", "found", "precision", "recall"]


def _total(name: str, runs: Sequence[Run]) -> list[str]:
    score = sum((run.score for run in runs), Score())
    seconds = sum(run.seconds for run in runs)
    return [f"**{name}**", "", "", str(sum(run.num_lines for run in runs)), f"{seconds:.1f}", *_numbers(score)]


def report(runs: Sequence[Run]) -> str:
    """Return the tables of docs/doctor/trees.md, and the findings and labels behind their numbers."""
    held_out = [run for run in runs if run.tree["held_out"]]
    lines = ["## By tree", ""]
    rows = []
    for run in runs:
        name = run.tree["repository"].removeprefix("https://github.com/")
        mark = " (held out)" if run.tree["held_out"] else ""
        rows.append(
            [
                f"[{name}]({run.tree['repository']}/tree/{run.tree['commit']}){mark}",
                f"`{run.tree['commit'][:7]}`",
                run.tree["kind"],
                str(run.num_lines),
                f"{run.seconds:.1f}",
                *_numbers(run.score),
            ]
        )
    rows.append(_total("that the rules were fitted to", [run for run in runs if not run.tree["held_out"]]))
    rows.append(_total("held out", held_out))
    rows.append(_total("all", runs))
    lines += _table(["tree", "commit", "what it is", "lines", "seconds", *COUNTS], rows, 3)

    lines += ["## In the files that were read, and elsewhere", ""]
    rows = []
    for name, part in (
        ("that the rules were fitted to", [r for r in runs if not r.tree["held_out"]]),
        ("held out", held_out),
    ):
        read = sum((r.score.only(lambda one, r=r: one.file in r.tree["read"]) for r in part), Score())
        rest = sum((r.score.only(lambda one, r=r: one.file not in r.tree["read"]) for r in part), Score())
        rows += [[name, "read in full", *_numbers(read)], [name, "elsewhere", *_numbers(rest)]]
    lines += _table(["trees", "files", *COUNTS], rows, 2)

    whole = sum((run.score for run in runs), Score())
    unseen = sum((run.score for run in held_out), Score())
    said = whole.true + whole.unjudged + [f for f, _ in whole.false + whole.debatable]
    codes = sorted({f.code for f in said} | {h.code for h in whole.found + whole.missed})
    lines += ["## By code", "", "In brackets: the held-out trees alone.", ""]
    lines += _table(
        ["code", *COUNTS],
        [
            [code, *(f"{a} ({b})" for a, b in zip(_numbers(whole.of(code)), _numbers(unseen.of(code))))]
            for code in codes
        ],
        1,
    )
    lines += ["## False findings", "", *_listed((run, f.place, why) for run in runs for f, why in run.score.false)]
    lines += ["## Missed labels", ""]
    lines += _listed((run, f"{h.code} {h.file}:{h.first}", h.why) for run in runs for h in run.score.missed)
    lines += ["## Neither", ""]
    lines += _listed((run, f.place, why) for run in runs for f, why in run.score.debatable)
    if whole.unjudged:
        lines += ["## Not judged yet", ""]
        lines += _listed((run, f.place, f.message) for run in runs for f in run.score.unjudged)
    lines += ["## Seen by the reader, without a code", ""]
    lines += _listed((run, "", text) for run in runs for text in run.tree["uncoded"])
    lines += ["## Files that were read", ""]
    lines += [f"- {_short(run)}: {', '.join(f'`{file}`' for file in run.tree['read'])}" for run in runs]
    return "\n".join(lines) + "\n"


def _short(run: Run) -> str:
    return run.tree["folder"].replace("+", "/").rpartition("-")[0]


def _listed(entries: Iterable[tuple[Run, str, str]]) -> list[str]:
    lines = [f"- {_short(run)}: {f'`{place}` ' if place else ''}{why}" for run, place, why in entries]
    return [*(lines or ["None."]), ""]


HEAD = "# The doctor on public trainers\n"
START = "<!-- what follows is written by the command above -->\n"


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.doctor_trees", description=__doc__.splitlines()[0])
    parser.add_argument("--trees", type=Path, required=True, help="the folder with the trees")
    parser.add_argument("--write", type=Path, help="the page whose generated part to replace")
    parser.add_argument("--only", help="folders that contain one of these names")
    parser.add_argument("--unjudged", action="store_true", help="only print findings without a verdict, as JSON")
    args = parser.parse_args(argv)
    trees = json.loads(LABELS.read_text(encoding="utf-8"))["trees"]
    names = args.only.split(",") if args.only else [""]
    runs = [examine(tree, args.trees) for tree in trees if any(name in tree["folder"] for name in names)]
    if args.unjudged:
        for run in runs:
            for finding in run.score.unjudged:
                print(json.dumps({"folder": run.tree["folder"], **vars(finding)}))
        return 0
    page = report(runs)
    if args.write:
        if not args.write.exists():
            args.write.write_text(f"{HEAD}\n{START}", encoding="utf-8")
        pages.fill(args.write, START, page)
    else:
        print(page, end="")
    unjudged = Counter(_short(run) for run in runs for _ in run.score.unjudged)
    for name, count in unjudged.items():
        print(f"{name}: {count} findings are not judged yet", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
