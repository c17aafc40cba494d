"""Defines `LaunchEnv`, a process's place in its job, and names the variables of the two commonest launchers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional

HANG = "torch would wait for missing ranks until its timeout"


class Names(NamedTuple):
    """A launcher's variables for a process's place in its job."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


TORCHRUN = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
PLACE = (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")  # torchrun's variables for a process's place in its job


@dataclass(frozen=True)
class LaunchEnv:
    """This process's place in the job.

    ``master_addr`` and ``master_port`` are None without a launcher, and may be None with one rank. ``node_rank`` is
    only a label: SLURM and torchrun state it; elsewhere it assumes that ranks fill equal nodes in order, and is -1 if
    they visibly do not. ``agent_store``: torchrun's agent already serves the store at ``master_port``, so rank 0 must
    not. ``reason``: which variables decided, or why a scheduler's were ignored, in one line. ``in_allocation``: this
    is a single process although a scheduler's variables are set, so ``reason`` should be printed.
    """

    launcher: str  # "torchrun" | "openmpi" | "pmi" | "submitit" | "slurm" | "none"
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: Optional[str]
    master_port: Optional[int]
    agent_store: bool
    reason: str
    in_allocation: bool = False

    @property
    def is_launched(self) -> bool:
        """Whether a launcher made this process a rank of a job (even of a single rank)."""
        return self.launcher != "none"


def alone(reason: str, in_allocation: bool = False) -> LaunchEnv:
    """Return the place of a single process."""
    return LaunchEnv("none", 0, 0, 1, 1, 0, None, None, False, reason, in_allocation)
