"""Reads a rank's place in its job from the variables of torchrun, MPI, SLURM and submitit, and SLURM's list of nodes.

Loaded only if a launcher's variables are set.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple, NoReturn, Optional

from ddpshim.errors import LaunchError
from ddpshim.process.place import HANG, SLURM, TORCHRUN, LaunchEnv, Names, alone
from ddpshim.variables import LAUNCHER

Address = tuple[Optional[str], Optional[int]]


class _Launcher(NamedTuple):
    name: str  # as `World.launcher`
    names: Names
    job_ids: tuple[tuple[str, ...], ...] = ()  # variables that together name the job; the first complete set is used
    nodelists: tuple[str, ...] = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")  # the first that is set is used


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
_SRUN = _Launcher(
    "slurm",
    SLURM,
    (("SLURM_JOB_ID", "SLURM_STEP_ID"),),
    ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
)
_LAUNCHERS = {  # by DDPSHIM_LAUNCHER
    "mpi": [
        _Launcher("openmpi", _OPENMPI, (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",), ("SLURM_JOB_ID",))),
        _Launcher("pmi", _MVAPICH, _OF_PMI),
        _Launcher("pmi", _PMI, _OF_PMI),
    ],
    "submitit": [_Launcher("submitit", _SUBMITIT, (("SUBMITIT_LOCAL_JOB_ID",),))],
    "slurm": [_SRUN],
}


def read(launcher: str, environ: Mapping[str, str], forced: str) -> LaunchEnv:
    """Return the place of a rank that `launcher` started. Local. `forced`: the value of DDPSHIM_LAUNCHER, if set.

    Raises LaunchError if variables are missing, are not numbers or contradict each other.
    """
    variables = Variables(environ)
    if launcher != "torchrun":
        return _read_others(launcher, variables, forced)
    found = variables.shown(LAUNCHER, *TORCHRUN)
    rank, world_size = variables.rank_and_size(TORCHRUN, found)
    place = variables.local(TORCHRUN, rank, world_size, found)
    master = variables.master(world_size, found)
    agents = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True" and None not in master
    return LaunchEnv(launcher, rank, place[0], world_size, *place[1:], *master, agents, found)


class Variables:
    """The variables that were found."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def shown(self, *names: str) -> str:
        return ", ".join(f"{name}={self.values[name]!r}" for name in dict.fromkeys(names) if name in self.values)

    def text(self, name: str) -> Optional[str]:
        value = self.values.get(name)
        if value is not None and not value.strip():
            raise LaunchError(f"{self.shown(name)} is empty: {HANG}. Set {name} or unset it.")
        return value

    def number(self, name: str) -> Optional[int]:
        value = self.values.get(name)
        if value is not None and not re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
            raise LaunchError(
                f"{self.shown(name)} is not a whole number of at least 0: {HANG}. Correct {name}, or let "
                "torchrun, mpirun or srun set it."
            )
        return None if value is None else int(value)

    def need(self, names: Sequence[str], found: str) -> list[int]:
        missing = [name for name in names if name not in self.values]
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

    def rank_and_size(self, names: Names, found: str) -> tuple[int, int]:
        rank, world_size = self.need(names[:2], found)
        self.check_below(rank, names.rank, world_size, names.world_size)
        return rank, world_size

    def local(self, names: Names, rank: int, world_size: int, found: str) -> tuple[int, int, int]:
        """Return (local_rank, local_world_size, node_rank); derives missing ones only from NNODES, or if all ranks are
        certainly on one machine."""
        local_rank, size = self.number(names.local_rank), self.number(names.local_world_size)
        num_nodes = self.number("NNODES")
        if size is None and num_nodes and world_size % num_nodes == 0:  # started by hand, on equal nodes
            size = world_size // num_nodes
        loopback = r"localhost(\.localdomain)?|127(\.[0-9]+){3}|::1"
        if size is None and (world_size == 1 or re.fullmatch(loopback, self.text("MASTER_ADDR") or "")):
            size = world_size
        if local_rank is None and size == world_size:
            local_rank = rank
        if local_rank is None or size is None:
            self.missing([name for name in names[2:] if name not in self.values], found)
        self.check_below(local_rank, names.local_rank, size, names.local_world_size)
        if size > world_size:
            raise LaunchError(
                f"{self.shown(names.local_world_size)} exceeds {self.shown(names.world_size)}: "
                f"{HANG}. Correct one of the two, or let torchrun, mpirun or srun set both."
            )
        in_order = world_size % size == 0 and rank % size == local_rank
        stated = [name for name in ("GROUP_RANK", "NODE_RANK") if names is TORCHRUN and name in self.values]
        node_rank = self.need(stated, found)[0] if stated else rank // size if in_order else -1
        return local_rank, size, node_rank

    def master(
        self, world_size: int, found: str, derived: Callable[[Optional[str], Optional[int]], Address] = lambda *set: set
    ) -> Address:
        """Return (master_addr, master_port), the same on all ranks; `derived` completes them."""
        port, address = self.number("MASTER_PORT"), self.text("MASTER_ADDR")
        if port is not None and not 1 <= port <= 65535:
            raise LaunchError(
                f"{self.shown('MASTER_PORT')} is not a port: ranks could not meet. Set MASTER_PORT "
                "to a free port from 1 to 65535."
            )
        if world_size == 1:
            return address, port
        address, port = derived(address, port)
        missing = ["MASTER_ADDR"] * (address is None) + ["MASTER_PORT"] * (port is None)
        if missing:
            self.missing(missing, found)
        return address, port


def _read_others(launcher: str, variables: Variables, forced: str) -> LaunchEnv:
    """Return the place of a rank that `launcher`, not torchrun, started; see `read`. Local.

    One task of submitit, and a process of a SLURM allocation that is no task of srun, are single processes unless
    `forced`.
    """
    known = _LAUNCHERS[launcher]
    one = next((one for one in known if any(name in variables.values for name in one.names[:2])), None)
    if one is None and launcher == "mpi":
        variables.missing([f"{_OPENMPI.rank} (or {_MVAPICH.rank}, {_PMI.rank})"], forced)
    one = one or known[0]
    # srun sets PMI_* too, but the local rank only in SLURM_LOCALID. Under mpiexec, SLURM_* number its daemons and not
    # the ranks: hence the comparison.
    is_pmi_alone = one.names is _PMI and _PMI.local_rank not in variables.values
    if is_pmi_alone and all(variables.number(of) == variables.number(its) for of, its in zip(_PMI[:2], SLURM)):
        one = _SRUN._replace(name=one.name)
    if one.names is SLURM and not forced and not is_in_step(variables):
        seen = variables.shown("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_ID", *SLURM[:2], "SLURM_PTY_PORT")
        reason = f"SLURM variables ({seen}), but not of an srun with several tasks: this is a single process"
        return alone(reason, in_allocation=True)
    found = variables.shown(LAUNCHER, *itertools.chain(*one.job_ids), *one.names)
    rank, world_size = variables.rank_and_size(one.names, found)
    if launcher == "submitit" and world_size == 1 and not forced:
        return alone(f"one task of submitit ({found})")
    read_local = _local if one.names is SLURM else Variables.local
    local_rank, size, node_rank = read_local(variables, one.names, rank, world_size, found)

    def derived(address: Optional[str], port: Optional[int]) -> Address:
        name = next((name for name in one.nodelists if name in variables.values), "")
        if address is None and size == world_size:
            address = "127.0.0.1"
        elif address is None and name:
            address = first_host(variables.text(name) or "", name)
        complete = (names for names in one.job_ids if all(name in variables.values for name in names))
        job_id = variables.shown(*next(complete, ()))
        if port is None and job_id:
            # Above the ports of system services, and below the ephemeral ports (on Linux from 32768).
            port = 15000 + zlib.crc32(job_id.encode()) % 15000
        return address, port

    master = variables.master(world_size, found, derived)
    return LaunchEnv(one.name, rank, local_rank, world_size, size, node_rank, *master, False, found)


def is_in_step(variables: Variables) -> bool:
    """Return whether srun started this as one of several tasks; batch scripts (reserved ids) and shells are not."""
    names = ("SLURM_STEP_ID", SLURM.world_size, SLURM.rank)
    if "SLURM_PTY_PORT" in variables.values or not all(name in variables.values for name in names):
        return False
    step_id, num_tasks, rank = variables.need(names, "")
    return step_id < 0xFFFFFFF0 and rank < num_tasks and num_tasks > 1


def _local(variables: Variables, names: Names, rank: int, world_size: int, found: str) -> tuple[int, int, int]:
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
