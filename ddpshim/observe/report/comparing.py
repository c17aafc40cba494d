"""Compares runs with the first of them: success, losses, speed, and differences in configuration."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from ddpshim.errors import ReportError
from ddpshim.observe.report.findings import Remark
from ddpshim.observe.report.results import Evaluation, evaluations
from ddpshim.observe.report.run import Run
from ddpshim.observe.report.tables import Table, reached, thinned
from ddpshim.observe.report.words import duration, number, rate, shown
from ddpshim.reading import read_bytes

_MOST_ROWS = 100
_FEW_DIGITS = 2
_FACTS = ("world_size", "backend", "device", "gpu", "seed", "options")


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by unique names.

    The experiment's or folder's name; where that is shared, with what follows it; or else where their paths differ.
    """
    names = [run.name.partition("/")[0] for run in runs]
    if len(set(names)) < len(names):
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
    """Return the tables of final values, of differences in settings, and of digits that agree."""
    return [table for table in (_values(runs), _digits(runs), _differences(runs)) if table.rows]


def verdicts(runs: Mapping[str, Run]) -> list[tuple[str, Remark]]:
    """Return, for each run but the first, its name and a sentence that compares it with the first. Local.

    The level is "note" if an interval of a last success rate does not overlap that of the first run, or if the losses
    of the first common epoch agree in fewer than 2 digits; else "good".
    """
    (first_name, first), *others = runs.items()
    return [(name, _against(first_name, first, run)) for name, run in others]


def _against(name: str, first: Run, run: Run) -> Remark:
    digits = [found for (_, what), found in _agreement(first, run).items() if what == "loss"]
    is_apart = bool(digits) and digits[0] < _FEW_DIGITS
    said = [f"losses agree in these digits: {_digits_of_losses(first, run)}" if digits else "no loss to compare"]
    before, after = _last(first), _last(run)
    for environment in (environment for environment in before if environment in after):
        (one, interval), (two, other) = (
            (each.success or 0.0, each.success_interval) for each in (before[environment], after[environment])
        )
        overlap = ""
        if interval and other:
            overlaps = max(interval[0], other[0]) <= min(interval[1], other[1])
            is_apart |= not overlaps
            overlap = ", the intervals overlap" if overlaps else ", the intervals do not overlap"
        where = f" in {environment}" if len(before) > 1 else ""
        said.append(f"success{where} {rate(two, other)} against {rate(one, interval)}{overlap}")
    then, now = speed(first), speed(run)
    if then and now:
        said.append(f"{now / then:.2f} times as fast")
    return Remark("note" if is_apart else "good", f"Against {name}: {'; '.join(said)}")


def _last(run: Run) -> dict[str, Evaluation]:
    """Return the last evaluation of each environment that has a success rate."""
    return {each.environment: each for each in evaluations(run) if each.success is not None}


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
    for run in runs.values():
        means = [epoch.mean for epoch in run.epochs if epoch.mean is not None]
        valid = [epoch.valid for epoch in run.epochs if epoch.valid is not None]
        now = speed(run)
        found.append(
            {
                "ranks": str(run.last.world_size),
                "speed-up": f"{now / before:.2f}" if now and before else "",
                "samples/s": f"{now:,.0f}" if now else "",
                "time": duration(run.wall_s) if run.is_recorded else "",
                "epochs": str(sum(bool(epoch.training) for epoch in run.epochs)),
                **dict(reached(run)),
                "last loss": number(means[-1]) if means else "",
                "best validation": number(min(valid)) if valid else "",
                "digits of the loss that agree": "" if run is first else _digits_of_losses(first, run),
            }
        )
    values = dict.fromkeys(name for of_run in found for name in of_run)
    rows = [[name, *(of_run.get(name, "") for of_run in found)] for name in values]
    note = "Speed-up: samples per second of training, against the first run. In brackets: 95% intervals, or the epoch."
    return Table("values", "Final values", ["what", *runs], [row for row in rows if any(row[1:])], note)


def _digits_of_losses(first: Run, other: Run) -> str:
    found = [(epoch, digits) for (epoch, what), digits in _agreement(first, other).items() if what == "loss"]
    if all(math.isinf(digits) for _, digits in found):
        return "all" if found else ""
    ends = found if len(found) == 1 else (found[0], found[-1])
    return ", ".join(f"{_digits_shown(digits)} in epoch {epoch}" for epoch, digits in ends)


def _digits_shown(digits: float) -> str:
    return "all" if math.isinf(digits) else str(digits)


def _differences(runs: Mapping[str, Run]) -> Table:
    facts = [dict(_facts(run)) for run in runs.values()]
    rows = []
    for name in sorted({name for of in facts for name in of}):
        # What a run did not record is unknown, not different.
        known = [of for of, run in zip(facts, runs.values()) if run.is_recorded or name.startswith("config.")]
        if len({of.get(name, "") for of in known}) > 1:
            rows.append([name, *(of.get(name, "") for of in facts)])
    note = f"The first {_MOST_ROWS} of {len(rows)}." if len(rows) > _MOST_ROWS else ""
    columns = ["config.json, options, versions", *runs]
    return Table("differences", "What differs", columns, rows[:_MOST_ROWS], note)


def _digits(runs: Mapping[str, Run]) -> Table:
    """Return, for each epoch, the numbers of all runs, and how many digits of each agree with the first."""
    first = next(iter(runs.values()))
    numbers = [_by_epoch(run) for run in runs.values()]
    agreeing = [_agreement(first, run) for run in runs.values() if run is not first]
    rows = [
        [str(key[0]), key[1], ", ".join(found), *(f"{of[key]:.9g}" if key in of else "" for of in numbers)]
        for key in numbers[0]
        if any(found := [_digits_shown(of[key]) if key in of else "" for of in agreeing])
    ]
    kept, note = thinned(rows, "row")
    about = (
        "7 digits: the relative difference is at most 1e-7. Training amplifies rounding, so later epochs agree in "
        "fewer digits."
    )
    note = f"{about} {note}".strip()
    return Table("digits", "Digits that agree", ["epoch", "value", "digits", *runs], kept, note)


def _agreement(first: Run, other: Run) -> dict[tuple[int, str], float]:
    """Return the number of digits in which losses and results of two runs agree, by epoch; infinity: all."""
    one, two = _by_epoch(first), _by_epoch(other)
    return {key: _agreeing(one[key], two[key]) for key in one if key in two}


def _by_epoch(run: Run) -> dict[tuple[int, str], float]:
    found: dict[tuple[int, str], Optional[float]] = {}
    for epoch in run.epochs:
        found[epoch.number, "loss"], found[epoch.number, "validation"] = epoch.mean, epoch.valid
    for each in evaluations(run):
        found[each.epoch, f"success rate in {each.environment}"] = each.success
        found[each.epoch, f"return in {each.environment}"] = each.mean_return
    return {key: value for key in sorted(found, key=lambda key: key[0]) if (value := found[key]) is not None}


def _agreeing(one: float, two: float) -> float:
    if one == two or (math.isnan(one) and math.isnan(two)):
        return math.inf
    if not (math.isfinite(one) and math.isfinite(two)):
        return 0
    return max(0, math.floor(-math.log10(abs(one - two) / max(abs(one), abs(two)))))


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
