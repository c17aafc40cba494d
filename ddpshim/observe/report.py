"""Reads a run from its ranks' records; writes its report, as Markdown or HTML. Imports no torch."""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Optional

from ddpshim.errors import ReportError
from ddpshim.observe import records
from ddpshim.observe.records import Record, main_loss
from ddpshim.process.observed import PARTS
from ddpshim.process.say import count, ranks_called, say, size

_FACTS = ("world_size", "backend", "device", "gpu", "seed", "options", "ddpshim", "torch", "Python")

Curve = dict[float, float]  # the value at each epoch or step
Rows = list[list[str]]  # of a table; the first one names the columns


@dataclass
class Run:
    """A run, as its ranks recorded it, in the order of its starts."""

    folder: Path
    starts: list[dict[int, list[Record]]]
    num_torn: int = 0

    @property
    def facts(self) -> Record:
        """The start record of the last start's lowest rank."""
        return self.starts[-1][min(self.starts[-1])][0]

    @property
    def world_size(self) -> int:
        return self.facts.get("world_size") or len(self.starts[-1])

    def passes(self, phase: str) -> dict[int, dict[int, Record]]:
        """Return the records of training or validation by epoch and rank; if one was repeated, the later start's."""
        passes: dict[int, dict[int, Record]] = {}
        for start in self.starts:
            of_start: dict[int, dict[int, Record]] = {}
            for rank, record in ((rank, record) for rank, found in start.items() for record in found):
                if record["kind"] == "epoch" and record.get("phase", "training") == phase:
                    of_start.setdefault(record["epoch"], {})[rank] = record
            passes.update(of_start)
        return dict(sorted(passes.items()))

    @functools.cached_property
    def evaluations(self) -> dict[tuple[int, str], Record]:
        """The lowest rank's evaluations by epoch and environment; if one was repeated, the later start's."""
        found: dict[tuple[int, str], Record] = {}
        for start in self.starts:
            epoch = 0
            for record in start[min(start)]:
                epoch = record["epoch"] if record["kind"] == "epoch" else epoch
                if record["kind"] == "rollout":
                    at = epoch if record.get("epoch") is None else record["epoch"]
                    found[at, str(record.get("environment"))] = record
        return dict(sorted(found.items()))

    @functools.cached_property
    def curves(self) -> dict[str, Curve]:
        """The run's numbers by name and epoch: the means over ranks, and those of episodes."""
        found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for phase in ("training", "validation"):
            for epoch, passes in self.passes(phase).items():
                for name, value in (own for record in passes.values() for own in (record.get("own") or {}).items()):
                    found[f"{phase}/{name}"][epoch].append(value)
        for (epoch, where), record in self.evaluations.items():
            for name, value in (record.get("metrics") or {}).items():
                found[f"rollout/{where}/{name}"][epoch].append(value)
        return {name: {at: sum(own) / len(own) for at, own in of_epochs.items()} for name, of_epochs in found.items()}

    def losses(self, phase: str) -> Curve:
        """Return the curve of the phase's loss."""
        own = {name.partition("/")[2]: curve for name, curve in self.curves.items() if name.startswith(f"{phase}/")}
        return own.get(main_loss(own) or "", {})

    def timed(self) -> dict[int, Record]:
        """Return steps, seconds and memory by rank, without the epoch that warms up, unless that is all."""
        found: dict[int, Record] = {}
        passes = [*self.passes("training").values()]
        for rank, record in (item for of_epoch in passes[1:] or passes for item in of_epoch.items()):
            held = found.setdefault(rank, {"steps": 0, "seconds": dict.fromkeys(PARTS, 0.0)})
            held.update(steps=held["steps"] + (record.get("steps") or 0), memory=record.get("memory"))
            for part in PARTS:
                held["seconds"][part] += (record.get("seconds") or {}).get(part, 0.0)
        return {rank: held for rank, held in sorted(found.items()) if held["steps"]}


def load(folder: Path) -> Run:
    """Return the run whose records are in `folder`, or up to two levels below. Local.

    Raises ReportError if there are none, or of several runs, and OSError if they cannot be read.
    """
    run = find(folder)
    if not run.starts:
        raise ReportError(
            f"{folder} holds no records of a run ({records.FOLDER}/rank_N.jsonl); there is nothing to report. Launched "
            "runs of robomimic write them beside config.json (not with DDPSHIM_RECORD=no), other trainers with "
            "ddpshim.record(folder). Two folders of any trainers can be compared: python -m ddpshim report A B."
        )
    return run


def find(folder: Path) -> Run:
    """Return what `load` does, or a run without starts if there are no records."""
    files = (file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{records.FOLDER}/rank_*.jsonl"))
    found = [folder] if records.files(folder) else sorted({file.parent.parent for file in files})
    if len(found) > 1:
        names = ", ".join(map(str, found[:8]))
        raise ReportError(f"{folder} holds records of {len(found)} runs; one would hide the others. Name one: {names}.")
    starts: dict[float, dict[int, list[Record]]] = {}
    num_torn = 0
    for rank, path in (item for home in found for item in records.files(home).items()):
        of_rank, torn = records.read(path)
        num_torn += torn
        current: list[Record] = []  # records before the first start are dropped
        for record in of_rank:
            if record["kind"] == "start":
                current = starts.setdefault(record.get("start") or 0, {}).setdefault(rank, [])
            current.append(record)
    return Run(next(iter(found), folder), [starts[number] for number in sorted(starts)], num_torn)


def verdict(run: Run) -> str:
    """Return a sentence on how the run ended. Local."""
    ends = {rank: found[-1] for rank, found in run.starts[-1].items() if found[-1]["kind"] == "end"}
    silent = [rank for rank in range(run.world_size) if rank not in ends]
    failed = {rank: end for rank, end in ends.items() if end.get("how") == "failed"}
    left = [end for end in ends.values() if end.get("how") == "left"]
    if failed:
        own = [rank for rank, end in failed.items() if end.get("first") in (None, rank) and not end.get("lost_a_peer")]
        if silent and not own:
            return f"Failed: {ranks_called(silent)} ended without an error message, perhaps killed (out of memory?)"
        rank = min(own or failed, key=lambda rank: float(failed[rank]["time"]))
        error, *_ = str(failed[rank].get("error")).split("\n")
        return f"Failed: rank {rank}: {error}"
    if left:
        why, epoch, step = (left[0].get(name) for name in ("reason", "epoch", "step"))
        return f"Interrupted ({why}): saved at epoch {epoch}, step {step}, from 0; DDPSHIM_RESUME=always resumes it"
    if not silent:
        return "Finished: every rank completed the training"
    last = max(found[-1]["time"] for found in run.starts[-1].values())
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(last))
    return f"{ranks_called(silent)} recorded no end (killed, or still running); the last record is from {moment} UTC"


def findings(run: Run) -> list[str]:
    """Return sentences on what to look at. Local."""
    found = []
    missing = [rank for rank in range(run.world_size) if rank not in run.starts[-1]]
    if missing:
        found.append(f"The records of {ranks_called(missing)} are missing: copy the files of all nodes into one folder")
    if run.num_torn:
        found.append(f"{count(run.num_torn, 'line')} of the records could not be read (killed while writing?)")
    odd = [epoch for epoch, loss in run.losses("training").items() if not math.isfinite(loss)]
    if odd:
        found.append(f"The loss is not finite from epoch {odd[0]} on")
    every = [record for start in run.starts for found in start.values() for record in found]
    guards = [record for record in every if record["kind"] == "guard"]
    failed = [guard for guard in guards if not guard.get("passed")]
    if failed:
        said, *_ = str(failed[0].get("said")).split("\n")
        found.append(f"A guard failed: {said}")
    elif guards:
        found.append(f"No guard failed ({len(guards)} comparisons of weights and step counts)")
    if len(run.starts) > 1:
        sizes = ", ".join(str(start[min(start)][0].get("world_size")) for start in run.starts)
        found.append(f"The run was started {len(run.starts)} times, on {sizes} ranks")
    return found


def tables(run: Run) -> dict[str, Rows]:
    """Return the tables of losses, of success, of time and of settings by their titles, without empty ones. Local."""
    losses = [["epoch", "training", "validation", "training of each rank"]]
    mean, valid, passes = run.losses("training"), run.losses("validation"), run.passes("training")
    for epoch in sorted({*run.passes("validation"), *passes}):
        owns = [record.get("own") or {} for _, record in sorted(passes.get(epoch, {}).items())]
        of_ranks = ", ".join(_number(own.get(main_loss(own) or "")) for own in owns)
        losses.append([str(epoch), _number(mean.get(epoch)), _number(valid.get(epoch)), of_ranks])
    success = [["epoch", "environment", "episodes", "success rate (95%)", "return"]]
    for (epoch, where), record in run.evaluations.items():
        metrics, ends = record.get("metrics") or {}, record.get("interval")
        rate = f"{100 * metrics['Success_Rate']:.0f}%" if "Success_Rate" in metrics else ""
        rate += f" ({100 * ends[0]:.0f}% to {100 * ends[-1]:.0f}%)" if ends else ""
        success.append([str(epoch), where, str(record.get("episodes") or ""), rate, _number(metrics.get("Return"))])
    settings = [["name", "value"], *([name, str(run.facts[name])] for name in _FACTS if run.facts.get(name))]
    found = {"Loss": losses, "Success": success, "Time of a step": table_of_times(run.timed()), "Settings": settings}
    return {title: rows for title, rows in found.items() if len(rows) > 1}


def table_of_times(by_rank: Mapping[int, Record]) -> Rows:
    """Return a row for each rank's record of steps, below the names of the columns. Local."""
    parts = _used_parts(by_rank)
    rows = [["rank", "steps", "ms a step", *(part.replace("_", " ") for part in parts), "memory, most"]]
    for rank, record in by_rank.items():
        steps, seconds = record["steps"], record["seconds"]
        total = sum(seconds.values())
        shares = [f"{100 * seconds[part] / total:.0f}%" for part in parts]
        peak = (record.get("memory") or {}).get("peak_rss")
        rows.append([str(rank), str(steps), f"{1000 * total / max(steps, 1):.2f}", *shares, size(peak) if peak else ""])
    return rows


def as_markdown(rows: Rows) -> str:
    """Return a table in Markdown, which may contain HTML, aligned for a terminal. Local."""
    cells = [[_safe(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    return "".join("| " + " | ".join(map(str.ljust, row, widths)) + " |\n" for row in cells)


def markdown(run: Run) -> str:
    """Return the report as Markdown, without charts. Local."""
    text = f"# {_safe(run.folder.resolve().name)}\n\n**{_safe(verdict(run))}.**\n\n"
    text += "".join(f"- {_safe(finding)}.\n" for finding in findings(run))
    return text + "".join(f"\n## {title}\n\n{as_markdown(rows)}" for title, rows in tables(run).items())


def html(run: Run) -> str:
    """Return the report as one HTML page, complete in itself; without plotly it has no charts. Local."""
    charts = ""
    try:
        charts = figure(run).to_html(full_html=False, include_plotlyjs=True)
    except ImportError:
        say("plotly is not installed, so the page has no charts; pip install plotly adds them")
    head = f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{_safe(run.folder.resolve().name)}</title>'
    return f'{head}\n{charts}\n<pre style="font-size: 14px; overflow-x: auto">{markdown(run)}</pre></html>\n'


def figure(run: Run) -> Any:
    """Return plotly's figure of loss, success with intervals, and the time of a step by rank. Local."""
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    drawn = make_subplots(rows=3, cols=1, subplot_titles=("loss", "success rate", "ms of a step, by rank"))

    def draw(row: int, name: str, curve: Curve, **more: Any) -> None:
        if curve:
            x, y = zip(*curve.items())
            drawn.add_trace(go.Scatter(x=x, y=y, name=escape(name), mode="lines+markers", **more), row=row, col=1)

    for phase in ("training", "validation"):
        draw(1, phase, run.losses(phase))
    for where in dict.fromkeys(where for _, where in run.evaluations):
        rates = run.curves.get(f"rollout/{where}/Success_Rate", {})
        ends = [run.evaluations[int(epoch), where].get("interval") or [rate] for epoch, rate in rates.items()]
        above, below = ([abs(end[i] - rate) for end, rate in zip(ends, rates.values())] for i in (-1, 0))
        draw(2, where, rates, error_y={"type": "data", "symmetric": False, "array": above, "arrayminus": below})
    timed = run.timed()
    for part in _used_parts(timed):
        ms = [1000 * record["seconds"][part] / record["steps"] for record in timed.values()]
        drawn.add_trace(go.Bar(x=[f"rank {rank}" for rank in timed], y=ms, name=part.replace("_", " ")), row=3, col=1)
    return drawn.update_layout(barmode="stack", height=1100)


def _used_parts(by_rank: Mapping[int, Record]) -> list[str]:
    return [part for part in PARTS if any(record["seconds"].get(part) for record in by_rank.values())]


def _safe(text: str) -> str:
    return escape(text, quote=False).replace("\n", " ")


def _number(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.6g}"
