"""Changes one line of the package at a time, and looks which test sees it: a change that none sees needs a test.

    python -m evidence.kills [--num 150] [--only TEXT] [--most SECONDS] [--folder FOLDER] [--write evidence/kills.md]

The changes (CHANGES) are chosen by hashes of their lines, over all folders by their size. First all tests but
tests/house run once, in a copy of this checkout whose changed lines note who runs them (15 minutes on two cores). Then,
for each change, the tests that run its line, fastest first, until one fails: half a minute for most. What is done is
kept in FOLDER, from which a later call goes on. What is changed at the top of a file is tried with all tests.
"""

from __future__ import annotations

import argparse
import ast
import collections
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import torch

from evidence import pages

ROOT = Path(__file__).parents[1]
PAGE_START = "<!-- python -m evidence.kills -->"
_MARK = "_mark"  # the module of the copy that notes who runs a line
_OTHERS = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "==", "Is": "is not", "IsNot": "is"}
_OTHERS |= {
    "In": "not in",
    "NotIn": "in",
    "Add": "-",
    "Sub": "+",
    "Mult": "+",
    "FloorDiv": "*",
    "And": "or",
    "Or": "and",
}


class Change(NamedTuple):
    """One line of a file, and what stands there instead."""

    file: str
    number: int
    line: str
    other: str
    marked: Optional[int]  # before which line of the file a mark goes; None: at its top, which all tests run

    @property
    def name(self) -> str:
        return hashlib.sha1(f"{self.file} {self.line} {self.other}".encode()).hexdigest()[:10]


def _compared(node: Any) -> Optional[str]:
    """Another comparison: a bound that is off by one, a condition upside down."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return None
    sides = ast.unparse(node.left), ast.unparse(node.comparators[0])
    return f"{sides[0]} {_OTHERS[type(node.ops[0]).__name__]} {sides[1]}"


def _joined(node: Any) -> Optional[str]:
    """`and` for `or`."""
    if not isinstance(node, ast.BoolOp):
        return None
    return f" {_OTHERS[type(node.op).__name__]} ".join(f"({ast.unparse(value)})" for value in node.values)


def _upside_down(node: Any) -> Optional[str]:
    """A condition without its `not`."""
    return f"({ast.unparse(node.operand)})" if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else None


def _computed(node: Any) -> Optional[str]:
    """Another sign."""
    if not isinstance(node, ast.BinOp) or (other := _OTHERS.get(type(node.op).__name__)) is None:
        return None
    texts = [x for x in ast.walk(node) if isinstance(x, (ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Starred))]
    texts += [x for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, (str, bytes))]
    return None if texts else f"({ast.unparse(node.left)}) {other} ({ast.unparse(node.right)})"


def _off_by_one(node: Any) -> Optional[str]:
    """Another number, or the other truth."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int):
        return None
    return str(not node.value if isinstance(node.value, bool) else node.value + 1)


def _left_out(node: Any) -> Optional[str]:
    """A call without its statement: a message that is not sent, a file that is not written."""
    return "pass" if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def _unchecked(node: Any) -> Optional[str]:
    """A check that always holds."""
    if not isinstance(node, ast.If) or not isinstance(node.body[0], ast.Raise) or node.orelse:
        return None
    return "False"


def _every_rank(node: Any) -> Optional[str]:
    """What the main rank does, done by every rank."""
    return "True" if isinstance(node, ast.Attribute) and node.attr == "is_main" else None


def _forgotten(node: Any) -> Optional[str]:
    """A list of names without one: a rule that is missing."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or '"' in node.value:
        return None
    names = node.value.split()
    is_list = len(names) > 4 and sum(hasattr(torch.Tensor, name) or hasattr(torch, name) for name in names) > 3
    return '"' + " ".join(names[:1] + names[2:]) + '"' if is_list else None


CHANGES: tuple[Callable[[Any], Optional[str]], ...] = (
    *(_compared, _joined, _upside_down, _computed, _off_by_one, _left_out, _unchecked, _every_rank, _forgotten),
)


def changes_of(path: Path) -> Iterator[tuple[str, Change]]:
    """Yield the changes of one file, each with the name of its kind."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()

    def visit(node: ast.AST, marked: Optional[int]) -> Iterator[tuple[str, Change]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global, ast.Assert)):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):  # a docstring
                continue
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                for inner in child.body[ast.get_docstring(child) is not None :]:
                    if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                        yield from visit(ast.Module([inner], []), None)
                    else:
                        yield from found(inner, inner.lineno if isinstance(child, ast.FunctionDef) else None)
                continue
            is_elif = isinstance(node, ast.If) and child in node.orelse and isinstance(child, ast.If)
            is_first = marked is not None and isinstance(child, ast.stmt) and not is_elif
            yield from found(child, child.lineno if is_first else marked)  # type: ignore[attr-defined]

    def found(node: Any, marked: Optional[int]) -> Iterator[tuple[str, Change]]:
        for change in CHANGES:
            old = node.test if change is _unchecked and isinstance(node, ast.If) else node
            if (text := change(node)) is None or old.lineno != old.end_lineno:
                continue
            line = lines[old.lineno - 1].encode()  # offsets are of bytes
            other = (line[: old.col_offset] + text.encode() + line[old.end_col_offset :]).decode()
            at = str(path.relative_to(ROOT))
            yield change.__name__, Change(at, old.lineno, line.decode().strip(), other.strip(), marked)
        yield from visit(node, marked)

    yield from visit(ast.parse(source), None)


def chosen(num: int) -> list[Change]:
    """Return `num` changes: of each folder by its lines, of all kinds, one of a line."""
    by_folder: dict[str, list[tuple[str, Change]]] = collections.defaultdict(list)
    sizes: dict[str, int] = collections.Counter()
    for path in sorted((ROOT / "ddpshim").rglob("*.py")):
        folder = str(path.parent.relative_to(ROOT))
        by_folder[folder] += changes_of(path)
        sizes[folder] += len(path.read_text(encoding="utf-8").splitlines())
    made = []
    for folder, found in by_folder.items():
        found.sort(key=lambda one: one[1].name)
        kinds: dict[str, list[Change]] = collections.defaultdict(list)
        for kind, change in found:
            kinds[kind].append(change)
        lines, most = set[tuple[str, int]](), max(1, round(num * sizes[folder] / sum(sizes.values())))
        while most and any(kinds.values()):
            for of_kind in kinds.values():
                while of_kind and most:
                    change = of_kind.pop(0)
                    if (change.file, change.number) not in lines:
                        lines.add((change.file, change.number))
                        made.append(change)
                        most -= 1
                        break
    return made


def copied(folder: Path) -> Path:
    """Return a copy of the files of this checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


# An empty file for each, as a test may limit the size of files. A process does not know for which test it works: its
# environment may be that of a server which another test started.
_MARKER = """
import os, posix, time
_posix, _seen = (posix.open, posix.close), set()  # hidden from what replaces functions of os
def hit(number):
    moment = int(4 * time.time())
    if (number, moment) not in _seen:
        _seen.add((number, moment))
        try:
            _posix[1](_posix[0](f"{path}/{{number}} {{time.time():.1f}}", os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError:
            pass
"""
_TIMER = """
import os
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open({path!r}, "a") as file:
            print(report.start, report.stop, report.nodeid, file=file)
"""


def tests_of(changes: list[Change], folder: Path) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Return the tests that run each change's line, by its name, and the seconds of all tests; runs them once."""
    known = folder / "tests.json"
    if known.exists():
        found, seconds = json.loads(known.read_text())
        if {change.name for change in changes} <= found.keys():
            return found, seconds
    shutil.rmtree(folder / "marked", ignore_errors=True)
    at, hits, times = copied(folder / "marked"), folder / "hits", folder / "times"
    (at / f"ddpshim/{_MARK}.py").write_text(_MARKER.format(path=hits))
    (at / "kills_times.py").write_text(_TIMER.format(path=str(times)))
    by_file: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for number, change in enumerate(changes):
        if change.marked is not None:
            by_file[change.file].append((change.marked, number))
    for file, marks in by_file.items():
        lines = (at / file).read_text(encoding="utf-8").splitlines()
        for before, number in sorted(marks, reverse=True):
            indent = len(lines[before - 1]) - len(lines[before - 1].lstrip())
            lines.insert(before - 1, f'{" " * indent}__import__("ddpshim.{_MARK}", fromlist=["hit"]).hit({number})')
        (at / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    shutil.rmtree(hits, ignore_errors=True)
    hits.mkdir()
    times.write_text("")
    run_tests(at, [], ["-p", "kills_times", "-q", "-n", "4"], 3600)
    spans: dict[str, list[float]] = {}
    for line in times.read_text().splitlines():
        start, stop, test = line.split(" ", 2)
        span = spans.setdefault(test, [float(start), float(stop)])
        span[:] = min(span[0], float(start)), max(span[1], float(stop))
    found = {change.name: [] for change in changes}
    seen = set[tuple[int, str]]()
    for one in hits.iterdir():
        number, moment = one.name.split()[:2]
        seen |= {
            (int(number), test) for test, (start, stop) in spans.items() if start - 0.2 <= float(moment) <= stop + 0.2
        }
    for number, test in seen:
        found[changes[number].name].append(test)
    seconds = {test: stop - start for test, (start, stop) in spans.items()}
    for change in changes:
        if change.marked is None:
            found[change.name] = [*seconds]
    known.write_text(json.dumps([found, seconds]))
    return found, seconds


def run_tests(at: Path, tests: list[str], options: list[str], deadline_s: float) -> str:
    """Return what pytest says of these tests, of the checkout in `at`; of all but tests/house without `tests`."""
    listed = at / "tests.txt"
    listed.write_text("\n".join(tests or ["tests"]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        *options,
    ]
    environ = {**os.environ, "PYTHONPATH": str(at), "PYTHONDONTWRITEBYTECODE": "1"}
    with (at / "said.txt").open("w+") as out:
        process = subprocess.Popen(
            [*command, "--ignore=tests/house", f"@{listed}"],
            **{"cwd": at, "env": environ, "stdout": out, "stderr": out, "start_new_session": True},
        )
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            print("FAILED (deadline)", file=out)
        out.seek(0)
        return out.read()


def seen_by(change: Change, at: Path, tests: list[str], seconds: dict[str, float], most_s: float) -> dict[str, Any]:
    """Make the change in `at`, run its tests until one fails, and undo it."""
    path, total, some = at / change.file, 0.0, list[str]()
    for test in sorted(tests, key=lambda test: seconds.get(test, 0.0)):
        if (total := total + seconds.get(test, 0.0)) < 2 * most_s:
            some.append(test)
    if not some:
        return {"test": None, "s": 0.0, "num": 0, "of": len(tests)}
    source, start = path.read_text(encoding="utf-8"), time.monotonic()
    lines = source.splitlines()
    line = lines[change.number - 1]
    lines[change.number - 1] = line[: len(line) - len(line.lstrip())] + change.other
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        said = run_tests(at, some, ["-x", "-q", "--no-header", "--tb=no", "-rfE"], 120 + most_s)
    finally:
        path.write_text(source, encoding="utf-8")
    failed = [one for one in said.splitlines() if one.startswith(("FAILED", "ERROR"))]
    if not failed and " passed" not in said:
        failed = ["FAILED (no test began)"]
    test = failed[0].split(" - ")[0].partition(" ")[2] if failed else None
    return {"test": test, "s": time.monotonic() - start, "num": len(some), "of": len(tests)}


def table(changes: list[Change], done: dict[str, Any]) -> list[str]:
    """Return the lines of the page: by folder, then what no test sees, then all."""
    by_folder: dict[str, list[Any]] = collections.defaultdict(list)
    for change in changes:
        if change.name in done:
            by_folder[str(Path(change.file).parent)].append(done[change.name]["test"])
    lines = pages.table(
        ["folder", "changes", "seen"],
        (
            (folder, str(len(tests)), str(sum(test is not None for test in tests)))
            for folder, tests in by_folder.items()
        ),
        prints=False,
    )
    rows = []
    for change in changes:
        if (found := done.get(change.name)) is not None:
            seen = found["test"] or f"**none** of the {found['num']} tried, of {found['of']} that run it"
            code = [f"`` {text.replace('|', '¦')} ``" for text in (change.line, change.other)]
            rows.append([f"{change.file[8:]}:{change.number}", *code, seen.replace("tests/", ""), f"{found['s']:.0f}"])
    rows.sort(key=lambda row: ("**" not in row[3], row[0]))
    return [*lines, "", *pages.table(["line", "was", "is", "seen by", "s"], rows, prints=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=150)
    parser.add_argument("--only", default="", help="a part of a file's name, or of a line")
    parser.add_argument("--most", type=float, default=400, help="seconds of tests for one change")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "ddpshim-kills")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    changes, path = chosen(asked.num), asked.folder / "done.json"
    tests, seconds = tests_of(changes, asked.folder)
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    shutil.rmtree(asked.folder / "changed", ignore_errors=True)
    at = copied(asked.folder / "changed")
    for number, change in enumerate(changes):
        if change.name not in done and (asked.only in change.file or asked.only in change.line):
            found = done[change.name] = seen_by(change, at, tests[change.name], seconds, asked.most)
            path.write_text(json.dumps(done, indent=1))
            print(f"{number + 1}/{len(changes)} {change.file}:{change.number} {change.line} -> {change.other}")
            print(f"    {found['test'] or 'NO TEST'} ({found['s']:.0f} s, {found['num']} of {found['of']})", flush=True)
    lines = table(changes, done)
    if asked.write:
        pages.fill(asked.write, PAGE_START, "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
