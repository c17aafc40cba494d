"""Writes a job for an engine other than SLURM (`ddpshim slurm --for`), from a template beside this file."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

from ddpshim.errors import LaunchError
from ddpshim.launch.slurm import Settings
from ddpshim.process.launch_env import EXIT_REQUEUE

_USED = ("program", "arguments", "is_module", "nodes", "gpus_per_node", "nproc_per_node", "job_name")
# The names by which both operators of Kubeflow tell a node its place; version 1 gives only the address another name.
_RUN_ON_KUBEFLOW = (
    "unset RANK WORLD_SIZE; exec python -m ddpshim run --nproc {nproc} --nnodes $PET_NNODES "
    "--node-rank $PET_NODE_RANK --master-addr ${{PET_MASTER_ADDR:-$MASTER_ADDR}} "
    "--master-port ${{PET_MASTER_PORT:-$MASTER_PORT}} {program}"
)


def job_file(settings: Settings, engine: str) -> str:
    """Return the text of a job for `engine`: "skypilot", "kubeflow", "trainjob" or "ray". Local.

    Raises LaunchError, with a line for each problem, if a setting is wrong or has no meaning there.
    """
    wrong = [f.name for f in fields(Settings) if f.name not in _USED and getattr(settings, f.name) != f.default]
    problems = [
        f"--{name.replace('_', '-')} is SLURM's, and --for {engine} would ignore it. Leave it out." for name in wrong
    ]
    nproc = settings.nproc_per_node or settings.gpus_per_node
    for name, text, least in (("nodes", settings.nodes, 1), ("nproc-per-node", nproc, 1)):
        if not re.fullmatch("[0-9]{1,6}", text) or int(text) < least:
            problems.append(f"--{name}={text!r} is not a whole number of at least {least}: no rank would start.")
    if not re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])?", settings.job_name):
        problems.append(f"--job-name={settings.job_name!r}: the engines take small letters, digits and - between them.")
    if engine == "skypilot" and settings.gpus_per_node == "0":
        problems.append("--gpus-per-node=0: the template asks for GPUs. Give their number, and edit the file.")
    if problems:
        raise LaunchError("\n".join(problems))
    program = [*(["-m"] if settings.is_module else []), settings.program, *settings.arguments]
    values = {
        "NAME": settings.job_name,
        "NODES": settings.nodes,
        "WORKERS": str(int(settings.nodes) - 1),
        "WORLD": str(int(settings.nodes) * int(nproc)),
        "NPROC": nproc,
        "GPUS": settings.gpus_per_node,
        "USE_GPU": str(settings.gpus_per_node != "0"),
        "REQUEUE": str(EXIT_REQUEUE),
        "PROGRAM": shlex.join(program),
        "LIST": json.dumps(program, ensure_ascii=False),
        "SHELL": json.dumps(_RUN_ON_KUBEFLOW.format(nproc=nproc, program=shlex.join(program)), ensure_ascii=False),
    }
    text = (Path(__file__).parent / f"{engine}.txt").read_text(encoding="utf-8")
    if settings.nodes == "1":
        text = text.partition("    Worker:")[0]
    return re.sub("@([A-Z_]+)@", lambda match: values[match[1]], text)
