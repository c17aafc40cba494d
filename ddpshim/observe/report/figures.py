"""Builds figures for plotly, which draws them in the page.

Text and grid take their colours from the page's style. The colours of lines and bars are visible on a light and on a
dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

# Contrast: at least 3 to 1 against both pages; 4.5 to 1 between white text and PART_COLOURS.
COLOURS = ("#2e7fd1", "#d2601a", "#128a64", "#b556a2", "#a67c00", "#3f93b5", "#8467c9", "#9a6a45")
PART_COLOURS = ("#b2590f", "#3d73b3", "#2b7f57", "#9b518f", "#6b7482")
GREY, GOOD, BAD = "#808894", "#1f8a54", "#d0454f"
DASHES = ("solid", "dash", "dot", "dashdot")
MOST_NAMED = 8
_FEW_POINTS = 12  # longer lines are drawn without markers
_HEIGHT = 300  # pixels

Figure = dict[str, Any]


class Chart(NamedTuple):
    """A figure with its texts. `says` is for those who cannot see it; `table` names the table with its numbers."""

    name: str
    title: str
    says: str
    how_to_read: str
    table: str
    figure: Figure


def figure(traces: Sequence[Figure], y: str, x: str = "epoch", height: int = _HEIGHT, **layout: Any) -> Figure:
    """Return a figure of `traces`; `x` and `y` are the titles of its axes."""
    traces = [trace for trace in traces if trace]
    xaxis: Figure = {"title": {"text": x, "standoff": 6}, "hoverformat": ".4~g"}
    xaxis.update(spikethickness=1, spikecolor=GREY)
    if x == "epoch":
        at = {value for trace in traces for value in trace["x"]}
        if max(at, default=0) - min(at, default=0) < MOST_NAMED:
            xaxis["dtick"] = 1
        if len(at) == 1:
            xaxis["range"] = [min(at) - 0.5, max(at) + 0.5]
    named = [trace for trace in traces if trace.get("showlegend", True)]
    for trace in named[MOST_NAMED:]:
        trace["showlegend"] = False
    return {
        "data": traces,
        "layout": {
            "height": height,
            "margin": {"l": 56, "r": 14, "t": 8, "b": 48},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": COLOURS[0]},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hovermode": "x unified" if len(named) <= MOST_NAMED else "closest",
            "showlegend": len(named) > 1,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
            "xaxis": xaxis,
            "yaxis": axis(y),
            "hoverlabel": {"namelength": -1},
            "uirevision": "kept",  # keeps the zoom when the page refreshes
            **layout,
        },
    }


def line(name: str, points: Mapping[Any, Optional[float]], number: int = 0, **more: Any) -> Figure:
    """Return a line; its colour and dashes depend on `number`, and differ for the first 32."""
    dash = DASHES[(number // len(COLOURS)) % len(DASHES)]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) <= _FEW_POINTS else "lines",
        "x": [*points],
        "y": [*points.values()],
        "name": html.escape(name),
        "line": {"color": COLOURS[number % len(COLOURS)], "width": 1.8, "dash": dash},
        "marker": {"size": 5},
        **more,
    }


def axis(title: str, **more: Any) -> Figure:
    return {"title": {"text": title}, "hoverformat": ".4~g", "automargin": True, **more}


def log_where_wide(values: Iterable[Optional[float]]) -> Figure:
    shown = [value for value in values if value is not None and math.isfinite(value)]
    is_wide = bool(shown) and min(shown) > 0 and max(shown) > 20 * min(shown)
    return {"type": "log"} if is_wide else {}


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a suitable unit for a duration, and how many seconds it has."""
    return ("s", 1.0) if seconds < 180 else ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
