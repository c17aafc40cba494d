"""Judges whether ranks run the same experiment as one process, by their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim.process.say import count
from ddpshim.tools.comparing import NUMBERS, OWN_DRAWS, Comparison, Parting
from ddpshim.tools.run_records import RunRecords
from ddpshim.tools.watching import AGAIN, ONE

_SEED, _ROUNDING = "seed", "rounding"  # why there is no answer
_SINGLE = float(torch.finfo(torch.float32).eps)
_AS_FAR = "another run in one process, which is rounded otherwise, is as far from the first one"
_IN_FLOAT64 = "float64 shows it (torch.set_default_dtype(torch.float64))"
_FEWEST = 0.5  # of the steps, of which "yes" is said
_FEWEST_TIMED = 4  # steps


@dataclass(frozen=True)
class Proof:
    """The result of a proof."""

    is_same: bool
    num_steps: int
    num_ranks: int
    # Between the trained weights of rank 0 and the one process, relative to their norm, after the last step that both
    # made; None if `is_same` is False.
    difference: Optional[float] = None
    speed: str = ""  # how long a step took in the second half of the steps; "" of too few
    by_design: Sequence[str] = field(default_factory=list)  # differs as the trainer is data parallel, and is no mistake
    parting: Optional[Parting] = None
    notes: Sequence[str] = field(default_factory=list)
    wrong: Sequence[Parting] = field(default_factory=list)  # what is wrong in one process too

    @property
    def is_unknown(self) -> bool:
        """Whether two runs in one process differ as much."""
        return self.parting is not None and self.parting.what in (_SEED, _ROUNDING)


def judge(folder: Path, num_ranks: int) -> Proof:
    """Return the proof, computed from the records in `folder`."""
    one, ranks = RunRecords(folder, ONE), [RunRecords(folder, f"rank_{rank}") for rank in range(num_ranks)]
    num_steps, wrong = min(run.num_steps for run in (one, *ranks)), [*_wrong_in_all(one, ranks[0])]
    compared = Comparison(one, ranks)
    parting, again, notes = compared.first(), RunRecords(folder, AGAIN), [*_notes(compared)]
    if parting is not None and again.num_steps:
        found, (parting, num_equal) = parting, _of_one_process(one, again, ranks, parting)
        if parting is None:
            num_steps = min(num_steps, num_equal)
            notes.append(
                f"step {found.step}: {found.found}; {_AS_FAR}. A mistake of less than ten times this size is not seen: "
                f"{_IN_FLOAT64}"
            )
    parting = parting or _equal_noise(ranks, OWN_DRAWS in compared.by_design)
    by_design = compared.by_design if parting is None else []
    is_same = parting is None and not by_design and num_steps > 0
    difference = compared.difference_of_weights(num_steps) if is_same else None
    speed = ""
    if is_same and num_steps >= _FEWEST_TIMED:
        speed = f"a step took {one.ms_of_step():.1f} ms in one process, {ranks[0].ms_of_step():.1f} ms on ranks"
        speed += ", which have replayed no call of a network yet" * (ranks[0].all("step")[-1]["replayed"] == 0)
    return Proof(is_same, num_steps, num_ranks, difference, speed, by_design, parting, notes, wrong)


def _wrong_in_all(one: RunRecords, main_rank: RunRecords) -> Iterator[Parting]:
    """Yield what is wrong however many ranks there are, so that no comparison shows it."""
    passes: dict[Any, dict[int, list[str]]] = {}  # samples, by loader and number of the pass
    for batch, _ in main_rank.trained:
        if batch["sampler"] == "DistributedSampler":
            of_loader = passes.setdefault((batch["place"], batch["num_samples"], batch["shuffles"]), {})
            of_loader.setdefault(batch["pass_number"], []).extend(batch["indices"] or batch["samples"] or ())
    for (place, _, shuffles), of_loader in passes.items():
        first, *others = of_loader.values()
        if shuffles is False:
            found, meaning = "the training data have the same order in every epoch", "DistributedSampler(shuffle=False)"
            yield Parting(1, "order", "", place, found, meaning)
        elif any(min(len(first), len(o)) > 3 and all(a == b for a, b in zip(first, o)) for o in others):
            found = "an epoch has the sample order of the first one"
            yield Parting(1, "order", "", place, found, "sampler.set_epoch(epoch) is not called")
    for number in sorted({r["optimizer"] for r in one.all("gradients")}):
        steps = [r for r in one.all("gradients") if r["optimizer"] == number]
        names = steps[0]["names"]
        if names and not any(gradient is not None for r in steps for gradient in r["gradients"]):
            found = f"none of its {count(len(names), 'parameter')} got a gradient in any step: it trains nothing"
            meaning = "it holds the parameters of another network: made before a copy, a wrap or a new layer"
            yield Parting(1, "optimizer", f"optimizer {number + 1}", steps[0]["place"], found, meaning)


def _equal_noise(ranks: Sequence[RunRecords], for_samples: bool) -> Optional[Parting]:
    """Return a Parting if all ranks draw from generators in one state: for their samples, or for what they compute."""
    before_samples = [record for run in ranks for record in run.drawn[:1] if for_samples]
    before_losses = [record for run in ranks for record in run.all("batch")[:1] if any(own.draws for own in ranks)]
    for firsts in (before_samples, before_losses):
        states = {record["streams"] for record in firsts}
        if 1 < len(firsts) == len(ranks) and len(states) == 1 and None not in states:
            found = "before the first batch all ranks' generators are in the same state, and samples use random numbers"
            meaning = (
                "ranks use the same random numbers for different samples: seed them with a hash of seed and rank "
                "(ddpshim.split_random_streams() does) after networks are built"
            )
            return Parting(1, "noise", "", ranks[0].trained[0][1]["place"], found, meaning)
    return None


def _of_one_process(
    one: RunRecords, again: RunRecords, ranks: Sequence[RunRecords], found: Parting
) -> tuple[Optional[Parting], int]:
    """Return what two runs in one process do not explain, and the number of steps that can be compared; else why not.

    None if they explain all that differs in these steps, `found` above all.
    """
    compared = Comparison(one, [again])
    compared.by_design = []  # its random numbers are those of the first one
    if found.what in NUMBERS:
        sizes, num_steps, is_rounding = compared.measured()
        left = Comparison(one, ranks, sizes).first()
        last = num_steps + 1 if is_rounding else max(num_steps, found.step)
        if left is not None and (left.what not in NUMBERS or left.step <= last):
            return left, 0
        if num_steps >= _FEWEST * one.num_steps:
            return None, num_steps
        where = " of ".join(filter(None, (found.what, found.where)))
        meaning = f"{_AS_FAR}. If it is a mistake, {_IN_FLOAT64}"
        return replace(found, what=_ROUNDING, where=where, meaning=meaning), 0
    own = compared.first()
    if own is None or own.what != found.what or own.step > found.step:
        return found, 0
    said = f"another run in one process differs, too: {found.what} in step {own.step}"
    meaning = (
        "call torch.manual_seed, random.seed and numpy.random.seed first. If it does: the program depends on time, "
        "on the order of a set, or on what it finds"
    )
    return replace(found, what=_SEED, where="", found=said, meaning=meaning), 0


def _notes(compared: Comparison) -> Iterator[str]:
    one, ranks = compared.one, compared.ranks
    if compared.eps > _SINGLE:
        yield f"computed in {compared.dtype}: rounding is {compared.eps / _SINGLE:,.0f} times larger than in float32"
    if one.num_steps and not one.all("batch"):
        yield "no batch came from a DataLoader: samples were not compared"
    if one.error and not any(run.error for run in ranks):
        yield f"the program failed in one process, after its last step, and not on the ranks: {one.error}"
