"""Reads the results of evaluations from a run's records: success and return."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

from ddpshim.observe import intervals
from ddpshim.observe.records import Record
from ddpshim.observe.report.run import Run

_MOST_EPISODES = 2000  # with more, no interval is computed
_ROUNDING = 1e-6

Interval = Optional[tuple[float, float]]


class Evaluation(NamedTuple):
    """One evaluation in one environment. Intervals have 95% confidence, or that given to `evaluate`."""

    epoch: int
    environment: str
    episodes: Optional[int]
    success: Optional[float]
    success_interval: Interval
    mean_return: Optional[float]
    return_interval: Interval
    seconds: float
    time: float


def evaluations(run: Run) -> list[Evaluation]:
    """Return the evaluations of all starts, by epoch; if one was repeated, that of the later start."""
    found: dict[tuple[int, str], Evaluation] = {}
    for start in run.starts:
        epoch = 0
        for record in start.ranks[min(start.ranks)]:
            if record["kind"] == "epoch" and type(record.get("epoch")) is int:
                epoch = record["epoch"]
            elif record["kind"] == "rollout":
                each = _evaluation(record, epoch)
                found[each.epoch, each.environment] = each
    return sorted(found.values(), key=lambda each: each.epoch)


def _evaluation(record: Record, epoch: int) -> Evaluation:
    metrics, episodes = record.get("metrics") or {}, record.get("episodes")
    success, mean_return = metrics.get("Success_Rate"), metrics.get("Return")
    if success is not None and not 0 <= success <= 1:
        success = None  # robocasa's -1: no episode was played
    interval = record.get("interval")
    returns = [value for value in record.get("returns") or () if math.isfinite(value)]
    return Evaluation(
        record["epoch"] if type(record.get("epoch")) is int else epoch,
        str(record.get("environment")),
        episodes,
        success,
        _of_rate(success, episodes) if interval is None else (interval[0], interval[1]),
        mean_return if mean_return is not None and math.isfinite(mean_return) else None,
        intervals.of_mean(returns) if len(set(returns)) > 1 else None,
        float(record.get("seconds", 0.0)),
        float(record["time"]),
    )


def _of_rate(rate: Optional[float], episodes: Optional[int]) -> Interval:
    """Return the Clopper-Pearson interval; None with too many episodes, or no whole number of successes."""
    if rate is None or not episodes or episodes > _MOST_EPISODES:
        return None
    successes = round(rate * episodes)
    return intervals.exact(successes, episodes) if abs(rate * episodes - successes) < _ROUNDING * episodes else None
