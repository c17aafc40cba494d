"""Reads the variables of a SLURM step, and lists of its nodes; loaded only if they are used."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from ddpshim.errors import LaunchError
from ddpshim.process.launch_env import HANG, SLURM, Names

if TYPE_CHECKING:
    from ddpshim.process.launchers import Variables


def is_in_step(variables: Variables) -> bool:
    """Return whether srun started this as one of several tasks; batch scripts (reserved ids) and shells are not."""
    names = ("SLURM_STEP_ID", SLURM.world_size, SLURM.rank)
    if "SLURM_PTY_PORT" in variables.values or not all(name in variables.values for name in names):
        return False
    step_id, num_tasks, rank = variables.need(names, "")
    return step_id < 0xFFFFFFF0 and rank < num_tasks and num_tasks > 1


def local(variables: Variables, names: Names, rank: int, world_size: int, found: str) -> tuple[int, int, int]:
    """Return (local_rank, local_world_size, node_rank) of a task of srun."""
    local_rank, node_rank = variables.need((names.local_rank, "SLURM_NODEID"), found)
    tasks_per_node = variables.text(names.local_world_size)
    if tasks_per_node is None:
        variables.missing([names.local_world_size], found)
    node_pattern = r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?"
    matches = [re.fullmatch(node_pattern, part) for part in tasks_per_node.split(",")]
    num_tasks = [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]
    if not all(matches) or sum(num_tasks) != world_size or node_rank >= len(num_tasks):
        shown = variables.shown(names.local_world_size, names.world_size, "SLURM_NODEID")
        raise LaunchError(
            f"{shown} contradict each other ('2(x3),1', 7 and 3 would fit): ranks would share a GPU, or {HANG}. "
            "Start the job with srun, or with torchrun on each node."
        )
    variables.check_below(local_rank, names.local_rank, num_tasks[node_rank], names.local_world_size)
    return local_rank, num_tasks[node_rank], node_rank


def expand_nodelist(nodelist: str, name: str = "nodelist") -> list[str]:
    """Return the host names of a SLURM hostlist, in order: ``"gpu[001-002,7]-ib,login1"`` is ``gpu001-ib``,
    ``gpu002-ib``, ``gpu7-ib``, ``login1``. With several brackets in a name, the last one varies fastest. Local.

    Raises LaunchError, which calls the list `name`, if it is not a hostlist.
    """
    host_pattern = r"(?:[^\[\],\s]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"
    is_valid = re.fullmatch(f"{host_pattern}(?:,{host_pattern})*", nodelist) is not None
    hosts: list[str] = []
    for host in re.findall(host_pattern, nodelist):
        # Every second part is the inside of a bracket.
        parts = enumerate(re.split(r"\[([^\]]*)\]", host))
        choices = [_expand_ranges(part) if index % 2 else [part] for index, part in parts]
        is_valid = is_valid and all(choices)
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    if not is_valid:
        raise LaunchError(
            f"{name} {nodelist!r} is not a SLURM hostlist: ranks would not find rank 0, and {HANG}. Correct it "
            "(as in 'gpu[001-003,07]'), or export MASTER_ADDR."
        )
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers of one bracket, padded as written; none if a range is decreasing."""
    ends = [part.split("-") for part in ranges.split(",")]
    if any(int(end[0]) > int(end[-1]) for end in ends):
        return []
    return [str(n).zfill(len(end[0])) for end in ends for n in range(int(end[0]), int(end[-1]) + 1)]
