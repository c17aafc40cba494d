"""Replaces the generated part of a page."""

from __future__ import annotations

from pathlib import Path


def fill(page: Path, start: str, text: str, end: str = "") -> None:
    """Write `text` after the mark `start`, replacing everything up to the mark `end`, or to the page's end.

    Raises ValueError, and writes nothing, if the page lacks a mark.
    """
    before, mark, rest = page.read_text(encoding="utf-8").partition(start)
    after = rest.partition(end)[2] if end else ""
    if not mark or end not in rest:
        raise ValueError(f"{page} has no {start if not mark else end!r}: there is no place for what was made")
    page.write_text(f"{before}{start}\n{text}{end}{after}", encoding="utf-8")
