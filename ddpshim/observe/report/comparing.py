"""Compares runs: their results, measured and predicted speed-up, and differences in configuration."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from ddpshim.errors import ReportError
from ddpshim.observe import predict
from ddpshim.observe.report.run import Run
from ddpshim.observe.report.tables import Table, reached
from ddpshim.observe.report.words import duration, number, shown
from ddpshim.reading import read_bytes

_MOST_ROWS = 100
_FACTS = ("world_size", "backend", "device", "gpu", "seed", "options")


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by unique names: their own, or else the parts in which their paths differ."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        paths = [run.folder.resolve() for run in runs]
        if len(set(paths)) < len(paths):
            raise ReportError(
                f"{paths[0]} and another folder hold the same run; there is nothing to compare. Name two."
            )
        above = os.path.commonpath(paths)
        parts = [path.relative_to(above).parts for path in paths]
        same = [len(set(of)) == 1 for of in zip(*parts)] if len({*map(len, parts)}) == 1 else []
        names = ["/".join(part for i, part in enumerate(of) if not (same and same[i])) or "." for of in parts]
    return dict(zip(names, runs))


def tables_of(runs: Mapping[str, Run]) -> list[Table]:
    """Return the tables of final values and of differences."""
    return [table for table in (_values(runs), _differences(runs)) if table.rows]


def speed(run: Run) -> Optional[float]:
    """Return the samples per second of training, of all ranks, in the last start that recorded them."""
    for start in reversed(run.starts):
        rates = []
        for rank in start.ranks:
            rows = [row for row in run.timed(rank) if row.start == start.number]
            wall_s = math.fsum(row.wall_s for row in rows)
            rates.append(math.fsum(row.record.get("samples") or 0 for row in rows) / wall_s if wall_s else 0.0)
        if all(rates):
            return math.fsum(rates)
    return None


def _values(runs: Mapping[str, Run]) -> Table:
    first = next(iter(runs.values()))
    before = speed(first)
    found: list[dict[str, str]] = []
    for name, run in runs.items():
        means = [epoch.mean for epoch in run.epochs if epoch.mean is not None]
        valid = [epoch.valid for epoch in run.epochs if epoch.valid is not None]
        now = speed(run)
        found.append(
            {
                "run": name,
                "ranks": str(run.last.world_size),
                "speed-up": f"{now / before:.2f}" if now and before else "",
                "predicted": "" if run is first else _predicted(first, run.last.world_size),
                "samples/s": f"{now:,.0f}" if now else "",
                "time": duration(run.wall_s),
                "epochs": str(sum(bool(epoch.training) for epoch in run.epochs)),
                **dict(reached(run)),
                "last loss": number(means[-1]) if means else "",
                "best validation": number(min(valid)) if valid else "",
            }
        )
    columns = list(dict.fromkeys(name for row in found for name in row if any(other.get(name) for other in found)))
    note = (
        "Speed-up: samples per second of training, against the first run; "
        "predicted: by ddpshim predict, from the first run's records. In brackets: "
        "95% intervals, or the epoch."
    )
    return Table("values", "Final values", columns, [[row.get(name, "") for name in columns] for row in found], note)


def _predicted(first: Run, world_size: int) -> str:
    try:
        return f"{predict.predict(predict.measured(first.folder), world_size).speedup:.2f}"
    except ReportError:  # its records lack the phases of a step
        return ""


def _differences(runs: Mapping[str, Run]) -> Table:
    facts = [dict(_facts(run)) for run in runs.values()]
    names = sorted({name for of in facts for name in of})
    rows = [
        [name, *(of.get(name, "") for of in facts)] for name in names if len({of.get(name, "") for of in facts}) > 1
    ]
    note = f"The first {_MOST_ROWS} of {len(rows)}." if len(rows) > _MOST_ROWS else ""
    columns = ["config.json, options, versions", *runs]
    return Table("differences", "What differs", columns, rows[:_MOST_ROWS], note)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    facts = run.last.facts
    yield from _flat("", {name: facts.get(name) for name in _FACTS})
    described = facts.get("environment")
    if isinstance(described, dict):
        yield from _flat("versions", described.get("versions"))
    yield from _flat("config", _config(run.folder / "config.json"))


def _config(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):  # not every trainer writes one
        return None


def _flat(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and depth < 8:
        for key, below in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), below, depth + 1)
    elif value is not None:
        yield name, shown(value)
