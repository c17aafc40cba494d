"""Finds the rank, and the phase of a step, that slows all ranks down, from the times that each rank measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from ddpshim.job.meter import PHASES
from ddpshim.process.remedies import remedy
from ddpshim.process.say import ranks_called

# Shares of a step: a lower cost is not reported. The second is for costs of all ranks: not wrong, only expensive.
_LEAST, _LEAST_OF_ALL = 0.03, 0.045
_LEAST_COST_S = 0.0005  # workers or messages that avoid a lower cost would cost more
_LEAST_BLOCKS = 4
# Standard errors by which a rank must be slower: one step that the system interrupted is not enough. The second is for
# data: loaders with workers stall in bursts.
_SURE, _SURE_OF_DATA = 2.5, 2.0
_ALIKE = 1.2
_RARE = ("save", "rollout")  # they have no noise: a rank that does none has zero
_OTHER = ("after", "evaluation", "outside")  # one phase for a slow rank: what its program does between steps
_OWN = {**{name: (name,) for name in PHASES if name not in ("communication", *_OTHER)}, "other": _OTHER}
_OF_ALL = ("data", "transfer", "communication", *_RARE)  # reported even if they take equally long on every rank

Block = Sequence[float]  # mean seconds of each of PHASES in a step
Blocks = Mapping[int, Block]  # of one rank, by the number of the block; the same steps on every rank

_WHAT = {
    "data": "waiting for data",
    "transfer": "between the arrival of a batch and the first call of a network",
    "forward": "in the forward pass and the loss",
    "backward": "in the backward pass",
    "communication": "waiting for gradients to cross the ranks",
    "optimizer": "in the optimizer",
    "save": "saving",
    "rollout": "in rollouts",
    "other": "between steps",
}
_LOOK_AT_DEVICE = (
    "Check for another program on its GPU or cores, a lower clock (nvidia-smi -q -d PERFORMANCE), or larger samples"
)
_LOOK_AT_CORES = "Check for another program on its cores, or larger samples"
# What to do, on GPUs and on the CPU; or the name of a remedy.
_DO_ALONE = {
    "data": ("Check its node's disk, and what else uses the cores there; more num_workers may hide it",) * 2,
    "transfer": (
        "Check for work on batches that only it does, and its GPU's link (nvidia-smi topo -m)",
        "Check for work on batches that only it does",
    ),
    **dict.fromkeys(("forward", "backward", "optimizer"), (_LOOK_AT_DEVICE, _LOOK_AT_CORES)),
    "other": ("Log, print and evaluate less often there, or divide that work over all ranks",) * 2,
}
_DO_TOGETHER = {
    "data": (
        "Increase num_workers (robomimic: train.num_data_workers), store images decoded and small, or keep the data in "
        "memory; more GPUs do not help",
        "Increase num_workers (robomimic: train.num_data_workers), store images decoded and small, or keep the data in "
        "memory; more ranks do not help",
    ),
    "transfer": (
        "Use pin_memory=True and .to(device, non_blocking=True), move images as uint8, augment in the workers or on "
        "the GPU",
        "Do in the workers what the program does with a batch before it calls a network",
    ),
}
_REMEDIES = {"communication": "fewer messages", "save": "fewer saves", "rollout": "fewer rollouts"}
_DO_WITHOUT_WORKERS = (
    "Store images decoded and small, or keep the data in memory; more ranks do not help, nor more num_workers, which "
    "would compete for the cores"
)


class Finding(NamedTuple):
    """A cause of slow steps.

    Attributes:
        phase: one of PHASES, or "other": what a slow rank does between steps.
        ranks: the slow ranks; empty if all are equally slow.
        cost_s: seconds lost in every step, on every rank, since the others wait.
        step_s: seconds of a step.
        has_room: there are cores for more data workers.
        is_on_gpu: whether ranks compute on GPUs.
    """

    phase: str
    ranks: tuple[int, ...]
    cost_s: float
    step_s: float
    has_room: bool = True
    is_on_gpu: bool = True

    @property
    def share(self) -> float:
        return self.cost_s / self.step_s

    def __str__(self) -> str:
        cost = f"{100 * self.share:.0f}% of each step ({1e3 * self.cost_s:.3g} of {1e3 * self.step_s:.4g} ms)"
        if self.phase in _REMEDIES:
            do = remedy(_REMEDIES[self.phase])
        elif not self.ranks and self.phase == "data" and not self.has_room:
            do = _DO_WITHOUT_WORKERS
        else:
            do = (_DO_ALONE if self.ranks else _DO_TOGETHER)[self.phase][not self.is_on_gpu]
            do = do if self.has_room else do.partition("; more num_workers")[0]
        if not self.ranks:
            return f"every rank spends {cost} {_WHAT[self.phase]}. {do}."
        who, verb = ranks_called(self.ranks), "is" if len(self.ranks) == 1 else "are"
        return f"{who} {verb} longer {_WHAT[self.phase]} than the others, which wait: {cost}. {do}."


def judge(ranks: Sequence[Blocks], loads_s: Sequence[Optional[float]]) -> Optional[Finding]:
    """Return the largest avoidable cost in a step; None if nothing costs much. Local.

    Args:
        ranks: the blocks of each rank, in the order of ranks.
        loads_s: the seconds per batch that each rank's workers need; None if unknown.
    """
    numbers = sorted(set(ranks[0]).intersection(*ranks[1:]))
    if len(numbers) < _LEAST_BLOCKS:
        return None
    index = {name: at for at, name in enumerate(PHASES)}

    def seconds(rank: int, names: Sequence[str]) -> list[float]:
        return [sum(ranks[rank][number][index[name]] for name in names) for number in numbers]

    everyone = range(len(ranks))
    step_s = statistics.fmean(statistics.fmean(seconds(rank, PHASES)) for rank in everyone)
    if step_s <= 0:
        return None
    found = []
    for phase in _OF_ALL:
        of_ranks = [seconds(rank, (phase,)) for rank in everyone]
        least = list(map(min, zip(*of_ranks)))
        cost_s = statistics.fmean(least)
        if phase == "communication":  # a busy machine makes it long in some steps
            cost_s = min(cost_s, statistics.median(least))
        found.append(Finding(phase, (), cost_s, step_s))
    if len(ranks) > 1:
        own = [seconds(rank, [name for name in PHASES if name != "communication"]) for rank in everyone]
        behind = list(map(statistics.fmean, _excess(own)))
        for phase, names in _OWN.items():
            of_ranks = [seconds(rank, names) for rank in everyone]
            costs = {}
            for rank, excess in enumerate(_excess(of_ranks)):
                if phase in _RARE or _is_sure(excess, _SURE_OF_DATA if phase == "data" else _SURE):
                    costs[rank] = min(statistics.fmean(excess), behind[rank])
            worst = max(costs.values(), default=0.0)
            if worst > 0:
                slow = tuple(rank for rank, cost in costs.items() if 2 * cost > worst)
                if phase == "data" and _all_load_alike([loads_s[rank] for rank in slow], loads_s):
                    slow = ()  # all workers are equally slow: the others' continue while these ranks wait
                found.append(Finding(phase, slow, worst, step_s))
    most = max(found, key=lambda finding: finding.cost_s)
    is_much = most.share >= (_LEAST if most.ranks else _LEAST_OF_ALL) and most.cost_s >= _LEAST_COST_S
    return most if is_much else None


def _excess(of_ranks: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return how much longer each rank takes than the median rank, block by block."""
    middles = list(map(statistics.median_low, zip(*of_ranks)))
    return [[own - middle for own, middle in zip(values, middles)] for values in of_ranks]


def _all_load_alike(of_some: Sequence[Optional[float]], of_all: Sequence[Optional[float]]) -> bool:
    known = [seconds for seconds in of_all if seconds is not None]
    if None in of_some or len(known) < len(of_all):
        return False
    return max(seconds for seconds in of_some if seconds is not None) < _ALIKE * statistics.median_low(known)


def _is_sure(excess: Sequence[float], num_errors: float) -> bool:
    error = statistics.stdev(excess) / len(excess) ** 0.5
    return bool(statistics.fmean(excess) > num_errors * error)
