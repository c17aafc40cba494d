"""Runs the programs that measure, each in its own process; writes their results beside the targets, and pictures.

    python -m evidence.benchmarks [--quick] [--only step,costs] [--out build/benchmarks]

With `--only`, the files keep their results of the other programs. Exit code 1 if a target does not hold or one fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch

from evidence import pages
from evidence.results import Result

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = {True: 300, False: 1800}  # of one program, by `quick`
# The programs, each a module here with `run(quick)`, and the question that its picture answers.
QUESTIONS = {
    "step": "How long does a step take?",
    "whole_run": "How long does the whole run take?",
    "one_process": "How much faster are two ranks?",
    "main_thread": "What does a step take of the main thread?",
    "node_memory": "How much memory does the data take?",
    "checkpoint": "How long does a save stop the training?",
    "rollouts": "How long do rollouts take?",
    "costs": "What do guards, records, exact bits and certificates cost?",
}
_NOT_OTHERS = ("size of the policy", "the data", "one rank")  # units ("x the data") that compare with no other program


def measure(name: str, quick: bool) -> list[Result]:
    """Run a program in its own process and return its results, or one failed result with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        code = "import sys; from evidence.benchmarks import save_run; save_run(*sys.argv[1:])"
        command = [sys.executable, "-c", code, name, str(int(quick)), str(file)]
        try:
            ended = subprocess.run(command, cwd=ROOT, check=False, timeout=DEADLINE_S[quick], stdin=subprocess.DEVNULL)
            reason = f"exit code {ended.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"not ended after {DEADLINE_S[quick]} s"
        if file.exists():
            return results_of({"results": json.loads(file.read_text(encoding="utf-8"))})
    # NaN misses any target, so the failure counts.
    return [Result(name, "the benchmark itself", float("nan"), "", at_most=0.0, note=f"FAILED: {reason}")]


def save_run(name: str, quick: str, file: str) -> None:
    """Run a program and write its results to `file`, which exists only if it succeeded."""
    found = importlib.import_module(f"evidence.{name}").run(bool(int(quick)))
    Path(file).write_text(json.dumps([asdict(result) for result in found]), encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return the versions, cores and GPUs with which the numbers were measured."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpus": torch.cuda.device_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def results_of(run: dict[str, Any]) -> list[Result]:
    """Return the results of a program from its JSON."""
    rows = run["results"]
    return [Result(**{**row, "quartiles": tuple(row["quartiles"]) if row["quartiles"] else None}) for row in rows]


def page(runs: dict[str, Any]) -> str:
    """Return the Markdown of all runs: each question, with its picture and table."""
    lines = [
        "# Benchmarks",
        "",
        "`python -m evidence.benchmarks --out evidence` writes this page. A unit `x something` means a ratio; both",
        "were measured alternately in one run. **Bold**: the target is missed. In the pictures ddpshim is 1, and",
        "shorter bars are better.",
        "",
    ]
    for name in (name for name in QUESTIONS if name in runs):
        lines += [f"## {QUESTIONS[name]}", ""]
        if compared(results_of(runs[name])):
            lines += [f"![{QUESTIONS[name]}](pictures/{name}.png)", ""]
        where = ", ".join(f"{key} {value}" for key, value in runs[name]["machine"].items())
        command = f"`python -m evidence.{name}{' --quick' if runs[name]['quick'] else ''}`"
        lines += [f"{command}, {where}", "", table(results_of(runs[name]))]
    return "\n".join(lines).rstrip() + "\n"


def table(results: Iterable[Result]) -> str:
    """Return a line for each thing that was measured, in bold what misses its target, with the notes below."""
    measured: dict[str, list[str]] = {}
    notes: dict[str, None] = {}
    for r in results:
        value = f"{_short(r.value)} {r.unit}".strip()
        more = [f"{_short(r.quartiles[0])} to {_short(r.quartiles[1])}"] if r.quartiles else []
        more += [f"≤ {_short(r.at_most)}"] if r.at_most is not None else []
        more += [f"≥ {_short(r.at_least)}"] if r.at_least is not None else []
        text = f"**{value}**" if r.holds is False else value
        measured.setdefault(r.what, []).append(f"{text} ({', '.join(more)})" if more else text)
        if r.note:
            notes[f"- {r.what}: {r.note}"] = None
    rows = ((what, "; ".join(texts)) for what, texts in measured.items())
    lines = pages.table(("what", "measured (quartiles, target)"), rows, prints=False)
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _short(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def compared(results: Iterable[Result]) -> dict[str, dict[str, float]]:
    """Return, for each thing that was measured, what others take of it, by name, if ddpshim takes 1.

    A result with a lower bound (`at_least`) is a rate: twice the rate is half the time.
    """
    found: dict[str, dict[str, float]] = {}
    for result in results:
        is_other = result.unit.startswith("x ") and result.unit[2:] not in _NOT_OTHERS
        if is_other and 0 < result.value < float("inf"):
            takes = result.value if result.at_least is not None else 1 / result.value
            found.setdefault(result.what, {})[result.unit[2:]] = takes
    return found


def draw_all(runs: dict[str, Any], folder: Path) -> None:
    """Draw a picture for each question that has results of others."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (name for name in QUESTIONS if name in runs):
        if found := compared(results_of(runs[name])):
            pages.draw(QUESTIONS[name], found, folder / f"{name}.png")


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds: minutes")
    parser.add_argument("--only", help=f"some of {', '.join(QUESTIONS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks", help="where the files go")
    args = parser.parse_args(argv)
    chosen = args.only.split(",") if args.only else [*QUESTIONS]
    if unknown := set(chosen) - {*QUESTIONS}:
        names = ", ".join(sorted(unknown))
        parser.error(f"--only: {names} is no benchmark; nothing would be run. There are {[*QUESTIONS]}")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "benchmarks.json"
    runs: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if args.only and file.exists() else {}
    for name in chosen:
        print(f"running {name}", file=sys.stderr, flush=True)
        results = measure(name, args.quick)
        runs[name] = {"machine": machine(), "quick": args.quick, "results": [asdict(result) for result in results]}
        print(table(results), flush=True)
    file.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(page(runs), encoding="utf-8")
    draw_all(runs, args.out / "pictures")
    aimed = [result for run in runs.values() for result in results_of(run) if result.holds is not None]
    print(f"{sum(bool(result.holds) for result in aimed)} of {len(aimed)} targets hold; {file.with_suffix('.md')}")
    return int(not all(result.holds for result in aimed))


if __name__ == "__main__":
    sys.exit(main())
