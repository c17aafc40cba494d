"""Draws the charts that compare the ranks of a run: losses, time, memory, and a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

from ddpshim.job.say import count
from ddpshim.observe.report.figures import (
    BAD,
    COLOURS,
    DASHES,
    GOOD,
    GREY,
    PART_COLOURS,
    Chart,
    Figure,
    axis,
    figure,
    line,
    time_unit,
)
from ddpshim.observe.report.findings import deviations, largest_gap
from ddpshim.observe.report.run import OWN_WORK, PARTS, Run
from ddpshim.observe.report.words import percent


def of_ranks(run: Run) -> list[Chart]:
    """Return the charts that compare the ranks."""
    drawn = (_deviations(run), _times(run), _balance(run), _memory(run), _timeline(run))
    return [chart for chart in drawn if chart is not None]


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
        "Each rank sees different samples, so lines move around zero. A line that stays away has different data or a "
        "different model; if all lines are exactly zero, every rank has the same samples."
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
        "xaxis": {"title": {"text": where, "standoff": 6}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "automargin": True, "showspikes": False},
    }
    drawn = figure(traces, "", where, height, barmode="stack", bargap=0.25, **{**axes, "hovermode": "y unified"})
    says = ", ".join(f"{name} {percent(sum(of) / len(of))}" for name, of in shares.items() if max(of) > 0.0005)
    how = (
        "Data wait: waiting for the next batch. Communication: the part not hidden behind compute, including the wait "
        "for slower ranks. Compute: forward and backward passes, and all else between two batches."
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
        "A step takes as long as its slowest rank. Lines should overlap; a rank above the others slows all of them "
        "down, and they wait for it in communication."
    )
    y = axis("own work, ms a step", rangemode="tozero")
    return Chart("balance", "Balance of the ranks", says, how, "time", figure(traces, "", yaxis=y))


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
    for (rank, key), of in held.items():
        number = run.ranks.index(rank)
        style = {"color": COLOURS[number % len(COLOURS)], "width": 1.8, "dash": DASHES[[*names].index(key)]}
        traces.append(
            line(
                f"rank {rank}{names[key]}",
                {at: v / scale for at, v in of.items()},
                line=style,
                legendgroup=rank,
                showlegend=key == "rss",
            )
        )
    at_end = [of[max(of)] for (_, key), of in held.items() if key == "rss"]
    says = f"At the end processes use {min(at_end) / scale:.1f} to {max(at_end) / scale:.1f} {unit}." if at_end else ""
    how = (
        "Memory of each rank's process at the end of an epoch, without its data workers; dashed and dotted: the peak "
        "that torch has allocated and reserved on its GPU. A line that keeps rising is a leak."
    )
    y = axis(f"memory, {unit}", rangemode="tozero")
    return Chart("memories", "Memory", says, how, "memory", figure(traces, "", yaxis=y))


def _timeline(run: Run) -> Optional[Chart]:
    offset, spans = 0.0, {}
    for start in run.starts:
        spans[start.number] = (offset, start.began)
        offset += start.ended - start.began
    unit, scale = time_unit(offset)

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
            label = f"epoch {record.get('epoch')}, {seconds:.4g} s" if type(record.get("epoch")) is int else ""
            bars[row].append((place(start.number, record["time"]) - width, width, label))
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
        "The work of the first rank over time; a tick is a comparison by the guards, a cross a failed one, a triangle "
        "a checkpoint. A broken line is a restart; the time between two starts is left out."
    )
    return Chart("timeline", "Timeline", says, how_to_read, "starts", drawn)


def _marks(row: str, at: Sequence[float], text: str, marker: Figure) -> Figure:
    shown = {"mode": "markers", "marker": marker, "name": row, "hovertemplate": f"{text}<extra></extra>"}
    return {"type": "scatter", "x": at, "y": [row] * len(at), **shown}
