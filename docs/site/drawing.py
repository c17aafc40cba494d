"""Writes docs/one_batch.svg, the drawing of one batch on two ranks in docs/run.md: `python -m docs.site.drawing`."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[1] / "one_batch.svg"
BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#c05621", "#2f855a", "#7a8594"  # grey is read on white and on black
LINE = 17  # pixels from one line of text to the next


def text(x: float, y: float, line: str, colour: str, size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="middle">{line}</text>\n'


def box(x: float, y: float, width: float, height: float, colour: str, *lines: str) -> str:
    """A filled box with white lines of text in its middle, so that the page behind it does not matter."""
    top = y + height / 2 - LINE * (len(lines) - 1) / 2 + 4.5
    drawn = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{colour}"/>\n'
    return drawn + "".join(text(x + width / 2, top + LINE * i, line, "#fff") for i, line in enumerate(lines))


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    ends = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
    return f'<line {ends} stroke="{GREY}" stroke-width="2" marker-end="url(#head)"/>\n'


def svg(width: int, height: int, title: str, drawn: str) -> str:
    """A picture with a transparent background."""
    head = f'<path d="M0,0 L7,3.5 L0,7 z" fill="{GREY}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{title}">\n<title>{title}</title>\n'
        '<marker id="head" markerUnits="userSpaceOnUse" markerWidth="7" markerHeight="7" refX="6" refY="3.5" '
        f'orient="auto">{head}</marker>\n{drawn}</svg>\n'
    )


def one_batch() -> str:
    drawn = text(50, 24, "batch of 8", GREY)
    for sample in range(8):
        drawn += box(12, 36 + 26 * sample + 16 * (sample > 3), 76, 23, (BLUE, ORANGE)[sample > 3], f"sample {sample}")
    for rank, (y, colour) in enumerate(((58, BLUE), (178, ORANGE))):
        drawn += text(169, (50, 254)[rank], f"rank {rank}", GREY)
        shown = {0: ("local shard", f"samples {4 * rank}-{4 * rank + 3}"), 1: ("forward", "same weights")}
        shown |= {3: ("backward", "local gradients"), 5: ("optimizer", "same step")}
        drawn += "".join(box(118 + 136 * i, y, 106, 60, colour, *lines) for i, lines in shown.items())
        drawn += "".join(arrow(90 + 136 * i, y + 30, 117 + 136 * i, y + 30) for i in range(6))
    drawn += box(390, 36, 106, 222, GREEN, "loss", "of all samples:", "gathered, the", "same number", "on both ranks")
    drawn += box(662, 36, 106, 222, GREEN, "all-reduce", "gradients:", "their mean", "on both ranks")
    return svg(916, 272, "One batch on two ranks: local shards, forward, loss, backward, all-reduce, optimizer", drawn)


if __name__ == "__main__":
    FILE.write_text(one_batch(), encoding="utf-8")
    print(FILE)
