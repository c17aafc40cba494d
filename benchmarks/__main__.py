"""Runs every benchmark in its own process, and writes results beside their targets as tables, JSON and pictures.

    python -m benchmarks [--quick] [--only step,overlap] [--out build/benchmarks]

With `--only`, the files keep their results of the other benchmarks. Exit code 1 if a target does not hold or a
benchmark fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch

import benchmarks
from benchmarks.page import draw_all, page, results_of, table
from benchmarks.results import Result

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = {True: 300, False: 1800}  # of one benchmark, by `quick`


def names() -> list[str]:
    """Return the names of the benchmarks: the modules here that have a `run`."""
    found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__"]
    return sorted(name for name in found if hasattr(importlib.import_module(f"benchmarks.{name}"), "run"))


def measure(name: str, quick: bool) -> list[Result]:
    """Run a benchmark in its own process and return its results, or one failed result with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        code = "import sys; from benchmarks.__main__ import save_run; save_run(*sys.argv[1:])"
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
    """Run a benchmark and write its results to `file`, which exists only if it succeeded."""
    found = importlib.import_module(f"benchmarks.{name}").run(bool(int(quick)))
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


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds: minutes")
    parser.add_argument("--only", help=f"some of {', '.join(names())}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks", help="where the files go")
    args = parser.parse_args(argv)
    chosen = args.only.split(",") if args.only else names()
    unknown = set(chosen) - set(names())
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is no benchmark; nothing would be run. There are {names()}")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "benchmarks.json"
    runs: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if args.only and file.exists() else {}
    for name in chosen:
        print(f"running {name}", file=sys.stderr, flush=True)
        results = measure(name, args.quick)
        runs[name] = {"machine": machine(), "quick": args.quick, "results": [asdict(result) for result in results]}
        print(table(results), flush=True)
    runs = dict(sorted(runs.items()))
    file.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    kept = [result for run in runs.values() for result in results_of(run)]
    file.with_suffix(".md").write_text(page(runs), encoding="utf-8")
    draw_all(runs, args.out / "benchmarks")
    aimed = [result for result in kept if result.holds is not None]
    print(f"{sum(bool(result.holds) for result in aimed)} of {len(aimed)} targets hold; {file.with_suffix('.md')}")
    return int(not all(result.holds for result in aimed))


if __name__ == "__main__":
    sys.exit(main())
