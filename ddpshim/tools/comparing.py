"""Finds the first difference between the records of the ranks and of the one process, and names its usual cause."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from ddpshim.rows.probe import are_near
from ddpshim.tools.run_records import Record, RunRecords, difference, differing, distance, moved_apart, ratio

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
OWN_DRAWS = (
    "random numbers of samples, as of augmentation (per rank: indices are equal, and so are samples that are made from "
    "equal random numbers)"
)
_OWN_NOISE = "random numbers (per rank, as under any DistributedDataParallel)"
_Found = tuple[str, str, str, str, str]  # of a Parting all but the step
# How often each sample, or index, is in the batches of a step: of one process, of all ranks together, of each rank.
_Drawn = tuple[Counter[str], Counter[str], list[Counter[str]]]


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


class Comparison:
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
        self._limits = {least: max(least, times * self.eps) for least, times in _TIMES_EPS.items()}
        self._known_by = "indices" if self._samples_differ_by_draws() else "samples"
        self.by_design = [_OWN_ORDER] if self._has_own_order() else []
        self.by_design += [OWN_DRAWS] if self._known_by == "indices" else []
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
            if math.isfinite(apart):  # `differing` also pairs the wrong ones
                self._sizes[place] = min(apart, self._sizes.get(place, math.inf))
            return True
        seen = self._largest.get(key, 0.0)
        of_one_process = max(self._sizes.get(one, 0.0) for one in (place, (step, key[0]))) / _AS_MUCH
        is_allowed = apart <= max(self._limits[least], _GROWS * seen, of_one_process)
        if is_allowed:
            self._largest[key] = max(seen, apart)
        return is_allowed

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
        if drawn is None or drawn[0] == drawn[1] or _OWN_ORDER in self.by_design:
            return
        mine, together, of_ranks = drawn
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
            meaning = f"a different sample order ({of_one} in one process, {of_main} on the ranks), or a different seed"
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
                if odd := differing(mine, own, lambda name, a, b: difference(a, b) > 1e-6):
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
                if apart > self._limits[_GRADIENT] * moved:
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
                more, meaning = _why_gradients(mine, every, [*odd], max(1e-3, self._limits[_GRADIENT]))
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
                apart = [moved_apart(*own, self.eps) for own in tensors]
                odd = [i for i, own in enumerate(apart) if not self._allows(step, ("weights", number, i), own, _WEIGHT)]
                limit = self._limits[_WEIGHT]
                of_rounding = (i for i, own in enumerate(tensors) if not apart[i] and moved_apart(*own) > limit)
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
        mine, theirs = self.one.of("state", step + 1), self.ranks[0].of("state", step + 1)
        if not (mine and theirs):
            return
        begun = self.one.all("state")[0]["tensors"]
        of_rounding = tuple(f".{name}" for name in self._of_rounding)  # copies of such weights
        if any(name.endswith("bias") for name in of_rounding):  # before BatchNorm, which subtracts it; not in its var
            of_rounding += (".running_mean",)

        def parts(name: str, a: Any, b: Any) -> bool:
            is_same = self._allows(step, ("state", name), moved_apart(begun.get(name, a), a, b, self.eps), _WEIGHT)
            return not is_same and not name.endswith(of_rounding)

        odd = differing(mine[0]["tensors"], theirs[0]["tensors"], parts)
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


def _eps_of(name: str) -> float:
    """Return the distance from 1 to the next number of the dtype with this name, "bfloat16"."""
    return float(torch.finfo(getattr(torch, name)).eps)


def _place(run: RunRecords, step: int) -> str:
    return next((r["place"] for kind in ("gradients", "loss") for r in run.of(kind, step)), "")


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(re.sub(r"~\w+#\d+", "", name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))
