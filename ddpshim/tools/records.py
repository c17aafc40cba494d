"""Reads what the processes of a proof recorded, and finds other numbers of steps or batches in it."""

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


def lengths_of_passes(one: RunRecords, ranks: Sequence[RunRecords], rounding: Any, step: int) -> Optional[Parting]:
    """Return a Parting if batches of this step are equally large, but a pass over the data has another number of them.

    Rates that depend on the length of the loader differ from then on, so this cause is looked for before them.
    """
    alone, spread = one.trained_on(step), [run.trained_on(step) for run in ranks]
    if not alone or not all(spread) or alone[0]["size"] != sum(own[0]["size"] for own in spread):
        return None
    length, of_ranks = alone[0]["num_batches"], [own[0]["num_batches"] or 0 for own in spread]
    if not length or not all(of_ranks) or set(of_ranks) == {length}:
        return None
    size, fewest, most = alone[0]["size"], min(of_ranks), max(of_ranks)
    found = f"a pass over the data has {length} batches in one process, {_range(fewest, most)} on the ranks"
    num_samples = alone[0]["num_samples"]
    if fewest < length and num_samples and (length - 1) * size < num_samples <= length * size:
        found += f": ranks read {fewest * size} of {num_samples} samples"
    meaning = "the loaders have other data, or another sampler or drop_last (with ranks the default of make_loader is "
    meaning += (
        "True: drop_last=False keeps the last batch); len(loader), and a learning rate planned with it, differ too"
    )
    return Parting(step + 1, "samples", "", spread[0][0]["place"], found, meaning)


def numbers_of_steps(one: RunRecords, ranks: Sequence[RunRecords], rounding: Any, step: int) -> Optional[Parting]:
    """Return a Parting if not all processes make this step, with the same optimizer.

    A process that the proof ended has not refused the step.
    """
    steps = [next(iter(run.of("step", step + 1)), None) for run in (one, *ranks)]
    stepped = {record["optimizer"] for record in steps if record is not None}
    missing = [run for run, record in zip((one, *ranks), steps) if record is None and not run.is_cut]
    if not stepped or (len(stepped) == 1 and not missing):
        return None
    fewest, most = min(run.num_steps for run in ranks), max(run.num_steps for run in ranks)
    found = f"one process made {one.num_steps} steps{_cut(one)}, the ranks {_range(fewest, most)}"
    found += next((_cut(run) for run in ranks if run.is_cut), "")
    if len(stepped) > 1:
        numbers = [f"optimizer {record['optimizer'] + 1}" for record in steps if record is not None]
        found = f"{numbers[0]} made the step in one process, {', '.join(numbers[1:])} on the ranks"
        meaning = "optimizers take turns in another way on the ranks"
    elif one.error and one in missing:
        meaning = f"the program failed in one process: {one.error}"
    else:
        meaning = (
            "the number of epochs or steps, or an early stop, depends on a number that is another one on the ranks: "
            "a loss or a count of a rank's own share of samples divided by the number of all, or the length of a loader"
        )
    last = next((record for run in missing for record in run.of("step", run.num_steps)), None)
    place = next((record["place"] for record in (last, *steps) if record is not None), "")
    return Parting(step + 1, "steps", "", place, found, meaning)


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
    for number, names in one.names.items():
        steps = [r for r in one.records if r["kind"] == "gradients" and r["optimizer"] == number]
        if names and steps and not any(gradient is not None for r in steps for gradient in r["gradients"]):
            found = f"none of its {count(len(names), 'parameter')} got a gradient in any step: it trains nothing"
            meaning = "it holds the parameters of another network: made before a copy, a wrap or a new layer"
            yield Parting(1, "optimizer", f"optimizer {number + 1}", steps[0]["place"], found, meaning)


def _cut(run: RunRecords) -> str:
    return " (and would make more)" if run.is_cut else ""


def _range(fewest: int, most: int) -> str:
    return str(most) if fewest == most else f"{fewest} to {most}"
