"""Reads a run, with all its starts, from its ranks' records. Imports no torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional

from ddpshim import adapters
from ddpshim.errors import ReportError
from ddpshim.evaluation import intervals
from ddpshim.observe import records
from ddpshim.observe.records import Record

_MOST_EPISODES = 2000  # with more, no interval is computed

Start = dict[int, list[Record]]  # the records of one start, by rank
Curves = dict[str, dict[float, float]]  # by name, the value at each epoch or step


@dataclass
class Epoch:
    """The records of an epoch's training pass and, if any, validation pass, by rank."""

    number: int
    training: dict[int, Record] = field(default_factory=dict)
    validation: dict[int, Record] = field(default_factory=dict)

    @property
    def mean(self) -> Optional[float]:
        """The mean training loss over ranks: as the trainer logged it, or else of the recorded losses."""
        return _mean_loss(self.training.values())

    @property
    def valid(self) -> Optional[float]:
        return _mean_loss(self.validation.values())


class Evaluation(NamedTuple):
    """One evaluation in one environment. The interval has 95% confidence, or that given to `evaluate`."""

    epoch: int
    environment: str
    episodes: Optional[int]
    success: Optional[float]
    interval: Optional[tuple[float, float]]
    mean_return: Optional[float]


@dataclass
class Run:
    """A run, as its ranks recorded it, in the order of its starts."""

    folder: Path
    starts: list[Start]
    num_torn: int = 0

    @property
    def facts(self) -> Record:
        """The start record of the last start's lowest rank."""
        return self.starts[-1][min(self.starts[-1])][0]

    @property
    def world_size(self) -> int:
        return int(self.facts.get("world_size", len(self.starts[-1])))

    @property
    def ends(self) -> dict[int, Record]:
        """How each rank of the last start ended, where it could record that."""
        return {rank: found[-1] for rank, found in self.starts[-1].items() if found[-1]["kind"] == "end"}

    def events(self, kind: str) -> Iterator[tuple[int, int, Record]]:
        """Yield all records of a kind, with the number of their start, from 0, and their rank."""
        for number, start in enumerate(self.starts):
            for rank, found in start.items():
                yield from ((number, rank, record) for record in found if record["kind"] == kind)

    @functools.cached_property
    def epochs(self) -> list[Epoch]:
        """The epochs by number; if one was repeated, that of the later start."""
        epochs: dict[int, Epoch] = {}
        by: dict[int, int] = {}
        for start, rank, record in self.events("epoch"):
            epoch = epochs.setdefault(record["epoch"], Epoch(record["epoch"]))
            passes = epoch.validation if record.get("phase") == "validation" else epoch.training
            if by.setdefault(id(passes), start) != start:
                passes.clear()
                by[id(passes)] = start
            passes[rank] = record
        return [epochs[number] for number in sorted(epochs)]

    @functools.cached_property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations by epoch, as the lowest rank recorded them; if one was repeated, that of the later start."""
        found: dict[tuple[int, str], Evaluation] = {}
        for start in self.starts:
            epoch = 0
            for record in start[min(start)]:
                epoch = record["epoch"] if record["kind"] == "epoch" else epoch
                if record["kind"] == "rollout":
                    each = _evaluation(record, epoch)
                    found[each.epoch, each.environment] = each
        return sorted(found.values(), key=lambda each: each.epoch)

    def curves(self) -> Curves:
        """Return the run's numbers by name and epoch: as the trainer averaged them, else the means over ranks."""
        curves: Curves = {}
        for epoch in self.epochs:
            for phase, passes in (("training", epoch.training), ("validation", epoch.validation)):
                for name in _names(passes.values()):
                    curves.setdefault(f"{phase}/{name}", {})[epoch.number] = _mean(name, passes.values())
        for each in self.evaluations:
            for name, result in (("Success_Rate", each.success), ("Return", each.mean_return)):
                if result is not None:
                    curves.setdefault(f"rollout/{each.environment}/{name}", {})[each.epoch] = result
        return curves


def load(folder: Path) -> Run:
    """Return the run whose records are in `folder`, or up to two levels below. Local.

    Raises ReportError if there are none, they cannot be read, or are of several runs.
    """
    run = find(folder)
    if run is None:
        raise ReportError(
            f"{folder} holds no records ({records.FOLDER}/rank_N.jsonl); there is nothing to report. Launched runs of "
            "robomimic write them beside config.json (not with DDPSHIM_RECORD=no), other trainers with "
            "ddpshim.record(folder). Two folders of any trainers can be compared: python -m ddpshim report A B."
        )
    return run


def find(folder: Path) -> Optional[Run]:
    """Return what `load` does, or None if there are no records."""
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder; there is nothing to report. Name the folder of a run.")
    near = (folder, folder.parent) if folder.name in (records.FOLDER, "logs", "models", "videos") else (folder,)
    found = [place for place in near if records.files(place)]
    if not found:
        files = (file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{records.FOLDER}/rank_*.jsonl"))
        found = sorted({file.parent.parent for file in files})
    if len(found) > 1:
        names = ", ".join(map(str, found[:8]))
        raise ReportError(f"{folder} holds records of {len(found)} runs; one would hide the others. Name one: {names}.")
    return _read(found[0]) if found else None


def _read(home: Path) -> Run:
    starts: dict[int, Start] = {}
    num_torn = 0
    for rank, path in records.files(home).items():
        try:
            found, torn = records.read(path)
        except OSError as error:
            said = f"{path} cannot be read ({error}); its rank would be missing. Make it readable."
            raise ReportError(said) from error
        num_torn += torn
        current: list[Record] = []  # records before the first start are dropped
        for record in found:
            if record["kind"] == "start":
                current = starts.setdefault(record.get("start", 1), {}).setdefault(rank, [])
            current.append(record)
    if not starts:
        raise ReportError(
            f"the records in {home / records.FOLDER} hold no start of a run ({num_torn} lines cannot be read); there "
            "is nothing to report. Was the run killed in its first second, or the disk full?"
        )
    return Run(home, [starts[number] for number in sorted(starts)], num_torn)


def logged(folder: Path) -> Optional[Run]:
    """Return the run of one process in `folder`, from its trainer's own log that an adapter reads; None without."""
    readers = [adapters.function(package, "logged") for package in adapters.packages()]
    places = sorted({file.parent for depth in ("", "*/", "*/*/") for file in folder.glob(f"{depth}config.json")})
    found = [(place, numbers) for place in places for read in readers if read and (numbers := read(place))]
    return Run(found[0][0], [{0: found[0][1]}]) if len(found) == 1 else None


def _names(passes: Collection[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in passes for of in ("own", "mean") for name in record.get(of) or {}))


def _mean(name: str, passes: Collection[Record]) -> float:
    logged = [record["mean"][name] for record in passes if name in (record.get("mean") or {})]
    values = logged or [record["own"][name] for record in passes if name in (record.get("own") or {})]
    return math.fsum(values) / len(values)


def _mean_loss(passes: Collection[Record]) -> Optional[float]:
    loss = records.main_loss(dict.fromkeys(_names(passes)))
    return None if loss is None else _mean(loss, passes)


def _evaluation(record: Record, epoch: int) -> Evaluation:
    metrics, episodes, interval = record.get("metrics") or {}, record.get("episodes"), record.get("interval")
    success = metrics.get("Success_Rate")
    if success is not None and not 0 <= success <= 1:
        success = None  # robocasa's -1: no episode was played
    if interval is None and success is not None and episodes and episodes <= _MOST_EPISODES:
        number = round(success * episodes)
        interval = intervals.exact(number, episodes) if abs(number - success * episodes) < 1e-6 * episodes else None
    epoch, where = epoch if record.get("epoch") is None else record["epoch"], str(record.get("environment"))
    return Evaluation(epoch, where, episodes, success, interval and tuple(interval), metrics.get("Return"))
