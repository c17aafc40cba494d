"""Reads what the processes of a proof recorded, and finds what is wrong in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ddpshim.process.say import count
from ddpshim.tools.watching import read


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


class RunRecords:
    """The records of one process, by step and kind."""

    def __init__(self, folder: Path, run: str) -> None:
        self.records = read(folder, run)
        self.num_steps = len(self.all("step"))
        self.is_cut = bool(self.all("cut"))  # ended by the proof, not by the program
        self.error = next((r["error"] for r in self.all("failed")), "")

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == kind]

    def same(self, kind: str, step: int, optimizer: int) -> Optional[dict[str, Any]]:
        return next((r for r in self.of(kind, step) if r["optimizer"] == optimizer), None)

    def first_step(self, optimizer: int) -> dict[str, Any]:
        """Return the record of an optimizer's first step, which has its parameters' names and first weights too."""
        return next(r for r in self.all("gradients") if r["optimizer"] == optimizer)

    def of(self, kind: str, step: int) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == kind and r["t"] == step]

    def draws(self) -> list[dict[str, Any]]:
        """Return the backward passes of batches for which this process drew random numbers, which are its own."""
        return [loss for batch, loss in self._trained() if batch["streams"] not in (None, loss["streams"])]

    def passes(self) -> list[list[dict[str, Any]]]:
        """Return the batches of each pass over a loader that a backward pass followed."""
        found: dict[int, list[dict[str, Any]]] = {}
        for batch, _ in self._trained():
            found.setdefault(batch["pass_number"], []).append(batch)
        return list(found.values())

    def trained_on(self, step: int) -> list[dict[str, Any]]:
        """Return the batches of a step that were followed by a backward pass."""
        return [batch for batch, loss in self._trained() if loss["t"] == step]

    def _trained(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each batch that a backward pass followed, with the first one's loss."""
        last: Optional[dict[str, Any]] = None
        for record in self.records:
            if record["kind"] == "batch":
                last = record
            elif record["kind"] == "loss" and last is not None:
                yield last, record
                last = None


def wrong_in_all(one: RunRecords, main_rank: RunRecords) -> Iterator[Parting]:
    """Yield what is wrong however many ranks there are, so that no comparison shows it."""
    orders: dict[Any, list[Sequence[str]]] = {}
    for passed in main_rank.passes():
        about = passed[0]
        key = about["place"], about["num_samples"], about["shuffles"]
        if about["sampler"] == "DistributedSampler":
            orders.setdefault(key, []).append([name for batch in passed for name in batch["samples"] or ()])
    for (place, _, shuffles), (first, *others) in orders.items():
        if shuffles is False:
            found, meaning = "training data come in one order in every pass", "DistributedSampler(shuffle=False)"
            yield Parting(1, "order", "", place, found, meaning)
        elif any(min(len(first), len(o)) > 3 and all(a == b for a, b in zip(first, o)) for o in others):
            found = "a pass over the training data has the order of the first one"
            yield Parting(1, "order", "", place, found, "sampler.set_epoch(epoch) is not called")
    for number in sorted({r["optimizer"] for r in one.all("gradients")}):
        steps = [r for r in one.all("gradients") if r["optimizer"] == number]
        names = steps[0]["names"]
        if names and not any(gradient is not None for r in steps for gradient in r["gradients"]):
            found = f"none of its {count(len(names), 'parameter')} got a gradient in any step: it trains nothing"
            meaning = "it holds the parameters of another network: made before a copy, a wrap or a new layer"
            yield Parting(1, "optimizer", f"optimizer {number + 1}", steps[0]["place"], found, meaning)


def equal_noise(ranks: Sequence[RunRecords]) -> Optional[Parting]:
    """Return a Parting if all ranks draw from generators in one state, so that their samples share random numbers."""
    firsts, draws = [run.all("batch")[:1] for run in ranks], [record for run in ranks for record in run.draws()]
    streams = {first[0]["streams"] if first else None for first in firsts}
    if len(ranks) < 2 or not draws or None in streams or len(streams) > 1:
        return None
    found = "before the first batch all ranks' generators are in the same state, and noise is drawn for samples"
    meaning = (
        "ranks draw the same noise, each for its own samples: seed them with a hash of seed and rank "
        "(ddpshim.split_random_streams() does) after networks are built"
    )
    return Parting(1, "noise", "", draws[0]["place"], found, meaning)
