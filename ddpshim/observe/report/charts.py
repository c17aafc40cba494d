"""Describes the charts of the report for plotly, which draws them in the page.

Text and grid take their colours from the page's style. Lines and bars have a colour that can be told from a light and
from a dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ddpshim.job.say import count
from ddpshim.observe.report.findings import deviations, largest_gap
from ddpshim.observe.report.results import evaluations
from ddpshim.observe.report.run import OWN_WORK, PARTS, Run
from ddpshim.observe.report.words import percent

# At least 3 to 1 against both pages; white text has 4.5 to 1 on those of PART_COLOURS.
COLOURS = ("#2e7fd1", "#d2601a", "#128a64", "#b556a2", "#a67c00", "#3f93b5", "#8467c9", "#9a6a45")
PART_COLOURS = ("#b2590f", "#3d73b3", "#2b7f57", "#9b518f", "#6b7482")
GREY, GOOD, BAD = "#808894", "#1f8a54", "#d0454f"
_WIDE = {"color": "rgba(128,136,148,0.35)", "width": 9}  # a line under others
_DASHES = ("solid", "dash", "dot", "dashdot")
_MOST_NAMED = 8
_FEW_POINTS = 12  # that a line is drawn with
_FEW_EPOCHS = 3  # of which the losses inside are drawn
_HEIGHT = 300  # pixels
_HIDDEN = ("Time_", "Timing_")  # metrics that the charts of time have

Figure = dict[str, Any]


class Chart(NamedTuple):
    """A picture, and what it says to those who cannot see it. `table` names the one with its numbers."""

    name: str
    title: str
    says: str
    how_to_read: str
    table: str
    figure: Figure


def of_results(runs: Mapping[str, Run]) -> list[Chart]:
    """What the policies reached over training, and their losses; runs by their name ("" where there is one)."""
    one = runs.get("")
    losses = (_losses(one), _metrics(one)) if one is not None else (_losses_of_runs(runs),)
    return [chart for chart in (_success(runs), _returns(runs), *losses) if chart is not None]


def of_ranks(run: Run) -> list[Chart]:
    """How the ranks worked together."""
    drawn = (_deviations(run), _times(run), _balance(run), _memory(run), _timeline(run))
    return [chart for chart in drawn if chart is not None]


def figure(traces: Sequence[Figure], y: str, x: str = "epoch", height: int = _HEIGHT, **layout: Any) -> Figure:
    """A chart of `traces` over epochs, or what else `x` is."""
    traces = [trace for trace in traces if trace]
    xaxis: Figure = {"title": {"text": x, "standoff": 6}, "hoverformat": ".4~g"}
    if x == "epoch":
        at = {value for trace in traces for value in trace["x"]}
        if max(at, default=0) - min(at, default=0) < _MOST_NAMED:
            xaxis["dtick"] = 1
        if len(at) == 1:
            xaxis["range"] = [min(at) - 0.5, max(at) + 0.5]
    named = [trace for trace in traces if trace.get("showlegend", True)]
    for trace in named[_MOST_NAMED:]:
        trace["showlegend"] = False
    return {
        "data": traces,
        "layout": {
            "height": height,
            "margin": {"l": 56, "r": 14, "t": 8, "b": 48},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": COLOURS[0]},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hovermode": "x unified" if len(named) <= _MOST_NAMED else "closest",
            "showlegend": len(named) > 1,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
            "xaxis": xaxis,
            "yaxis": {"title": {"text": y}, "hoverformat": ".4~g", "automargin": True},
            "uirevision": "kept",  # what is zoomed stays so when the page refreshes
            **layout,
        },
    }


def line(name: str, points: Mapping[Any, Optional[float]], number: int = 0, **more: Any) -> Figure:
    """A line in the colour and dashes of this `number`, which differ for the first 32."""
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


def _success(runs: Mapping[str, Run]) -> Optional[Chart]:
    return _evaluated(
        "success",
        "Success rate",
        runs,
        (lambda each: each.success, lambda each: each.success_interval),
        "%{y:.0%}",
        "%{customdata[0]:.0%} to %{customdata[1]:.0%}",
        yaxis={"title": {"text": "success rate"}, "tickformat": ".0%", "range": [-0.03, 1.05]},
    )


def _returns(runs: Mapping[str, Run]) -> Optional[Chart]:
    return _evaluated(
        "return",
        "Return",
        runs,
        (lambda each: each.mean_return, lambda each: each.return_interval),
        "%{y:.4~g}",
        "%{customdata[0]:.4~g} to %{customdata[1]:.4~g}",
        yaxis={"title": {"text": "return of an episode"}, "automargin": True},
    )


def _evaluated(
    name: str, title: str, runs: Mapping[str, Run], of: Any, shown: str, shown_interval: str, **layout: Any
) -> Optional[Chart]:
    value_of, interval_of = of
    traces: list[Figure] = []
    said = []
    for run_name, run in runs.items():
        found = [each for each in evaluations(run) if value_of(each) is not None]
        for environment in dict.fromkeys(each.environment for each in found):
            mine = [each for each in found if each.environment == environment]
            called = f"{run_name}: {environment}" if run_name and environment != "None" else run_name or environment
            values = {each.epoch: value_of(each) for each in mine}
            ends = [interval_of(each) or (value_of(each),) * 2 for each in mine]
            reach = [(high - value, value - low) for (low, high), value in zip(ends, values.values())]
            bars = {"type": "data", "symmetric": False, "width": 3, "thickness": 1.2}
            up, down = zip(*reach)
            bars.update(array=up, arrayminus=down)
            number = len(traces) if len(runs) == 1 else list(runs).index(run_name)
            told = [[*end, each.episodes] for end, each in zip(ends, mine)]
            text = f"{shown} ({shown_interval}, %{{customdata[2]}} episodes)"
            has_interval = any(map(interval_of, mine))
            more = (
                {"error_y": bars, "customdata": told, "hovertemplate": text}
                if has_interval
                else {"hovertemplate": shown}
            )
            traces.append(line(called, values, number, **{**more, "mode": "lines+markers"}))
            last = percent(value_of(mine[-1])) if name == "success" else f"{value_of(mine[-1]):.4g}"
            said.append(f"{called} {last}" if len(runs) > 1 or len(traces) > 1 else last)
    if not traces:
        return None
    says = f"At the end: {', '.join(said[:_MOST_NAMED])}."
    how = (
        "The bars are 95% intervals (or of the confidence that evaluate() was told): the policy itself is within them."
    )
    return Chart(name, title, says, how, "rollouts", figure(traces, "", **layout))


def _log_where_wide(values: Iterable[Optional[float]]) -> Figure:
    shown = [value for value in values if value is not None and math.isfinite(value)]
    is_wide = bool(shown) and min(shown) > 0 and max(shown) > 20 * min(shown)
    return {"type": "log"} if is_wide else {}


def _axis(title: str, **more: Any) -> Figure:
    return {"title": {"text": title}, "hoverformat": ".4~g", "automargin": True, **more}


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
        traces.insert(1, line("validation", valid, line=dotted, marker=marker, mode="lines+markers"))
    says = f"Mean training loss {means[0]:.4g} in epoch {x[0]}"
    if len(x) > 1:
        says = f"Training loss from {means[0]:.4g} in epoch {x[0]} to {means[-1]:.4g} in epoch {x[-1]}"
    says += f", validation loss {[*valid.values()][-1]:.4g} at the end." if valid else "."
    inside = "inside the epochs, " if has_curves else ""
    how = (
        f"One line per rank, {inside}over the wide line of their mean: where the lines lie on each other, ranks agree."
    )
    axis = _axis("loss", **_log_where_wide([*means, *valid.values()]))
    drawn = figure(traces, "loss", "epochs" if has_curves else "epoch", yaxis=axis)
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
    says = f"Training loss at the end: {', '.join(said[:_MOST_NAMED])}."
    axis = _axis("loss", **_log_where_wide(value for trace in traces for value in trace["y"]))
    how = "The mean of each run's ranks; validation is dotted."
    return Chart("losses", "Loss", says, how, "values", figure(traces, "loss", yaxis=axis))


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
    menu = {"buttons": choices, "x": 0, "xanchor": "left", "y": 1.04, "yanchor": "bottom", "pad": {"t": 0, "b": 0}}
    margin = {"l": 56, "r": 14, "t": 44, "b": 48}
    drawn = figure(traces, "", updatemenus=[menu], margin=margin, showlegend=False)
    says = f"{count(len(values), 'metric')} that the trainer logs beside the loss."
    return Chart(
        "metrics", "Other metrics", says, "The list above the chart chooses one; means over the ranks.", "", drawn
    )


def _deviations(run: Run) -> Optional[Chart]:
    gap = largest_gap(run)
    if gap is None:
        return None
    by_epoch = [{rank: 100 * (loss / centre - 1) for rank, loss, centre in deviations(e) if centre} for e in run.epochs]
    traces = []
    for number, rank in enumerate(run.ranks):
        own = {epoch.number: of_ranks.get(rank) for epoch, of_ranks in zip(run.epochs, by_epoch)}
        traces.append(line(f"rank {rank}", own, number))
    epoch, rank, share = gap
    ring = {"symbol": "circle-open", "size": 12, "color": BAD, "line": {"width": 2}}
    at = {epoch.number: by_epoch[run.epochs.index(epoch)][rank]}
    traces.append(line("largest", at, mode="markers", marker=ring, showlegend=False, hoverinfo="skip"))
    says = f"Rank {rank} is farthest from the mean, by {percent(share)} in epoch {epoch.number} (circled)."
    how = (
        "Each rank sees other samples, so lines move around zero. One that stays away from it has other data or "
        "another model; lines that are all exactly zero mean the same samples on every rank."
    )
    drawn = figure(traces, "own loss against the mean, %")
    return Chart("deviations", "Difference between the ranks", says, how, "loss", drawn)


def _times(run: Run) -> Optional[Chart]:
    ranks = [rank for rank in run.ranks if run.trained_s(rank)]
    if not ranks:
        return None
    shares = {name: [run.share(rank, [part]) for rank in ranks] for part, name in PARTS.items()}
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [100 * share for share in of],
            "y": [f"rank {rank}" for rank in ranks],
            "name": name,
            "marker": {"color": colour},
            "text": [f"{100 * share:.0f}%" if share >= 0.08 and len(ranks) <= 16 else "" for share in of],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "textfont": {"color": "#ffffff"},
            "hovertemplate": "%{x:.1f}%",
        }
        for (name, of), colour in zip(shares.items(), PART_COLOURS)
    ]
    height = min(600, max(220, 140 + 32 * len(ranks)))
    where = "share of the time in training epochs, %"
    axes = {
        "xaxis": {"title": {"text": where}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    drawn = figure(traces, "", where, height, barmode="stack", bargap=0.25, **{**axes, "hovermode": "y unified"})
    says = ", ".join(f"{name} {percent(sum(of) / len(of))}" for name, of in shares.items() if max(of) > 0.0005)
    how = (
        "Data wait: the next batch was not there yet. Communication: what of it was not hidden behind compute, waiting "
        "for slower ranks included. Compute holds forward and backward passes and all else between two batches."
    )
    return Chart("times", "Where the time went", f"Mean over the ranks: {says}.", how, "time", drawn)


def _balance(run: Run) -> Optional[Chart]:
    lines: dict[int, dict[float, Optional[float]]] = {}
    for epoch in run.epochs:
        for rank, row in epoch.training.items():
            if row.steps:
                lines.setdefault(rank, {})[epoch.number] = 1000 * row.seconds(OWN_WORK) / row.steps
    works = {rank: 1000 * work for rank, work in run.own_work().items()}
    if len(works) < 2:
        return None
    traces = [line(f"rank {rank}", lines[rank], number) for number, rank in enumerate(sorted(lines))]
    slow, fast = max(works, key=lambda r: works[r]), min(works, key=lambda r: works[r])
    says = f"Slowest is rank {slow} with {works[slow]:.2f} ms a step, fastest rank {fast} with {works[fast]:.2f}."
    how = (
        "A step takes as long as its slowest rank. Lines should lie on each other; a rank above the others holds all "
        "of them up, and they wait for it in communication."
    )
    axis = _axis("own work, ms a step", rangemode="tozero")
    return Chart("balance", "Balance of the ranks", says, how, "time", figure(traces, "", yaxis=axis))


def _memory(run: Run) -> Optional[Chart]:
    names = {"rss": "", "gpu_allocated": ", GPU", "gpu_reserved": ", GPU reserved"}
    held: dict[tuple[int, str], dict[float, float]] = {}
    for epoch in run.epochs:
        for rank, row in epoch.training.items():
            for key in names:
                if row.memory.get(key) is not None:
                    held.setdefault((rank, key), {})[epoch.number] = row.memory[key]
    if not held:
        return None
    most = max(value for of in held.values() for value in of.values())
    unit, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    traces = []
    for (rank, key), of in sorted(held.items()):
        number = run.ranks.index(rank)
        style = {"color": COLOURS[number % len(COLOURS)], "width": 1.8, "dash": _DASHES[[*names].index(key)]}
        traces.append(line(f"rank {rank}{names[key]}", {at: v / scale for at, v in of.items()}, line=style))
    at_end = [of[max(of)] for (_, key), of in held.items() if key == "rss"]
    says = f"At the end processes hold {min(at_end) / scale:.1f} to {max(at_end) / scale:.1f} {unit}." if at_end else ""
    how = (
        "What each rank's process holds at the end of an epoch, without its data workers, and the most that torch has "
        "held on its GPU. A line that keeps rising is a leak."
    )
    axis = _axis(f"memory, {unit}", rangemode="tozero")
    return Chart("memories", "Memory", says, how, "memory", figure(traces, "", yaxis=axis))


def _timeline(run: Run) -> Optional[Chart]:
    offset, spans = 0.0, {}
    for start in run.starts:
        spans[start.number] = (offset, start.began)
        offset += start.ended - start.began
    unit, scale = ("s", 1.0) if offset < 180 else ("minutes", 60.0) if offset < 3 * 3600 else ("hours", 3600.0)

    def place(number: int, moment: float) -> float:
        before, began = spans[number]
        return (before + moment - began) / scale

    bars: dict[str, list[tuple[float, float, str]]] = {"training": [], "validation": [], "rollouts": []}
    for start, rank, record in (*run.events("epoch"), *run.events("rollout")):
        if rank == min(start.ranks):
            row, seconds = "rollouts", float(record.get("seconds") or 0.0) if record["kind"] == "rollout" else 0.0
            if record["kind"] == "epoch":
                row = "validation" if record.get("phase") == "validation" else "training"
                seconds = math.fsum(record.get("seconds", {}).values())
            width = max(seconds, 0.001 * offset) / scale
            told = f"epoch {record.get('epoch')}, {seconds:.4g} s" if type(record.get("epoch")) is int else ""
            bars[row].append((place(start.number, record["time"]) - width, width, told))
    traces: list[Figure] = []
    for name, colour in zip(bars, PART_COLOURS[1:]):
        if bars[name]:
            base, x, text = zip(*bars[name])
            bar = {"type": "bar", "orientation": "h", "base": base, "x": x, "y": [name] * len(x), "width": 0.6}
            traces.append({**bar, "marker": {"color": colour}, "hovertext": text, "hoverinfo": "text", "name": name})
    guards, saves = list(run.events("guard")), list(run.events("checkpoint"))
    for passed, colour, symbol in ((True, GOOD, "line-ns-open"), (False, BAD, "x")):
        at = [place(s.number, r["time"]) for s, _, r in guards if bool(r.get("passed")) is passed]
        how = "a guard compared" if passed else "a guard failed"
        traces.append(_marks("guards", at, how, {"symbol": symbol, "color": colour, "size": 11}))
    at = [place(s.number, r["time"]) for s, _, r in saves]
    traces.append(_marks("checkpoints", at, "saved", {"symbol": "triangle-down", "color": GREY, "size": 10}))
    traces = [trace for trace in traces if trace["y"]]
    if not traces:
        return None
    broken = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": BAD, "width": 1.5, "dash": "dash"}}
    starts = [spans[start.number][0] / scale for start in run.starts[1:]]
    rows = len({name for trace in traces for name in trace["y"]})
    drawn = figure(
        traces,
        "",
        f"time while it ran, {unit}",
        110 + 34 * rows,
        barmode="overlay",
        hovermode="closest",
        showlegend=False,
        shapes=[{**broken, "x0": at, "x1": at} for at in starts],
        yaxis={"autorange": "reversed", "automargin": True, "fixedrange": True},
    )
    num_failed = sum(not r.get("passed") for _, _, r in guards)
    says = (
        f"{count(len(run.starts), 'start')}, {count(len(bars['training']), 'training epoch')}, "
        f"{count(len(guards), 'guard result')} of which {num_failed} failed, {count(len(saves), 'checkpoint')}."
    )
    how_to_read = (
        "What the first rank did, one after the other; a tick is a comparison of the guards, a cross one that failed, "
        "a triangle a checkpoint. A broken line is where the run was started again; the time between is left out."
    )
    return Chart("timeline", "Timeline", says, how_to_read, "starts", drawn)


def _marks(row: str, at: Sequence[float], text: str, marker: Figure) -> Figure:
    shown = {"mode": "markers", "marker": marker, "name": row, "hovertemplate": f"{text}<extra></extra>"}
    return {"type": "scatter", "x": at, "y": [row] * len(at), **shown}
