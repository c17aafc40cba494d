"""Runs the programs that measure, each in its own process; writes their results beside the targets.

    python -m evidence.benchmarks [--quick] [--only checkpoint,costs] [--out build/benchmarks]

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
# The programs, each a module here with `run(quick)`, and the question that it answers.
QUESTIONS = {
    "whole_run": "How long does the whole run take?",
    "one_process": "How much faster are two ranks?",
    "main_thread": "What does a step take of the main thread?",
    "checkpoint": "How long does a save stop the training?",
    "costs": "What do guards, records, exact bits and certificates cost?",
}


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
    """Return the Markdown of all runs: each question, with its table."""
    lines = [
        "# Benchmarks",
        "",
        "`python -m evidence.benchmarks --out evidence` writes this page. A unit `x something` means a ratio; both",
        "were measured alternately in one run. **Bold**: the target is missed.",
        "",
    ]
    for name in (name for name in QUESTIONS if name in runs):
        lines += [f"## {QUESTIONS[name]}", ""]
        where = ", ".join(f"{key} {value}" for key, value in runs[name]["machine"].items())
        command = f"`python -m evidence.{name}{' --quick' if runs[name]['quick'] else ''}`"
        lines += [f"{command}, {where}", "", table(results_of(runs[name]))]
    return "\n".join(lines).rstrip() + "\n"


def table(results: Iterable[Result]) -> str:
    """Return a line for each thing that was measured, with its notes; in bold what misses its target."""
    measured: dict[str, list[str]] = {}
    notes: dict[str, dict[str, None]] = {}
    for r in results:
        value = f"{_short(r.value)} {r.unit}".strip()
        more = [f"{_short(r.quartiles[0])} to {_short(r.quartiles[1])}"] if r.quartiles else []
        more += [f"≤ {_short(r.at_most)}"] if r.at_most is not None else []
        more += [f"≥ {_short(r.at_least)}"] if r.at_least is not None else []
        text = f"**{value}**" if r.holds is False else value
        measured.setdefault(r.what, []).append(f"{text} ({', '.join(more)})" if more else text)
        notes.setdefault(r.what, {}).update({r.note: None} if r.note else {})
    rows = ((what, "; ".join(texts), "; ".join(notes[what])) for what, texts in measured.items())
    return "\n".join(pages.table(("what", "measured (quartiles, target)", "notes"), rows, prints=False)) + "\n"


def _short(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"


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
    aimed = [result for run in runs.values() for result in results_of(run) if result.holds is not None]
    print(f"{sum(bool(result.holds) for result in aimed)} of {len(aimed)} targets hold; {file.with_suffix('.md')}")
    return int(not all(result.holds for result in aimed))


if __name__ == "__main__":
    sys.exit(main())
