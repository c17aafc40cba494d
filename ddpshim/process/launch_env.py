"""Reads this process's place in its job (rank, world size, address) from the launcher's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Optional

from ddpshim.errors import LaunchError
from ddpshim.variables import LAUNCHER

EXIT_REQUEUE = 75  # EX_TEMPFAIL: the run was asked to stop, and saved; the launcher may start it again

# The variable that names a job: the variable that counts its restarts.
JOB_NAMES = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT"}

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
_SIGNS = {
    "torchrun": TORCHRUN[:3],
    "mpi": tuple(f"{of}_{what}" for of in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI") for what in ("RANK", "SIZE")),
    "submitit": ("SUBMITIT_LOCAL_GLOBALID",),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID"),
}


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


def read_launch_env(environ: Mapping[str, str]) -> LaunchEnv:
    """Return this process's place in the job. Local: reads ``environ`` only, opens no socket, writes nothing.

    The first that applies decides: DDPSHIM_LAUNCHER = torchrun, slurm, mpi, submitit or none; torchrun's variables;
    Open MPI's; PMI's (MPICH, Intel MPI, MVAPICH); those of submitit's local executor; a SLURM step of several tasks.
    Else it is a single process, also inside a SLURM allocation: SLURM_JOB_ID and SLURM_NTASKS=4 without a step give
    rank 0 of 1, and ``reason`` says why.

    Raises LaunchError if variables are missing, are not numbers or contradict each other.
    """
    forced = f"{LAUNCHER}={environ[LAUNCHER]!r}" if environ.get(LAUNCHER) else ""
    seen = (launcher for launcher, names in _SIGNS.items() if any(name in environ for name in names))
    launcher = environ.get(LAUNCHER) or next(seen, "none")
    if launcher == "none":
        return alone(f"{forced or 'no launcher variable was seen'}, so this is a single process")
    if launcher not in _SIGNS:
        raise LaunchError(
            f"{forced} is not a launcher: this process would have to guess its rank, and {HANG}. Set DDPSHIM_LAUNCHER "
            "to torchrun, slurm, mpi, submitit or none, or unset it."
        )
    from ddpshim.process import launchers

    return launchers.read(launcher, environ, forced)


def alone(reason: str, in_allocation: bool = False) -> LaunchEnv:
    """Return the place of a single process."""
    return LaunchEnv("none", 0, 0, 1, 1, 0, None, None, False, reason, in_allocation)


def read_num_restarts(environ: Mapping[str, str]) -> int:
    """How often torchrun (--max-restarts) or SLURM (a requeue) has restarted this job. Local.

    >>> read_num_restarts({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "0"})
    2
    """
    return max(read_counts(environ).values())


def read_counts(environ: Mapping[str, str]) -> dict[str, int]:
    """Return how often each launcher has restarted the job, by the variable that names the job."""
    counts = {name: environ.get(count, "") for name, count in JOB_NAMES.items()}
    return {name: int(count) if re.fullmatch("[0-9]{1,9}", count) else 0 for name, count in counts.items()}
