"""Writes a run's curves, of each rank and of the mean over ranks, as TensorBoard events or a W&B run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Protocol, Union

from ddpshim.errors import ReportError
from ddpshim.observe.records import Record

KINDS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}  # with the packages that write them
_MEAN = None  # the `rank` of a point of the mean


class Point(NamedTuple):
    """One value of a curve: of one rank, or of the mean over ranks (rank None)."""

    rank: Optional[int]
    name: str
    value: float


class _Writer(Protocol):
    def write(self, points: Sequence[Point], epoch: int, moment: Optional[float]) -> None: ...

    def close(self) -> None: ...


class Curves:
    """Writes the curves of all ranks, epoch by epoch, in one process."""

    def __init__(self, folder: Union[str, os.PathLike[str]], log_with: Iterable[str]) -> None:
        """Write below `folder`: TensorBoard events to tensorboard/, a W&B run (offline if WANDB_MODE is not set) to
        wandb/. `log_with`: kinds that `check` has accepted."""
        classes: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb}
        self._writers: list[_Writer] = [classes[kind](Path(folder)) for kind in log_with]

    def add(self, by_rank: Mapping[int, Record]) -> None:
        """Write the ranks' records of one epoch and phase. Local."""
        points = list(_points(by_rank))
        first = next(iter(by_rank.values()))
        for writer in self._writers:
            writer.write(points, int(first["epoch"]), first.get("time"))

    def close(self) -> None:
        """Flush and close the writers. Local."""
        for writer in self._writers:
            writer.close()


def check(log_with: Union[str, Iterable[str]]) -> tuple[str, ...]:
    """Return the kinds in `log_with`. Local. Raises ReportError if one is unknown, or its package is not installed."""
    kinds = (log_with,) if isinstance(log_with, str) else tuple(dict.fromkeys(log_with))
    for kind in kinds:
        if kind not in KINDS:
            raise ReportError(f"log_with={kind!r} is not known; no curve would be written. Use {' or '.join(KINDS)}.")
        if not any(map(importlib.util.find_spec, KINDS[kind])):
            raise ReportError(
                f"log_with={kind!r}, but {' or '.join(KINDS[kind])} is not installed; no curve would be written. Run "
                f"`pip install {KINDS[kind][0]}`, or leave it out."
            )
    return kinds


def _points(by_rank: Mapping[int, Record]) -> Iterator[Point]:
    """Yield the points of one epoch and phase: its metrics and, for training, the seconds of each part.

    A mean that the trainer logged is used as it is; otherwise it is computed. With one rank, only the mean is yielded.
    """
    curves: dict[str, dict[int, float]] = {}
    logged: dict[str, float] = {}
    for rank, record in by_rank.items():
        phase = record.get("phase", "training")
        metrics = {f"{phase}/{name}": value for name, value in (record.get("own") or {}).items()}
        seconds = record.get("seconds") or {} if phase == "training" else {}
        for name, value in {**metrics, **{f"seconds/{part}": value for part, value in seconds.items()}}.items():
            curves.setdefault(name, {})[rank] = float(value)
        logged = logged or {f"{phase}/{name}": float(value) for name, value in (record.get("mean") or {}).items()}
    for name in dict.fromkeys([*curves, *logged]):
        values = curves.get(name, {})
        yield Point(_MEAN, name, logged[name] if name in logged else math.fsum(values.values()) / len(values))
        if len(by_rank) > 1:
            yield from (Point(rank, name, value) for rank, value in values.items())


class _TensorBoard:
    """Writes the mean to the folder and each rank to a subfolder, which TensorBoard draws in one chart."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._class = folder / "tensorboard", _summary_writer()
        self._writers: dict[Optional[int], Any] = {}

    def write(self, points: Sequence[Point], epoch: int, moment: Optional[float]) -> None:
        for point in points:
            if point.rank not in self._writers:
                name = "" if point.rank is _MEAN else f"rank_{point.rank}"
                # Drop what an earlier start wrote from this epoch on: this start trains these epochs again.
                self._writers[point.rank] = self._class(str(self._folder / name), purge_step=epoch or None)
            self._writers[point.rank].add_scalar(point.name, point.value, epoch, walltime=moment)
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _summary_writer() -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    return importlib.import_module("tensorboardX").SummaryWriter


class _Wandb:
    """Writes all curves to one run: the program's current run, or else a new one."""

    def __init__(self, folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        self._is_ours = wandb.run is None
        if self._is_ours:
            folder.mkdir(parents=True, exist_ok=True)
            mode = os.environ.get("WANDB_MODE", "offline")
            self._run = wandb.init(dir=str(folder), name=folder.absolute().name, mode=mode)
            self._run.define_metric("*", step_metric="epoch")
        else:
            self._run = wandb.run

    def write(self, points: Sequence[Point], epoch: int, moment: Optional[float]) -> None:
        values = {name if rank is _MEAN else f"{name}/rank_{rank}": value for rank, name, value in points}
        self._run.log({"epoch": epoch, **values})

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()
