"""Reads what `watching` has recorded of a process of a proof, and tells how far two recorded tensors are apart."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpshim.tools.watching import NUM_SIGNS

Record = dict[str, Any]


class RunRecords:
    """The records of one process."""

    def __init__(self, folder: Path, run: str) -> None:
        path = folder / f"{run}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        self.records = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be incomplete
        self.num_steps = len(self.all("step"))
        self.is_cut = bool(self.all("cut"))  # ended by the proof, not by the program
        self.error = next((r["error"] for r in self.all("failed")), "")
        of_passes = [r for r in self.records if r["kind"] in ("batch", "loss")]
        pairs = zip(of_passes, of_passes[1:])
        # Each batch that a backward pass followed, with the first one's loss.
        self.trained = [pair for pair in pairs if (pair[0]["kind"], pair[1]["kind"]) == ("batch", "loss")]
        # The losses of batches for which this process drew random numbers, which are its own.
        self.draws = [loss for batch, loss in self.trained if batch["streams"] not in (None, loss["streams"])]
        # Of each loader whose samples are trained on, the record of some drawn from equal random numbers, or {}.
        loaders = dict.fromkeys(batch["loader"] for batch, _ in self.trained)
        self.drawn = [next((r for r in self.all("drawn") if r["loader"] == loader), Record()) for loader in loaders]

    def all(self, kind: str) -> list[Record]:
        return [r for r in self.records if r["kind"] == kind]

    def of(self, kind: str, step: int) -> list[Record]:
        return [r for r in self.all(kind) if r["t"] == step]

    def first_step(self, optimizer: int) -> Record:
        """Return the record of an optimizer's first step, which has its parameters' names and first weights too."""
        return next(r for r in self.all("gradients") if r["optimizer"] == optimizer)

    def ms_of_step(self) -> float:
        """Return the median of the first optimizer's steps, of two or more, in the second half: calls were traced."""
        ends = [step["seconds"] for step in self.all("step") if step["optimizer"] == 0]
        times = [end - begin for begin, end in zip(ends, ends[1:])]
        return float(1000 * statistics.median(times[len(times) // 2 :]))

    def trained_on(self, step: int) -> list[Record]:
        """Return the batches of a step that were followed by a backward pass."""
        return [batch for batch, loss in self.trained if loss["t"] == step]


def distance(one: Any, other: Any) -> float:
    """Return the norm of two tensors' difference; None counts as zeros, and NaN differs from numbers by infinity."""
    if one is None or other is None:
        return float((one or other or [0.0])[0])
    apart = math.dist(one[1:], other[1:]) / math.sqrt(NUM_SIGNS)
    if math.isnan(apart):
        return 0.0 if str(one) == str(other) else math.inf
    return apart


def difference(one: Any, other: Any) -> float:
    """Return the norm of two tensors' difference relative to the first; infinity if one is None and the other not 0."""
    apart, size = distance(one, other), one[0] if one and other else 0.0
    return apart / size if size else (math.inf if apart else 0.0)


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the best factor in `other` = factor * `one`, and what remains of `other`, relative to `one`."""
    square = sum(a * a for a in one[1:])
    factor = sum(a * b for a, b in zip(one[1:], other[1:])) / square if square else 0.0
    left = math.sqrt(sum((factor * a - b) ** 2 for a, b in zip(one[1:], other[1:])) / (square or 1.0))
    return factor, left


def moved_apart(begun: Any, a: Any, b: Any, eps: float = 0.0) -> float:
    """Return the distance of `a` and `b` over the distance `a` moved from `begun` (over `a` if it did not move).

    0 within `eps` of `a`: a bias whose gradient cancels, and an average of it, moves by the last bit, or not.
    """
    apart, size = distance(a, b), (a or [0.0])[0]
    return 0.0 if apart <= eps * size else apart / (distance(a, begun) or size or 1.0)


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any], parts: Callable[[str, Any, Any], bool]) -> list[str]:
    """Return the names of tensors that differ; networks that look alike are paired so that the fewest do."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for name in mine:
        which = name.partition(".")[0]
        kinds.setdefault(which.partition("#")[0], {}).setdefault(which, []).append(name)
    odd: list[str] = []
    for names in kinds.values():
        known = sorted(names)
        found: list[list[str]] = []
        for order in itertools.permutations(known) if len(known) < 5 else [tuple(known)]:
            pairs = [(name, name.replace(a, b, 1)) for a, b in zip(known, order) for name in names[a]]
            found.append([a for a, b in pairs if b in theirs and parts(a, mine[a], theirs[b])])
        odd += sorted(found, key=len)[0]
    return odd
