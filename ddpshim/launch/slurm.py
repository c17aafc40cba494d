"""Writes an sbatch script that survives its time limit, preemption and a full queue (`ddpshim slurm`)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ddpshim.errors import LaunchError
from ddpshim.process.launch_env import EXIT_REQUEUE
from ddpshim.trainers.patching.patchset import load_sets

_NEVER_SENT_S = 65535  # SLURM's own limit of --signal


def _option(metavar: str, text: str, default: Optional[str] = None, also: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"metavar": metavar, "help": text, "also": also})


@dataclass(frozen=True)
class Settings:
    """The user's settings, as text: `batch_script` checks them all at once. None: the site's default."""

    program: str
    arguments: list[str] = field(default_factory=list)
    is_module: bool = False
    nodes: str = _option("N", "nodes", "1", ("--nnodes",))
    gpus_per_node: str = _option("N", "GPUs of each node, 0 for the CPU", "1")
    nproc_per_node: Optional[str] = _option("N", "ranks on each node (one for each GPU)", also=("--nproc",))
    cpus_per_rank: Optional[str] = _option("N", "cores for each rank: 1, and 1 for each of its data workers")
    time: Optional[str] = _option("TIME", "time limit as sbatch takes it: 2-12, 12:00:00, 30")
    partition: Optional[str] = _option("NAME", "the queue")
    account: Optional[str] = _option("NAME", "who pays")
    job_name: str = _option("NAME", "the job's name", "ddpshim")
    output: str = _option("PATTERN", "file for the output", "%x-%j.out")
    signal_before: str = _option("S", "seconds before the limit at which the ranks get SIGUSR1", "120")
    launcher: Optional[str] = _option(
        "srun|torchrun",
        "what starts the ranks (srun only for programs that import ddpshim; others need torchrun's variables)",
    )


def batch_script(settings: Settings) -> str:
    """Return the text of an sbatch script. Local.

    The ranks, not the batch shell, get SIGUSR1 `signal_before` seconds before the limit and SIGTERM at preemption; if
    they exit with 75 the job is requeued. Raises LaunchError, with a line for each problem.
    """
    problems = [*_problems(settings)]
    if problems:
        raise LaunchError("\n".join(problems))
    ranks = int(settings.nproc_per_node or settings.gpus_per_node)
    by_torchrun = not joins_by_itself(settings) if settings.launcher is None else settings.launcher == "torchrun"
    tasks = 1 if by_torchrun else ranks
    cores = settings.cpus_per_rank and int(settings.cpus_per_rank) * ranks // tasks
    directives = {
        "job-name": settings.job_name,
        "nodes": settings.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": settings.gpus_per_node if int(settings.gpus_per_node) else None,
        "cpus-per-task": cores,
        "time": settings.time,
        "partition": settings.partition,
        "account": settings.account,
        "output": settings.output,
        "open-mode": "append",
        "signal": f"USR1@{settings.signal_before}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
    lines += ["#SBATCH --requeue"]
    to_fill_in = [_TO_FILL_IN[name] for name in _TO_FILL_IN if directives[name] is None]
    if to_fill_in:
        lines += ["", _HOW_TO_FILL_IN, *to_fill_in]
    # srun takes the cores of a task from its own option only (SLURM 22.05 and later).
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=60", *([f"--cpus-per-task={cores}"] if cores else [])]
    run, rank = ["python", "-m", "ddpshim", "run", f"--nproc={ranks}"], ["python", "-u", "-m", "ddpshim.launch.rank"]
    python = run if by_torchrun else rank
    program = [*(["-m"] if settings.is_module else []), settings.program, *settings.arguments]
    return _TEMPLATE.format(
        directives="\n".join(lines),
        command=shlex.join([*srun, *python, *program]),
        logs=_LOGS_OF_RUN if by_torchrun else _LOGS_OF_SRUN,
        requeue=EXIT_REQUEUE,
    )


def joins_by_itself(settings: Settings) -> bool:
    """Return whether the program reads SLURM's variables, because it imports ddpshim or is patched by it. Local; reads
    files."""
    package = settings.program.partition(".")[0]
    if settings.is_module and any(patch_set.package == package for patch_set in load_sets()):
        return True
    from ddpshim.trainers.patching.in_memory import imports_ddpshim
    from ddpshim.trainers.unedited.program import module_file

    source = module_file(settings.program) if settings.is_module else settings.program
    return imports_ddpshim(Path(source or ""))


_HOW_TO_FILL_IN = """\
# Not given, so the site's defaults hold. Write this script again with more options, or complete a line and remove one
# "#" from it."""
_TO_FILL_IN = {
    "time": """\
# Without a limit of its own the job gets the partition's. The ranks are signalled before it (--signal), to save.
##SBATCH --time=12:00:00""",
    "partition": "##SBATCH --partition=NAME",
    "account": "##SBATCH --account=NAME",
    # Not a line to complete: srun would not take the cores from it.
    "cpus-per-task": """\
# Most sites give a task one core. Choose with --cpus-per-rank: 1 for the rank, and 1 for each of its data workers.""",
}
_LOGS_OF_RUN = """\
# Each rank's output goes to ddpshim-logs/TIME-PID/rank_N.log, rank 0's also into the job's own (--output)."""
_LOGS_OF_SRUN = """\
# All ranks write into the job's output (--output). For a file for each rank, give srun below --output=rank_%t.log."""

# --wait and not --kill-on-bad-exit, which would kill a rank that still saves when another has exited with 75.
_TEMPLATE = """\
#!/bin/bash
{directives}

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


def _problems(settings: Settings) -> Iterator[str]:
    numbers = {"nodes": 1, "gpus_per_node": 0, "nproc_per_node": 1, "cpus_per_rank": 1, "signal_before": 1}
    for name, least in numbers.items():
        value = getattr(settings, name)
        if value is not None and not (re.fullmatch("[0-9]{1,6}", value) and int(value) >= least):
            yield (
                f"{_flag(name)}={value!r} is not a whole number of at least {least}: sbatch would refuse the "
                "script. Correct it."
            )
    if settings.gpus_per_node == "0" and settings.nproc_per_node is None:
        yield (
            "--gpus-per-node=0 without --nproc-per-node: no rank would be started. Give the number of ranks per node."
        )
    for name in ("partition", "account", "job_name", "output"):
        value = getattr(settings, name)
        if value is not None and not re.fullmatch(r"[\w%@+=:,./-]+", value):
            yield (
                f"{_flag(name)}={value!r} is empty, or contains characters other than letters, digits and "
                "%@+=:,./-: sbatch would misread it. Change it."
            )
    if settings.launcher not in (None, "srun", "torchrun"):
        yield f"--launcher={settings.launcher!r} is unknown: nothing would start the ranks. Use srun or torchrun."
    limit_s = None if settings.time is None else _seconds(settings.time)
    if settings.time is not None and not limit_s:
        yield (
            f"--time={settings.time!r} is not a time limit: sbatch would refuse the script. Write minutes, H:MM:SS "
            "or D-HH:MM:SS, above zero."
        )
    if re.fullmatch("[0-9]{1,6}", settings.signal_before):
        most = min(_NEVER_SENT_S, limit_s - 1 if limit_s else _NEVER_SENT_S)
        if int(settings.signal_before) > most:
            yield (
                f"--signal-before={settings.signal_before} is more than {most} seconds: the signal would come at "
                "the start, or never. Use a few minutes, and a longer limit."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _seconds(text: str) -> Optional[int]:
    """Return the seconds of a time limit in sbatch's notation; None if it is not one."""
    match = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,9}(?::[0-9]{1,9}){0,2})", text)
    if match is None:
        return None
    parts = [int(part) for part in match[2].split(":")]
    if match[1] is None and len(parts) < 3:
        parts.insert(0, 0)  # without days two numbers are minutes and seconds, and one is minutes
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(match[1] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
