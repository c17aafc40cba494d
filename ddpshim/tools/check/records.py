"""Holds what the processes of a proof recorded, and the form of a difference between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ddpshim.tools.check.watching import read


@dataclass(frozen=True)
class Parting:
    """The first difference between the ranks and the one process."""

    step: int  # from 1
    # seed, samples, noise, weights at the start, loss, gradients, learning rate, weights, optimizer, networks, steps
    what: str
    where: str  # which tensors, backward pass or optimizer
    place: str  # file:line of the user's program
    found: str
    meaning: str  # the usual cause


class Run:
    """The records of one process, by step and kind."""

    def __init__(self, folder: Path, run: str) -> None:
        self.records = read(folder, run)
        self.names = {r["optimizer"]: r["names"] for r in self.records if r["kind"] == "optimizer"}
        self.num_steps = sum(r["kind"] == "step" for r in self.records)
        self.is_cut = any(r["kind"] == "cut" for r in self.records)  # ended by the proof, not by the program
        self.error = next((r["error"] for r in self.records if r["kind"] == "failed"), "")

    def of(self, kind: str, step: int) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == kind and r["t"] == step]

    def passes(self) -> list[list[dict[str, Any]]]:
        """Return the batches of each pass over a loader that a backward pass followed."""
        found: dict[int, list[dict[str, Any]]] = {}
        for batch, _ in self._trained():
            found.setdefault(batch["pass_number"], []).append(batch)
        return list(found.values())

    def trained_on(self, step: int) -> list[dict[str, Any]]:
        """Return the batches of a step that were followed by a backward pass; one that only repeats a row is empty."""
        return [
            batch if loss.get("weight", 1.0) else {**batch, "size": 0, "samples": []}
            for batch, loss in self._trained()
            if loss["t"] == step
        ]

    def _trained(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each batch that a backward pass followed, with the first one's loss."""
        last: Optional[dict[str, Any]] = None
        for record in self.records:
            if record["kind"] == "batch":
                last = record
            elif record["kind"] == "loss" and last is not None:
                yield last, record
                last = None
