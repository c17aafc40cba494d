"""Builds the tables with all numbers of the report."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import NamedTuple, Optional

from ddpshim.observe.records import Record
from ddpshim.observe.report.results import evaluations
from ddpshim.observe.report.run import PARTS, Run, Start
from ddpshim.observe.report.words import between, clock, duration, first_line, number, percent, rate, shown, size
from ddpshim.options import Options

_MOST_ROWS = 100


class Table(NamedTuple):
    """A table of texts."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def headline(run: Run) -> list[tuple[str, str]]:
    """Return the key numbers, by name."""
    facts = run.last.facts
    samples = sum(epoch.samples for epoch in run.epochs)
    rates = [steps / wall for rank in run.ranks if (wall := run.trained_s(rank)) and (steps := run.steps(rank))]
    best = min((epoch.valid for epoch in run.epochs if epoch.valid is not None), default=None)
    last = next((epoch.mean for epoch in reversed(run.epochs) if epoch.mean is not None), None)
    device = facts.get("gpu") or facts.get("device", "")
    out = [("last loss", number(last))]
    if best is not None:
        out.append(("best validation", number(best)))
    return [
        *reached(run),
        *out,
        ("epochs", str(sum(bool(epoch.training) for epoch in run.epochs))),
        ("time", duration(run.wall_s)),
        ("steps/s", f"{statistics.median(rates):.1f}" if rates else "not known"),
        ("samples seen", f"{samples:,}" if samples else "not known"),
        ("ranks", f"{run.last.world_size} ({facts.get('backend') or 'one process'} on {device})"),
    ]


def reached(run: Run) -> list[tuple[str, str]]:
    """Return the last and the best success rate, and the last return, of each environment."""
    found = evaluations(run)
    environments = list(dict.fromkeys(each.environment for each in found))
    out = []
    for environment in environments:
        evaluated = [each for each in found if each.environment == environment]
        name = f" in {environment}" if len(environments) > 1 else ""
        if evaluated[-1].success is not None:
            best = max(evaluated, key=lambda each: (each.success or 0.0, each.epoch))
            out += [
                (f"last success rate{name}", rate(evaluated[-1].success, evaluated[-1].success_interval)),
                (f"best success rate{name}", f"{percent(best.success or 0.0)} (epoch {best.epoch})"),
            ]
        if evaluated[-1].mean_return is not None:
            out.append((f"last return{name}", between(evaluated[-1].mean_return, evaluated[-1].return_interval)))
    return out


def thinned(rows: list[list[str]], what: str) -> tuple[list[list[str]], str]:
    """Return at most about 100 of the rows, one for each `what`, and a note that says which."""
    every = math.ceil(len(rows) / _MOST_ROWS)
    kept = rows[:: every or 1] + ([rows[-1]] if rows and (len(rows) - 1) % every else [])
    return kept, f"One {what} in {every} (of {len(rows)} in all), and the last." if every > 1 else ""


def tables(run: Run) -> list[Table]:
    """Return all tables that have rows."""
    made = (_rollouts(run), _losses(run), _times(run), _memories(run), _starts(run), _guards(run), _checkpoints(run))
    return [table for table in (*made, _environment(run), _options(run)) if table.rows]


def table_of_times(ranks: list[Record]) -> str:
    """Return the tables of time and memory as plain text, from one epoch's record of each rank."""
    records = {rank: [{"kind": "epoch", "epoch": 1, **record}] for rank, record in enumerate(ranks)}
    run = Run(Path(), [Start(1, records)], 0)
    lines = []
    for table in (_times(run), _memories(run)):
        widths = [max(map(len, column)) for column in zip(table.columns, *table.rows)]
        for row in (table.columns, *table.rows) if table.rows else ():
            lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
    return "\n".join(lines)


def _losses(run: Run) -> Table:
    ranks = run.ranks if len(run.ranks) > 1 else []
    has_valid = any(epoch.valid is not None for epoch in run.epochs)
    columns = ["epoch", "steps", "mean loss", *(f"rank {rank}" for rank in ranks)]
    rows = []
    for epoch in run.epochs:
        own = [number(epoch.training[rank].loss) if rank in epoch.training else "" for rank in ranks]
        row = [str(epoch.number), str(epoch.steps), number(epoch.mean), *own]
        rows.append([*row, number(epoch.valid)] if has_valid else row)
    kept, note = thinned(rows, "epoch")
    return Table("loss", "Loss", [*columns, *(["validation"] if has_valid else [])], kept, note)


def _times(run: Run) -> Table:
    columns = ["rank", "steps", "steps/s", "ms a step", *PARTS.values(), "GPU use"]
    rows = []
    for rank in run.ranks:
        steps, wall = run.steps(rank), run.trained_s(rank)
        if not wall:
            continue
        uses = [use for row in run.rows(rank) if (use := row.memory.get("gpu_use")) is not None]
        shares = [percent(run.share(rank, [part])) for part in PARTS]
        speed = [f"{steps / wall:.1f}", f"{1000 * wall / max(1, steps):.2f}"]
        rows.append([str(rank), str(steps), *speed, *shares, f"{statistics.mean(uses):.0f}%" if uses else ""])
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    note = (
        "Training epochs except the first of each start. Communication is the part not hidden behind compute, "
        "including the wait for slower ranks."
    )
    return Table("time", "Where the time of each rank went", columns, rows, note)


def _memories(run: Run) -> Table:
    rows = []
    gpu = {"gpu_allocated": "GPU allocated, most", "gpu_reserved": "GPU reserved, most", "gpu_total": "GPU has"}
    if not any("gpu_total" in row.memory for rank in run.ranks for row in run.rows(rank)):
        gpu = {}
    for rank in run.ranks:
        memories = [row.memory for row in run.rows(rank)]
        if not memories:
            continue
        last = memories[-1]
        most = max(m.get("peak_rss") or m.get("rss") or 0 for m in memories)
        row = [str(rank), size(last.get("rss")), size(max(most, last.get("rss") or 0) or None)]
        rows.append([*row, *(size(last.get(key)) for key in gpu)])
    columns = ["rank", "process, last epoch", "process, most", *gpu.values()]
    return Table("memory", "Memory", columns, rows, "Data workers are separate processes.")


def _starts(run: Run) -> Table:
    rows = []
    for start in run.starts:
        trained = [e.number for e in run.epochs for row in e.training.values() if row.start == start.number]
        epochs = f"{min(trained)} to {max(trained)}" if trained else "none complete"
        ends = start.ends()
        said = {_how(ends.get(rank)) for rank in range(start.world_size) if rank not in start.missing}
        num_ranks = f"{start.world_size}" + (f" ({len(start.missing)} missing)" if start.missing else "")
        row = [str(start.number), clock(start.began), num_ranks, duration(start.ended - start.began), epochs]
        rows.append([*row, "; ".join(sorted(said))])
    return Table("starts", "Starts", ["start", "began (UTC)", "ranks", "took", "epochs", "how it ended"], rows)


def _guards(run: Run) -> Table:
    groups: dict[tuple[str, str], list[Record]] = {}
    for _, _, record in run.events("guard"):
        groups.setdefault((str(record.get("check")), str(record.get("network", ""))), []).append(record)
    rows = []
    for (check, network), found in groups.items():
        failed = [record for record in found if not record.get("passed")]
        at = sorted({int(record.get("reductions", 0)) for record in found})
        what = f"weights and random streams of {network}" if check == "weights" else "numbers of backward passes"
        shown = ", ".join(map(str, at)) if len(at) < 8 else f"{', '.join(map(str, at[:4]))}, ..., {at[-1]}"
        said = first_line(failed[0].get("said")) if failed else ""
        rows.append([what, shown, str(len(found) - len(failed)), str(len(failed)), said])
    return Table("guards", "Guards", ["compared", "after backward passes", "passed", "failed", "said"], rows)


def _checkpoints(run: Run) -> Table:
    rows = []
    folder = run.folder.resolve()
    for start, _, record in run.events("checkpoint"):
        path = Path(str(record.get("path")))
        shown = path.relative_to(folder) if folder in path.parents else path
        how = "in the background" if record.get("in_background") else "at once"
        seconds = f"{1000 * float(record.get('seconds', 0.0)):.0f} ms"
        moment = duration(float(record["time"]) - start.began)
        rows.append([f"{start.number}", moment, str(shown), size(record.get("bytes")), seconds, how])
    note = f"The last {_MOST_ROWS} of {len(rows)}." if len(rows) > _MOST_ROWS else ""
    columns = ["start", "after", "file", "size", "training waited", "written"]
    return Table("checkpoints", "Checkpoints", columns, rows[-_MOST_ROWS:], note)


def _rollouts(run: Run) -> Table:
    rows = [
        [
            str(each.epoch),
            each.environment,
            "" if each.episodes is None else str(each.episodes),
            "" if each.success is None else rate(each.success, each.success_interval),
            "" if each.mean_return is None else between(each.mean_return, each.return_interval),
            duration(each.seconds),
        ]
        for each in evaluations(run)
    ]
    columns = ["epoch", "environment", "episodes", "success rate", "return", "took"]
    note = f"The last {_MOST_ROWS} of {len(rows)}. " if len(rows) > _MOST_ROWS else ""
    return Table("rollouts", "Rollouts", columns, rows[-_MOST_ROWS:], f"{note}In brackets: the 95% interval.")


def _environment(run: Run) -> Table:
    facts = run.last.facts
    names = ("launcher", "world_size", "local_world_size", "backend", "device", "gpu", "seed", "num_restarts")
    rows = [[name, shown(facts[name])] for name in names if facts.get(name) is not None]
    described = facts.get("environment")
    described = described if isinstance(described, dict) else {}
    patches = sorted(name for name in described if str(name).endswith(" patch"))  # of each adapter that has some
    for section in ("versions", "GPUs", *patches, "machine", "variables"):
        content = described.get(section)
        if isinstance(content, dict):
            rows += [[f"{section}: {name}", shown(value)] for name, value in content.items() if value is not None]
        elif content is not None:
            rows.append([section, shown(content)])
    return Table("environment", "Environment", ["what", "value"], rows, "Of the last start, without names of machines.")


def _options(run: Run) -> Table:
    default, chosen = vars(Options()), run.last.facts.get("options", {})
    rows = [
        [name, shown(value), "" if name in default and default[name] == value else "changed"]
        for name, value in chosen.items()
    ]
    return Table("options", "Options", ["option", "value", ""], sorted(rows, key=lambda row: row[2] == ""))


def _how(end: Optional[Record]) -> str:
    if end is None:
        return "no end recorded"
    if end.get("how") == "left":
        return f"saved and left ({end.get('reason')})"
    return f"{end.get('how')}: {first_line(end.get('error'))}" if end.get("error") else str(end.get("how"))
