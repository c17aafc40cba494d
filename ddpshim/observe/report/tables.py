"""Builds the tables with all numbers of the report."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import NamedTuple, Optional

from ddpshim.observe.records import Record
from ddpshim.observe.report.results import evaluations
from ddpshim.observe.report.run import PARTS, Run, Start
from ddpshim.observe.report.words import between, clock, duration, first_line, ms, number, percent, rate, shown, size

_MOST_ROWS = 100


class Table(NamedTuple):
    """A table of texts."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def headline(run: Run) -> list[tuple[str, str]]:
    """Return the key numbers, by name. Local."""
    facts = run.last.facts
    samples = sum(epoch.samples for epoch in run.epochs)
    rates = [steps / wall for rank in run.ranks if (wall := run.trained_s(rank)) and (steps := run.steps(rank))]
    best = min((epoch.valid for epoch in run.epochs if epoch.valid is not None), default=None)
    last = next((epoch.mean for epoch in reversed(run.epochs) if epoch.mean is not None), None)
    device = facts.get("gpu") or facts.get("device", "")
    found = [
        *reached(run),
        ("last loss", number(last)),
        ("best validation", number(best)),
        ("epochs", str(sum(bool(epoch.training) for epoch in run.epochs))),
        ("time", duration(run.wall_s)),
        ("steps/s", f"{statistics.median(rates):.1f}" if rates else "not known"),
        ("samples seen", f"{samples:,}" if samples else "not known"),
        ("ranks", f"{run.last.world_size} ({facts.get('backend') or 'one process'} on {device})"),
        ("began (UTC)", clock(run.starts[0].began)),
        ("options", shown(facts["options"]) if facts.get("options") else ""),
    ]
    return [(name, value) for name, value in found if value]


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
    """Return all tables that have rows. Local."""
    made = (_rollouts(run), _losses(run), _times(run), _checkpoints(run), _starts(run), _guards(run))
    return [table for table in made if table.rows]


def table_of_times(ranks: list[Record]) -> str:
    """Return the table of time as plain text, from one epoch's record of each rank. Local."""
    records = {rank: [{"kind": "epoch", "epoch": 1, **record}] for rank, record in enumerate(ranks)}
    table = _times(Run(Path(), [Start(1, records)], 0))
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows)]
    rows = (table.columns, *table.rows) if table.rows else ()
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def _losses(run: Run) -> Table:
    has_valid = any(epoch.valid is not None for epoch in run.epochs)
    rows = []
    for epoch in run.epochs:
        own = [row.loss for row in epoch.training.values() if row.loss is not None]
        spread = f" ({number(min(own))} to {number(max(own))})" if len(own) > 1 else ""
        row = [str(epoch.number), str(epoch.steps), number(epoch.mean) + spread]
        rows.append([*row, number(epoch.valid)] if has_valid else row)
    kept, note = thinned(rows, "epoch")
    about = "The mean over ranks, in brackets the lowest and the highest loss of a rank. " if len(run.ranks) > 1 else ""
    columns = ["epoch", "steps", "loss", *(["validation"] if has_valid else [])]
    return Table("loss", "Loss", columns, kept, f"{about}{note}".strip())


def _times(run: Run) -> Table:
    columns = ["rank", "steps", "steps/s", "ms a step", *PARTS.values(), "memory, most", "GPU use", "GPU memory, most"]
    rows = []
    for rank in run.ranks:
        steps, wall = run.steps(rank), run.trained_s(rank)
        if not wall:
            continue
        memories = [row.memory for row in run.rows(rank)]
        uses = [use for memory in memories if (use := memory.get("gpu_use")) is not None]
        held = max((memory.get("peak_rss") or memory.get("rss") or 0 for memory in memories), default=0)
        reserved, total = memories[-1].get("gpu_reserved"), memories[-1].get("gpu_total")
        shares = [percent(run.share(rank, [part])) for part in PARTS]
        row = [str(rank), str(steps), f"{steps / wall:.1f}", f"{1000 * wall / max(1, steps):.2f}", *shares]
        row += [size(held or None), f"{statistics.mean(uses):.0f}%" if uses else ""]
        rows.append([*row, f"{size(reserved)} of {size(total)}" if reserved and total else ""])
    kept = [place for place in range(len(columns)) if place < 4 or any(row[place] for row in rows)]
    note = (
        "Training epochs except the first of each start, which warms up. Communication is the part not hidden behind "
        "compute, including the wait for slower ranks. Memory is without data workers."
    )
    rows = [[row[place] for place in kept] for row in rows]
    title = "Where the time of each rank went"
    return Table("time", title, [columns[place] for place in kept], rows, f"{note} {_on_twice(run)}".strip())


def _on_twice(run: Run) -> str:
    """Return how long a step would take on twice as many ranks, or "" if the ranks shared a device or cores.

    A step's compute and data wait halve with the batch of a rank. The rest does not: messages between more ranks even
    take longer.
    """
    start, facts = run.last, run.last.facts
    # nccl refuses two ranks on one GPU; gloo does not.
    alone = start.world_size == 1 or facts.get("backend") == "nccl"
    num_here = facts.get("local_world_size", start.world_size)
    has_cores = facts.get("device") == "cpu" and num_here <= facts.get("cores", 0)
    timed = [row for rank in start.ranks for row in run.timed(rank) if row.start == start.number and row.steps]
    steps = sum(row.steps for row in timed)
    if not (alone or has_cores) or start.missing or not steps or facts.get("options", {}).get("per_rank_batch"):
        return ""
    now_s = math.fsum(row.wall_s for row in timed) / steps
    then_s = now_s - math.fsum(row.seconds(["compute", "data_wait"]) for row in timed) / steps / 2
    without = ", without communication, which one rank does not show" if start.world_size == 1 else ""
    return (
        f"On {2 * start.world_size} ranks of this kind, a step of the same global batch would take at least about "
        f"{ms(then_s)} in place of {ms(now_s)}{without}: compute and data wait halve, the rest does not."
    )


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
    return Table(
        "starts",
        "Starts, and how each ended",
        ["start", "began (UTC)", "ranks", "took", "epochs", "how it ended"],
        rows,
    )


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
    waited = math.fsum(float(record.get("seconds", 0.0)) for _, _, record in run.events("checkpoint"))
    share = f", {percent(waited / run.wall_s)} of the run" if run.wall_s else ""
    columns = ["start", "after", "file", "size", "training waited", "written"]
    return _of_last("checkpoints", "Checkpoints", columns, rows, f"Training waited {duration(waited)} for them{share}.")


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
    return _of_last("success", "Success", columns, rows, "In brackets: the 95% interval.")


def _of_last(name: str, title: str, columns: list[str], rows: list[list[str]], note: str) -> Table:
    """Return a table of the last 100 rows at most, whose note says so."""
    which = f"The last {_MOST_ROWS} of {len(rows)}. " if len(rows) > _MOST_ROWS else ""
    return Table(name, title, columns, rows[-_MOST_ROWS:], f"{which}{note}")


def _how(end: Optional[Record]) -> str:
    if end is None:
        return "no end recorded"
    if end.get("how") == "left":
        return f"saved and left ({end.get('reason')})"
    return f"{end.get('how')}: {first_line(end.get('error'))}" if end.get("error") else str(end.get("how"))
