"""Reads this process's place in its job from MPI's, SLURM's or submitit's variables; loaded only if some are set."""

from __future__ import annotations

import itertools
import re
import zlib
from typing import Optional

from ddpshim.errors import LaunchError
from ddpshim.process.launch_env import HANG, LaunchEnv, Names
from ddpshim.process.launch_variables import Variables, read_local
from ddpshim.variables import LAUNCHER

# OMPI_COMM_WORLD_NODE_RANK is a rank *on* the node, not the node's index, so it is not read.
_OPENMPI = Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_MVAPICH = Names("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
_PMI = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
# Variables of submitit's local executor, whose tasks are on one machine; on SLURM submitit uses srun.
_SUBMITIT = Names("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS")

# mpirun inside a SLURM job starts its remote daemons in a separate step: ranks on the first node and on the
# others see different SLURM_STEP_* values, so only the job's variables give values that all ranks must share.
# The tasks of one srun share a step, which may cover only some of the job's nodes, and share them with other steps.
_JOB_NODELISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_JOB_IDS = {
    _OPENMPI: (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",), ("SLURM_JOB_ID",)),
    _MVAPICH: (("PMI_JOBID",), ("SLURM_JOB_ID",)),
    _PMI: (("PMI_JOBID",), ("SLURM_JOB_ID",)),
    _SLURM: (("SLURM_JOB_ID", "SLURM_STEP_ID"),),
    _SUBMITIT: (("SUBMITIT_LOCAL_JOB_ID",),),
}


def read_mpi(variables: Variables, forced: str) -> LaunchEnv:
    """Return the place of a rank of mpirun, with any MPI. `forced`: the value of DDPSHIM_LAUNCHER, if set. Local."""
    known = (_OPENMPI, _MVAPICH, _PMI)
    names = next((names for names in known if any(name in variables.values for name in names[:2])), None)
    if names is None:
        variables.missing([f"{_OPENMPI.rank} (or {_MVAPICH.rank}, {_PMI.rank})"], forced)
    launcher = "openmpi" if names is _OPENMPI else "pmi"
    found = variables.shown(LAUNCHER, *names)
    rank, world_size = variables.rank_and_world_size(names, found)
    # srun sets PMI_* too, also in interactive shells, but the local rank only in SLURM_LOCALID. Under mpiexec,
    # SLURM_* number its daemons and not the ranks: hence the comparison.
    in_step = (variables.number(_SLURM.rank), variables.number(_SLURM.world_size)) == (rank, world_size)
    if names is _PMI and _PMI.local_rank not in variables.values and in_step:
        return read_slurm(variables, launcher, forced)
    local_rank, size, node_rank = read_local(variables, names, rank, world_size, found)
    master = _read_master(variables, names, world_size, size, found)
    return LaunchEnv(launcher, rank, local_rank, world_size, size, node_rank, *master, False, found)


def read_submitit(variables: Variables, forced: str) -> LaunchEnv:
    """Return the place of a task of submitit's local executor; one task is a single process, unless `forced`. Local."""
    found = variables.shown(LAUNCHER, "SUBMITIT_LOCAL_JOB_ID", *_SUBMITIT[:3])
    rank, world_size = variables.rank_and_world_size(_SUBMITIT, found)
    if world_size == 1 and not forced:
        return LaunchEnv("none", 0, 0, 1, 1, 0, None, None, False, f"one task of submitit ({found})")
    local_rank, size, node_rank = read_local(variables, _SUBMITIT, rank, world_size, found)
    master = _read_master(variables, _SUBMITIT, world_size, size, found)
    return LaunchEnv("submitit", rank, local_rank, world_size, size, node_rank, *master, False, found)


def read_slurm(variables: Variables, launcher: str, forced: str) -> LaunchEnv:
    """Return the place of a task of srun; elsewhere in an allocation a single process, unless `forced`. Local."""
    if not forced and not _is_slurm_step(variables):
        seen = variables.shown("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_ID", *_SLURM[:2], "SLURM_PTY_PORT")
        reason = f"SLURM variables ({seen}), but not of an srun with several tasks: this is a single process"
        return LaunchEnv("none", 0, 0, 1, 1, 0, None, None, False, reason, in_allocation=True)
    found = variables.shown(LAUNCHER, "SLURM_JOB_ID", "SLURM_STEP_ID", *_SLURM)
    rank, world_size = variables.rank_and_world_size(_SLURM, found)
    local_rank, node_rank = variables.need((_SLURM.local_rank, "SLURM_NODEID"), found)
    tasks_per_node = variables.text(_SLURM.local_world_size)
    if tasks_per_node is None:
        variables.missing([_SLURM.local_world_size], found)
    node_pattern = r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?"
    matches = [re.fullmatch(node_pattern, part) for part in tasks_per_node.split(",")]
    num_tasks = [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]
    if not all(matches) or sum(num_tasks) != world_size or node_rank >= len(num_tasks):
        shown = variables.shown(_SLURM.local_world_size, _SLURM.world_size, "SLURM_NODEID")
        raise LaunchError(
            f"{shown} contradict each other ('2(x3),1', 7 and 3 would fit): ranks would share a GPU, or {HANG}. "
            "Start the job with srun, or with torchrun on each node."
        )
    size = num_tasks[node_rank]
    variables.check_below(local_rank, _SLURM.local_rank, size, _SLURM.local_world_size)
    master = _read_master(variables, _SLURM, world_size, size, found)
    return LaunchEnv(launcher, rank, local_rank, world_size, size, node_rank, *master, False, found)


def _is_slurm_step(variables: Variables) -> bool:
    """Return whether srun started this as one of several tasks; batch scripts (reserved ids) and shells are not."""
    names = ("SLURM_STEP_ID", _SLURM.world_size, _SLURM.rank)
    if "SLURM_PTY_PORT" in variables.values or not all(name in variables.values for name in names):
        return False
    step_id, num_tasks, rank = variables.need(names, "")
    return step_id < 0xFFFFFFF0 and rank < num_tasks and num_tasks > 1


def _read_master(
    variables: Variables, names: Names, world_size: int, local_world_size: int, found: str
) -> tuple[Optional[str], Optional[int]]:
    """Return (master_addr, master_port), the same on all ranks, for launchers that do not set them."""
    master_addr, master_port = variables.master()
    if world_size == 1:
        return master_addr, master_port
    if master_addr is None and local_world_size == world_size:
        master_addr = "127.0.0.1"
    if master_addr is None:
        nodelists = ("SLURM_STEP_NODELIST", *_JOB_NODELISTS) if names is _SLURM else _JOB_NODELISTS
        name = next((name for name in nodelists if name in variables.values), "")
        try:
            master_addr = expand_nodelist(variables.text(name) or "")[0] if name else None
        except LaunchError as error:
            raise LaunchError(f"{name}: {error}") from error
    known_ids = (ids for ids in _JOB_IDS[names] if all(name in variables.values for name in ids))
    job_id = variables.shown(*next(known_ids, ()))
    if master_port is None and job_id:
        # Above the ports of system services, and below the ephemeral ports (on Linux from 32768).
        master_port = 15000 + zlib.crc32(job_id.encode()) % 15000
    missing = ["MASTER_ADDR"] * (master_addr is None) + ["MASTER_PORT"] * (master_port is None)
    if missing:
        variables.missing(missing, found)
    return master_addr, master_port


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the host names of a SLURM hostlist, in order: ``"gpu[001-002,7]-ib,login1"`` is ``gpu001-ib``,
    ``gpu002-ib``, ``gpu7-ib``, ``login1``. With several brackets in a name, the last one varies fastest. Local.

    Raises LaunchError if it is not a hostlist.
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
            f"nodelist {nodelist!r} is not a SLURM hostlist: ranks would not find rank 0, and {HANG}. Correct it "
            "(as in 'gpu[001-003,07]'), or export MASTER_ADDR."
        )
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers of one bracket, padded as written; none if a range is decreasing."""
    ends = [part.split("-") for part in ranges.split(",")]
    if any(int(end[0]) > int(end[-1]) for end in ends):
        return []
    return [str(n).zfill(len(end[0])) for end in ends for n in range(int(end[0]), int(end[-1]) + 1)]
