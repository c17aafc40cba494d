"""Writes an sbatch script that survives its time limit, preemption and a full queue (`ddpshim slurm`)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from ddpshim.errors import LaunchError
from ddpshim.process.launch_env import EXIT_REQUEUE


def batch_script(program: Sequence[str], asked: argparse.Namespace) -> str:
    """Return the text of an sbatch script for a file or -m and a module, with its arguments. Local.

    `asked`: the options of `ddpshim slurm`. None: one rank for each GPU; one core for each rank of a task that starts
    several, else the site's default.

    The ranks, not the batch shell, get SIGUSR1 two minutes before the limit and SIGTERM at preemption; if they exit
    with 75 the job is requeued. Raises LaunchError if no rank would be started.
    """
    ranks = asked.nproc_per_node or asked.gpus_per_node
    if not ranks:
        raise LaunchError(
            "--gpus-per-node=0 without --nproc-per-node: no rank would be started. Give the number of ranks per node."
        )
    by_torchrun = asked.launcher == "torchrun"
    tasks = 1 if by_torchrun else ranks
    cores = (asked.cpus_per_rank or int(ranks > tasks)) * ranks // tasks  # 0: what the site gives to a task
    directives = {
        "nodes": asked.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": asked.gpus_per_node or None,
        "cpus-per-task": cores or None,
        "time": asked.time,
    }
    # srun takes the cores of a task from its own option only (SLURM 22.05 and later).
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=60", *([f"--cpus-per-task={cores}"] if cores else [])]
    run, rank = ["python", "-m", "ddpshim", "run", f"--nproc={ranks}"], ["python", "-u", "-m", "ddpshim.launch.rank"]
    return _TEMPLATE.format(
        directives="".join(f"#SBATCH --{name}={value}\n" for name, value in directives.items() if value is not None),
        command=shlex.join([*srun, *(run if by_torchrun else rank), *program]),
        logs=_LOGS_OF_RUN if by_torchrun else _LOGS_OF_SRUN,
        requeue=EXIT_REQUEUE,
    )


_LOGS_OF_RUN = """\
# Each rank's output goes to ddpshim-logs/TIME-PID/rank_N.log, rank 0's also into the job's own (--output)."""
_LOGS_OF_SRUN = """\
# All ranks write into the job's output (--output). For a file for each rank, give srun below --output=rank_%t.log."""

# --wait and not --kill-on-bad-exit, which would kill a rank that still saves when another has exited with 75.
_TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name=ddpshim
{directives}#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# Options of the site (--partition, --account) go here, or on sbatch's command line. Without --time the job gets the
# partition's limit. A rank needs a core, and one more for each of its data workers: --cpus-per-rank.

# The site's own lines go here: module load ..., source .../bin/activate

set -euo pipefail
export PYTHONHASHSEED="${{PYTHONHASHSEED:-0}}"  # sets of strings have one order in all ranks
echo "job $SLURM_JOB_ID (restart ${{SLURM_RESTART_COUNT:-0}}) on $SLURM_JOB_NODELIST, in $PWD"

# --signal without "B:" reaches the ranks and not this shell. If a site signals both, the shell ignores it.
trap : TERM USR1

{logs}

# --wait: when one rank has ended, the others get one minute; they would wait for it for half an hour.
code=0
{command} || code=$?

# The trainer has saved, to resume later.
if [ "$code" -eq {requeue} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
