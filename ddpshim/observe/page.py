"""Writes the report of a run, as Markdown or one HTML page whose charts plotly draws. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Callable, NamedTuple, Optional

from ddpshim.errors import ReportError
from ddpshim.failures.failure_notes import LOST, meaning_of
from ddpshim.observe.records import Record, main_loss
from ddpshim.observe.runs import Run
from ddpshim.process.say import count, ranks_called, size

PARTS = {"data_wait": "data wait", "compute": "compute", "optimizer": "optimizer"}
_QUIET_S = 120.0
_MOST_ROWS = 100
_FACTS = ("world_size", "backend", "device", "gpu", "seed", "options", "ddpshim", "torch", "Python")


class Table(NamedTuple):
    """A table of texts."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def verdict(run: Run) -> str:
    """Return a sentence on how the run ended. Local."""
    ends, size_ = run.ends, run.world_size
    silent = [rank for rank in range(size_) if rank not in ends]
    failed = {rank: end for rank, end in ends.items() if end.get("how") in ("failed", "stopped")}
    left = [end for end in ends.values() if end.get("how") == "left"]
    if failed:
        lost = [r for r, e in failed.items() if e.get("lost_a_peer") or meaning_of(str(e.get("error"))) == LOST]
        own = [r for r, e in failed.items() if e.get("first") in (None, r) and r not in lost]
        if silent and not own:
            return f"Failed: {ranks_called(silent)} ended without an error message, perhaps killed (out of memory?)"
        rank = min(own or failed, key=lambda r: float(failed[r]["time"]))
        return f"Failed: rank {rank}: {(str(failed[rank].get('error')).splitlines() or [''])[0]}"
    if left:
        where = f"epoch {left[0].get('epoch', '?')}, step {left[0].get('step', '?')}"
        why, code = left[0].get("reason", "a signal"), left[0].get("exit_code", 75)
        said = f"Interrupted ({why}): saved at {where}, counted from 0; stopped with exit code {code}"
        return f"{said}; DDPSHIM_RESUME=always resumes it"
    if not silent:
        return "Finished: every rank completed the training"
    last = max(records[-1]["time"] for records in run.starts[-1].values())
    if not ends and time.time() - last < _QUIET_S:
        return f"Still running, apparently: the last record is {time.time() - last:.0f} s old"
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(last))
    who = "No rank" if not ends else f"{ranks_called(silent)} of {size_} never"
    return f"{who} recorded its end (killed, or the machine went down); the last record is from {moment} UTC"


def findings(run: Run) -> list[str]:
    """Return sentences on what to look at. Local."""
    found = []
    missing = [rank for rank in range(run.world_size) if rank not in run.starts[-1]]
    if missing:
        found.append(f"The records of {ranks_called(missing)} are missing: copy the files of all nodes into one folder")
    if run.num_torn:
        found.append(f"{count(run.num_torn, 'line')} of the records could not be read (killed while writing?)")
    odd = [epoch.number for epoch in run.epochs if epoch.mean is not None and not math.isfinite(epoch.mean)]
    if odd:
        found.append(f"The loss is not finite from epoch {odd[0]} on")
    guards = [record for _, _, record in run.events("guard")]
    said = [str(record.get("said")).splitlines()[0] for record in guards if not record.get("passed")]
    if said:
        found.append(f"A guard failed: {said[0]}")
    elif guards:
        found.append(f"No guard failed ({len(guards)} comparisons of weights and step counts)")
    saves = [float(record.get("seconds", 0)) for _, _, record in run.events("checkpoint")]
    if saves:
        found.append(f"{len(saves)} checkpoints were saved; training waited {math.fsum(saves):.1f} s for them")
    if len(run.starts) > 1:
        sizes = ", ".join(str(start[min(start)][0].get("world_size")) for start in run.starts)
        found.append(f"The run was started {len(run.starts)} times, on {sizes} ranks")
    return found


def tables(run: Run) -> list[Table]:
    """Return the tables of losses, of success and of time, without empty ones. Local."""
    losses = [
        [str(epoch.number), _number(epoch.mean), _number(epoch.valid), ", ".join(_losses(epoch.training))]
        for epoch in run.epochs
    ]
    success = [
        [str(e.epoch), e.environment, str(e.episodes or ""), _rate(e.success, e.interval), _number(e.mean_return)]
        for e in run.evaluations
    ]
    facts = {name: run.facts.get(name) for name in _FACTS}
    found = [
        Table("Loss", ["epoch", "mean", "validation", "of each rank"], losses),
        Table("Success", ["epoch", "environment", "episodes", "success rate (95%)", "return"], success),
        table_of_times(_timed(run)),
        Table("Settings", ["name", "value"], [[name, str(value)] for name, value in facts.items() if value]),
    ]
    return [table._replace(rows=table.rows[-_MOST_ROWS:]) for table in found if table.rows]


def table_of_times(by_rank: Mapping[int, Record]) -> Table:
    """Return a row for each rank's record of steps. Local."""
    rows = []
    for rank, record in by_rank.items():
        steps, seconds = record.get("steps") or 0, record.get("seconds") or {}
        total = math.fsum(seconds.values())
        shares = [f"{100 * seconds.get(part, 0.0) / total:.0f}%" if total else "" for part in PARTS]
        peak = (record.get("memory") or {}).get("peak_rss")
        rows.append([str(rank), str(steps), f"{1000 * total / max(steps, 1):.2f}", *shares, size(peak) if peak else ""])
    return Table("Time of a step", ["rank", "steps", "ms a step", *PARTS.values(), "memory, most"], rows)


def _md(text: str) -> str:
    """Escape `text` for a line or a table cell of Markdown, which may contain HTML."""
    for special, safe in {
        "&": "&amp;",
        "<": "&lt;",
        ">": "&gt;",
        "|": "\\|",
        "`": "\\`",
        "*": "\\*",
        "\n": " ",
    }.items():
        text = text.replace(special, safe)
    return text


def as_markdown(table: Table, safe: Callable[[str], str] = _md) -> list[str]:
    """Return the lines of a table in Markdown, aligned for a terminal; `safe` escapes a text. Local."""
    rows = [[safe(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]


def markdown(run: Run, safe: Callable[[str], str] = _md) -> str:
    """Return the report as Markdown, without charts. Local."""
    lines = [f"# {safe(run.folder.resolve().name)}", "", f"**{safe(verdict(run))}.**"]
    lines += ["", *(f"- {safe(finding)}." for finding in findings(run))]
    for table in tables(run):
        lines += ["", f"## {table.title}", "", *as_markdown(table, safe)]
    return "\n".join(lines) + "\n"


def html(run: Run) -> str:
    """Return the report as one HTML page, complete in itself. Local. Raises ReportError without plotly."""
    name, figure = escape(run.folder.resolve().name), _figure(run).to_html(full_html=False, include_plotlyjs=True)
    text = escape(markdown(run, safe=str))
    head = f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
    return f'{head}\n{figure}\n<pre style="font-size: 14px; overflow-x: auto">{text}</pre></html>\n'


def can_draw() -> bool:
    """Return whether plotly is installed. Local."""
    return importlib.util.find_spec("plotly") is not None


def _figure(run: Run) -> Any:
    """Return plotly's figure of loss, success with intervals, and the time of a step by rank."""
    if not can_draw():
        raise ReportError(
            "plotly is not installed; the page would have no charts. Run `pip install ddpshim[report]` (or `pip "
            "install plotly`), or use --markdown."
        )
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=3, cols=1, subplot_titles=("loss", "success rate", "ms of a step, by rank"))

    def draw(row: int, name: str, points: Sequence[tuple[Any, Any]], **more: Any) -> None:
        if points:
            x, y = zip(*points)
            figure.add_trace(go.Scatter(x=x, y=y, name=escape(name), mode="lines+markers", **more), row=row, col=1)

    draw(1, "mean of the ranks", [(e.number, e.mean) for e in run.epochs if e.mean is not None])
    draw(1, "validation", [(e.number, e.valid) for e in run.epochs if e.valid is not None])
    for rank in range(run.world_size):  # inside the epochs
        curves = [(e.number, e.training.get(rank, {}).get("curve") or []) for e in run.epochs]
        points = [(at - 1 + (i + 0.5) / len(curve), loss) for at, curve in curves for i, loss in enumerate(curve)]
        draw(1, f"steps of rank {rank}", points, visible="legendonly" if len(run.epochs) > 3 else True)
    played = [each for each in run.evaluations if each.success is not None]
    for where in dict.fromkeys(each.environment for each in played):
        own = [(each, each.success or 0.0) for each in played if each.environment == where]
        ends = [each.interval or (success, success) for each, success in own]
        above = [high - success for (_, high), (_, success) in zip(ends, own)]
        below = [success - low for (low, _), (_, success) in zip(ends, own)]
        bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        draw(2, where, [(each.epoch, success) for each, success in own], error_y=bars)
    timed = _timed(run)
    for part, name in PARTS.items():
        ms = [1000 * r["seconds"].get(part, 0.0) / max(1, r["steps"]) for r in timed.values()]
        figure.add_trace(go.Bar(x=[f"rank {rank}" for rank in timed], y=ms, name=name), row=3, col=1)
    return figure.update_layout(barmode="stack", height=1100)


def _timed(run: Run) -> dict[int, Record]:
    """Return steps, seconds and memory of each rank, without the epoch that warms up, unless that is all."""
    found: dict[int, Record] = {}
    for epoch in run.epochs[1:] or run.epochs:
        for rank, record in epoch.training.items():
            held = found.setdefault(rank, {"steps": 0, "seconds": dict.fromkeys(PARTS, 0.0)})
            held["steps"] += record.get("steps") or 0
            for part, seconds in (record.get("seconds") or {}).items():
                held["seconds"][part] = held["seconds"].get(part, 0.0) + seconds
            held["memory"] = record.get("memory")
    return {rank: held for rank, held in sorted(found.items()) if held["steps"]}


def _losses(passes: Mapping[int, Record]) -> list[str]:
    held = [passes[rank].get("own") or {} for rank in sorted(passes)]
    return [_number(own[name]) for own in held if (name := main_loss(own)) is not None]


def _number(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.6g}"


def _rate(share: Optional[float], interval: Optional[tuple[float, float]]) -> str:
    within = f" ({100 * interval[0]:.0f}% to {100 * interval[1]:.0f}%)" if interval else ""
    return "" if share is None else f"{100 * share:.0f}%{within}"
