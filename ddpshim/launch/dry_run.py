"""Prints what `run` would start, but starts nothing (`run --dry-run`)."""

from __future__ import annotations

import os
import shlex

from ddpshim.launch.runner import Launch, check, nodes_of_scheduler, torchrun_arguments
from ddpshim.options import Options
from ddpshim.variables import PREFIX


def text(job: Launch) -> str:
    """Return the command that each node would run, and its options. Local.

    Raises LaunchError and OptionsError as the run would.
    """
    job = nodes_of_scheduler(job, os.environ)
    check(job, os.environ)
    options = Options.read()
    program = [*(["-m"] if job.is_module else []), job.program, *job.arguments]
    command = ["python", "-m", "torch.distributed.run", *torchrun_arguments(job, "DIR"), *program]
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX) and value}
    logs = f"{job.log_dir or 'ddpshim-logs/TIME-PID'}/rank_N.log"
    lines = [
        f"command on {f'node {job.node_rank} of {job.nnodes}' if (job.nnodes or 1) > 1 else 'this machine'}:",
        f"  {shlex.join(command)}",
        f"options: {options}",
        *(f"  {name}={shlex.quote(value)}" for name, value in given.items()),
        f"output of each rank: {logs if job.has_logs else 'the screen'}",
    ]
    return "\n".join(lines)
