"""Writes the report into a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Optional, Union

from ddpshim.errors import ReportError
from ddpshim.observe.report.findings import findings, verdict
from ddpshim.observe.report.run import Run, load
from ddpshim.observe.report.tables import headline, tables


def markdown(run: Run) -> str:
    """The report as Markdown."""
    ended = verdict(run)
    lines = [f"# Run {_md(run.folder.name)}", "", f"**{_md(ended.text)}.**", ""]
    lines += [f"- {name}: {_md(value)}" for name, value in headline(run)]
    lines += ["", "## What to look at", "", *(f"- {_md(finding.text)}." for finding in findings(run))]
    for table in tables(run):
        lines += ["", f"## {table.title}", ""]
        lines += ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(map(_md, row)) + " |" for row in table.rows]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines) + "\n"


def write(folder: Union[str, os.PathLike[str]], out: Optional[Path] = None, as_markdown: bool = False) -> Path:
    """Write the report of the run in `folder`; where it is. Local.

    Raises ReportError where there is nothing to report, `out` cannot be written, or the page's matplotlib is missing.
    """
    run = load(folder)
    out = out or run.folder / ("report.md" if as_markdown else "report.html")
    if as_markdown:
        text = markdown(run)
    else:
        from ddpshim.observe.report import page

        text = page.html(run)
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


def _md(text: str) -> str:
    """`text` in a cell of a table, or a line, of Markdown that may hold HTML."""
    for special in "\\`*_[]|#":
        text = text.replace(special, "\\" + special)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
