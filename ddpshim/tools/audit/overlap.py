"""Finds in the records of an audit the samples and files that several ranks read or wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Optional

from ddpshim.tools.audit.verdict import Incident, error, found, named, of_ranks
from ddpshim.tools.audit.witness import Record, Seen, usual

_SELDOM = 0.01  # a fraction of common samples that is ignored


def overlaps(ranks: Sequence[Seen], single_batch: Optional[int]) -> Iterator[Incident]:
    """Yield the findings. `single_batch`: samples of one step of the one-process training; None skips that check."""
    for look in (_shares, _orders, _lengths, _files, _folders):
        yield from look(ranks)
    yield from _batch(ranks, single_batch)


def _shares(ranks: Sequence[Seen]) -> Iterator[Incident]:
    """Yield at most one finding: later passes repeat the error of the first."""
    for number, passes in enumerate(zip(*(seen.training for seen in ranks)), start=1):
        code = "DDP205" if passes[0].record["is_iterable"] else "DDP204"
        for (one, first), (other, second) in combinations(zip(ranks, passes), 2):
            pair = named([one.rank, other.rank])
            num = min(len(first.batches), len(second.batches))
            equal = [_content(a) == _content(b) for a, b in zip(first.batches, second.batches)]
            if not first.tells_samples_apart or not second.tells_samples_apart:
                continue
            if num > 1 and all(equal):
                yield found(
                    code,
                    f"{pair} read the same samples in all of the first {num} batches of {first.place} (pass "
                    f"{number}): the result of one process, for {len(ranks)} times the work.",
                )
                return
            mine, theirs = set(first.samples), set(second.samples)
            both, least = len(mine & theirs), min(len(mine), len(theirs))
            # Drawing with replacement, or a robot that does not move, gives equal samples also within one rank.
            within = max(1 - len(set(each.samples)) / len(each.samples) for each in (first, second))
            by_chance = 2 * within + 2 * _SELDOM + 3 * math.sqrt(within / least)
            if both > max(len(ranks), by_chance * least):
                yield found(
                    code,
                    f"{pair} read {both} of the same samples among the {least} that each read from {first.place} "
                    f"(pass {number}): the data are not split, and an epoch has up to {len(ranks)} times the samples.",
                )
                return


def _content(batch: Record) -> Optional[list[str]]:
    return None if batch["samples"] is None else sorted(batch["samples"])


def _orders(ranks: Sequence[Seen]) -> Iterator[Incident]:
    """Yield at most one finding: a rank whose next pass over the same data has the same order."""
    for seen in ranks:
        for number, (first, second) in enumerate(zip(seen.training, seen.training[1:]), start=1):
            if first.record["data"] != second.record["data"]:
                continue
            length = min(len(first.samples), len(second.samples))
            num = min(len(first.batches), len(second.batches))
            has_same = first.samples[:length] == second.samples[:length] and len(set(first.samples[:length])) > 1
            sampler, shuffles = second.record["sampler"], second.record["shuffles"]
            # Random augmentation changes every sample's hash. Then only the sampler's epoch shows a constant order.
            is_other = set(first.samples).isdisjoint(second.samples)
            epochs = first.record["epoch"], second.record["epoch"]
            stands = bool(shuffles) and is_other and epochs[0] is not None and epochs[0] == epochs[1]
            if sampler == "SequentialSampler" or second.record["is_iterable"] or not ((num > 1 and has_same) or stands):
                continue
            code = {True: "DDP203", False: "DDP202", None: "DDP302"}[shuffles]
            epoch = f", its epoch {epochs[1]} in both" if shuffles and epochs[0] == epochs[1] else ""
            what = f"the same {num} batches in the same order" if has_same else "samples in the same order"
            yield found(
                code,
                f"in passes {number} and {number + 1} over {second.place} {named([seen.rank])} read {what} "
                f"({sampler}{epoch}); every epoch is a copy of the first.",
            )
            return


def _lengths(ranks: Sequence[Seen]) -> Iterator[Incident]:
    for number, passes in enumerate(zip(*(seen.training for seen in ranks)), start=1):
        counts = [len(each.batches) for each in passes]
        ended = [count for count, each in zip(counts, passes) if each.has_ended]
        if ended and max(counts) > min(ended):
            said = of_ranks({seen.rank: f"{count} batches" for seen, count in zip(ranks, counts)})
            yield error(
                "uneven-batches",
                f"pass {number} over {passes[0].place} had {said}; the ranks with more wait for gradients that "
                "never come, or get those of the next epoch.",
                "Split the data evenly (DistributedSampler pads, drop_last=True leaves out), or train under "
                "torch's Join.",
            )
            return


def _batch(ranks: Sequence[Seen], single_batch: Optional[int]) -> Iterator[Incident]:
    sizes = [usual(seen.sizes) for seen in ranks]
    if single_batch is not None and all(sizes) and sum(sizes) != single_batch:
        rates = ranks[0].steps[0]["lr"]
        yield found(
            "DDP206",
            f"a step is made on {sum(sizes)} samples ({' + '.join(map(str, sizes))}), and on {single_batch} in the "
            f"training of one process; with the learning rate {rates[0] if rates else 'unknown'} of one process this "
            f"is a different training, with {single_batch / sum(sizes):.3g} times the steps in an epoch.",
        )


def _files(ranks: Sequence[Seen]) -> Iterator[Incident]:
    by_path: dict[tuple[str, str], dict[int, str]] = {}
    for seen in ranks:
        for record in seen.files:
            what, path = record["what"], record["path"]
            folder, _, name = path.rpartition("/")
            if name.startswith("events.out.tfevents"):  # each process adds its own suffix
                what, path = "append", f"{folder}/events.out.tfevents.*"
            by_path.setdefault((what, path), {})[seen.rank] = record["place"]
    shared = [(what, path, ranks) for (what, path), ranks in by_path.items() if len(ranks) > 1]
    for code, which, verb, effect in (
        ("DDP404", "delete", "delete", "a rank deletes what another has just made, or fails because it is gone"),
        ("DDP401", "write", "write", "simultaneous writes corrupt files, and the last rank's remains"),
        ("DDP403", "append", "append to", "logs have each line several times, from different shares"),
    ):
        mine = [(path, places) for what, path, places in shared if what == which]
        if mine:
            path, places = mine[0]
            place = next(iter(places.values()))
            at = f" at {place}" if place else ""
            more = f", and {len(mine) - 1} more" if len(mine) > 1 else ""
            yield found(code, f"{named(list(places))} {verb} {path}{at}{more}; {effect}.")


def _folders(ranks: Sequence[Seen]) -> Iterator[Incident]:
    """Yield at most one finding: a folder that the same line of the program creates under different names."""
    by_place: dict[str, dict[int, list[str]]] = {}
    for seen in ranks:
        for record in seen.files:
            if record["what"] == "mkdir" and record["place"]:
                by_place.setdefault(record["place"], {}).setdefault(seen.rank, []).append(record["path"])
    for place, made in by_place.items():
        paths = {rank: of_rank[-1] for rank, of_rank in made.items()}  # the innermost folder
        # A line may create several folders, some on one rank only: if all ranks made the same one as well, it is fine.
        are_elsewhere = not any(all(path in of_rank for of_rank in made.values()) for path in paths.values())
        if are_elsewhere and not _name_their_ranks(paths):
            yield found(
                "DDP405",
                f"the folder that is made at {place} is {of_ranks(paths)}; ranks write to, load from and wait for "
                "different places.",
            )
            return


def _name_their_ranks(paths: Mapping[int, str]) -> bool:
    """Whether `paths` differ only in the number of the rank."""
    return len({re.sub(rf"(?<!\d){rank}(?!\d)", "R", path) for rank, path in paths.items()}) == 1
