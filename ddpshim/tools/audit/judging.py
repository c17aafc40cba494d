"""Turns the records of an audited job into facts, findings, and a list of what could not be checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Optional

from ddpshim.tools.audit.divergence import divergences
from ddpshim.tools.audit.overlap import overlaps
from ddpshim.tools.audit.verdict import Incident, error, found, named, of_ranks
from ddpshim.tools.audit.witness import Record, Seen, common_steps, usual

_MAX_NAMED = 3


@dataclass(frozen=True)
class Judgement:
    """The report of an audit."""

    facts: dict[str, str]
    findings: list[Incident]
    notes: list[str]
    not_looked_at: list[str]


def judge(
    records: Mapping[int, Sequence[Record]], is_stalled: bool = False, single_batch: Optional[int] = None
) -> Judgement:
    """Return the report on a job, from the `records` of each rank (see recording.py) in the order of writing."""
    ranks = [Seen(rank, records[rank]) for rank in sorted(records)]
    # How the job ended is reported last: the findings before it may be the cause.
    findings = chain(divergences(ranks), overlaps(ranks, single_batch), _ends(ranks, is_stalled))
    return Judgement(
        _facts(ranks),
        sorted(findings, key=lambda finding: finding.severity != "error"),
        list(_notes(ranks)),
        list(_not_looked_at(ranks)),
    )


def _ends(ranks: Sequence[Seen], is_stalled: bool) -> Iterator[Incident]:
    steps = {seen.rank: seen.num_steps() for seen in ranks}
    counts = of_ranks({rank: f"{count} steps" for rank, count in steps.items()})
    well = [seen for seen in ranks if seen.exit_code == 0]
    failed = [seen for seen in ranks if seen.exit_code != 0 and not seen.has_stopped]
    if is_stalled:
        where = "; ".join(f"{named([seen.rank])}: {_position(seen)}" for seen in ranks)
        yield error(
            "stalled",
            f"no rank made progress, and the job was stopped. {where}. If a rank has ended, or is elsewhere, the "
            "others wait for it in a collective until the process group's timeout.",
            "Make every rank call each collective (a backward pass of the wrapped network is one) equally often.",
        )
    elif failed:
        for seen in well:
            if seen.num_left or seen.num_steps() < max(steps[other.rank] for other in failed):
                yield found(
                    "DDP503",
                    f"{named([seen.rank])} ended with exit code 0 after {seen.num_steps()} steps, within a step, "
                    f"and {named([other.rank for other in failed])} failed. A launcher that sees code 0 waits for "
                    "the others, or takes the job as finished.",
                )
    elif len(set(steps.values())) > 1:
        yield error(
            "uneven-steps",
            f"{counts}, and every exit code is 0. If each step is a collective, the ranks with more steps hang or "
            "fail at the next; otherwise they train different models.",
            "Read the end of the log of the rank with the fewest steps: an exception that was caught and printed "
            "looks like this. Otherwise give all ranks the same number of batches, and let none leave the loop by "
            "its own values.",
        )
    if not is_stalled and not failed and not any(steps.values()):
        yield error(
            "no-steps",
            "no rank made a step of a torch.optim.Optimizer; weights, gradients and random streams could not be "
            'compared, so "nothing found" proves nothing.',
            "Audit the program that trains, with arguments that make it train.",
        )


def _position(seen: Seen) -> str:
    if seen.exit_code is not None:
        return f"had ended (exit code {seen.exit_code}) after {seen.num_steps()} steps"
    if seen.has_stopped:
        return f"had made the {seen.num_steps()} steps that were asked for"
    place = f", at {seen.stack}" if seen.stack else ""
    return f"{seen.num_steps()} steps and {seen.num_left} batches after the last{place}"


def _facts(ranks: Sequence[Seen]) -> dict[str, str]:
    out = {"ranks": str(len(ranks)), "steps": of_ranks({seen.rank: seen.num_steps() for seen in ranks})}
    first = next((seen.steps[0] for seen in ranks if seen.steps), None)
    if first is None:
        return out
    out["optimizer"] = f"{first['type']}, learning rate {', '.join(f'{lr:g}' for lr in dict.fromkeys(first['lr']))}"
    sizes = [usual(seen.sizes) for seen in ranks]
    if all(sizes):
        out["batch of a step"] = f"{sum(sizes)} samples ({' + '.join(map(str, sizes))})"
        out["samples"] = of_ranks({s.rank: sum(len(p.samples) for p in s.training) for s in ranks})
        out["passes"] = of_ranks(
            {s.rank: f"{len(s.training)} begun, {sum(p.has_ended for p in s.training)} ended" for s in ranks}
        )
    is_wrapped = [each for optimizer in ranks[0].optimizers.values() for each in optimizer["is_wrapped"]]
    if any(is_wrapped):
        out["in DistributedDataParallel"] = f"{sum(is_wrapped)} of {len(is_wrapped)} parameters"
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
    for key, steps in common_steps(ranks):
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
    if not all(each.tells_samples_apart for each in training):
        yield "shares and order of batches whose samples look alike, or hold no tensors"
