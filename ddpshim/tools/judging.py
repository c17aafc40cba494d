"""Finds the first difference between the records of the ranks and of the one process, and names its usual cause."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim.process.say import count
from ddpshim.rows.probe import are_near
from ddpshim.tools.watching import AGAIN, NUM_SIGNS, ONE, read

# Below these a difference counts as rounding: relative to the loss, to the gradient, to the distance a weight moved.
_LOSS, _GRADIENT, _WEIGHT = 1e-5, 1e-4, 1e-2
# Training amplifies rounding from step to step; a mistake does more.
_GROWS = 100.0
# A ReLU that rounding turns on changes gradients by up to so much, of one step: a mistake is there in the next, too.
_TURN = 1e-2
# A gradient that cancels (of a bias before BatchNorm) is rounding alone: so much of all gradients, or less.
_CANCELS = 1e-5
# Adam moves a weight whose gradient is rounding alone (a bias before BatchNorm, that of attention's keys) at random, by
# full steps. Weights differ only if those that do have this part of all that moved.
_PART = 0.3
# A difference is rounding if two runs in one process that round otherwise have this part of it.
_AS_MUCH = 0.1
_SEED, _ROUNDING = "seed", "rounding"  # why there is no answer
_SINGLE = float(torch.finfo(torch.float32).eps)
# In bfloat16 or float16 a loss may be rounded once, and a gradient once for each layer: so many times eps.
_TIMES_EPS = {_LOSS: 2, _GRADIENT: 10, _WEIGHT: 10}
_MAKE_LOADER = (
    ". Build the loader with ddpshim.make_loader, or divide the batch size by the number of ranks and give the loader "
    "a DistributedSampler"
)

_WHY_LOSS = (
    "samples and weights are the same: BatchNorm with local statistics (use SyncBatchNorm), a loss that is not a "
    "mean over samples (divided by a local count, or comparing samples), or a loss that is scaled"
)
_WHY_LATER_LOSS = (
    "samples and weights are the same, and losses were equal in the steps before: what has changed on some ranks since "
    "(eval mode, a buffer, a normaliser), or a loss divided by a local count, which had been equal (masks)"
)
_WHY_LOSS_OF_WHOLES = (
    "samples and weights are the same, and ddpshim computes whole batches: a loss that the program scales by the "
    "number of ranks, something outside of torch that differs between ranks, or a mistake of ddpshim: does it differ "
    "with DDPSHIM_CAPTURE=off, and with DDPSHIM_ROWS=off too?"
)
_BY_MORE = "by more than 1% of the distance they moved"
NUMBERS = ("loss", "gradients", "weights", "networks")  # what rounding changes
_LOOKS = ("samples", "lengths", "start", "losses", "gradients", "rates", "weights", "networks", "steps")
# What neither the order of samples nor random numbers change.
_ALWAYS = ("samples", "start", "noise", "gradients", "rates", "steps")
_MANY = 3  # steps: a rank whose batches may have nothing to draw for leaves a step out, or two
_OWN_ORDER = (
    "sample order (setup() has its own, from seed and epoch, like DistributedSampler; the last batch of an epoch may "
    "be left out)"
)
_OWN_DRAWS = (
    "random numbers of samples, as of augmentation (per rank: indices are equal, and so are samples that are made from "
    "equal random numbers)"
)
_OWN_NOISE = "random numbers (per rank, as under any DistributedDataParallel)"
_AS_FAR = "another run in one process, which is rounded otherwise, is as far from the first one"
_IN_FLOAT64 = "float64 shows it (torch.set_default_dtype(torch.float64))"
_FEWEST = 0.5  # of the steps, of which "yes" is said
_FEWEST_TIMED = 4  # steps
_Found = tuple[str, str, str, str, str]  # of a Parting all but the step
# How often each sample, or index, is in the batches of a step: of one process, of all ranks together, of each rank.
_Drawn = tuple[Counter[str], Counter[str], list[Counter[str]]]
Record = dict[str, Any]


@dataclass(frozen=True)
class Parting:
    """The first difference between the ranks and the one process."""

    step: int  # from 1
    # samples, noise, weights at the start, loss, gradients, learning rate, weights, optimizer, networks, steps; or why
    # there is no answer: seed, rounding
    what: str
    where: str  # which tensors, backward pass or optimizer
    place: str  # file:line of the user's program
    found: str
    meaning: str  # the usual cause


class RunRecords:
    """The records of one process.

    Attributes:
        trained: each batch that a backward pass followed, with the first one's loss.
        draws: the losses of batches for which this process drew random numbers, which are its own.
        drawn: of each loader whose samples are trained on, the record of some drawn from equal random numbers, or {}.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.records = read(folder, run)
        self.num_steps = len(self.all("step"))
        self.is_cut = bool(self.all("cut"))  # ended by the proof, not by the program
        self.error = next((r["error"] for r in self.all("failed")), "")
        of_passes = [r for r in self.records if r["kind"] in ("batch", "loss")]
        pairs = zip(of_passes, of_passes[1:])
        self.trained = [pair for pair in pairs if (pair[0]["kind"], pair[1]["kind"]) == ("batch", "loss")]
        self.draws = [loss for batch, loss in self.trained if batch["streams"] not in (None, loss["streams"])]
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


@dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        difference: between the trained weights of rank 0 and the one process, after the last step that both made,
            relative to their norm; None if `is_same` is False.
        speed: how long a step took in the second half of the steps; "" of too few.
        by_design: what is not that of one process because the trainer is data parallel, and is no mistake.
    """

    is_same: bool
    num_steps: int
    num_ranks: int
    difference: Optional[float] = None
    speed: str = ""
    by_design: Sequence[str] = field(default_factory=list)
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
    compared = _Comparison(one, ranks)
    parting, again, notes = compared.first(), RunRecords(folder, AGAIN), [*_notes(compared)]
    if parting is not None and again.num_steps:
        found, (parting, num_equal) = parting, _of_one_process(one, again, ranks, parting)
        if parting is None:
            num_steps = min(num_steps, num_equal)
            notes.append(
                f"step {found.step}: {found.found}; {_AS_FAR}. A mistake of less than ten times this size is not seen: "
                f"{_IN_FLOAT64}"
            )
    parting = parting or _equal_noise(ranks, _OWN_DRAWS in compared.by_design)
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
    compared = _Comparison(one, [again])
    compared.by_design = []  # its random numbers are those of the first one
    if found.what in NUMBERS:
        sizes, num_steps, is_rounding = compared.measured()
        left = _Comparison(one, ranks, sizes).first()
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


class _Comparison:
    """Compares ranks with the one process; `by_design`: what is another one there, without a mistake.

    `sizes`: how far numbers are apart (of a step, and what they are) in two runs in one process.
    """

    def __init__(self, one: RunRecords, ranks: Sequence[RunRecords], sizes: Optional[dict[Any, float]] = None) -> None:
        self.one, self.ranks, self._sizes, self._is_measuring = one, ranks, sizes or {}, False
        self._largest: dict[Any, float] = {}
        self._turned: dict[Any, bool] = {}  # whether a gradient differed in its optimizer's last step, by a turn
        self._of_rounding: set[str] = set()  # names of weights that rounding alone moves
        self.dtype = max((r["dtype"] for r in one.all("loss")), key=_eps_of, default="float32")
        self.eps = _eps_of(self.dtype)
        self._known_by = "indices" if self._samples_differ_by_draws() else "samples"
        self.by_design = [_OWN_ORDER] if self._has_own_order() else []
        self.by_design += [_OWN_DRAWS] if self._known_by == "indices" else []
        self.by_design += [_OWN_NOISE] if any(run.draws for run in ranks) else []

    def first(self) -> Optional[Parting]:
        """Return the first difference; None if there is none."""
        # Ranks may have failed in the first step.
        for step in range(max(1, *(run.num_steps for run in (self.one, *self.ranks)))):
            for look in _ALWAYS if self.by_design else _LOOKS:
                if found := next(getattr(self, f"_{look}")(step), None):
                    return Parting(step + 1, *found)
        return None

    def measured(self) -> tuple[dict[Any, float], int, bool]:
        """Return how far numbers are apart, in how many steps, and whether most gradients of the next are so by 1%."""
        self._is_measuring = True
        num_steps = min(run.num_steps for run in (self.one, *self.ranks))
        for step in range(num_steps):
            for look in (self._losses, self._gradients, self._weights, self._networks):
                list(look(step))  # nothing: all is allowed
            # A gradient may be near by chance.
            apart = [size for (t, key), size in self._sizes.items() if (t, key[0]) == (step, "gradients")]
            self._sizes[step, "gradients"] = statistics.median(apart) if apart else 0.0
            if self._sizes[step, "gradients"] > _TURN:
                return self._sizes, step, True
        return self._sizes, num_steps, False

    def _pairs(self, kind: str, step: int) -> Iterator[tuple[Record, list[Record]]]:
        """Yield each record of the one process in a step, with each rank's of the same optimizer, if all have one."""
        for record in self.one.of(kind, step):
            of_ranks = (own for run in self.ranks for own in run.of(kind, step))
            found = [own for own in of_ranks if own["optimizer"] == record["optimizer"]]
            if len(found) == len(self.ranks):
                yield record, found

    def _allows(self, step: int, key: Any, apart: float, least: float) -> bool:
        """Whether the difference `apart` counts as rounding. Call it in the order of steps: the limit only grows."""
        place = step, key
        if self._is_measuring:
            if math.isfinite(apart):  # `_differing` also pairs the wrong ones
                self._sizes[place] = min(apart, self._sizes.get(place, math.inf))
            return True
        seen = self._largest.get(key, 0.0)
        of_one_process = max(self._sizes.get(one, 0.0) for one in (place, (step, key[0]))) / _AS_MUCH
        is_allowed = apart <= max(self._least_limit(least), _GROWS * seen, of_one_process)
        if is_allowed:
            self._largest[key] = max(seen, apart)
        return is_allowed

    def _least_limit(self, least: float) -> float:
        return max(least, _TIMES_EPS[least] * self.eps)

    def _drawn(self, step: int, by: str) -> Optional[_Drawn]:
        """Return what was drawn in a step, `by` "samples" or "indices"; None if some are not known."""
        alone, spread = self.one.trained_on(step), [run.trained_on(step) for run in self.ranks]
        if not alone or not all(spread):
            return None
        mine = Counter(name for batch in alone for name in batch[by] or ())
        of_ranks = [Counter[str]() for _ in spread]
        for rank, batches in enumerate(spread):
            for number, batch in enumerate(batches):
                # A batch that ddpshim gives to every rank whole counts once.
                is_whole = batch["streams"] is None and [batch[by]] == [own[by] for own in alone[number : number + 1]]
                if not (rank and is_whole):
                    of_ranks[rank].update(batch[by] or ())
        return (mine, sum(of_ranks, Counter[str]()), of_ranks) if mine and any(of_ranks) else None

    def _all_drawn(self, by: str) -> list[_Drawn]:
        return [found for step in range(self.one.num_steps) if (found := self._drawn(step, by)) is not None]

    def _samples_differ_by_draws(self) -> bool:
        """Whether ranks' samples are others, which equal random numbers would make those of the one process."""
        runs, differ = (self.one, *self.ranks), any(mine != theirs for mine, theirs, _ in self._all_drawn("samples"))
        are_known = all(batch["indices"] for run in runs for batch, _ in run.trained)
        if not (differ and are_known and all(record for run in runs for record in run.drawn)):
            return False
        pairs = [(a["samples"], b["samples"]) for run in self.ranks for a, b in zip(self.one.drawn, run.drawn)]
        common = [(mine[i], theirs[i]) for mine, theirs in pairs for i in mine if i in theirs]
        return bool(common) and all(are_near(*own) for own in common)

    def _has_own_order(self) -> bool:
        """Whether ranks got shares of make_loader, in batches of the right size, with samples in another order."""
        drawn = self._all_drawn(self._known_by)
        if not drawn or not all(batch["is_share"] for run in self.ranks for batch, _ in run.trained):
            return False
        size, of_ranks = (sum(counted.values()) for counted in drawn[0][:2])
        return size == of_ranks and any(mine != theirs for mine, theirs, _ in drawn)

    def _samples(self, step: int) -> Iterator[_Found]:
        drawn = self._drawn(step, self._known_by)
        if drawn is None:
            return
        mine, together, of_ranks = drawn
        if mine == together or _OWN_ORDER in self.by_design:
            return
        size, of_all, common = (sum(names.values()) for names in (mine, together, mine & together))
        alone, main = self.one.trained_on(step)[0], self.ranks[0].trained_on(step)[0]
        of_one, of_main, by_index = alone["sampler"], main["sampler"], self._drawn(step, "indices")
        if all(own == of_ranks[0] for own in of_ranks) and len(of_ranks) > 1:
            meaning = f"every rank reads the same samples: a sampler that divides them is missing{_MAKE_LOADER}"
        elif of_all == len(of_ranks) * size:
            meaning = f"each rank takes a batch as large as that of the single process{_MAKE_LOADER}"
        elif size != of_all:
            meaning = "the batch of a step has another size"
        elif of_one.startswith("Weighted") and not of_main.startswith("Weighted"):
            meaning = f"the weights of {of_one} are lost: ranks use {of_main}"
        elif alone["pass_number"] > self.one.trained_on(0)[0]["pass_number"]:
            meaning = "epochs differ from the second on: set_epoch is not called, or with a wrong number"
        elif by_index is not None and by_index[0] == by_index[1]:
            meaning = (
                "the same indices give other samples: each rank has other data (normalised or split by itself, files "
                "in another order), or a sample draws from a generator that the dataset keeps"
            )
        else:
            meaning = f"a different sample order ({of_one} in one process, {of_main} on the ranks), or a "
            meaning += "different seed"
            if by_index is None:
                meaning += ", or random numbers of samples (augmentation) are per rank"
        found = f"{size} samples in one process, {of_all} on {len(of_ranks)} ranks, {common} common"
        yield "samples", "", main["place"], found, meaning

    def _noise(self, step: int) -> Iterator[_Found]:
        """Look for a rank that draws no random numbers from this step on, while another one does in every step."""
        for rank, run in enumerate(self.ranks):
            drew, trained = ({loss["t"] for loss in losses} for losses in (run.draws, (own for _, own in run.trained)))
            others = (other for other in self.ranks if len(other.draws) == len(other.trained) > 0)
            if drew == {t for t in trained if t < step} and len(trained - drew) >= _MANY and any(others):
                found = f"rank {rank} uses no random numbers from this step on, while other ranks do in each step"
                meaning = (
                    "its networks are in eval mode: a validation on this rank alone that is not followed by .train()"
                )
                yield "noise", "", next(own["place"] for _, own in run.trained if own["t"] >= step), found, meaning

    def _lengths(self, step: int) -> Iterator[_Found]:
        """Look for equal batches in passes of another length: first, since rates depend on the length of the loader."""
        alone, spread = self.one.trained_on(step), [run.trained_on(step) for run in self.ranks]
        if not alone or not all(spread) or len(alone[0]["samples"]) != sum(len(own[0]["samples"]) for own in spread):
            return
        length, of_ranks = alone[0]["num_batches"], [own[0]["num_batches"] or 0 for own in spread]
        if not length or not all(of_ranks) or set(of_ranks) == {length}:
            return
        size, num_samples, fewest = len(alone[0]["samples"]), alone[0]["num_samples"], min(of_ranks)
        found = f"an epoch has {length} batches in one process, {_range(of_ranks)} on the ranks"
        if fewest < length and num_samples and (length - 1) * size < num_samples <= length * size:
            found += f": ranks read {fewest * size} of {num_samples} samples"
        meaning = (
            "the loaders have other data, or another sampler or drop_last (with ranks the default of make_loader is "
            "True: drop_last=False keeps the last batch); len(loader), and a learning rate planned with it, differ too"
        )
        yield "samples", "", spread[0][0]["place"], found, meaning

    def _start(self, step: int) -> Iterator[_Found]:
        for rank, run in enumerate(self.ranks):
            for alone, theirs in zip(self.one.of("begun", step), run.of("begun", step)):  # one, or none
                mine, own = alone["tensors"], theirs["tensors"]
                if odd := _differing(mine, own, lambda name, a, b: difference(a, b) > 1e-6):
                    size = max(difference(mine[name], own.get(name)) for name in odd)
                    found = f"rank {rank} begins with other values (relative difference {size:.1e})"
                    meaning = "networks are built from a different seed or in a different order, and not broadcast"
                    yield "weights at the start", _named(odd), _place(run, step), found, meaning

    def _losses(self, step: int) -> Iterator[_Found]:
        alone, spread = self.one.of("loss", step), [run.of("loss", step) for run in self.ranks]
        if any(len(own) != len(alone) for own in spread):
            return
        for i, (record, *others) in enumerate(zip(alone, *spread)):
            if not all(record["losses"]):
                return
            where, place, dtypes = f"backward pass {i + 1}", record["place"], {own["dtype"] for own in others}
            if dtypes != {record["dtype"]}:
                found = f"computed in {record['dtype']} in one process, in {', '.join(sorted(dtypes))} on ranks"
                meaning = "autocast, or the dtype of the networks, is another one on the ranks"
                yield "loss", where, place, found, meaning
            for j, (value, *theirs) in enumerate(zip(record["losses"], *(own["losses"] for own in others))):
                mean, scale = math.fsum(theirs) / len(theirs), max(abs(value), 1e-12)
                if not self._allows(step, ("loss", i, j), abs(mean - value) / scale, _LOSS):
                    shown = ", ".join(f"{v:.8g}" for v in theirs)
                    found = f"{value:.8g} in one process, {mean:.8g} as the mean of the ranks' ({shown})"
                    yield "loss", where, place, found, self._why_loss(step)

    def _why_loss(self, step: int) -> str:
        """Return why losses of a step differ: weights may do so by less than what counts, after the step before."""
        for record, found in self._pairs("step", step):
            first = self.one.first_step(record["optimizer"])
            for theirs in found:
                tensors = zip(first["names"], first["weights"], record["weights"], theirs["weights"])
                kept = [own for name, *own in tensors if name not in self._of_rounding]
                apart, moved = (math.hypot(*(distance(own[i], own[1]) for own in kept)) for i in (2, 0))
                if apart > self._least_limit(_GRADIENT) * moved:
                    return (
                        f"after the step before, weights differ by {apart / moved if moved else math.inf:.1g} of the "
                        "distance they moved: the optimizer has another learning rate or other settings"
                    )
        if all(own["streams"] is None for run in self.ranks for own in run.of("loss", step)):
            return _WHY_LOSS_OF_WHOLES
        return _WHY_LATER_LOSS if step else _WHY_LOSS

    def _gradients(self, step: int) -> Iterator[_Found]:
        for record, found in self._pairs("gradients", step):
            number, mine, every = record["optimizer"], record["gradients"], [own["gradients"] for own in found]
            total = math.hypot(*(own[0] for own in mine if own is not None))

            def relative(a: Any, b: Any, total: float = total) -> float:
                apart, size = distance(a, b), (a or [0.0])[0] + 1e-2 * total  # sums may cancel
                if a and b and max(a[0], b[0]) <= _CANCELS * total:
                    return 0.0
                return apart / size if size else (math.inf if apart else 0.0)

            odd: dict[int, float] = {}
            for i, gradient in enumerate(mine):
                apart = max(relative(gradient, own[i]) for own in every)
                # A reduction gives all ranks the same bits, whatever the precision.
                is_reduced = all(relative(every[0][i], own[i]) <= _GRADIENT for own in every[1:])
                key = number, i
                is_same = bool(self.by_design) or self._allows(step, ("gradients", *key), apart, _GRADIENT)
                is_turn = not is_same and apart <= _TURN and self._turned.get(key) is False
                self._turned[key] = is_turn
                if not ((is_same or is_turn) and is_reduced):
                    odd[i] = apart
            if odd:
                names = self.one.first_step(number)["names"]
                where = _named([names[i] for i in sorted(odd, key=lambda i: -odd[i])])
                said = f"{len(odd)} of {len(mine)} gradients differ (the first by {max(odd.values()):.1e})"
                more, meaning = _why_gradients(mine, every, [*odd], max(1e-3, self._least_limit(_GRADIENT)))
                yield "gradients", where, record["place"], said + more, meaning

    def _rates(self, step: int) -> Iterator[_Found]:
        for record, every in self._pairs("gradients", step):
            for rank, theirs in enumerate(every):
                if not any(abs(a - b) > 1e-9 * abs(a) for a, b in zip(record["lr"], theirs["lr"])):
                    continue
                found = f"{record['lr']} in one process, {theirs['lr']} on rank {rank}"
                meaning = "it is scaled by the number of ranks, a schedule steps more often, or each rank has its own"
                yield "learning rate", f"optimizer {record['optimizer'] + 1}", theirs["place"], found, meaning

    def _weights(self, step: int) -> Iterator[_Found]:
        for record, found in self._pairs("step", step + 1):
            number, mine = record["optimizer"], record["weights"]
            first = self.one.first_step(number)
            for theirs in found:
                tensors = [*zip(first["weights"], mine, theirs["weights"])]
                apart = [_moved(*own, self.eps) for own in tensors]
                odd = [i for i, own in enumerate(apart) if not self._allows(step, ("weights", number, i), own, _WEIGHT)]
                limit = self._least_limit(_WEIGHT)
                of_rounding = (i for i, own in enumerate(tensors) if not apart[i] and _moved(*own) > limit)
                self._of_rounding.update(first["names"][i] for i in of_rounding)
                pairs = ((theirs["weights"][i], own["weights"][i]) for own in found for i in odd)
                are_equal = all(difference(*pair) <= 1e-6 for pair in pairs)
                moved = [distance(begun, now) for begun, now, _ in tensors]
                if are_equal and math.hypot(*(moved[i] for i in odd)) <= _PART * math.hypot(*moved):
                    self._of_rounding.update(first["names"][i] for i in odd)
                elif odd:
                    said = f"after the step {len(odd)} of {len(mine)} weights differ, {_BY_MORE}"
                    meaning = "gradients are the same: the optimizer has other settings or another state, or weights "
                    meaning += "are changed beside it on some ranks"
                    yield "weights", _named([first["names"][i] for i in odd]), theirs["place"], said, meaning

    def _networks(self, step: int) -> Iterator[_Found]:
        runs = self.one, self.ranks[0]
        mine, theirs = (next((r["tensors"] for r in run.of("state", step + 1)), None) for run in runs)
        if mine is None or theirs is None:
            return
        begun = next(iter(self.one.all("state")))["tensors"]
        of_rounding = tuple(f".{name}" for name in self._of_rounding)  # copies of such weights
        if any(name.endswith("bias") for name in of_rounding):  # before BatchNorm, which subtracts it; not in its var
            of_rounding += (".running_mean",)

        def parts(name: str, a: Any, b: Any) -> bool:
            is_same = self._allows(step, ("state", name), _moved(begun.get(name, a), a, b, self.eps), _WEIGHT)
            return not is_same and not name.endswith(of_rounding)

        odd = _differing(mine, theirs, parts)
        if not odd:
            return
        found = f"{len(odd)} tensors other than the trained weights differ after the step, {_BY_MORE}"
        meaning = (
            "a copy of the trained weights is not updated correctly on the ranks: an average or a target that holds "
            "another network's weights, is updated on one rank or at other steps, or a buffer of local samples"
        )
        yield "networks", _named(odd), _place(self.ranks[0], step), found, meaning

    def difference_of_weights(self, step: int) -> float:
        both = ((mine["weights"], theirs["weights"]) for mine, (theirs, *_) in self._pairs("step", step))
        pairs = [pair for weights in both for pair in zip(*weights)]
        apart, size = math.hypot(*(distance(a, b) for a, b in pairs)), math.hypot(*(a[0] for a, _ in pairs))
        return apart / size if size else apart

    def _steps(self, step: int) -> Iterator[_Found]:
        """Look for a process that does not make this step though the proof did not end it, or by another optimizer."""
        one, runs = self.one, (self.one, *self.ranks)
        made = [record for run in runs for record in run.of("step", step + 1)]
        missing = [run for run in runs if not run.is_cut and run.num_steps <= step]
        numbers = [f"optimizer {record['optimizer'] + 1}" for record in made]
        if not made or (len({*numbers}) == 1 and not missing):
            return
        num_steps, more = _range([run.num_steps for run in self.ranks]), " (and would make more)"
        found = f"one process made {one.num_steps} steps{more * one.is_cut}, the ranks "
        found += num_steps + more * any(run.is_cut for run in self.ranks)
        if len({*numbers}) > 1:
            found = f"{numbers[0]} made the step in one process, {', '.join(numbers[1:])} on the ranks"
            meaning = "optimizers take turns in another way on the ranks"
        elif one.error and one in missing:
            meaning = f"the program failed in one process: {one.error}"
        else:
            meaning = (
                "the number of epochs or steps, or an early stop, differs by rank: it depends on a local loss, "
                "on a count of local samples divided by the number of all, or on the length of a loader"
            )
        last = [record for run in missing for record in run.of("step", run.num_steps)]
        yield "steps", "", [*last, *made][0]["place"], found, meaning


def _why_gradients(mine: Any, every: Sequence[Any], odd: Sequence[int], near: float) -> tuple[str, str]:
    """Return what else is found of the gradients `odd`, and why they differ."""
    apart = [i for i in odd if any(difference(every[0][i], own[i]) > 1e-6 for own in every[1:])]
    if apart:
        return (
            f"; {len(apart)} of them differ between ranks",
            "they are not reduced: the network is not wrapped, is trained past its wrapper's forward (.module, a "
            "method, no_sync), or was wrapped before something was unfrozen; or they were changed after the reduction",
        )
    found = [ratio(mine[i], every[0][i]) for i in odd if mine[i] and every[0][i]]
    factors = [factor for factor, _ in found]
    if found and all(left < near for _, left in found) and max(factors) - min(factors) < near * abs(max(factors)):
        return (
            f"; they are {max(factors):.6g} times those of one process",
            "gradients are added up, not averaged; averaged twice, as the loss is divided by ranks too; clipped or "
            "scaled differently",
        )
    return (
        "",
        "losses are the same, and gradients equal on all ranks: they are clipped or changed before the reduction, a "
        "part of the graph is cut off (detach) or gathered without gradient, or steps accumulate otherwise",
    )


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
        odd += sorted(found, key=len)[0]
    return odd


def distance(one: Any, other: Any) -> float:
    """Return the norm of two tensors' difference; None counts as zeros, and NaN differs from numbers by infinity."""
    if one is None or other is None:
        return float((one or other or [0.0])[0])
    apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(one[1:], other[1:])) / NUM_SIGNS)
    if apart != apart:
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


def _eps_of(name: str) -> float:
    """Return the distance from 1 to the next number of the dtype with this name, "bfloat16"."""
    return float(torch.finfo(getattr(torch, name)).eps)


def _moved(begun: Any, a: Any, b: Any, eps: float = 0.0) -> float:
    """Return the distance of `a` and `b` over the distance `a` moved from `begun` (over `a` if it did not move).

    0 within `eps` of `a`: a bias whose gradient cancels, and an average of it, moves by the last bit, or not.
    """
    apart, size = distance(a, b), (a or [0.0])[0]
    return 0.0 if apart <= eps * size else apart / (distance(a, begun) or size or 1.0)


def _place(run: RunRecords, step: int) -> str:
    return next((r["place"] for kind in ("gradients", "loss") for r in run.of(kind, step)), "")


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(re.sub(r"~\w+#\d+", "", name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


def _notes(compared: _Comparison) -> Iterator[str]:
    one, ranks = compared.one, compared.ranks
    if compared.eps > _SINGLE:
        yield f"computed in {compared.dtype}: rounding is {compared.eps / _SINGLE:,.0f} times larger than in float32"
    if one.num_steps and not one.all("batch"):
        yield "no batch came from a DataLoader: samples were not compared"
    if one.error and not any(run.error for run in ranks):
        yield f"the program failed in one process, after its last step, and not on the ranks: {one.error}"
