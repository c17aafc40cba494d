"""Writes the report to a file, and the curves to TensorBoard or W&B."""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

from ddpshim.errors import ReportError
from ddpshim.observe import exporting
from ddpshim.observe.report.comparing import named, tables_of
from ddpshim.observe.report.findings import findings, verdict
from ddpshim.observe.report.results import evaluations
from ddpshim.observe.report.run import Run, load, load_all
from ddpshim.observe.report.tables import Table, headline, tables

PathLike = Union[str, os.PathLike[str]]


def markdown(runs: Sequence[Run]) -> str:
    """Return the report as Markdown, of one run or a comparison of several."""
    if len(runs) > 1:
        by_name = named(runs)
        lines = [f"# {_md(' against '.join(by_name))}", ""]
        lines += [f"- {_md(name)}: {_md(verdict(run).text)}." for name, run in by_name.items()]
        return "\n".join([*lines, *_tables(tables_of(by_name))]) + "\n"
    (run,) = runs
    lines = [f"# {_md(run.name)}", "", f"**{_md(verdict(run).text)}.**", ""]
    lines += [f"- {name}: {_md(value)}" for name, value in headline(run)]
    lines += ["", "## What to look at", "", *(f"- {_md(finding.text)}." for finding in findings(run))]
    return "\n".join([*lines, *_tables(tables(run))]) + "\n"


def write(folders: Sequence[PathLike], out: Optional[Path] = None, as_markdown: bool = False) -> Path:
    """Write the report of the runs in `folders`, and return its path. Local.

    Raises ReportError if there is nothing to report, `out` cannot be written, or plotly is missing for HTML.
    """
    runs = load_all(folders)
    suffix = ".md" if as_markdown else ".html"
    out = out or (runs[0].folder / f"report{suffix}" if len(runs) == 1 else Path(f"comparison{suffix}"))
    if as_markdown:
        text = markdown(runs)
    else:
        from ddpshim.observe.report import page

        here = out.parent.resolve()
        text = page.html(runs, lambda path: urllib.parse.quote(os.path.relpath(path.resolve(), here)), page.plotly_js())
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
                f"{below} cannot be written ({error}); the curves would be lost. Name another folder."
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


def _tables(made: Sequence[Table]) -> list[str]:
    lines = []
    for table in made:
        lines += ["", f"## {table.title}", ""]
        lines += ["| " + " | ".join(map(_md, table.columns)) + " |", "|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(map(_md, row)) + " |" for row in table.rows]
        lines += ["", table.note] if table.note else []
    return lines


def _md(text: str) -> str:
    """Escape `text` for a line or a table cell of Markdown, which may contain HTML."""
    for special in "\\`*_[]|#":
        text = text.replace(special, "\\" + special)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
