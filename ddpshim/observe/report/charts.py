"""Draws success and loss over training, for one run or several, as figures of plotly in plain dictionaries.

Text and grid take their colours from the page's style. The colours of lines are visible on a light and on a dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ddpshim.observe.report.results import evaluations
from ddpshim.observe.report.run import Run
from ddpshim.observe.report.words import rate

# Contrast: at least 3 to 1 against both pages.
COLOURS = ("#2e7fd1", "#d2601a", "#128a64", "#b556a2", "#a67c00", "#3f93b5", "#8467c9", "#9a6a45")
GREY = "#808894"
_DASHES = ("solid", "dash", "dot", "dashdot")
_WIDE = {"color": "rgba(128,136,148,0.35)", "width": 9}  # the line of the mean, drawn under the others
_MOST_NAMED = 8
_FEW_POINTS = 12  # longer lines are drawn without markers
_FEW_EPOCHS = 3  # with more epochs, losses inside them are not drawn

Figure = dict[str, Any]


class Chart(NamedTuple):
    """A figure with its texts. `says` is for those who cannot see it."""

    name: str
    title: str
    says: str
    how_to_read: str
    figure: Figure


def charts(runs: Mapping[str, Run]) -> list[Chart]:
    """Return the charts of success and loss that have points; `runs` by name ("" if there is only one). Local."""
    one = runs.get("")
    found = (_success(runs), _losses_of_runs(runs) if one is None else _losses(one))
    return [chart for chart in found if chart is not None]


def _success(runs: Mapping[str, Run]) -> Optional[Chart]:
    traces: list[Figure] = []
    said = []
    for run_name, run in runs.items():
        found = [(each, each.success) for each in evaluations(run) if each.success is not None]
        for environment in dict.fromkeys(each.environment for each, _ in found):
            own = [(each, success) for each, success in found if each.environment == environment]
            ends = [each.success_interval or (success, success) for each, success in own]
            shown = [rate(success, each.success_interval) for each, success in own]
            bars = {
                "type": "data",
                "symmetric": False,
                "width": 3,
                "thickness": 1.2,
                "array": [high - success for (_, high), (_, success) in zip(ends, own)],
                "arrayminus": [success - low for (low, _), (_, success) in zip(ends, own)],
            }
            more = {"error_y": bars, "customdata": shown, "hovertemplate": "%{customdata}", "mode": "lines+markers"}
            name = f"{run_name}: {environment}" if run_name else environment
            traces.append(_line(name, {each.epoch: success for each, success in own}, len(traces), **more))
            said.append(f"{name} {shown[-1]}")
    if not traces:
        return None
    says = f"At the end: {', '.join(said[:_MOST_NAMED])}."
    drawn = _figure(traces, _axis("success rate", tickformat=".0%", range=[-0.03, 1.05]))
    return Chart("success", "Success rate", says, "The bars are 95% intervals.", drawn)


def _losses(run: Run) -> Optional[Chart]:
    epochs = [epoch for epoch in run.epochs if epoch.mean is not None]
    if not epochs:
        return None
    means = [(epoch.number, epoch.mean) for epoch in epochs]
    has_curves = len(epochs) <= _FEW_EPOCHS and any(r.record.get("curve") for e in epochs for r in e.training.values())
    wide: list[tuple[float, Optional[float]]] = [*means]
    if has_curves:
        wide = [edge for number, mean in means for edge in ((number - 1, mean), (number, mean), (number, None))]
    under: Figure = {"x": [at for at, _ in wide], "y": [mean for _, mean in wide], "mode": "lines", "line": _WIDE}
    traces = [_line("mean of the ranks", {}, **under)]
    valid = _validation(run)
    if valid:
        traces.append(_line("validation", valid, line={"color": GREY, "width": 1.5, "dash": "dot"}))
    for number, rank in enumerate(run.ranks):
        rows = [(epoch.number, epoch.training[rank]) for epoch in epochs if rank in epoch.training]
        points: dict[float, Optional[float]] = {at: row.loss for at, row in rows}
        if has_curves:
            curves = [(at, row.record.get("curve", [])) for at, row in rows]
            points = {at - 1 + (i + 0.5) / len(curve): loss for at, curve in curves for i, loss in enumerate(curve)}
        traces.append(_line(f"rank {rank}", points, number))
    (first, before), (last, after) = means[0], means[-1]
    says = f"Mean training loss {before:.4g} in epoch {first}" + (
        f", {after:.4g} in epoch {last}" if epochs[1:] else ""
    )
    says += f"; validation loss {[*valid.values()][-1]:.4g} at the end." if valid else "."
    inside = "inside the epochs, " if has_curves else ""
    how = f"One line per rank, {inside}over the wide line of their mean: where the lines overlap, ranks agree."
    shown = [*(mean for _, mean in means), *valid.values()]
    y = _axis("loss", **_log_where_wide(shown))
    return Chart("losses", "Loss", says, how, _figure(traces, y, "epochs" if has_curves else "epoch"))


def _losses_of_runs(runs: Mapping[str, Run]) -> Optional[Chart]:
    traces: list[Figure] = []
    said = []
    for number, (name, run) in enumerate(runs.items()):
        means = {epoch.number: epoch.mean for epoch in run.epochs if epoch.mean is not None}
        valid = _validation(run)
        if means:
            # The first run stays visible under others that overlap it.
            style = {"color": COLOURS[number % len(COLOURS)], "width": 1.8 if number else 5}
            traces.append(_line(name, means, line=style))
            said.append(f"{name} {[*means.values()][-1]:.4g}")
        if valid:
            dotted = {"color": COLOURS[number % len(COLOURS)], "width": 1.5, "dash": "dot"}
            traces.append(_line(f"{name}, validation", valid, line=dotted))
    if not traces:
        return None
    says = f"Training loss at the end: {', '.join(said[:_MOST_NAMED])}."
    y = _axis("loss", **_log_where_wide(value for trace in traces for value in trace["y"]))
    return Chart("losses", "Loss", says, "The mean of each run's ranks; validation is dotted.", _figure(traces, y))


def _validation(run: Run) -> dict[int, float]:
    return {epoch.number: epoch.valid for epoch in run.epochs if epoch.valid is not None}


def _figure(traces: Sequence[Figure], y: Figure, x: str = "epoch") -> Figure:
    xaxis: Figure = {"title": {"text": x, "standoff": 6}, "hoverformat": ".4~g"}
    xaxis.update(spikethickness=1, spikecolor=GREY)
    at = {value for trace in traces for value in trace["x"]}
    if x == "epoch" and max(at, default=0) - min(at, default=0) < _MOST_NAMED:
        xaxis["dtick"] = 1
    if len(at) == 1:
        xaxis["range"] = [min(at) - 0.5, max(at) + 0.5]
    for trace in traces[_MOST_NAMED:]:
        trace["showlegend"] = False
    return {
        "data": traces,
        "layout": {
            "height": 300,
            "margin": {"l": 56, "r": 14, "t": 8, "b": 48},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": COLOURS[0]},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hovermode": "x unified" if len(traces) <= _MOST_NAMED else "closest",
            "showlegend": len(traces) > 1,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
            "xaxis": xaxis,
            "yaxis": y,
            "hoverlabel": {"namelength": -1},
        },
    }


def _line(name: str, points: Mapping[Any, Optional[float]], number: int = 0, **more: Any) -> Figure:
    """Return a line; its colour and dashes depend on `number`, and differ for the first 32."""
    dash = _DASHES[(number // len(COLOURS)) % len(_DASHES)]
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


def _axis(title: str, **more: Any) -> Figure:
    return {"title": {"text": title}, "hoverformat": ".4~g", "automargin": True, **more}


def _log_where_wide(values: Iterable[Optional[float]]) -> Figure:
    shown = [value for value in values if value is not None and math.isfinite(value)]
    is_wide = bool(shown) and min(shown) > 0 and max(shown) > 20 * min(shown)
    return {"type": "log"} if is_wide else {}
