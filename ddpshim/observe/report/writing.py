"""Writes the report into a file."""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

from ddpshim.errors import ReportError
from ddpshim.observe.report.comparing import named, tables_of
from ddpshim.observe.report.findings import findings, verdict
from ddpshim.observe.report.run import Run, load
from ddpshim.observe.report.tables import Table, headline, tables

PathLike = Union[str, os.PathLike[str]]


def markdown(runs: Sequence[Run]) -> str:
    """The report as Markdown, of a run or of several beside each other."""
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
    """Write the report of the runs in `folders`; where it is. Local.

    Raises ReportError where there is nothing to report, `out` cannot be written, or the page's plotly is missing.
    """
    runs = [load(folder) for folder in folders]
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
        partial.write_text(text, encoding="utf-8", errors="replace")  # half a character of JSON has no bytes
        os.replace(partial, out)
    except OSError as error:
        with contextlib.suppress(OSError):  # most often it is not there
            partial.unlink()
        raise ReportError(
            f"{out} cannot be written ({error}); the report would be lost. Name another --out."
        ) from error
    return out


def _tables(made: Sequence[Table]) -> list[str]:
    lines = []
    for table in made:
        lines += ["", f"## {table.title}", ""]
        lines += ["| " + " | ".join(map(_md, table.columns)) + " |", "|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(map(_md, row)) + " |" for row in table.rows]
        lines += ["", table.note] if table.note else []
    return lines


def _md(text: str) -> str:
    """`text` in a cell of a table, or a line, of Markdown that may hold HTML."""
    for special in "\\`*_[]|#":
        text = text.replace(special, "\\" + special)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
