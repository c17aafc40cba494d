"""Writes the report as HTML or Markdown, and the curves to TensorBoard or W&B."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

from ddpshim.errors import ReportError
from ddpshim.observe import exporting
from ddpshim.observe.report import page
from ddpshim.observe.report.charts import charts
from ddpshim.observe.report.comparing import named, tables_of, verdicts
from ddpshim.observe.report.findings import findings, verdict
from ddpshim.observe.report.results import evaluations
from ddpshim.observe.report.run import Run, load, load_all
from ddpshim.observe.report.tables import headline, tables

PathLike = Union[str, os.PathLike[str]]


def contents(runs: Sequence[Run]) -> page.Contents:
    """Return the report of one run, or a comparison of several with the first. Local.

    Raises ReportError if two of the runs are the same.
    """
    if len(runs) == 1:
        (run,) = runs
        return page.Contents(
            run.name, [("", verdict(run))], headline(run), findings(run), charts({"": run}), tables(run)
        )
    by_name = named(runs)
    ends = [(name, verdict(run)) for name, run in by_name.items()]
    title = " against ".join(by_name)
    return page.Contents(title, [*verdicts(by_name), *ends], [], [], charts(by_name), tables_of(by_name))


def markdown(runs: Sequence[Run]) -> str:
    """Return the report as Markdown, without charts. Local. Raises what `contents` does."""
    report = contents(runs)
    lines = [f"# {_md(report.title)}", ""]
    lines += [f"- **{_md(f'{name}: {said.text}' if name else said.text)}.**" for name, said in report.verdicts]
    lines += [f"- {name}: {_md(value)}" for name, value in report.numbers]
    if report.findings:
        lines += ["", "## What to look at", "", *(f"- {_md(finding.text)}." for finding in report.findings)]
    for table in report.tables:
        lines += ["", f"## {table.title}", ""]
        lines += ["| " + " | ".join(map(_md, table.columns)) + " |", "|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(map(_md, row)) + " |" for row in table.rows]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines) + "\n"


def write(folders: Sequence[PathLike], out: Optional[Path] = None, as_markdown: bool = False) -> Path:
    """Write the report of the runs in `folders` to `out`, and return its path. Local.

    The default is report.html in the run's folder, or for several comparison.html here.

    Raises ReportError if there is nothing to report, `out` cannot be written, or plotly is missing for HTML.
    """
    runs = load_all(folders)
    out = out or (runs[0].folder / "report.html" if len(runs) == 1 else Path("comparison.html"))
    text = markdown(runs) if as_markdown else page.html(contents(runs), page.plotly_js())
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")  # JSON may hold half a surrogate pair
        os.replace(partial, out)
    except OSError as error:
        with contextlib.suppress(OSError):  # usually it does not exist
            partial.unlink()
        raise ReportError(
            f"{out} cannot be written ({error}); the report would be lost. Name another --out."
        ) from error
    return out


def export(folders: Sequence[PathLike], out: Optional[Path], kind: str) -> list[Path]:
    """Write the curves of runs as `kind`, "tensorboard" or "wandb" (offline), and return their folders. Local.

    They are written below `out` (for several runs, in one folder each), or below the run's folder if `out` is None.
    Raises ReportError if there is nothing to report, or the curves cannot be written.
    """
    by_name = named([load(folder) for folder in folders])
    (kind,) = exporting.check(kind)
    written = []
    for name, run in by_name.items():
        below = run.folder if out is None else out if len(by_name) == 1 else out / name
        try:
            below.mkdir(parents=True, exist_ok=True)
            _export(run, exporting.Curves(below, [kind]))
        except OSError as error:
            raise ReportError(
                f"{below} cannot be written ({error}); the curves would be lost. Name another --out."
            ) from error
        written.append(below / kind)
    return written


def _export(run: Run, curves: exporting.Curves) -> None:
    with contextlib.closing(curves):
        for epoch in run.epochs:
            for rows in (epoch.training, epoch.validation):
                if rows:
                    curves.add({rank: row.record for rank, row in sorted(rows.items())})
        for each in evaluations(run):
            found = {"Success_Rate": each.success, "Return": each.mean_return}
            own = {f"{each.environment}/{name}": value for name, value in found.items() if value is not None}
            if own:
                curves.add({0: {"phase": "rollout", "epoch": each.epoch, "time": each.time, "own": own}})


def _md(text: str) -> str:
    """Escape `text` for a line or a table cell of Markdown, which may contain HTML."""
    for special in "\\`*_[]|#":
        text = text.replace(special, "\\" + special)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
