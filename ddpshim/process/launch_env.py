"""Reads this process's place in its job (rank, world size, address) from the variables of its launcher.

Launchers are torchrun, MPI, SLURM's srun and submitit. A process loads this only if one of them may have started it.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Optional

from ddpshim.errors import LaunchError
from ddpshim.variables import LAUNCHER

EXIT_REQUEUE = 75  # EX_TEMPFAIL: the run was asked to stop, and saved; the launcher may start it again
HANG = "torch would wait for missing ranks until its timeout"

# The variable that names a job: the variable that counts its restarts.
JOB_NAMES = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT"}


class Names(NamedTuple):
    """A launcher's variables for a process's place in its job."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


class _Launcher(NamedTuple):
    option: str  # as DDPSHIM_LAUNCHER
    name: str  # as `World.launcher`
    names: Names
    signs: tuple[str, ...]  # any of them says that this launcher started the process
    job_ids: tuple[tuple[str, ...], ...] = ()  # variables that together name the job; the first complete set is used


TORCHRUN = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PLACE = (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")  # torchrun's variables for a process's place in its job
_SLURM = Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_PMI = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# OMPI_COMM_WORLD_NODE_RANK is a rank *on* the node, not the node's index, so it is not read.
_OPENMPI, _MVAPICH = (
    Names(*(f"{of}_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    for of in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
)
# Variables of submitit's local executor, whose tasks are on one machine; on SLURM submitit uses srun.
_SUBMITIT = Names("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS")
_OF_PMI = (("PMI_JOBID",), ("SLURM_JOB_ID",))
# mpirun inside a SLURM job starts its remote daemons in a separate step: ranks on the first node and on the others see
# different SLURM_STEP_* values, so only the job's variables give values that all ranks must share. The tasks of one
# srun share a step, which may cover only some of the job's nodes, and share them with other steps.
_OF_SRUN = ("SLURM_JOB_ID", "SLURM_STEP_ID")
_SRUN = _Launcher("slurm", "slurm", _SLURM, (*_OF_SRUN, "SLURM_NTASKS", "SLURM_PROCID"), (_OF_SRUN,))
_OF_OPENMPI = (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",), ("SLURM_JOB_ID",))
_LAUNCHERS = (  # the first with a sign decides
    _Launcher("torchrun", "torchrun", TORCHRUN, TORCHRUN[:3]),
    _Launcher("mpi", "openmpi", _OPENMPI, _OPENMPI[:2], _OF_OPENMPI),
    _Launcher("mpi", "pmi", _MVAPICH, _MVAPICH[:2], _OF_PMI),
    _Launcher("mpi", "pmi", _PMI, _PMI[:2], _OF_PMI),
    _Launcher("submitit", "submitit", _SUBMITIT, _SUBMITIT[:1], (("SUBMITIT_LOCAL_JOB_ID",),)),
    _SRUN,
)


@dataclass(frozen=True)
class LaunchEnv:
    """This process's place in the job.

    ``node_rank`` is only a label: SLURM and torchrun state it; elsewhere it assumes that ranks fill equal nodes in
    order, and is -1 if they visibly do not.
    """

    reason: str  # which variables decided, or why a scheduler's were ignored, in one line
    launcher: str = "none"  # "torchrun" | "openmpi" | "pmi" | "submitit" | "slurm" | "none"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: Optional[str] = None  # None without a launcher, perhaps also with one rank
    master_port: Optional[int] = None  # the same
    agent_store: bool = False  # torchrun's agent already serves the store at `master_port`, so rank 0 must not
    in_allocation: bool = False  # a single process though a scheduler's variables are set: `reason` should be printed

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
    asked = environ.get(LAUNCHER)
    forced = f"{LAUNCHER}={asked!r}" if asked else ""
    known = [one for one in _LAUNCHERS if not asked or one.option == asked]
    one = next((one for one in known if any(name in environ for name in one.signs)), None)
    if asked == "none" or (one is None and not asked):
        return LaunchEnv(f"{forced or 'no launcher variable was seen'}, so this is a single process")
    if not known:
        raise LaunchError(
            f"{forced} is not a launcher: this process would have to guess its rank, and {HANG}. Set DDPSHIM_LAUNCHER "
            "to torchrun, slurm, mpi, submitit or none, or unset it."
        )
    variables = _Variables(environ)
    if one is None and asked == "mpi":
        variables.missing([f"{_OPENMPI.rank} (or {_MVAPICH.rank}, {_PMI.rank})"], forced)
    one = one or known[0]
    # srun sets PMI_* too, but the local rank only in SLURM_LOCALID. Under mpiexec, SLURM_* number its daemons and not
    # the ranks: hence the comparison.
    is_pmi_alone = one.names is _PMI and _PMI.local_rank not in environ
    if is_pmi_alone and all(variables.number(of) == variables.number(its) for of, its in zip(_PMI[:2], _SLURM)):
        one = _SRUN._replace(name=one.name)
    if one.names is _SLURM and not forced and not _is_in_step(variables):
        shown = variables.shown("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_ID", *_SLURM[:2], "SLURM_PTY_PORT")
        reason = f"SLURM variables ({shown}), but not of an srun with several tasks: this is a single process"
        return LaunchEnv(reason, in_allocation=True)
    found = variables.shown(LAUNCHER, *itertools.chain(*one.job_ids), *one.names)
    rank, world_size = variables.need(one.names[:2], found)
    variables.check_below(rank, one.names.rank, world_size, one.names.world_size)
    if one.option == "submitit" and world_size == 1 and not forced:
        return LaunchEnv(f"one task of submitit ({found})")
    read_local = _local_of_srun if one.names is _SLURM else _local
    local_rank, size, node_rank = read_local(variables, one.names, rank, world_size, found)
    address, port = _master(variables, one, size, world_size, found)
    agents = one.option == "torchrun" and variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    agents = agents and None not in (address, port)
    return LaunchEnv(found, one.name, rank, local_rank, world_size, size, node_rank, address, port, agents)


def read_counts(environ: Mapping[str, str]) -> dict[str, int]:
    """Return how often torchrun (--max-restarts) and SLURM (a requeue) have restarted the job, as JOB_NAMES. Local.

    >>> read_counts({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "many"})
    {'SLURM_JOB_ID': 2, 'TORCHELASTIC_RUN_ID': 0}
    """
    counts = {name: environ.get(count, "") for name, count in JOB_NAMES.items()}
    return {name: int(count) if re.fullmatch("[0-9]{1,9}", count) else 0 for name, count in counts.items()}


def first_host(nodelist: str, name: str = "nodelist") -> str:
    """Return the first host name of a SLURM hostlist: ``"gpu[001-002,7]-ib,login1"`` begins with ``gpu001-ib``. Local.

    Raises LaunchError, which calls the list `name`, if it is not a hostlist.
    """
    host_pattern = r"(?:[^\[\],\s]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"
    if re.fullmatch(f"{host_pattern}(?:,{host_pattern})*", nodelist) is None:
        raise LaunchError(
            f"{name} {nodelist!r} is not a SLURM hostlist: ranks would not find rank 0, and {HANG}. Correct it "
            "(as in 'gpu[001-003,07]'), or export MASTER_ADDR."
        )
    first: str = re.findall(host_pattern, nodelist)[0]
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first)


class _Variables(dict[str, str]):
    """The variables that were found; reading one raises LaunchError if it is wrong."""

    def shown(self, *names: str) -> str:
        return ", ".join(f"{name}={self[name]!r}" for name in dict.fromkeys(names) if name in self)

    def text(self, name: str) -> Optional[str]:
        value = self.get(name)
        if value is not None and not value.strip():
            raise LaunchError(f"{self.shown(name)} is empty: {HANG}. Set {name} or unset it.")
        return value

    def number(self, name: str) -> Optional[int]:
        value = self.get(name)
        if value is not None and not re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
            raise LaunchError(
                f"{self.shown(name)} is not a whole number of at least 0: {HANG}. Correct {name}, or let "
                "torchrun, mpirun or srun set it."
            )
        return None if value is None else int(value)

    def need(self, names: Sequence[str], found: str) -> list[int]:
        missing = [name for name in names if name not in self]
        if missing:
            self.missing(missing, found)
        return [number for number in map(self.number, names) if number is not None]

    def missing(self, names: Sequence[str], found: str) -> NoReturn:
        wanted = " and ".join(names)
        raise LaunchError(
            f"{found} found, but {wanted} not set: this process would train alone, or {HANG}. Start the job with "
            f"torchrun, or export {wanted}; for one process unset what was found, or "
            "export DDPSHIM_LAUNCHER=none (torchrun, slurm or mpi force that launcher)."
        )

    def check_below(self, rank: int, rank_name: str, size: int, size_name: str) -> None:
        if rank >= size:
            raise LaunchError(
                f"{rank_name}={rank} is not below {size_name}={size}: {HANG}. "
                f"Correct {rank_name} or {size_name}, or let torchrun, mpirun or srun set both."
            )


def _local(variables: _Variables, names: Names, rank: int, world_size: int, found: str) -> tuple[int, int, int]:
    """Return (local_rank, local_world_size, node_rank); derives missing ones only from NNODES, or if all ranks are
    certainly on one machine."""
    local_rank, size = variables.number(names.local_rank), variables.number(names.local_world_size)
    num_nodes = variables.number("NNODES")
    if size is None and num_nodes and world_size % num_nodes == 0:  # started by hand, on equal nodes
        size = world_size // num_nodes
    loopback = r"localhost(\.localdomain)?|127(\.[0-9]+){3}|::1"
    if size is None and (world_size == 1 or re.fullmatch(loopback, variables.text("MASTER_ADDR") or "")):
        size = world_size
    if local_rank is None and size == world_size:
        local_rank = rank
    if local_rank is None or size is None:
        variables.missing([name for name in names[2:] if name not in variables], found)
    variables.check_below(local_rank, names.local_rank, size, names.local_world_size)
    if size > world_size:
        raise LaunchError(
            f"{variables.shown(names.local_world_size)} exceeds {variables.shown(names.world_size)}: "
            f"{HANG}. Correct one of the two, or let torchrun, mpirun or srun set both."
        )
    in_order = world_size % size == 0 and rank % size == local_rank
    stated = [name for name in ("GROUP_RANK", "NODE_RANK") if names is TORCHRUN and name in variables]
    node_rank = variables.need(stated, found)[0] if stated else rank // size if in_order else -1
    return local_rank, size, node_rank


def _local_of_srun(variables: _Variables, names: Names, rank: int, world_size: int, found: str) -> tuple[int, int, int]:
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


def _is_in_step(variables: _Variables) -> bool:
    """Return whether srun started this as one of several tasks; batch scripts (reserved ids) and shells are not."""
    names = ("SLURM_STEP_ID", _SLURM.world_size, _SLURM.rank)
    if "SLURM_PTY_PORT" in variables or not all(name in variables for name in names):
        return False
    step_id, num_tasks, rank = variables.need(names, "")
    return step_id < 0xFFFFFFF0 and rank < num_tasks and num_tasks > 1


def _master(
    variables: _Variables, one: _Launcher, local_size: int, world_size: int, found: str
) -> tuple[Optional[str], Optional[int]]:
    """Return (master_addr, master_port), the same on all ranks; derives missing ones for others than torchrun."""
    port, address = variables.number("MASTER_PORT"), variables.text("MASTER_ADDR")
    if port is not None and not 1 <= port <= 65535:
        raise LaunchError(
            f"{variables.shown('MASTER_PORT')} is not a port: ranks could not meet. Set MASTER_PORT "
            "to a free port from 1 to 65535."
        )
    if world_size == 1:
        return address, port
    if address is None and one.names is not TORCHRUN:
        nodelists = ("SLURM_STEP_NODELIST",) * (one.names is _SLURM) + ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
        name = next((name for name in nodelists if name in variables), "")
        is_local = local_size == world_size
        address = "127.0.0.1" if is_local else first_host(variables.text(name) or "", name) if name else None
    complete = (names for names in one.job_ids if all(name in variables for name in names))
    if port is None and (job_id := variables.shown(*next(complete, ()))):
        # Above the ports of system services, and below the ephemeral ports (on Linux from 32768).
        port = 15000 + zlib.crc32(job_id.encode()) % 15000
    missing = ["MASTER_ADDR"] * (address is None) + ["MASTER_PORT"] * (port is None)
    if missing:
        variables.missing(missing, found)
    return address, port
