"""Writes the pages of this folder: their tables, the part of a page that a program made, and the pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional

_OURS, _OTHERS = "tab:blue", "0.7"


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
    return "\n".join(table([*columns.values()], ([_cell(row.get(key)) for key in columns] for row in rows), False))


def _cell(value: Any) -> str:
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


def draw(question: str, found: dict[str, dict[str, float]], file: Path) -> None:
    """Draw bars: for each thing that was measured, ddpshim's of length 1 and others by name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows: list[tuple[str, float, str]] = []  # label, length, colour; an empty label is a gap
    places: list[tuple[float, str]] = []
    for what, others in found.items():
        what = what.replace("s a second", "s, the time for as many")  # rates: see `benchmarks.compared`
        places.append((len(rows), what))
        rows += [("", 0.0, _OURS), ("ddpshim", 1.0, _OURS), *((name, takes, _OTHERS) for name, takes in others.items())]
    lengths = [length for _, length, _ in rows]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.2 * len(rows)), layout="constrained")
    axes.barh(range(len(rows)), lengths, color=[colour for *_, colour in rows], height=0.8)
    most, least = max(lengths), min(length for length in lengths if length)
    is_log = most > 8
    for place, (label, length, _) in enumerate(rows):
        if label:
            axes.text(length, place, f" {label}  {length:.3g}", va="center", fontsize=7)
    for place, what in places:
        axes.text(0, place, what, va="center", fontsize=8, weight="bold", transform=axes.get_yaxis_transform())
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    if is_log:
        axes.set_xscale("log")
    axes.set_xlim((least / 3) if is_log else 0, most * (4 if is_log else 1.35))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("what others take where ddpshim takes 1: time for the same, or memory")
    axes.set_title(question)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(file, dpi=110)
    plt.close(figure)
