"""Public silent bugs of distributed training, each as a small program, and which tool finds which bug.

Run it: python -m evidence.bugs [--write evidence/bugs.md] [--only WORDS]

evidence/planted contains them: a name, the addresses of the reports, the right findings, and the text for the trainer's
places. "- " begins a line of the bug, "+ " a line of its clean twin. `check` looks at both, on two ranks; programs
that use ddpshim also run under its guards.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional

from evidence import pages
from tests.preloaded import environment, preloaded, start_afresh
from tests.preloaded_commands import commands

FOLDER = Path(__file__).parent / "planted"
PAGE = Path(__file__).parent.parent / "evidence" / "bugs.md"
AREAS = ("data", "losses", "gradients", "weights", "schedules", "validation", "others")
TOOLS = ("guards", "check")
DEADLINE_S = 120.0
# `python -m ddpshim ARGUMENTS` whose processes are forked from one with torch imported: argv[1] is that Python.
_PRELOADED = """
import functools, inspect, runpy, sys
inspect.stack = functools.partial(inspect.stack, 0)  # torch calls it to name its events: seconds
sys.executable = sys.argv.pop(1)
sys.argv[0] = "ddpshim"
runpy.run_module("ddpshim", run_name="__main__")
"""


class Trainer(NamedTuple):
    """A program with places, `{place}`, and their default texts."""

    text: str
    parts: Mapping[str, str]


class Bug(NamedTuple):
    """A bug, and its clean twin."""

    name: str
    area: str
    sources: Sequence[str]
    trainers: Sequence[str]  # "raw": with torch alone, "ours": with ddpshim
    means: frozenset[str]  # right answers: what differs in a proof (and :in which tensor)
    is_cold: bool  # its ranks must be new Pythons, not forks
    parts: Mapping[str, str]

    def program(self, trainer: str, is_clean: bool = False) -> str:
        """Return the program with the bug, or its clean twin."""
        made, base = TRAINERS[trainer].text, TRAINERS[trainer].parts
        own = {place: text for place, text in self.parts.items() if "." not in place}
        own.update({place[len(trainer) + 1 :]: text for place, text in self.parts.items() if f"{trainer}." in place})
        parts = {**base, **{place: _of_one(text, is_clean) for place, text in own.items()}}
        while found := re.search(r"^( *)\{(\w+)\}\n", made, re.MULTILINE):
            made = made.replace(found[0], textwrap.indent(parts.get(found[2], "").rstrip("\n") + "\n", found[1]))
        made = re.sub(r"\n\s*\n(?= )(?! +def )", "\n", made)  # empty places leave no empty line
        return re.sub(r"\n{4,}", "\n\n\n", made)


def _of_one(text: str, is_clean: bool) -> str:
    """Return the lines of the bug or of its twin, with the common lines."""
    lines = (line for line in text.splitlines(keepends=True) if not line.startswith("-+"[not is_clean] + " "))
    return "".join(line[2:] if line.startswith(("- ", "+ ")) else line for line in lines)


def texts_in(text: str) -> dict[str, str]:
    """Return the text below each `=== NAME`, by name."""
    return dict(re.findall(r"^=== (.*)\n((?:(?!=== ).*\n)*)", text, re.MULTILINE))


def parts_in(text: str) -> dict[str, str]:
    """Return the text below each `--- PLACE`, by place."""
    return dict(re.findall(r"^--- ([\w.]+)\n((?:(?!--- ).*\n)*)", text, re.MULTILINE))


def _read_trainers() -> dict[str, Trainer]:
    read: dict[str, Trainer] = {}
    for name, text in texts_in((FOLDER / "trainers.txt").read_text()).items():
        raw = read.get("raw", Trainer("", {}))
        read[name] = Trainer(text.partition("--- ")[0] or raw.text, {**raw.parts, **parts_in(text)})
    return read


def _read_bugs() -> Iterator[Bug]:
    for area in AREAS:
        for name, text in texts_in((FOLDER / f"{area}.txt").read_text()).items():
            said = dict(re.findall(r"^(\w+): (.*)$", text.partition("--- ")[0], re.MULTILINE))
            means = frozenset(shlex.split(said["means"]))
            trainers = said.get("on", "raw").split()
            yield Bug(name, area, said.get("source", "").split(), trainers, means, "cold" in said, parts_in(text))


TRAINERS = _read_trainers()
BUGS = list(_read_bugs())


@dataclass
class Answer:
    """A tool's result for a program: its findings by their shortest names."""

    findings: list[str] = field(default_factory=list)
    trouble: str = ""  # why the tool could not check, or how the program failed
    where: str = ""  # of a proof: the tensors that differ


@dataclass
class Result:
    """The tools' answers for a bug, and for its twin."""

    bug: Bug
    buggy: dict[str, Answer] = field(default_factory=dict)
    clean: dict[str, Answer] = field(default_factory=dict)
    cannot_happen: bool = False  # with ddpshim it is the same experiment

    def right(self, tool: str) -> list[str]:
        """Return a tool's findings that name the bug and that it does not report for the twin."""
        said, alarms = self.buggy[tool], self.clean[tool].findings
        places = (mean.partition(":") for mean in self.bug.means)
        means = {what for what, _, where in places if not where or where in said.where}
        return [one for one in said.findings if (one in means or tool == "guards") and one not in alarms]

    @property
    def is_found(self) -> bool:
        return any(self.right(tool) for tool in TOOLS if tool in self.buggy)


def command(argv: Sequence[str], folder: Path, is_cold: bool = False) -> tuple[int, str]:
    """Run `python -m ddpshim` with these arguments; return its exit code and its output."""
    if is_cold:
        return start_afresh(["-m", "ddpshim", *argv], environment(), folder, DEADLINE_S, True)
    return start_afresh(["-c", _PRELOADED, str(commands() / "python"), *argv], environment(), folder, DEADLINE_S)


def look(tool: str, program: str, is_cold: bool = False) -> Answer:
    """Check a program with a tool on two ranks, and return its answer."""
    asked = ["run", "--nproc", "2"] if tool == "guards" else [tool, "--json"]
    with tempfile.TemporaryDirectory(prefix="bug-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(program)
        code, said = command([*asked, "train.py"], folder, is_cold)
    if tool == "guards":
        stopped = re.search(r"SyncError: (.*)", said)
        return Answer([] if stopped is None else ["stops"], said[-2000:] if code and stopped is None else "")
    start = said.find('{\n  "schema"')
    if start < 0:
        return Answer([], f"exit code {code}: {said[-2000:]}")
    report = json.JSONDecoder().raw_decode(said[start:])[0]
    said = [*([report["parting"]] if report["parting"] else []), *report["wrong"]]
    trouble = "" if said or report["is_same"] or report["by_design"] else "nothing compared"
    return Answer([one["what"] for one in said], trouble, where=" ".join(one["where"] for one in said))


def examine(bug: Bug) -> Result:
    """Check a bug and its twin with each tool."""
    result = Result(bug)
    for is_clean, answers in ((False, result.buggy), (True, result.clean)):
        for trainer in bug.trainers:
            program = bug.program(trainer, is_clean)
            tools = ["check"] if trainer == bug.trainers[0] else []
            for tool in [*tools, *(["guards"] if trainer == "ours" else [])]:
                answers[tool] = look(tool, program, bug.is_cold)
    if "ours" in bug.trainers and not result.right("guards"):
        result.cannot_happen = look("check", bug.program("ours")) == Answer()
    return result


# The page


def _cell(result: Result, tool: str) -> str:
    if tool not in result.buggy:
        return "–"
    right = ", ".join(result.right(tool))
    return right or ("cannot happen" if tool == "guards" and result.cannot_happen else "no")


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f}%)" if whole else "–"


def row(result: Result) -> str:
    links = " ".join(f"[{_shown(source)}]({source})" for source in result.bug.sources)
    cells = [result.bug.name, links, *(_cell(result, tool) for tool in TOOLS)]
    return "| " + " | ".join(cells) + " |"


def _shown(source: str) -> str:
    known = re.fullmatch(r"https://github.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)", source)
    return f"{known[1]}#{known[2]}" if known else source.removeprefix("https://").partition("/")[0]


def report(results: Sequence[Result]) -> str:
    """Return the tables of evidence/bugs.md. Bugs without a public report are not counted."""
    every, results = results, [each for each in results if each.bug.sources]
    lines = ["| tool | finds | false alarms on the twins |", "|---|---|---|"]
    for tool in TOOLS:
        asked = [each for each in results if tool in each.buggy]
        alarms = sum(bool(each.clean[tool].findings) for each in asked)
        found = sum(bool(each.right(tool)) for each in asked)
        lines.append(f"| {tool} | {_share(found, len(asked))} | {_share(alarms, len(asked))} |")
    alarms = sum(any(answer.findings for answer in each.clean.values()) for each in results)
    found = sum(each.is_found for each in results)
    lines.append(f"| together | {_share(found, len(results))} | {_share(alarms, len(results))} |")
    for area in AREAS:
        of_area = [each for each in every if each.bug.area == area]
        if of_area:
            head = "| bug | reported | " + " | ".join(TOOLS) + " |"
            lines += ["", f"## {area.capitalize()}", "", head, "|---|---|---|---|", *map(row, of_area)]
    lines += ["", "## Found by none", ""]
    lines += [f"- {each.bug.name}" for each in every if not each.is_found] or ["None."]
    lines += ["", "## False alarms", ""]
    lines += list(_alarms(every)) or ["None."]
    return "\n".join(lines) + "\n"


def _alarms(results: Iterable[Result]) -> Iterator[str]:
    for each in results:
        for tool, answer in each.clean.items():
            if answer.findings:
                yield f"- {tool}, on the twin of “{each.bug.name}”: {', '.join(answer.findings)}"


def read_page(page: str) -> dict[str, Result]:
    """Return the results in the page's tables by the bug's name, for bugs that still exist."""
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]
    cells_of = {cells[0]: cells[2:] for cells in rows if len(cells) == 2 + len(TOOLS)}
    alarms = {
        (name, tool): said.split(", ") for tool, name, said in re.findall(r"- (\w+), on the twin of “(.*)”: (.*)", page)
    }
    read: dict[str, Result] = {}
    for bug in (bug for bug in BUGS if bug.name in cells_of):
        result = read[bug.name] = Result(bug)
        where = " ".join(mean.partition(":")[2] for mean in bug.means)
        for tool, cell in zip(TOOLS, cells_of[bug.name]):
            if cell != "–":
                found = [] if cell in ("no", "cannot happen") else cell.split(", ")
                result.buggy[tool] = Answer(found, where=where)
                result.clean[tool] = Answer(alarms.get((bug.name, tool), []))
                result.cannot_happen |= cell == "cannot happen"
    return read


START = "<!-- what follows is written by python -m evidence.bugs --write evidence/bugs.md -->\n"


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.bugs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="bugs whose names have one of these words, by commas")
    parser.add_argument("--write", type=Path, help="the page whose tables to replace; what is not run stays")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args(argv)
    bugs = [bug for bug in BUGS if any(word in bug.name for word in chosen.only.split(","))]
    preloaded()  # started once, before threads need it
    results = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for result in pool.map(examine, bugs):
            results.append(result)
            print(row(result), file=sys.stderr)
            for what, answers in (("", result.buggy), ("twin: ", result.clean)):
                for tool, answer in answers.items():
                    others = [] if what else [one for one in answer.findings if one not in result.right(tool)]
                    if answer.trouble or others or (what and answer.findings):
                        print(f"    {what}{tool}: {others or answer.findings} {answer.trouble}", file=sys.stderr)
    if chosen.write:
        page = chosen.write.read_text()
        every = {**read_page(page), **{result.bug.name: result for result in results}}
        made = report([every[bug.name] for bug in BUGS])
        pages.fill(chosen.write, START, made)
    else:
        print(report(results), end="")
    return int(any(answer.trouble for each in results for answer in (*each.buggy.values(), *each.clean.values())))


if __name__ == "__main__":
    sys.exit(main())
