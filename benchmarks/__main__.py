"""Every benchmark, each in a process of its own: what was measured beside its target, as a table, JSON and a picture.

    python -m benchmarks [--quick] [--only step,sampler] [--out build/benchmarks]

With `--only`, what the files there hold of the other benchmarks is kept. Exit code 1 where a target does not hold or a
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
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch

import benchmarks
from benchmarks.results import Result

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = {True: 300, False: 1800}  # by `quick`: of one benchmark


def names() -> list[str]:
    """The benchmarks: the modules here that have a `run`."""
    found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__"]
    return sorted(name for name in found if hasattr(importlib.import_module(f"benchmarks.{name}"), "run"))


def measure(name: str, quick: bool) -> list[Result]:
    """The results of a benchmark that runs in a process of its own; one that says why where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        code = "import sys; from benchmarks.__main__ import save_run; save_run(*sys.argv[1:])"
        command = [sys.executable, "-c", code, name, str(int(quick)), str(file)]
        try:
            ended = subprocess.run(command, cwd=ROOT, check=False, timeout=DEADLINE_S[quick], stdin=subprocess.DEVNULL)
            said = f"exit code {ended.returncode}"
        except subprocess.TimeoutExpired:
            said = f"not ended after {DEADLINE_S[quick]} s"
        if file.exists():
            return _results({"results": json.loads(file.read_text(encoding="utf-8"))})
    # A target that nothing can meet: the failure counts.
    return [Result(name, "the benchmark itself", float("nan"), "", at_most=0.0, note=f"FAILED: {said}")]


def save_run(name: str, quick: str, file: str) -> None:
    """Run a benchmark and leave its results in `file`, which is there only if it went through."""
    found = importlib.import_module(f"benchmarks.{name}").run(bool(int(quick)))
    Path(file).write_text(json.dumps([asdict(result) for result in found]), encoding="utf-8")


def _results(run: dict[str, Any]) -> list[Result]:
    rows = run["results"]
    return [Result(**{**row, "quartiles": tuple(row["quartiles"]) if row["quartiles"] else None}) for row in rows]


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpus": torch.cuda.device_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def page(runs: dict[str, Any]) -> str:
    """The Markdown of all runs, a table for each."""
    lines = ["# Benchmarks", "", "Written by `python -m benchmarks --out docs`.", "", "![targets](benchmarks.png)", ""]
    for name, run in runs.items():
        where = ", ".join(f"{key} {value}" for key, value in run["machine"].items())
        lines += [f"## {name}", "", f"{where}{', `--quick`' if run['quick'] else ''}", "", table(_results(run))]
    return "\n".join(lines).rstrip() + "\n"


def table(results: Iterable[Result]) -> str:
    """The results as a Markdown table, with a note below for each that has one."""
    results = list(results)
    lines = ["| benchmark | what | measured | quartiles | target | holds |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for r in results:
        spread = f"{_short(r.quartiles[0])} to {_short(r.quartiles[1])}" if r.quartiles else ""
        target = f"≤ {_short(r.at_most)}" if r.at_most is not None else ""
        target = f"≥ {_short(r.at_least)}" if r.at_least is not None else target
        holds = {True: "yes", False: "**no**", None: ""}[r.holds]
        measured = f"{_short(r.value)} {r.unit}".strip()
        lines.append(f"| {r.benchmark} | {r.what} | {measured} | {spread} | {target} | {holds} |")
    noted = [f"- {r.benchmark}, {r.what}: {r.note}" for r in results if r.note]
    return "\n".join([*lines, *([""] if noted else []), *noted]) + "\n"


def _short(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def draw(results: Iterable[Result], file: Path) -> None:
    """A picture of how much of its target each result takes up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    aimed = [r for r in results if r.holds is not None and r.value == r.value]
    shares = [_share(r, r.value) for r in aimed]
    errors = [[abs(_share(r, q) - s) for q in (r.quartiles or (r.value,) * 2)] for r, s in zip(aimed, shares)]
    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(aimed)), layout="constrained")
    colours = ["tab:blue" if r.holds else "tab:red" for r in aimed]
    axes.barh(range(len(aimed)), shares, color=colours, xerr=list(zip(*errors)) if errors else None, ecolor="0.3")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(aimed)), [f"{r.benchmark}: {r.what}, {r.unit}" for r in aimed], fontsize=8)
    axes.set_ylim(len(aimed) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel("measured / target (left of 1: it holds); bars: quartiles")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def overview(results: Iterable[Result], file: Path) -> None:
    """The same in small: a row for each benchmark, a dot for each of its targets."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    aimed = [r for r in results if r.holds is not None and r.value == r.value]
    rows = list(dict.fromkeys(r.benchmark for r in aimed))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.3 * len(rows)), layout="constrained")
    for holds, colour, meaning in ((True, "tab:blue", "holds"), (False, "tab:red", "does not hold")):
        dots = [(_share(r, r.value), rows.index(r.benchmark)) for r in aimed if r.holds is holds]
        label = f"{len(dots)} of {len(aimed)} targets: {meaning}"
        axes.scatter(*zip(*dots) if dots else ((), ()), color=colour, alpha=0.6, label=label)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel("measured / target (left of the line: it holds)")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _share(result: Result, value: float) -> float:
    if result.at_most is not None:
        return value / result.at_most if result.at_most else float("inf")
    return (result.at_least or 0.0) / value if value else float("inf")


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
    kept = [result for run in runs.values() for result in _results(run)]
    file.with_suffix(".md").write_text(page(runs), encoding="utf-8")
    draw(kept, file.with_suffix(".png"))
    overview(kept, args.out / "benchmarks_overview.png")
    aimed = [result for result in kept if result.holds is not None]
    print(f"{sum(bool(result.holds) for result in aimed)} of {len(aimed)} targets hold; {file.with_suffix('.md')}")
    return int(not all(result.holds for result in aimed))


if __name__ == "__main__":
    sys.exit(main())
