"""Reads this process's place in its job (rank, world size, address) from the launcher's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddpshim.errors import LaunchError
from ddpshim.process.place import HANG, TORCHRUN, LaunchEnv, alone
from ddpshim.variables import LAUNCHER

EXIT_REQUEUE = 75  # EX_TEMPFAIL: the run was asked to stop, and saved; the launcher may start it again

# The variable that names a job: the variable that counts its restarts.
JOB_NAMES = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT"}

_SIGNS = {
    "torchrun": TORCHRUN[:3],
    "mpi": tuple(f"{of}_{what}" for of in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI") for what in ("RANK", "SIZE")),
    "submitit": ("SUBMITIT_LOCAL_GLOBALID",),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID"),
}


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
