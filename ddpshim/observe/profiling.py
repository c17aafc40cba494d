"""Measures what the time of each rank goes into: data, compute, communication that is not hidden."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Optional

import torch

from ddpshim import checkpoint
from ddpshim.job import machine
from ddpshim.job.group import World, world
from ddpshim.job.meter import PARTS, Meter


@contextlib.contextmanager
def profile(path: Optional[checkpoint.PathLike] = None) -> Iterator[Profile]:
    """Count where the time of this block goes; at its end the main rank prints a table, and writes `path` (JSON).

    Collective at the end, where the block did not raise. For the block around a training loop, with any of torch's
    data loaders and optimizers, and networks of `wrap_parallel`; `Meter` says what counts to which part. Before and
    after it nothing is counted, and nothing costs anything.

    Args:
        path: a file for what `Profile.summary` gives, written by the main rank; None writes none.
    """
    counted = Profile(path)
    with counted.measured():
        yield counted
    counted.collect()
    counted.report()


class Profile:
    """The times of all ranks, added up over the blocks that were measured.

    `ranks` has a row for each, in rank order, as of the last `collect()`: steps (batches), wall_s, the seconds of
    each part (data_wait_s, compute_s, communication_s, optimizer_s, other_s; they add up to wall_s),
    peak_memory_bytes (of the GPU, or else of the process).
    """

    def __init__(self, path: Optional[checkpoint.PathLike] = None) -> None:
        self.path = path
        self.ranks: list[dict[str, float]] = []
        self._here: World = world()
        self._total: dict[str, float] = {}
        self._last: dict[str, float] = {}

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count what happens in this block. Local."""
        meter = Meter(uses_events=self._here.backend == "nccl")
        meter.start()
        try:
            yield
        finally:
            meter.stop()
            parts = {f"{part}_s": meter.seconds[part] for part in PARTS}
            self._last = {"steps": meter.num_batches, "wall_s": sum(parts.values()), **parts}
            self._total = {key: self._total.get(key, 0) + value for key, value in self._last.items()}

    def collect(self) -> dict[str, float]:
        """Metrics of the last block for a trainer's log; `ranks` and the file at `path` then hold all (collective).

        Times are milliseconds a step: their mean over the ranks, and the largest.
        """
        peak = _peak_memory_bytes(self._here.device)
        rows = self._here.gather((self._last, {**self._total, "peak_memory_bytes": peak}))
        self.ranks = [{"rank": rank, **total} for rank, (_, total) in enumerate(rows)]
        if self.path is not None and self._here.is_main:
            with checkpoint.written(self.path) as partial, open(partial, "w") as file:
                json.dump(self.summary(), file, indent=4)
        log = {"Profile_Steps_Per_Second": min(_per_second(last) for last, _ in rows)}
        for part in PARTS:
            times = [1000 * last[f"{part}_s"] / max(1, last["steps"]) for last, _ in rows]
            name = "".join(f"_{word.capitalize()}" for word in part.split("_"))
            log[f"Profile{name}_Ms"], log[f"Profile{name}_Ms_Max"] = sum(times) / len(times), max(times)
        log["Profile_Peak_Memory_GB_Max"] = max(row["peak_memory_bytes"] for row in self.ranks) / 1e9
        return log

    def summary(self) -> dict[str, Any]:
        """What is written: the world, its options, and `ranks` with their steps_per_s. Local."""
        here = self._here
        return {
            "world_size": here.world_size,
            "backend": here.backend,
            "device": str(here.device.type),
            "options": asdict(here.options),
            "ranks": [{**row, "steps_per_s": _per_second(row)} for row in self.ranks],
        }

    def report(self) -> None:
        """Print the table of `ranks`, on the main rank. Local."""
        if self._here.is_main:
            print(self.table(), file=sys.stderr, flush=True)

    def table(self) -> str:
        """The last collected numbers as text: milliseconds a step, and what share of the time that is. Local."""
        titles = ["rank", "steps", "steps/s", *(part.replace("_", " ") for part in PARTS), "peak memory"]
        lines = [titles]
        for row in self.ranks:
            cells = [f"{row['rank']}", f"{row['steps']}", f"{_per_second(row):.1f}"]
            for part in PARTS:
                seconds = row[f"{part}_s"]
                share = seconds / row["wall_s"] if row["wall_s"] else 0.0
                cells.append(f"{1000 * seconds / max(1, row['steps']):.2f} ms {share:4.0%}")
            lines.append([*cells, f"{row['peak_memory_bytes'] / 1e9:.2f} GB"])
        widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
        shown = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)
        return "ddpshim: where each rank's time went, for each step\n" + "\n".join(shown)


def _per_second(row: dict[str, float]) -> float:
    return row["steps"] / row["wall_s"] if row["wall_s"] else 0.0


def _peak_memory_bytes(device: torch.device) -> int:
    """The most that torch has held on the GPU, or else the process in memory, since it started."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return machine.resident_bytes()[1] or 0
