"""Finds the first difference between the records of the ranks and of the one process, and names its usual cause."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from ddpshim.tools.records import Parting, RunRecords, lengths_of_passes, numbers_of_steps, wrong_in_all
from ddpshim.tools.sketches import SINGLE, difference, distance, eps_of, ratio
from ddpshim.tools.watching import ONE, PERTURBED

# Ranks may differ from the one process by this many times the perturbed run's difference. Below the third line's
# limits a difference always counts as rounding: relative to the loss, to the gradient, to the distance a weight moved.
_TIMES_PERTURBED = 5.0
_LOSS, _GRADIENT, _WEIGHT = 1e-5, 1e-4, 1e-2
_SEED = "seed"
# In bfloat16 or float16 a loss may be rounded once, and a gradient once for each layer: so many times eps.
_TIMES_EPS = {_LOSS: 2, _GRADIENT: 10, _WEIGHT: 10}
_MAKE_LOADER = (
    ". Build the loader with ddpshim.make_loader, or divide the batch size by the number of ranks and give the loader "
    "a DistributedSampler"
)


@dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        difference: between the trained weights of rank 0 and the one process, after the last step that both made,
            relative to their norm; None if `is_same` is False.
        of_rounding: the same between the perturbed run and the one process.
    """

    is_same: bool
    num_steps: int
    num_ranks: int
    difference: Optional[float] = None
    of_rounding: Optional[float] = None
    parting: Optional[Parting] = None
    notes: Sequence[str] = field(default_factory=list)
    wrong: Sequence[Parting] = field(default_factory=list)  # what is wrong in one process too

    @property
    def is_unknown(self) -> bool:
        """Whether two runs in one process differ already."""
        return self.parting is not None and self.parting.what == _SEED


def judge(folder: Path, num_ranks: int) -> Proof:
    """Return the proof, computed from the records in `folder`."""
    one, perturbed = RunRecords(folder, ONE), RunRecords(folder, PERTURBED)
    ranks = [RunRecords(folder, f"rank_{rank}") for rank in range(num_ranks)]
    num_steps = min(run.num_steps for run in (one, *ranks))
    rounding = _Rounding(one, perturbed)
    wrong = [*wrong_in_all(one, ranks[0])]
    parting = _unseeded(one, perturbed) or _first_parting(one, ranks, rounding)
    parting = parting or _equal_noise(ranks)
    notes = [*_notes(one, ranks, rounding, parting)]
    if parting is not None or not num_steps:
        return Proof(False, num_steps, num_ranks, parting=parting, notes=notes, wrong=wrong)
    apart, of_rounding = _difference_of_weights(one, ranks[0]), _difference_of_weights(one, perturbed)
    return Proof(True, num_steps, num_ranks, apart, of_rounding, notes=notes, wrong=wrong)


def _unseeded(one: RunRecords, perturbed: RunRecords) -> Optional[Parting]:
    """Return a Parting if two runs in one process differ before the first step, after which one has rounding errors."""
    for look in (_samples, _start, _losses):
        found = look(one, [perturbed], _Rounding(one, one), 0)
        if found is not None:
            said = f"two runs in one process differ in this already: {found.what}"
            meaning = "the program has no seed: call torch.manual_seed, random.seed and numpy.random.seed first. Or it "
            meaning += "depends on the time, the order of a set, or a file of an earlier run"
            return replace(found, what=_SEED, where="", found=said, meaning=meaning)
    return None


def _first_parting(one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding) -> Optional[Parting]:
    looks = (_samples, lengths_of_passes, _start, _losses, _gradients, _rates, _weights, _networks, numbers_of_steps)
    for step in range(max(1, *(run.num_steps for run in (one, *ranks)))):  # ranks may have failed in the first one
        for look in looks:
            parting = look(one, ranks, rounding, step)
            if parting is not None:
                return parting
    return None


class _Rounding:
    """Limits on differences that count as rounding, from the perturbed run's differences so far."""

    def __init__(self, one: RunRecords, perturbed: RunRecords) -> None:
        self.perturbed = perturbed
        self._largest: dict[Any, float] = {}
        self.dtype = max((r["dtype"] for r in one.records if r["kind"] == "loss"), key=eps_of, default="float32")
        self.eps = eps_of(self.dtype) if eps_of(self.dtype) > SINGLE else 0.0

    def allows(self, key: Any, of_ranks: float, of_perturbed: Optional[float], least: float) -> bool:
        """Whether the difference `of_ranks` counts as rounding. Call it in the order of steps: the limit only grows."""
        told = of_perturbed if of_perturbed is not None and math.isfinite(of_perturbed) else 0.0
        seen = self._largest[key] = max(self._largest.get(key, 0.0), told)
        return of_ranks <= max(least, _TIMES_EPS[least] * self.eps, _TIMES_PERTURBED * seen)


def _samples(one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding, step: int) -> Optional[Parting]:
    alone, spread = one.trained_on(step), [run.trained_on(step) for run in ranks]
    if not alone or not all(spread):
        return None
    mine = Counter(name for batch in alone for name in batch["samples"] or ())
    of_ranks = [
        Counter(name for batch in own if not (rank and batch["whole"]) for name in batch["samples"] or ())
        for rank, own in enumerate(spread)
    ]
    together = sum(of_ranks, Counter())
    if mine == together or not mine or not together:
        return None
    sizes = sum(mine.values()), sum(together.values())
    samplers = alone[0]["sampler"], spread[0][0]["sampler"]
    found = (
        f"{sizes[0]} samples in one process, {sizes[1]} on {len(ranks)} ranks, {sum((mine & together).values())} common"
    )
    if all(own == of_ranks[0] for own in of_ranks) and len(ranks) > 1:
        meaning = "every rank reads the same samples: a sampler that divides them is missing"
        meaning += _MAKE_LOADER
    elif sizes[1] == len(ranks) * sizes[0]:
        meaning = "each rank takes a batch as large as the one process's"
        meaning += _MAKE_LOADER
    elif sizes[0] != sizes[1]:
        meaning = "the batch of a step has another size"
    elif samplers[0].startswith("Weighted") and not samplers[1].startswith(("Weighted", "Sharded")):
        meaning = f"the weights of {samplers[0]} are lost: ranks draw by {samplers[1]}"
    elif alone[0]["pass_number"] > one.trained_on(0)[0]["pass_number"]:
        meaning = "passes over the data differ from the second on: set_epoch is not called, or with a wrong number"
    else:
        meaning = (
            f"a different order of samples ({samplers[0]} in one process, {samplers[1]} on the ranks), or a "
            "different seed"
        )
    return Parting(step + 1, "samples", "", spread[0][0]["place"], found, meaning)


def _start(one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding, step: int) -> Optional[Parting]:
    alone = next((r["tensors"] for r in one.of("begun", step)), None)
    for rank, run in enumerate(ranks):
        theirs = next((r["tensors"] for r in run.of("begun", step)), None)
        if alone is None or theirs is None:
            continue
        odd = _differing(alone, theirs, lambda name, a, b: difference(a, b) > 1e-6)
        if odd:
            size = max(difference(alone[name], theirs.get(name)) for name in odd)
            found = f"rank {rank} begins with other values (relative difference {size:.1e})"
            meaning = "networks are built from a different seed or in a different order, and are not broadcast"
            return Parting(step + 1, "weights at the start", _shown(odd), _place(run, step), found, meaning)
    return None


def _losses(one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding, step: int) -> Optional[Parting]:
    alone, spread = one.of("loss", step), [run.of("loss", step) for run in ranks]
    by_rounding = rounding.perturbed.of("loss", step)
    for i, record in enumerate(alone):
        if any(len(own) != len(alone) for own in spread) or not all(record["losses"]):
            return None
        dtypes = {own[i]["dtype"] for own in spread}
        if dtypes != {record["dtype"]}:
            found = f"computed in {record['dtype']} in one process, in {', '.join(sorted(dtypes))} on ranks"
            meaning = "autocast, or the dtype of the networks, is another one on the ranks"
            return Parting(step + 1, "loss", f"backward pass {i + 1}", record["place"], found, meaning)
        for j, value in enumerate(record["losses"]):
            theirs = [own[i]["losses"][j] for own in spread if j < len(own[i]["losses"])]
            if len(theirs) != len(ranks):
                return None
            mean, scale = math.fsum(theirs) / len(theirs), max(abs(value), 1e-12)
            near = by_rounding[i]["losses"][j] if i < len(by_rounding) else value
            if not rounding.allows(("loss", i, j), abs(mean - value) / scale, abs(near - value) / scale, _LOSS):
                shown = ", ".join(f"{v:.8g}" for v in theirs)
                found = f"{value:.8g} in one process, {mean:.8g} as the mean of the ranks' ({shown})"
                return Parting(step + 1, "loss", f"backward pass {i + 1}", record["place"], found, _why_loss(one))
    return None


def _why_loss(one: RunRecords) -> str:
    state = [r for r in one.records if r["kind"] == "state"]
    has_batchnorm = state and any(name.endswith("running_mean") for name in state[0]["tensors"])
    of_batch = "BatchNorm that takes its statistics over a rank's samples (SyncBatchNorm), or " if has_batchnorm else ""
    return (
        f"samples and weights are the same: {of_batch}a loss that is not a mean over samples (divided by a rank's own "
        "count, or comparing samples), a loss that is scaled, or noise that is not drawn for samples"
    )


def _gradients(one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding, step: int) -> Optional[Parting]:
    for record in one.of("gradients", step):
        number = record["optimizer"]
        theirs = [_same(run, "gradients", step, number) for run in ranks]
        if any(own is None for own in theirs):
            continue
        near_steps = range(step, step + 3)  # ranks round from the first forward pass on, before the perturbed run
        pairs = [[_same(run, "gradients", t, number) for run in (one, rounding.perturbed)] for t in near_steps]
        nears = [(a["gradients"], b["gradients"]) for a, b in pairs if a and b]
        total = math.sqrt(sum(own[0] ** 2 for own in record["gradients"] if own is not None))

        def relative(a: Any, b: Any, total: float = total) -> float:
            apart, size = distance(a, b), (a or [0.0])[0] + 1e-2 * total  # sums may cancel
            return apart / size if size else (math.inf if apart else 0.0)

        every = [own["gradients"] for own in theirs if own is not None]
        odd, sizes = [], []
        for i, mine in enumerate(record["gradients"]):
            apart = max(relative(mine, own[i]) for own in every)
            # A reduction gives all ranks the same bits, whatever the precision.
            is_reduced = all(relative(every[0][i], own[i]) <= _GRADIENT for own in every[1:])
            of_near = max((relative(a[i], b[i]) for a, b in nears), default=None)
            is_near = rounding.allows(("gradients", number, i), apart, of_near, _GRADIENT)
            if not (is_near and is_reduced):
                odd.append(i)
                sizes.append(apart)
        if odd:
            where = _named(one.names[number], [i for _, i in sorted(zip([-s for s in sizes], odd))])
            found = f"{len(odd)} of {len(record['gradients'])} gradients differ (the first by {max(sizes):.1e})"
            near_enough = max(1e-3, _TIMES_EPS[_GRADIENT] * rounding.eps)
            why = _why_gradients(record, every, odd, found, near_enough)
            return Parting(step + 1, "gradients", where, record["place"], *why)
    return None


def _why_gradients(
    record: dict[str, Any], every: Sequence[Any], odd: Sequence[int], found: str, near: float
) -> tuple[str, str]:
    apart = [i for i in odd if any(difference(every[0][i], own[i]) > 1e-6 for own in every[1:])]
    if apart:
        return (
            f"{found}; {len(apart)} of them differ between ranks",
            "they are not reduced: the network is not wrapped, is trained past its wrapper's forward (.module, a "
            "method, no_sync), or was wrapped before something was unfrozen; or they were changed after the reduction",
        )
    factors = [ratio(record["gradients"][i], every[0][i]) for i in odd if record["gradients"][i] and every[0][i]]
    if factors and all(left < near for _, left in factors):
        low, high = min(c for c, _ in factors), max(c for c, _ in factors)
        if high - low < near * abs(high):
            return (
                f"{found}; they are {high:.4g} times those of one process",
                "gradients are added up, not averaged; averaged twice, as the loss is divided by ranks too; clipped or "
                "scaled differently",
            )
    return (
        found,
        "losses are the same, and gradients equal on all ranks: they are clipped or changed before the reduction, a "
        "part of the graph is cut off (detach) or gathered without gradient, or steps accumulate otherwise",
    )


def _rates(one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding, step: int) -> Optional[Parting]:
    for record in one.of("gradients", step):
        for rank, run in enumerate(ranks):
            theirs = _same(run, "gradients", step, record["optimizer"])
            if theirs is not None and any(abs(a - b) > 1e-9 * abs(a) for a, b in zip(record["lr"], theirs["lr"])):
                found = f"{record['lr']} in one process, {theirs['lr']} on rank {rank}"
                meaning = "it is scaled by the number of ranks, a schedule steps more often, or ranks have their own"
                where = f"optimizer {record['optimizer'] + 1}"
                return Parting(step + 1, "learning rate", where, theirs["place"], found, meaning)
    return None


def _weights(one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding, step: int) -> Optional[Parting]:
    for record in one.of("step", step + 1):
        number = record["optimizer"]
        start = next((r["weights"] for r in one.records if r["kind"] == "start" and r["optimizer"] == number), None)
        near = _same(rounding.perturbed, "step", step + 1, number) or record
        for run in ranks:
            theirs = _same(run, "step", step + 1, number)
            if theirs is None or start is None:
                continue
            names, eps = one.names[number], eps_of(rounding.dtype)
            odd = [
                i
                for i, (begun, a, b, c) in enumerate(zip(start, record["weights"], theirs["weights"], near["weights"]))
                if not rounding.allows(("weights", number, i), _moved(begun, a, b, eps), _moved(begun, a, c), _WEIGHT)
            ]
            if odd:
                found = f"after the step {len(odd)} of {len(names)} weights differ, "
                found += "by more than 1% of the distance they moved"
                meaning = "gradients are the same: the optimizer has other settings or another state, or weights are "
                meaning += "changed beside it on some ranks"
                return Parting(step + 1, "weights", _named(names, odd), theirs["place"], found, meaning)
    return None


def _networks(one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding, step: int) -> Optional[Parting]:
    record = next(iter(one.of("state", step + 1)), None)
    theirs = next(iter(ranks[0].of("state", step + 1)), None)
    near = next(iter(rounding.perturbed.of("state", step + 1)), record)
    if record is None or theirs is None or near is None:
        return None
    begun: dict[str, Any] = next((r["tensors"] for r in one.records if r["kind"] == "state"), {})

    def parts(name: str, a: Any, b: Any) -> bool:
        start, c = begun.get(name, a), near["tensors"].get(name, a)
        return not rounding.allows(("state", name), _moved(start, a, b), _moved(start, a, c), _WEIGHT)

    odd = _differing(record["tensors"], theirs["tensors"], parts)
    if not odd:
        return None
    meaning = "a copy of the trained weights is not updated correctly on the ranks: an average or a target that holds "
    meaning += (
        "another network's weights, is updated on one rank or at other steps, or a buffer of a rank's own samples"
    )
    found = f"{len(odd)} tensors other than the trained weights differ after the step, "
    found += "by more than 1% of the distance they moved"
    return Parting(step + 1, "networks", _shown(odd), _place(ranks[0], step), found, meaning)


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any], parts: Callable[[str, Any, Any], bool]) -> list[str]:
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
        found.sort(key=len)
        odd += found[0]
    return odd


def _shown(names: Sequence[str]) -> str:
    return _named([re.sub(r"~\w+#\d+", "", name) for name in names], range(len(names)))


def _equal_noise(ranks: Sequence[RunRecords]) -> Optional[Parting]:
    firsts = [next((r for r in run.records if r["kind"] == "batch"), None) for run in ranks]
    draws = [r for run in ranks for r in run.records if r["kind"] == "draw"]
    streams = {first["streams"] for first in firsts if first is not None}
    if len(ranks) < 2 or not draws or None in streams or len(streams) > 1 or None in firsts:
        return None
    found = "before the first batch all ranks' generators are in the same state, and noise is drawn for samples"
    meaning = (
        "ranks draw the same noise, each for its own samples: seed them with a hash of seed and rank "
        "(ddpshim.setup(seed=...) does) after networks are built"
    )
    return Parting(1, "noise", "", draws[0]["place"], found, meaning)


def _moved(begun: Any, a: Any, b: Any, eps: float = 0.0) -> float:
    """Return the distance of `a` and `b` over the distance `a` moved from `begun` (over `a` if it did not move).

    0 within `eps` of `a`: a bias whose gradient cancels moves by the last bit, or not.
    """
    apart, size = distance(a, b), (a or [0.0])[0]
    return 0.0 if apart <= eps * size else apart / (distance(a, begun) or size or 1.0)


def _same(run: RunRecords, kind: str, step: int, optimizer: int) -> Optional[dict[str, Any]]:
    return next((r for r in run.of(kind, step) if r["optimizer"] == optimizer), None)


def _place(run: RunRecords, step: int) -> str:
    return next((r["place"] for kind in ("gradients", "loss") for r in run.of(kind, step)), "")


def _named(names: Sequence[str], which: Sequence[int]) -> str:
    shown = [names[i] or f"parameter {i}" for i in which[:3]]
    return ", ".join(shown) + (f" and {len(which) - 3} more" if len(which) > 3 else "")


def _notes(
    one: RunRecords, ranks: Sequence[RunRecords], rounding: _Rounding, parting: Optional[Parting]
) -> Iterator[str]:
    if rounding.eps:
        yield f"computed in {rounding.dtype}: rounding is {rounding.eps / SINGLE:,.0f} times larger than in float32"
    if any(r["kind"] == "draw" for run in ranks for r in run.records):
        yield "ranks draw their own noise; for the comparison each was given its rows of the one process's noise"
    if one.num_steps and not any(r["kind"] == "batch" for r in one.records):
        yield "no batch came from a DataLoader: samples were not compared, and ranks' noise was not replaced"
    if one.error and not any(run.error for run in ranks):
        yield f"the program failed in one process, after its last step, and not on the ranks: {one.error}"

    is_of_noise = parting is not None and parting.what in ("loss", "gradients")
    if parting and is_of_noise and any(run.of("own noise", parting.step - 1) for run in ranks):
        yield (
            "a rank had a batch whose samples are not all in one batch of the one process (other batch sizes?): for it "
            "the rank drew its own noise, which may be the only difference; try it without noise"
        )


def _difference_of_weights(one: RunRecords, other: RunRecords) -> float:
    step = min(one.num_steps, other.num_steps)
    both = ((mine, _same(other, "step", step, mine["optimizer"])) for mine in one.of("step", step))
    pairs = [pair for mine, theirs in both if theirs for pair in zip(mine["weights"], theirs["weights"])]
    apart, size = math.hypot(*(distance(a, b) for a, b in pairs)), math.hypot(*(a[0] for a, _ in pairs))
    return apart / size if size else apart
