"""Writes the pages of this folder: their tables, and the part of a page that a program made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional


def fill(page: Path, start: str, text: str, end: str = "") -> None:
    """Write `text` after the mark `start`, replacing everything up to the mark `end`, or to the page's end.

    Raises ValueError, and writes nothing, if the page lacks a mark.
    """
    before, mark, rest = page.read_text(encoding="utf-8").partition(start)
    after = rest.partition(end)[2] if end else ""
    if not mark or end not in rest:
        raise ValueError(f"{page} has no {start if not mark else end!r}: there is no place for what was made")
    page.write_text(f"{before}{start}\n{text}{end}{after}", encoding="utf-8")


def parser(description: Optional[str]) -> argparse.ArgumentParser:
    """Return a parser of the options that all programs have which compare ranks with one process."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", default="2,3", help="a run on the first is stopped and resumed on the last")
    made.add_argument("--write", type=Path, help="a page that has the line after which the table stands")
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], prints: bool = True) -> list[str]:
    """Return the lines of a table, and print each when it is there."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
        if prints:
            print(lines[-1], flush=True)
    return lines


def table_of(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return a table of mappings; `columns` has their keys, and the heads."""
    return "\n".join(table([*columns.values()], ([cell(row.get(key)) for key in columns] for row in rows), False))


def cell(value: Any) -> str:
    """Return a value as a cell of a table; **no** for False."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.0e}" if value else "0"
    return "" if value is None else str(value)


def finish(lines: Sequence[str], page: Optional[Path], start: str, end: str = "") -> NoReturn:
    """Print the lines, fill `page` with them, and exit: with 1 if something in them is bold, which is a difference."""
    text = "\n".join(lines) + "\n"
    print(text)
    if page:
        fill(page, start, text, end)
    sys.exit("**" in text)
