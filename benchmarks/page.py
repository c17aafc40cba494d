"""Builds the page of all results: a picture and tables for each question. Pictures show ddpshim beside others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.results import Result

# Picture: its question, and the benchmarks that answer it.
QUESTIONS = {
    "step": ("How long does a step take?", ("step",)),
    "overlap": ("How much of the communication hides behind backward?", ("overlap",)),
    "run": ("How long does the whole run take?", ("whole_run",)),
    "data": ("How fast is data loading?", ("data_path",)),
    "memory": ("How much memory does the data take?", ("node_memory",)),
    "saves": ("How long does a save stop the training?", ("checkpoint",)),
    "rollouts": ("How long do rollouts take?", ("rollouts", "evaluation")),
}
_NOT_OTHERS = ("size of the policy", "the data", "one rank")  # units ("x the data") that compare with no other program
_OURS, _OTHERS = "tab:blue", "0.7"


def results_of(run: dict[str, Any]) -> list[Result]:
    """Return the results of a benchmark from its JSON."""
    rows = run["results"]
    return [Result(**{**row, "quartiles": tuple(row["quartiles"]) if row["quartiles"] else None}) for row in rows]


def page(runs: dict[str, Any]) -> str:
    """Return the Markdown of all runs: the questions with their pictures, then other measurements."""
    lines = [
        "# Benchmarks",
        "",
        "This page lists all measurements, with targets. `python -m benchmarks --out evidence` writes it. A unit",
        "`x something` means a ratio; both were measured alternately in one run. In the pictures ddpshim is 1, and",
        "shorter bars are better.",
        "",
    ]
    left = dict(runs)
    for name, (question, benchmarks) in QUESTIONS.items():
        asked = {benchmark: left.pop(benchmark) for benchmark in benchmarks if benchmark in left}
        if asked:
            lines += [f"## {question}", ""]
            if compared([r for run in asked.values() for r in results_of(run)]):
                lines += [f"![{question}](benchmarks/{name}.png)", ""]
            lines += _tables(asked)
    if left:
        lines += ["## Other measurements", "", *_tables(left)]
    return "\n".join(lines).rstrip() + "\n"


def _tables(runs: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in runs.items():
        where = ", ".join(f"{key} {value}" for key, value in run["machine"].items())
        lines += [f"### {name}", "", f"{where}{', `--quick`' if run['quick'] else ''}", "", table(results_of(run))]
    return lines


def table(results: Iterable[Result]) -> str:
    """Return the results as a Markdown table, with the notes below it."""
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
    """Draw a picture for each question that has results."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (question, benchmarks) in QUESTIONS.items():
        results = [r for benchmark in benchmarks if benchmark in runs for r in results_of(runs[benchmark])]
        if found := compared(results):
            draw(question, found, folder / f"{name}.png")


def draw(question: str, found: dict[str, dict[str, float]], file: Path) -> None:
    """Draw bars, one group for each thing that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows: list[tuple[str, float, str]] = []  # label, length, colour; an empty label is a gap
    places: list[tuple[float, str]] = []
    for what, others in found.items():
        what = what.replace("s a second", "s, the time for as many")  # rates: see `compared`
        places.append((len(rows), what))
        rows += [("", 0.0, _OURS)]
        bars = [("ddpshim", 1.0, _OURS), *((name, takes, _OTHERS) for name, takes in others.items())]
        rows += bars
    lengths = [length for _, length, _ in rows]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.2 * len(rows)), layout="constrained")
    axes.barh(range(len(rows)), lengths, color=[colour for *_, colour in rows], height=0.8)
    most = max(lengths)
    is_log = most > 8
    for place, (label, length, _) in enumerate(rows):
        if label:
            axes.text(length, place, f" {label}  {_times(length)}", va="center", fontsize=7)
    for place, what in places:
        axes.text(0, place, what, va="center", fontsize=8, weight="bold", transform=axes.get_yaxis_transform())
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    if is_log:
        axes.set_xscale("log")
    least = min(length for length in lengths if length)
    axes.set_xlim((least / 3) if is_log else 0, most * (4 if is_log else 1.35))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("what others take where ddpshim takes 1: time for the same, or memory")
    axes.set_title(question)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _times(length: float) -> str:
    return "" if length == 1 else f"{length:.2f}" if length < 10 else f"{length:.0f}"
