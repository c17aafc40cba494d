"""Describes in sentences how a run ended, and problems in its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ddpshim.failures.failure_notes import LOST, meaning_of
from ddpshim.observe.report.run import Run
from ddpshim.observe.report.words import clock, first_line, ms, number, percent, span
from ddpshim.process.say import count, ranks_called

_MUCH_DATA_WAIT, _MUCH_COMMUNICATION = 0.15, 0.3
_UNEVEN = 1.15
_WARM_S = 30.0


class Remark(NamedTuple):
    """A sentence of the report. Levels: "bad" needs action, "note" may need it, "good" is as expected."""

    level: str
    text: str


def verdict(run: Run) -> Remark:
    """Return a sentence on how the run ended. Local."""
    if not run.is_recorded:
        trained = count(sum(bool(epoch.training) for epoch in run.epochs), "epoch")
        return Remark("note", f"One process, no records of ddpshim: {trained}, from the log of its trainer")
    start, ends = run.last, run.last.ends()
    silent = [rank for rank in range(start.world_size) if rank not in ends]
    left = [end for end in ends.values() if end.get("how") == "left"]
    failed = {rank: end for rank, end in ends.items() if end.get("how") in ("failed", "stopped")}
    if failed:
        lost = [r for r, e in failed.items() if e.get("lost_a_peer") or meaning_of(str(e.get("error"))) == LOST]
        own = [r for r, e in failed.items() if e.get("first") in (None, r) and r not in lost]
        if silent and not own:
            who = ranks_called(silent)
            return Remark("bad", f"Failed: {who} ended without an error message, perhaps killed (out of memory?)")
        rank = min(own or failed, key=lambda r: float(failed[r]["time"]))
        return Remark("bad", f"Failed: rank {rank}: {first_line(failed[rank].get('error'))}")
    if left:
        where = f"epoch {left[0].get('epoch', '?')}, step {left[0].get('step', '?')}"
        return Remark(
            "note",
            f"Interrupted ({left[0].get('reason', 'a signal')}): saved at {where}, counted from 0; stopped with exit "
            f"code {left[0].get('exit_code', 75)}; DDPSHIM_RESUME=always resumes it",
        )
    if not silent:
        return Remark("good", "Finished: every rank completed the training")
    if run.is_running:
        return Remark("note", f"Still running, apparently: the last record is {run.quiet_s:.0f} s old")
    last = clock(start.ended)
    who = "No rank" if not ends else f"{ranks_called(silent)} of {start.world_size} never"
    return Remark("bad", f"{who} recorded its end (killed, or the machine went down); the last record is from {last}")


def findings(run: Run) -> list[Remark]:
    """Return what to look at, the worst first. Local."""
    looks = (_about_records, _about_losses, _about_guards, _about_time)
    found = [finding for look in looks for finding in look(run)]
    return sorted(found, key=lambda finding: ("bad", "note", "good").index(finding.level))


def _about_records(run: Run) -> Iterator[Remark]:
    for start in run.starts:
        if start.missing:
            yield Remark(
                "bad",
                f"In start {start.number} the records of {ranks_called(start.missing)} are missing; what follows is "
                "about the others. On nodes without a shared disk, copy the files of all nodes into one folder",
            )
    if run.num_torn:
        lines = count(run.num_torn, "line")
        yield Remark("note", f"{lines} of the records could not be read (killed while writing?): left out")
    progress = run.unfinished()
    if progress is not None:
        said = "" if progress.get("loss") is None else f", loss {number(progress['loss'])}"
        yield Remark("note", f"After the last complete epoch {progress.get('steps')} more steps were recorded{said}")
    if len(run.starts) > 1:
        sizes = ", ".join(str(start.world_size) for start in run.starts)
        yield Remark("note", f"The run was started {len(run.starts)} times, on {sizes} ranks")


def _about_losses(run: Run) -> Iterator[Remark]:
    by_epoch = [
        (epoch, {r: row.loss for r, row in epoch.training.items() if row.loss is not None}) for epoch in run.epochs
    ]
    odd = [(epoch, rank) for epoch, of in by_epoch for rank, loss in of.items() if not math.isfinite(loss)]
    if odd:
        epoch, rank = odd[0]
        yield Remark(
            "bad",
            f"The loss is not finite from epoch {epoch.number} on (rank {rank}): lower the learning rate, clip "
            "gradients, or look for broken samples",
        )
    several = [set(of.values()) for _, of in by_epoch if len(of) > 1]
    if several and all(len(losses) == 1 for losses in several):
        yield Remark(
            "note",
            "All ranks report exactly the same losses: they were averaged before they were recorded, or every rank "
            "sees the same samples",
        )


def _about_guards(run: Run) -> Iterator[Remark]:
    guards = list(run.events("guard"))
    failed = [(rank, record) for _, rank, record in guards if not record.get("passed")]
    if failed:
        rank, record = failed[0]
        yield Remark("bad", f"A guard failed on rank {rank}: {first_line(record.get('said'))}")
    elif guards:
        weights, steps = (sum(r.get("check") == check for _, _, r in guards) for check in ("weights", "steps"))
        compared = f"{weights} comparisons of weights, {steps} of step counts"
        yield Remark("good", f"No guard failed ({compared}, on all ranks)")
    elif run.last.world_size > 1:
        off = run.last.facts.get("options", {}).get("guard") is False
        why = "guards are switched off (DDPSHIM_GUARD)" if off else "no backward pass of a wrapped network was compared"
        yield Remark("note", f"No guard checked this run: {why}")


def _about_time(run: Run) -> Iterator[Remark]:
    for _, _, record in run.events("slow"):
        yield Remark("note", f"After {record.get('steps')} steps: {str(record.get('said')).rstrip('.')}")
    ranks = [rank for rank in run.ranks if any(row.wall_s for row in run.rows(rank))]
    if not any(len(run.timed(rank)) < len(run.rows(rank)) or run.trained_s(rank) > _WARM_S for rank in ranks):
        return  # all that was measured is the warm-up
    waits, talks = ({rank: run.share(rank, [part]) for rank in ranks} for part in ("data_wait", "communication"))
    if min(waits.values()) > _MUCH_DATA_WAIT:
        yield Remark(
            "bad",
            f"Data wait is {span(waits.values())} of the training time on every rank: raise num_workers (robomimic: "
            "train.num_data_workers), or keep the data in memory",
        )
    elif max(waits.values()) > _MUCH_DATA_WAIT:
        rank = max(waits, key=lambda r: waits[r])
        share = percent(waits[rank])
        yield Remark("bad", f"Data wait is {share} of the training time on rank {rank}: look at that node's disk")
    works = run.own_work()
    if works:
        slow, fast = max(works, key=lambda r: works[r]), min(works, key=lambda r: works[r])
        ratio = works[slow] / max(works[fast], 1e-9)
        if ratio > _UNEVEN:
            yield Remark(
                "note",
                f"Rank {slow} is {ratio:.1f} times slower than rank {fast} ({ms(works[slow])} against "
                f"{ms(works[fast])} of its own work a step), and the others wait for it in communication: look for "
                "another program on its GPU or cores, or slower data",
            )
    if len(talks) > 1 and min(talks.values()) > _MUCH_COMMUNICATION:
        yield Remark(
            "note",
            f"Communication takes {span(talks.values())} of the training time on every rank: the network between them "
            "is slow for this model, or a step is short; a larger batch, or fewer ranks, would use them better",
        )
