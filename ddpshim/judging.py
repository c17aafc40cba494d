"""What the records of an audited job say: facts, findings, and what could not be looked at. Pure: from lists to lists.

Records are those of ddpshim/recording.py, by rank and in the order in which each rank wrote them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any, Optional

from ddpshim.doctor.findings import CODES
from ddpshim.witness import Pass, Record, Seen

_SELDOM = 0.01  # this share of equal samples is no sign of anything
_MAX_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """A hazard that happened. `code` where the doctor has the same one, with a page of its own."""

    code: Optional[str]
    name: str
    severity: str
    message: str
    fix: str

    def as_text(self) -> str:
        title = f"{self.code} {self.name}" if self.code else self.name
        page = f" (docs/doctor/{self.code}.md)" if self.code else ""
        return f"{self.severity} {title}: {self.message}\n    fix: {self.fix}{page}"


@dataclass
class Report:
    facts: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=list)


def judge(
    records: Mapping[int, Sequence[Record]], is_stalled: bool = False, single_batch: Optional[int] = None
) -> Report:
    """The report on a job whose ranks left these `records`."""
    ranks = [Seen(rank, records[rank]) for rank in sorted(records)]
    report = Report()
    without_group = _group([seen for seen in ranks if seen.steps], len(ranks))
    report.findings += without_group
    if all(seen.steps for seen in ranks):
        report.findings += () if without_group else _weights(ranks)
        report.findings += chain(_untrained(ranks[0]), _rates(ranks), _streams(ranks))
    report.findings += chain(_shares(ranks), _orders(ranks), _lengths(ranks), _files(ranks), _folders(ranks))
    if single_batch is not None:
        report.findings += _batch(ranks, single_batch)
    report.findings += _ends(ranks, is_stalled)  # last: what was found before may be why
    order = ("error", "warning")
    report.findings.sort(key=lambda finding: order.index(finding.severity))
    report.facts = _facts(ranks)
    report.notes += _notes(ranks)
    report.not_looked_at += _not_looked_at(ranks)
    return report


def _found(code: str, message: str) -> Finding:
    known = CODES[code]
    return Finding(code, known.name, known.severity, message, known.fix)


def _error(name: str, message: str, fix: str) -> Finding:
    return Finding(None, name, "error", message, fix)


def _of_ranks(values: Mapping[int, Any]) -> str:
    """12 on rank 0, 13 on ranks 1 and 2."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


# How it ended


def _ends(ranks: Sequence[Seen], is_stalled: bool) -> Iterator[Finding]:
    steps = {seen.rank: seen.num_steps() for seen in ranks}
    counts = _of_ranks({rank: f"{count} steps" for rank, count in steps.items()})
    well = [seen for seen in ranks if seen.exit_code == 0]
    failed = [seen for seen in ranks if seen.exit_code != 0 and not seen.has_stopped]
    if is_stalled:
        where = "; ".join(f"{_ranks([seen.rank])}: {_position(seen)}" for seen in ranks)
        yield _error(
            "stalled",
            f"no rank came any further, and the job was ended. {where}. A rank that is over, or is somewhere else, "
            "leaves its peers waiting in a collective until the timeout of the process group.",
            "Let every rank come to each collective (a backward pass of the wrapped network is one) equally often.",
        )
    elif failed:
        for seen in well:
            if seen.num_left or seen.num_steps() < max(steps[other.rank] for other in failed):
                yield _found(
                    "DDP503",
                    f"{_ranks([seen.rank])} ended with exit code 0 after {seen.num_steps()} steps, in the middle of "
                    f"one, and {_ranks([other.rank for other in failed])} failed. A launcher that sees code 0 waits "
                    "for the others, or takes the job for done.",
                )
    elif len(set(steps.values())) > 1:
        yield _error(
            "uneven-steps",
            f"{counts}, and every exit code is 0. Where each step is a collective the longer ranks hang or fail at "
            "their next one; where it is none, the models are different ones.",
            "See what the log of the shortest rank ends with: an exception that was caught and printed looks like "
            "this. Else give all ranks equally many batches, and let none leave the loop by a value of its own.",
        )
    if not is_stalled and not failed and not any(steps.values()):
        yield _error(
            "no-steps",
            "no rank made a step of a torch.optim.Optimizer; weights, gradients and random streams could not be "
            "compared, and nothing found means nothing.",
            "Audit the program that trains, with arguments that make it train.",
        )


def _position(seen: Seen) -> str:
    place = f", at {seen.stack}" if seen.stack else ""
    if seen.exit_code is not None:
        return f"was over (exit code {seen.exit_code}) after {seen.num_steps()} steps"
    if seen.has_stopped:
        return f"had made the {seen.num_steps()} steps that were asked for"
    return f"{seen.num_steps()} steps and {seen.num_left} batches after the last{place}"


def _group(ranks: Sequence[Seen], world_size: int) -> list[Finding]:
    sizes = {seen.rank: seen.steps[0].get("group_size") for seen in ranks}
    if all(size == world_size for size in sizes.values()):
        return []
    said = _of_ranks({rank: "no process group" if not size else f"one of {size}" for rank, size in sizes.items()})
    return [
        _error(
            "no-process-group",
            f"at the first step there was {said}, where {world_size} ranks were started; each rank trains a model of "
            f"its own, {world_size} times the same work.",
            "Call torch.distributed.init_process_group() before the network is made, and wrap the network.",
        )
    ]


# What was trained


def _weights(ranks: Sequence[Seen]) -> Iterator[Finding]:
    """At most one: the first thing that differed is the cause of all later ones."""
    rates_differ = False  # which is a finding of its own, and makes other weights of equal gradients
    for key, steps in _common_steps(ranks):
        rates_differ = rates_differ or any(step["lr"] != steps[0]["lr"] for step in steps)
        if any("values" not in step for step in steps):
            continue
        names = ranks[0].optimizers[key[0]]
        lengths = {seen.rank: f"{len(step['values'])} parameters" for seen, step in zip(ranks, steps)}
        if len(set(lengths.values())) > 1:
            yield _error(
                "unequal-optimizers",
                f"the {steps[0]['type']} at {steps[0]['place']} has {_of_ranks(lengths)}; what some leave out is "
                "trained by the others alone.",
                "Build the network and the optimizer alike on all ranks.",
            )
            return
        gradients, values = (_differing([step[what] for step in steps]) for what in ("gradients", "values"))
        if gradients:
            code = "DDP102" if all(names["is_wrapped"][i] for i in gradients) else "DDP107"
            shown = _show(ranks, steps, "gradients", gradients, names["names"])
            how = {
                "DDP102": "DistributedDataParallel holds them, and did not reduce them: the training went past its "
                "forward (through .module, a method, or under no_sync() in the last backward pass)",
                "DDP107": "no DistributedDataParallel holds them",
            }[code]
            yield _found(
                code,
                f"in step {key[1]} of {steps[0]['type']} ({steps[0]['place']}) gradients of {shown}; {how}. Each rank "
                "trains a model of its own, and that of rank 0 is saved.",
            )
            return
        if values and not rates_differ:
            shown = _show(ranks, steps, "values", values, names["names"])
            yield _error(
                "unequal-weights",
                f"after step {key[1]} of {steps[0]['type']} ({steps[0]['place']}) {shown}, though the gradients of "
                "all steps so far were equal: they were not equal before. Gradients are averaged over different "
                "models.",
                "Load checkpoints and change weights on all ranks alike, before the network is wrapped.",
            )
            return
        if values:
            return


def _untrained(seen: Seen) -> Iterator[Finding]:
    """An optimizer that was made from another network than the one that is trained."""
    for number, places in seen.without_gradient().items():
        names, is_wrapped = seen.optimizers[number]["names"], seen.optimizers[number]["is_wrapped"]
        step = next(step for step in seen.steps if step["optimizer"] == number)
        # What is in a trained network may be frozen for a while.
        is_of_another = len(places) == len(names) and not any(is_wrapped)
        strange = [i for i in places if is_of_another or not names[i]]
        if strange:
            yield _found(
                "DDP106",
                f"{len(strange)} of {len(names)} parameters of {step['type']} ({step['place']}) never had a gradient, "
                "and are not those of the network that is trained, which stays as it was.",
            )


def _common_steps(ranks: Sequence[Seen]) -> Iterator[tuple[tuple[int, int], list[Record]]]:
    """Each step that all ranks made, in the order of the first one."""
    tables = [seen.at() for seen in ranks]
    for key in tables[0]:
        if all(key in table for table in tables):
            yield key, [table[key] for table in tables]


def _differing(rows: Sequence[Sequence[Any]]) -> list[int]:
    first = rows[0]
    return [i for i, one in enumerate(first) if any((row[i] and row[i][0]) != (one and one[0]) for row in rows[1:])]


def _show(ranks: Sequence[Seen], steps: Sequence[Record], what: str, places: Sequence[int], names: list[str]) -> str:
    shown = ", ".join(f"'{names[i]}'" if names[i] else f"number {i}" for i in places[:_MAX_NAMED])
    more = f" and {len(places) - _MAX_NAMED} more" if len(places) > _MAX_NAMED else ""
    i = places[0]
    sums = _of_ranks({s.rank: f"{step[what][i][1]:.8g}" if step[what][i] else "none" for s, step in zip(ranks, steps)})
    total = len(steps[0][what])
    return f"{len(places)} of {total} parameters differ between ranks ({shown}{more}; the first sums to {sums})"


def _rates(ranks: Sequence[Seen]) -> Iterator[Finding]:
    for key, steps in _common_steps(ranks):
        if any(step["lr"] != steps[0]["lr"] for step in steps):
            rates = _of_ranks({seen.rank: step["lr"] for seen, step in zip(ranks, steps)})
            yield _error(
                "unequal-learning-rates",
                f"in step {key[1]} of {steps[0]['type']} ({steps[0]['place']}) the learning rates are {rates}; equal "
                "gradients make different models.",
                "Let a schedule depend on what is equal on all ranks: the number of steps, or a loss that was reduced "
                "(dist.all_reduce).",
            )
            return


def _streams(ranks: Sequence[Seen]) -> Iterator[Finding]:
    """Noise that ranks drew alike between a batch and its step."""
    alike: Counter[str] = Counter()
    total = 0
    for i in range(min(len(seen.steps) for seen in ranks)):
        after = [seen.steps[i].get("streams") for seen in ranks]
        before = [seen.batch_before.get(i) for seen in ranks]
        if None in after or None in before:
            continue
        total += 1
        for name in after[0]:  # type: ignore[union-attr]
            states = [streams.get(name) for streams in after]  # type: ignore[union-attr]
            was = [batch["streams"].get(name) for batch in before]  # type: ignore[index]
            has_moved = all(old is not None and old != new for old, new in zip(was, states))
            alike[name] += has_moved and len(set(states)) < len(states)
    drawn = {name: count for name, count in alike.items() if count}
    if drawn:
        said = ", ".join(f"{name} in {count} of {total} steps" for name, count in drawn.items())
        yield _found(
            "DDP301",
            f"ranks drew random numbers between a batch and its step, and their streams stood at the same place "
            f"afterwards ({said}): they dropped the same units and added the same noise, each to its own samples, as "
            "if there were fewer samples.",
        )


# What was read


def _training_passes(ranks: Sequence[Seen]) -> Iterator[tuple[int, list[Pass]]]:
    """The first, second, ... pass that each rank trained on."""
    for number, passes in enumerate(zip(*(seen.training for seen in ranks)), start=1):
        yield number, list(passes)


def _shares(ranks: Sequence[Seen]) -> Iterator[Finding]:
    """At most one: what was wrong in the first pass is in the second."""
    for number, passes in _training_passes(ranks):
        code = "DDP205" if passes[0].record["is_iterable"] else "DDP204"
        for (one, first), (other, second) in combinations(zip(ranks, passes), 2):
            pair = _ranks([one.rank, other.rank])
            num = min(len(first.batches), len(second.batches))
            equal = [_content(a) == _content(b) for a, b in zip(first.batches, second.batches)]
            if not _tells_samples_apart(first) or not _tells_samples_apart(second):
                continue
            if num > 1 and all(equal):
                yield _found(
                    code,
                    f"{pair} read the same samples in all of the first {num} batches of {first.place} (pass {number}):"
                    f" the result of one process, and {len(ranks)} times its work.",
                )
                return
            mine, theirs = set(first.samples), set(second.samples)
            both, least = len(mine & theirs), min(len(mine), len(theirs))
            # Drawing with replacement, or standing still, gives equal samples within a rank as well.
            within = max(1 - len(set(each.samples)) / len(each.samples) for each in (first, second))
            by_chance = 2 * within + 2 * _SELDOM + 3 * math.sqrt(within / least)
            if both > max(len(ranks), by_chance * least):
                yield _found(
                    code,
                    f"{pair} read {both} of the same samples among the {least} that each read from {first.place} "
                    f"(pass {number}): they have no shares of their own, and an epoch has up to {len(ranks)} times "
                    "the samples.",
                )
                return


def _content(batch: Record) -> Optional[list[str]]:
    return None if batch["samples"] is None else sorted(batch["samples"])


def _tells_samples_apart(one: Pass) -> bool:
    return len(set(one.samples)) > 1


def _orders(ranks: Sequence[Seen]) -> Iterator[Finding]:
    """At most one."""
    for seen in ranks:
        for number, (first, second) in enumerate(zip(seen.training, seen.training[1:]), start=1):
            if first.record["data"] != second.record["data"]:
                continue
            length = min(len(first.samples), len(second.samples))
            num = min(len(first.batches), len(second.batches))
            has_same = first.samples[:length] == second.samples[:length] and len(set(first.samples[:length])) > 1
            sampler, shuffles = second.record["sampler"], second.record["shuffles"]
            stands = bool(shuffles) and first.record["epoch"] == second.record["epoch"]
            if sampler == "SequentialSampler" or second.record["is_iterable"] or not ((num > 1 and has_same) or stands):
                continue
            code = {True: "DDP203", False: "DDP202", None: "DDP302"}[shuffles]
            epoch = f", its epoch {second.record['epoch']} in both" if stands else ""
            what = f"the same {num} batches in the same order" if has_same else "samples in the same order"
            yield _found(
                code,
                f"in passes {number} and {number + 1} over {second.place} {_ranks([seen.rank])} read {what} "
                f"({sampler}{epoch}); every epoch is a copy of the first.",
            )
            return


def _lengths(ranks: Sequence[Seen]) -> Iterator[Finding]:
    for number, passes in _training_passes(ranks):
        counts = [len(each.batches) for each in passes]
        ended = [count for count, each in zip(counts, passes) if each.has_ended]
        if ended and max(counts) > min(ended):
            said = _of_ranks({seen.rank: f"{count} batches" for seen, count in zip(ranks, counts)})
            yield _error(
                "uneven-batches",
                f"pass {number} over {passes[0].place} had {said}; the ranks with more wait for gradients that never "
                "come, or take those of the next epoch.",
                "Split the data evenly (DistributedSampler pads, drop_last=True leaves out), or train under "
                "torch's Join.",
            )
            return


def _batch(ranks: Sequence[Seen], single_batch: int) -> Iterator[Finding]:
    sizes = [_usual(seen.sizes) for seen in ranks]
    if all(sizes) and sum(sizes) != single_batch:
        rates = ranks[0].steps[0]["lr"]
        yield _found(
            "DDP206",
            f"a step is made on {sum(sizes)} samples ({' + '.join(map(str, sizes))}), and on {single_batch} in the "
            f"training of one process; with the learning rate {rates[0] if rates else 'unknown'} of that one it is "
            f"another training, with {single_batch / sum(sizes):.3g} times the steps in an epoch.",
        )


def _usual(values: Sequence[int]) -> int:
    return Counter(values).most_common(1)[0][0] if values else 0


# What was written


def _files(ranks: Sequence[Seen]) -> Iterator[Finding]:
    by_path: dict[tuple[str, str], dict[int, str]] = {}
    for seen in ranks:
        for record in seen.files:
            what, path = record["what"], record["path"]
            folder, _, name = path.rpartition("/")
            if name.startswith("events.out.tfevents"):  # a name of its own for each process
                what, path = "append", f"{folder}/events.out.tfevents.*"
            by_path.setdefault((what, path), {})[seen.rank] = record["place"]
    shared = [(what, path, ranks) for (what, path), ranks in by_path.items() if len(ranks) > 1]
    for code, which, effect in (
        ("DDP404", "delete", "a rank deletes what another one has just made, or fails because it is gone"),
        ("DDP401", "write", "files that are written at once are torn, and the last rank's stays"),
        ("DDP403", "append", "logs have each line several times, from different shares"),
    ):
        mine = [(path, places) for what, path, places in shared if what == which]
        if mine:
            path, places = mine[0]
            place = next(iter(places.values()))
            at = f" at {place}" if place else ""
            more = f", and {len(mine) - 1} more" if len(mine) > 1 else ""
            verb = {"delete": "delete", "write": "write", "append": "append to"}[which]
            yield _found(code, f"{_ranks(list(places))} {verb} {path}{at}{more}; {effect}.")


def _folders(ranks: Sequence[Seen]) -> Iterator[Finding]:
    """A folder that one line of the program makes under another name on each rank; at most one."""
    by_place: dict[str, dict[int, str]] = {}
    for seen in ranks:
        for record in seen.files:
            if record["what"] == "mkdir" and record["place"]:
                by_place.setdefault(record["place"], {})[seen.rank] = record["path"]  # the last one is the innermost
    for place, paths in by_place.items():
        if len(set(paths.values())) > 1 and not _name_their_ranks(paths):
            yield _found(
                "DDP405",
                f"the folder that is made at {place} is {_of_ranks(paths)}; what ranks write, load and wait for lies "
                "in different places.",
            )
            return


def _name_their_ranks(paths: Mapping[int, str]) -> bool:
    """Whether the numbers in which `paths` differ are the ranks."""
    first, *others = (re.sub(rf"(?<!\d){rank}(?!\d)", "R", path) for rank, path in paths.items())
    return all(other == first for other in others)


# What else is told


def _facts(ranks: Sequence[Seen]) -> dict[str, str]:
    out = {"ranks": str(len(ranks))}
    out["steps"] = _of_ranks({seen.rank: seen.num_steps() for seen in ranks})
    first = next((seen.steps[0] for seen in ranks if seen.steps), None)
    if first is None:
        return out
    out["optimizer"] = f"{first['type']}, learning rate {', '.join(f'{lr:g}' for lr in dict.fromkeys(first['lr']))}"
    sizes = [_usual(seen.sizes) for seen in ranks]
    if all(sizes):
        out["batch of a step"] = f"{sum(sizes)} samples ({' + '.join(map(str, sizes))})"
        out["samples"] = _of_ranks({s.rank: sum(len(p.samples) for p in s.training) for s in ranks})
        out["passes"] = _of_ranks(
            {s.rank: f"{len(s.training)} begun, {sum(p.has_ended for p in s.training)} ended" for s in ranks}
        )
    mine = ranks[0].optimizers.values()
    wrapped = sum(sum(each["is_wrapped"]) for each in mine)
    if wrapped:
        out["in DistributedDataParallel"] = f"{wrapped} of {sum(len(each['names']) for each in mine)} parameters"
    unused = [
        ranks[0].optimizers[number]["names"][i] or f"number {i}"
        for number, places in ranks[0].without_gradient().items()
        for i in places
    ]
    if unused:
        shown = ", ".join(unused[:_MAX_NAMED]) + (" ..." if len(unused) > _MAX_NAMED else "")
        out["without a gradient"] = f"{len(unused)} parameters: {shown}"
    return out


def _notes(ranks: Sequence[Seen]) -> Iterator[str]:
    for key, steps in _common_steps(ranks):
        tables = [step.get("buffers") or {} for step in steps]
        names = [name for name in tables[0] if any(table.get(name, [0])[0] != tables[0][name][0] for table in tables)]
        if names:
            yield (
                f"buffers differ between ranks ({', '.join(names[:_MAX_NAMED])}), from step {key[1]} on: statistics "
                "of each rank's own share, as torch's DDP has them (rank 0's are saved). SyncBatchNorm makes them one."
            )
            return


def _not_looked_at(ranks: Sequence[Seen]) -> Iterator[str]:
    yield "losses, metrics and what is done with them; evaluation; samples that were not read"
    yield "files that C++ writes by itself (HDF5, videos), other machines, and what is logged over the network"
    training = [each for seen in ranks for each in seen.training]
    if not training:
        yield "shares, order and number of batches, and noise: no step was made on a batch of a torch DataLoader"
        return
    if not all(any(each.has_ended for each in seen.training) for seen in ranks):
        yield "the number of batches in an epoch: none ended on every rank (more --steps, or --to-end)"
    if not all(len(seen.training) > 1 for seen in ranks):
        yield "the order of the second epoch (set_epoch): it did not begin (more --steps, or --to-end)"
    if not all(_tells_samples_apart(each) for each in training):
        yield "shares and order of batches whose samples look alike, or hold no tensors"
