"""Reads a run, with all its starts, from its ranks' records."""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from ddpshim import adapters
from ddpshim.errors import ReportError
from ddpshim.observe import records, sound
from ddpshim.observe.records import Record

# The parts of training time, as `ddpshim.job.meter.PARTS`, and their names in the report.
PARTS = {part: part.replace("_", " ") for part in ("data_wait", "compute", "optimizer", "communication", "other")}
_QUIET_S = 120.0
OWN_WORK = ("data_wait", "compute", "optimizer", "other")  # parts in which other ranks may wait for this one


class Row(NamedTuple):
    """One rank's record of an epoch, from the last start that trained it."""

    start: int
    record: Record

    @property
    def loss(self) -> Optional[float]:
        """This rank's own loss."""
        return _loss(self.record.get("own"))

    @property
    def steps(self) -> int:
        return int(self.record.get("steps", 0))

    @property
    def wall_s(self) -> float:
        return math.fsum(self.record.get("seconds", {}).values())

    @property
    def memory(self) -> Record:
        """Bytes by kind, at the end of the epoch."""
        return dict(self.record.get("memory", {}))

    def seconds(self, parts: Iterable[str]) -> float:
        return math.fsum(self.record.get("seconds", {}).get(part, 0.0) for part in parts)


@dataclass
class Epoch:
    """The training pass and, if any, the validation pass of an epoch, by rank."""

    number: int
    training: dict[int, Row] = field(default_factory=dict)
    validation: dict[int, Row] = field(default_factory=dict)

    @property
    def mean(self) -> Optional[float]:
        """The mean training loss over ranks: as the trainer logged it, or else of the recorded losses."""
        return _mean_of(self.training)

    @property
    def valid(self) -> Optional[float]:
        return _mean_of(self.validation)

    @property
    def steps(self) -> int:
        """The steps of the epoch, including those of an earlier start that was interrupted in it."""
        return max((row.steps + row.record.get("first_step", 0) for row in self.training.values()), default=0)

    @property
    def samples(self) -> int:
        """The samples that all ranks saw in `steps`; 0 if not recorded."""
        rows = [row for row in self.training.values() if row.steps and row.record.get("samples")]
        return round(self.steps * math.fsum(row.record["samples"] / row.steps for row in rows))


@dataclass
class Start:
    """One start of the run: from a launcher's call to the end of its ranks."""

    number: int
    ranks: dict[int, list[Record]] = field(default_factory=dict)

    @property
    def facts(self) -> Record:
        """The start record of the lowest rank that has records."""
        return self.ranks[min(self.ranks)][0]

    @property
    def world_size(self) -> int:
        return int(self.facts.get("world_size", len(self.ranks)))

    @property
    def missing(self) -> list[int]:
        """Ranks without records."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    @property
    def began(self) -> float:
        return min(float(records[0]["time"]) for records in self.ranks.values())

    @property
    def ended(self) -> float:
        """When the last record was written."""
        return max(float(records[-1]["time"]) for records in self.ranks.values())

    def ends(self) -> dict[int, Record]:
        """Return the end record of each rank that wrote one."""
        return {rank: found[-1] for rank, found in self.ranks.items() if found[-1]["kind"] == "end"}


@dataclass
class Run:
    """A run, as its ranks recorded it."""

    folder: Path
    starts: list[Start]
    num_torn: int
    is_recorded: bool = True  # else from the log of a trainer in one process

    @functools.cached_property
    def epochs(self) -> list[Epoch]:
        """The epochs by number; if one was repeated, that of the later start."""
        epochs: dict[int, Epoch] = {}
        for start, rank, record in self.events("epoch"):
            if type(record.get("epoch")) is int:
                epoch = epochs.setdefault(record["epoch"], Epoch(record["epoch"]))
                rows = epoch.validation if record.get("phase") == "validation" else epoch.training
                if any(row.start != start.number for row in rows.values()):
                    rows.clear()
                rows[rank] = Row(start.number, record)
        return [epochs[number] for number in sorted(epochs)]

    @property
    def name(self) -> str:
        """The folder's name; if it has no letters, with the folders above it: `lift_bc/20260101120000`."""
        parts = self.folder.resolve().parts
        first = next((i for i in reversed(range(len(parts))) if re.search("[A-Za-z]", parts[i])), len(parts) - 1)
        return "/".join(parts[first:])

    @property
    def is_running(self) -> bool:
        """Whether no rank has ended and the last record is recent."""
        return not self.last.ends() and self.quiet_s < _QUIET_S

    @property
    def quiet_s(self) -> float:
        """The age of the last record."""
        return time.time() - self.last.ended

    @property
    def last(self) -> Start:
        return self.starts[-1]

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for start in self.starts for rank in start.ranks})

    @property
    def wall_s(self) -> float:
        """The time of all starts, without the time between them."""
        return math.fsum(start.ended - start.began for start in self.starts)

    def events(self, kind: str) -> Iterator[tuple[Start, int, Record]]:
        """Yield all records of a kind, with their start and rank."""
        for start in self.starts:
            for rank, found in start.ranks.items():
                yield from ((start, rank, record) for record in found if record["kind"] == kind)

    def unfinished(self) -> Optional[Record]:
        """Return the last progress record of an unfinished epoch in the last start, or None."""
        newest_first = reversed(self.last.ranks[min(self.last.ranks)])
        found = next((record for record in newest_first if record["kind"] in ("progress", "epoch")), None)
        return found if found is not None and found["kind"] == "progress" else None

    def rows(self, rank: int) -> list[Row]:
        """Return the training epochs of a rank."""
        return [epoch.training[rank] for epoch in self.epochs if rank in epoch.training]

    def timed(self, rank: int) -> list[Row]:
        """Return the training epochs of a rank without the first of each start, which warms up, unless that is all."""
        rows = self.rows(rank)
        return [row for before, row in zip(rows, rows[1:]) if row.start == before.start] or rows

    def steps(self, rank: int) -> int:
        """Return the number of steps in `timed`."""
        return sum(row.steps for row in self.timed(rank))

    def trained_s(self, rank: int) -> float:
        """Return the seconds in `timed`."""
        return math.fsum(row.wall_s for row in self.timed(rank))

    def share(self, rank: int, parts: Iterable[str]) -> float:
        """Return the share of `trained_s` that `parts` took."""
        wall, parts = self.trained_s(rank), tuple(parts)
        return math.fsum(row.seconds(parts) for row in self.timed(rank)) / wall if wall else 0.0

    def own_work(self) -> dict[int, float]:
        """Return the seconds of own work per step, by rank, in the last start that recorded them for several ranks."""
        for start in reversed(self.starts):
            rows = {rank: [row for row in self.timed(rank) if row.start == start.number] for rank in start.ranks}
            steps = {rank: sum(row.steps for row in own) for rank, own in rows.items()}
            work = {rank: math.fsum(row.seconds(OWN_WORK) for row in own) for rank, own in rows.items()}
            works = {rank: work[rank] / steps[rank] for rank in rows if steps[rank]}
            if len(works) > 1:
                return works
        return {}


def load_all(folders: Sequence[Union[str, os.PathLike[str]]]) -> list[Run]:
    """Return the runs in these folders. Local. Several are for a comparison: see `load`."""
    return [load(folder, is_compared=len(folders) > 1) for folder in folders]


def load(folder: Union[str, os.PathLike[str]], is_compared: bool = False) -> Run:
    """Return the run whose records are in `folder`, or up to two levels below. Local.

    For a comparison, a run without records may be one that an adapter reads from its trainer's own log.
    Raises ReportError if there are none, they cannot be read, or are of several runs.
    """
    home = _find(Path(folder))
    if home is None:
        return _logged(Path(folder), is_compared)
    starts: dict[int, Start] = {}
    num_torn = num_begun = 0
    for rank, path in records.files(home).items():
        try:
            found, torn, is_begun = records.read(path)
        except OSError as error:
            raise ReportError(
                f"{path} cannot be read ({error}); the report would lack rank {rank}. Make it readable."
            ) from error
        num_torn += torn
        num_begun += is_begun
        current: list[Record] = []  # records before the first start are dropped
        for record in found:
            if record["kind"] == "start":
                number = int(record.get("start", 1))
                current = starts.setdefault(number, Start(number)).ranks.setdefault(rank, [])
            current.append(record)
    if not starts:
        raise ReportError(
            f"the records in {home / records.FOLDER} hold no start of a run ({num_torn + num_begun} lines cannot be "
            "read); there is nothing to report. Was the run killed in its first second, or the disk full?"
        )
    run = Run(home, [starts[number] for number in sorted(starts)], num_torn + num_begun)
    if run.is_running:  # the incomplete lines are still being written
        run.num_torn = num_torn
    return run


def _find(folder: Path) -> Optional[Path]:
    """Return the folder, at or near `folder`, whose `ddpshim` holds records; None if there are none."""
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder; there is nothing to report. Name the folder of a run.")
    near = (folder, folder.parent) if folder.name in (records.FOLDER, "logs", "models", "videos") else (folder,)
    found = [place for place in near if records.files(place)]
    if not found:
        files = (file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{records.FOLDER}/rank_*.jsonl"))
        found = sorted({file.parent.parent for file in files})
    return _only(found, folder, "holds records of") if found else None


def _logged(folder: Path, is_compared: bool) -> Run:
    """Return the run of one process in `folder`, or up to two levels below, from the log of its trainer."""
    offered = [adapters.function(package, "logged") for package in adapters.packages()]
    readers = [logged for logged in offered if logged is not None]
    places = sorted({file.parent for depth in ("", "*/", "*/*/") for file in folder.glob(f"{depth}config.json")})
    found = {place: numbers for place in places for logged in readers if (numbers := logged(place))}
    if not found:
        raise ReportError(
            f"{folder} holds no records ({records.FOLDER}/rank_N.jsonl); there is nothing to report. Launched runs of "
            "robomimic write them beside config.json (not with DDPSHIM_RECORD=no), other trainers with "
            "ddpshim.record(folder)."
        )
    home = _only([*found], folder, "holds logs, but no records, of")
    if not is_compared:
        raise ReportError(
            f"{folder} holds the log of a run in one process, but no records of ddpshim; a page about it alone would "
            f"be nearly empty. Compare it with a recorded run: python -m ddpshim report {folder} RUN_DIR."
        )
    start = {"kind": "start", "time": 0.0, "start": 1, "world_size": 1}
    return Run(home, [Start(1, {0: [start, *filter(sound.is_sound, found[home])]})], 0, is_recorded=False)


def _only(found: Sequence[Path], folder: Path, holds: str) -> Path:
    if len(found) > 1:
        names = ", ".join(str(place) for place in found[:8]) + (", ..." if len(found) > 8 else "")
        raise ReportError(
            f"{folder} {holds} {len(found)} runs; one would hide the others. Name one, or several to compare "
            f"them: {names}."
        )
    return found[0]


def _loss(metrics: Any) -> Optional[float]:
    if not isinstance(metrics, dict):
        return None
    name = records.main_loss(metrics)
    return None if name is None else float(metrics[name])


def _mean_of(rows: dict[int, Row]) -> Optional[float]:
    for row in rows.values():
        said = _loss(row.record.get("mean"))
        if said is not None:
            return said
    losses = [row.loss for row in rows.values() if row.loss is not None]
    return math.fsum(losses) / len(losses) if losses else None
