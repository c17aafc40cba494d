"""Reads what a policy reached from a run's records: success and return of its evaluations, and their videos."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple, Optional

from ddpshim.observe import intervals
from ddpshim.observe.records import Record
from ddpshim.observe.report.run import Run

_VIDEOS = (".mp4", ".webm")
_DEEPEST = 4  # folders below that of the run
_MOST_EPISODES = 2000  # whose interval is computed
_ROUNDING = 1e-6

Interval = Optional[tuple[float, float]]


class Evaluation(NamedTuple):
    """The episodes of an environment that were played at one time. Intervals: at 95%, or as `evaluate` was told."""

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
    """Those of all starts, by epoch; what a later start has played again replaces what an earlier one did."""
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


def videos(run: Run) -> list[Path]:
    """Files of videos in the folder of the run, the newest first."""
    patterns = ("/".join(["*"] * depth) for depth in range(1, _DEEPEST + 1))
    found = (path for pattern in patterns for path in run.folder.glob(pattern) if path.suffix.lower() in _VIDEOS)
    return sorted((path for path in found if path.is_file()), key=lambda path: (-path.stat().st_mtime, path))


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
    """That of Clopper and Pearson, where `rate` is one of whole successes in `episodes`."""
    if rate is None or not episodes or episodes > _MOST_EPISODES:
        return None
    successes = round(rate * episodes)
    return intervals.exact(successes, episodes) if abs(rate * episodes - successes) < _ROUNDING * episodes else None
