"""Predicts the speed and the bottleneck of a training on another number of ranks, from the records of one run.

A rank's computation shrinks with its share of the global batch (with per_rank_batch it is constant), the rest of a step
is constant, loaders are limited by their workers and the cores of a node, and gradients are reduced in a ring
(`ring_model`) over the links that the run measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

from ddpshim.errors import ReportError
from ddpshim.job.say import count
from ddpshim.observe.report.run import Start, load
from ddpshim.observe.report.words import ms
from ddpshim.observe.ring_model import Cluster, Link, Training

_NEEDED = {
    "steps",
    "seconds",
    "sends_s",
    "workers",
    "cores",
    "gradient_bytes",
    "bucket_bytes",
}  # fields of records of kind "pace"
# Phases proportional to a rank's share of the batch or of the episodes; the rest take as long on any number of ranks.
_SHRINKS = ("transfer", "forward", "backward", "rollout", "evaluation")
_STAYS = ("optimizer", "after", "save", "outside")
PHASES = (*_SHRINKS, *_STAYS, "data", "communication")  # as in `ddpshim.job.meter`, which imports torch
_STALLS = 0.03  # the share of a step above which a wait for data means that the loader is at its limit
_NO_HELP = 1.1  # more ranks help if twice as many are more than this times as fast
_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Measured:
    """The measured step of one run.

    Attributes:
        step_s: the mean over the ranks.
        seconds: the times of phases on the slowest rank; communication without the wait for other ranks.
        waits_s: the wait in a step because another rank than the slowest may be last in it.
        worker_s: the time that a worker of a loader takes for a batch of its rank; None if unknown.
        cores: the cores of a node.
        ranks_per_node: the number in that run.
        link: None if the run had one rank.
        holds_global_batch: False with the option per_rank_batch.
    """

    world_size: int
    step_s: float
    seconds: Mapping[str, float]
    waits_s: float
    gradient_bytes: float
    bucket_bytes: float
    num_workers: int
    worker_s: Optional[float]
    cores: int
    ranks_per_node: int
    link: Optional[Link]
    holds_global_batch: bool = True


class Prediction(NamedTuple):
    """The predicted step on `world_size` ranks, the speed-up of the training against the run, and what limits it.

    `more_help`: whether twice as many ranks are more than 10% faster.
    """

    world_size: int
    step_s: float
    speedup: float
    limit: str
    more_help: bool
    notes: tuple[str, ...]


def predict(run: Measured, world_size: int, gpus_per_node: Optional[int] = None) -> Prediction:
    """Predict `run` on `world_size` ranks. Local."""
    per_node = gpus_per_node or max(_GPUS_PER_NODE, run.ranks_per_node)
    step_s, parts = _step(run, world_size, per_node)
    # If one node holds the ranks, let it hold twice as many: another node adds cores, and an unmeasured network.
    twice_s, _ = _step(run, 2 * world_size, 2 * world_size if world_size <= per_node else per_node)
    more = 1 if run.holds_global_batch else 2
    grows = 1 if run.holds_global_batch else world_size / run.world_size
    return Prediction(
        world_size,
        step_s,
        grows * run.step_s / step_s,
        max(parts, key=lambda part: parts[part]),
        more * step_s / twice_s > _NO_HELP,
        tuple(_notes(run, world_size, per_node)),
    )


def _step(run: Measured, world_size: int, per_node: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and those of each part that may limit it, by name."""
    share = run.world_size / world_size if run.holds_global_batch else 1.0
    computes = share * (run.waits_s + sum(run.seconds[phase] for phase in _SHRINKS))
    stays = sum(run.seconds[phase] for phase in _STAYS)
    sends = _exposed_s(run, world_size, share, per_node)
    reads = 0.0
    if not run.num_workers:
        crowd = max(1.0, min(world_size, per_node) / run.cores) / max(1.0, run.ranks_per_node / run.cores)
        reads = share * run.seconds["data"] * crowd
    step_s = computes + stays + sends + reads
    parts = {"the networks' computation": computes, "what every rank does alike": stays, "communication": sends}
    loads = _loads_s(run, world_size, share, per_node)
    if loads > step_s:
        return loads, {**parts, "the data loader": loads}
    return step_s, {**parts, "the data loader": reads}


def _exposed_s(run: Measured, world_size: int, share: float, per_node: int) -> float:
    """Return how long a step waits for gradients: by the model, plus the run's excess over the model."""
    if run.link is None or world_size == 1:
        return 0.0
    here = Cluster("here", run.link, run.link, max(per_node, run.world_size))

    def modelled(size: int, part: float) -> float:
        forward_s, backward_s = part * run.seconds["forward"], part * run.seconds["backward"]
        training = Training(run.gradient_bytes / 4, forward_s + backward_s, run.bucket_bytes, backward_s=backward_s)
        return training.step_s(size, here) - training.compute_s

    return modelled(world_size, share) + max(0.0, run.seconds["communication"] - modelled(run.world_size, 1.0))


def _loads_s(run: Measured, world_size: int, share: float, per_node: int) -> float:
    """Return the seconds per batch that loaders with workers need; 0 without workers, or if unknown."""
    if not run.num_workers:
        return 0.0

    def at_once(ranks: int, ranks_of_node: int) -> float:
        """Return how many workers of a rank have a core."""
        return min(run.num_workers, run.cores / min(ranks, ranks_of_node))

    after = at_once(world_size, per_node)
    if run.seconds["data"] > _STALLS * run.step_s:
        return share * run.step_s * at_once(run.world_size, run.ranks_per_node) / after
    if run.worker_s is None:
        return 0.0
    # With more busy workers than cores, the time per batch includes the wait for a core.
    busy = min(run.num_workers, run.worker_s / run.step_s)
    own_s = run.worker_s * min(1.0, run.cores / run.ranks_per_node / busy)
    return share * own_s / after


def _notes(run: Measured, world_size: int, per_node: int) -> list[str]:
    notes = []
    if run.link is None:
        notes.append("Communication is not included: the run had one rank")
    elif world_size > per_node >= run.world_size:
        notes.append("The network between nodes is assumed to be as fast as within a node: the run had one node")
    if run.num_workers and run.worker_s is None and run.seconds["data"] <= _STALLS * run.step_s:
        notes.append("Whether the data loader can keep up is unknown: so far it did")
    return notes


def as_text(run: Measured, found: Prediction) -> str:
    """Return the prediction as text."""
    if found.speedup >= 0.995:
        speed = f"{found.speedup:.1f} times as fast"
    else:
        speed = f"slower, {found.speedup:.2f} times as fast"
    help_ = "more GPUs help" if found.more_help else "more GPUs will not help"
    times = f"{ms(found.step_s)} a step, {ms(run.step_s)} in the run"
    gpus = f"{count(found.world_size, 'GPU')}: {speed} as the {run.world_size} of the run ({times})"
    return ". ".join((f"{gpus}; {found.limit} is the limit; {help_}", *found.notes)) + "."


def measured(folder: Union[str, os.PathLike[str]]) -> Measured:
    """Return the step of the last start below `folder` that recorded the phases of all ranks. Local.

    Raises ReportError if no start did.
    """
    run = load(folder)
    for start in reversed(run.starts):
        paces = {rank: [r for r in found if r.keys() >= _NEEDED] for rank, found in start.ranks.items()}
        if all(paces.values()) and not start.missing:
            steps = min(found[-1]["steps"] for found in paces.values())
            same = [next(r for r in found if r["steps"] == steps) for _, found in sorted(paces.items())]
            return _measured(start, same)
    raise ReportError(
        f"the records below {folder} do not contain the phases of all ranks' steps; nothing can be predicted. A "
        "launched run records them after 20 steps, if the options record and diagnose are on."
    )


def _measured(start: Start, paces: Sequence[Mapping[str, Any]]) -> Measured:
    facts = start.facts
    seconds = [{phase: float(pace["seconds"].get(phase, 0.0)) for phase in PHASES} for pace in paces]
    steps_s = [math.fsum(of_rank.values()) for of_rank in seconds]
    step_s = math.fsum(steps_s) / len(steps_s)
    own_s, slowest = max(
        ((math.fsum(of_rank.values()) - of_rank["communication"], of_rank) for of_rank in seconds),
        key=lambda found: found[0],
    )
    sends_s = min(float(pace["sends_s"]) for pace in paces)
    worker_s = [pace["worker_s"] for pace in paces if pace.get("worker_s")]
    link = facts.get("link")
    return Measured(
        world_size=start.world_size,
        step_s=step_s,
        seconds={**slowest, "communication": sends_s},
        waits_s=max(0.0, step_s - own_s - sends_s),
        gradient_bytes=paces[0]["gradient_bytes"],
        bucket_bytes=paces[0]["bucket_bytes"],
        num_workers=paces[0]["workers"],
        worker_s=max(worker_s) if worker_s else None,
        cores=paces[0]["cores"],
        ranks_per_node=int(facts.get("local_world_size", start.world_size)),
        link=None if link is None else Link(*link),
        holds_global_batch=not facts.get("options", {}).get("per_rank_batch", False),
    )
