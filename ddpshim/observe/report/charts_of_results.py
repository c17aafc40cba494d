"""Draws the charts of success, return and losses over training, for one run or several."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any, Optional

from ddpshim.job.say import count
from ddpshim.observe.report.figures import (
    COLOURS,
    GREY,
    MOST_NAMED,
    Chart,
    Figure,
    axis,
    figure,
    line,
    log_where_wide,
    time_unit,
)
from ddpshim.observe.report.results import Evaluation, evaluations
from ddpshim.observe.report.run import Run
from ddpshim.observe.report.words import percent

_WIDE = {"color": "rgba(128,136,148,0.35)", "width": 9}  # the line of the mean, drawn under the others
_FEW_EPOCHS = 3  # with more epochs, losses inside them are not drawn
_HIDDEN = ("Time_", "Timing_")  # metrics that the charts of time show


def of_results(runs: Mapping[str, Run]) -> list[Chart]:
    """Return the charts of success, return and losses; `runs` by name ("" if there is only one)."""
    one = runs.get("")
    losses = (_losses(one), _metrics(one)) if one is not None else (_losses_of_runs(runs), _losses_by_time(runs))
    found = {name: evaluations(run) for name, run in runs.items()}
    drawn = [chart for chart in (_success(found), _returns(found), *losses) if chart is not None]
    if one is None:
        for trace in (trace for chart in drawn for trace in chart.figure["data"]):
            if trace["line"]["color"] == COLOURS[0]:
                trace["line"]["width"] = 5  # the first run stays visible under others that overlap it
    return drawn


def _success(found: Mapping[str, list[Evaluation]]) -> Optional[Chart]:
    return _evaluated(
        "success",
        "Success rate",
        found,
        (lambda each: each.success, lambda each: each.success_interval),
        "%{y:.0%}",
        "%{customdata[0]:.0%} to %{customdata[1]:.0%}",
        yaxis=axis("success rate", tickformat=".0%", range=[-0.03, 1.05]),
    )


def _returns(found: Mapping[str, list[Evaluation]]) -> Optional[Chart]:
    return _evaluated(
        "return",
        "Return",
        found,
        (lambda each: each.mean_return, lambda each: each.return_interval),
        "%{y:.4~g}",
        "%{customdata[0]:.4~g} to %{customdata[1]:.4~g}",
        yaxis=axis("return of an episode"),
    )


def _evaluated(
    name: str,
    title: str,
    by_run: Mapping[str, list[Evaluation]],
    of: Any,
    shown: str,
    shown_interval: str,
    **layout: Any,
) -> Optional[Chart]:
    value_of, interval_of = of
    traces: list[Figure] = []
    said = []
    num_environments = len({each.environment for all_of_run in by_run.values() for each in all_of_run})
    for run_name, all_of_run in by_run.items():
        found = [each for each in all_of_run if value_of(each) is not None]
        for environment in dict.fromkeys(each.environment for each in found):
            evaluated = [each for each in found if each.environment == environment]
            called = f"{run_name}: {environment}" if run_name and num_environments > 1 else run_name or environment
            values = {each.epoch: value_of(each) for each in evaluated}
            ends = [interval_of(each) or (value_of(each),) * 2 for each in evaluated]
            reach = [(high - value, value - low) for (low, high), value in zip(ends, values.values())]
            bars = {"type": "data", "symmetric": False, "width": 3, "thickness": 1.2}
            up, down = zip(*reach)
            bars.update(array=up, arrayminus=down)
            number = len(traces) if len(by_run) == 1 else list(by_run).index(run_name)
            details = [[*end, each.episodes] for end, each in zip(ends, evaluated)]
            text = f"{shown} ({shown_interval}, %{{customdata[2]}} episodes)"
            has_interval = any(map(interval_of, evaluated))
            more = (
                {"error_y": bars, "customdata": details, "hovertemplate": text}
                if has_interval
                else {"hovertemplate": shown}
            )
            traces.append(line(called, values, number, **{**more, "mode": "lines+markers"}))
            last = percent(value_of(evaluated[-1])) if name == "success" else f"{value_of(evaluated[-1]):.4g}"
            said.append(f"{called} {last}" if len(by_run) > 1 or num_environments > 1 else last)
    if not traces:
        return None
    says = f"At the end: {', '.join(said[:MOST_NAMED])}."
    how = "The bars are 95% intervals." if any("error_y" in trace for trace in traces) else ""
    return Chart(name, title, says, how, "rollouts", figure(traces, "", **layout))


def _losses(run: Run) -> Optional[Chart]:
    epochs = [epoch for epoch in run.epochs if epoch.mean is not None]
    if not epochs:
        return None
    x = [epoch.number for epoch in epochs]
    means = [epoch.mean for epoch in epochs]
    has_curves = len(epochs) <= _FEW_EPOCHS and any(r.record.get("curve") for e in epochs for r in e.training.values())
    wide: list[tuple[float, Optional[float]]] = [*zip(x, means)]
    if has_curves:
        wide = [edge for number, mean in wide for edge in ((number - 1, mean), (number, mean), (number, None))]
    under: Figure = {"x": [at for at, _ in wide], "y": [mean for _, mean in wide], "mode": "lines", "line": _WIDE}
    traces = [line("mean of the ranks", {}, **under)]
    for number, rank in enumerate(run.ranks):
        rows = [(epoch.number, epoch.training[rank]) for epoch in epochs if rank in epoch.training]
        points: dict[float, Optional[float]] = {at: row.loss for at, row in rows}
        if has_curves:
            curves = [(at, row.record.get("curve", [])) for at, row in rows]
            points = {at - 1 + (i + 0.5) / len(curve): loss for at, curve in curves for i, loss in enumerate(curve)}
        traces.append(line(f"rank {rank}", points, number))
    valid = {epoch.number: epoch.valid for epoch in epochs if epoch.valid is not None}
    if valid:
        dotted = {"color": GREY, "width": 1.5, "dash": "dot"}
        marker = {"symbol": "diamond-open", "size": 7}
        traces.insert(1, line("validation", valid, line=dotted, marker=marker))
    says = f"Mean training loss {means[0]:.4g} in epoch {x[0]}"
    if len(x) > 1:
        says = f"Training loss from {means[0]:.4g} in epoch {x[0]} to {means[-1]:.4g} in epoch {x[-1]}"
    says += f", validation loss {[*valid.values()][-1]:.4g} at the end." if valid else "."
    inside = "inside the epochs, " if has_curves else ""
    how = f"One line per rank, {inside}over the wide line of their mean: where the lines overlap, ranks agree."
    y = axis("loss", **log_where_wide([*means, *valid.values()]))
    drawn = figure(traces, "loss", "epochs" if has_curves else "epoch", yaxis=y)
    return Chart("losses", "Loss", says, how, "loss", drawn)


def _losses_of_runs(runs: Mapping[str, Run]) -> Optional[Chart]:
    traces: list[Figure] = []
    said = []
    for number, (name, run) in enumerate(runs.items()):
        means = {epoch.number: epoch.mean for epoch in run.epochs if epoch.mean is not None}
        valid = {epoch.number: epoch.valid for epoch in run.epochs if epoch.valid is not None}
        if means:
            traces.append(line(name, means, number))
            said.append(f"{name} {[*means.values()][-1]:.4g}")
        if valid:
            dotted = {"color": COLOURS[number % len(COLOURS)], "width": 1.5, "dash": "dot"}
            traces.append(line(f"{name}, validation", valid, line=dotted))
    if not traces:
        return None
    says = f"Training loss at the end: {', '.join(said[:MOST_NAMED])}."
    y = axis("loss", **log_where_wide(value for trace in traces for value in trace["y"]))
    how = "The mean of each run's ranks; validation is dotted."
    return Chart("losses", "Loss", says, how, "values", figure(traces, "loss", yaxis=y))


def _losses_by_time(runs: Mapping[str, Run]) -> Optional[Chart]:
    points: dict[str, dict[float, Optional[float]]] = {}
    for name, run in runs.items():
        if not run.is_recorded:
            continue  # its log has no times
        offset, before = 0.0, dict[int, float]()
        for start in run.starts:  # the time between two starts is left out
            before[start.number] = offset - start.began
            offset += start.ended - start.began
        rows = [(epoch.mean, next(iter(epoch.training.values()))) for epoch in run.epochs if epoch.mean is not None]
        points[name] = {before[row.start] + float(row.record["time"]): mean for mean, row in rows}
    longest = max((second for of in points.values() for second in of), default=0.0)
    if not longest:
        return None
    unit, scale = time_unit(longest)
    traces = [
        line(name, {second / scale: mean for second, mean in points[name].items()}, number)
        for number, name in enumerate(runs)
        if name in points
    ]
    says = f"The last epoch ended after {', '.join(f'{max(of) / scale:.4g}' for of in points.values() if of)} {unit}."
    how = "The same losses over the time while each run ran, evaluations and saving included."
    y = axis("loss", **log_where_wide(value for of in points.values() for value in of.values()))
    drawn = figure(traces, "", f"time while it ran, {unit}", yaxis=y, hovermode="closest")
    return Chart("losses_by_time", "Loss over time", says, how, "values", drawn)


def _metrics(run: Run) -> Optional[Chart]:
    values: dict[str, dict[float, float]] = {}
    for epoch in run.epochs:
        rows = [row.record for row in epoch.training.values()]
        means = [record["mean"] for record in rows if record.get("mean")] or [
            record.get("own") or {} for record in rows
        ]
        for name in sorted({name for mean in means for name in mean}):
            found = [mean[name] for mean in means if name in mean]
            if name != "Loss" and not name.startswith(_HIDDEN) and None not in found:
                values.setdefault(name, {})[epoch.number] = math.fsum(found) / len(found)
    if not values:
        return None
    traces = [line(name, of, visible=number == 0) for number, (name, of) in enumerate(values.items())]
    choices = [
        {"label": html.escape(name), "method": "update", "args": [{"visible": [other == name for other in values]}]}
        for name in values
    ]
    menu = {
        "buttons": choices,
        "active": 0,
        "x": 0,
        "xanchor": "left",
        "y": 1.04,
        "yanchor": "bottom",
        "pad": {"t": 0, "b": 0},
    }
    margin = {"l": 56, "r": 14, "t": 44, "b": 48}
    drawn = figure(traces, "", updatemenus=[menu], margin=margin, showlegend=False)
    says = f"{count(len(values), 'metric')} that the trainer logs beside the loss."
    return Chart(
        "metrics", "Other metrics", says, "Choose one in the list above the chart; means over the ranks.", "", drawn
    )
