"""Reads from a launcher's variables which process of which job this is."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Optional

from ddpshim.errors import LaunchError
from ddpshim.variables import LAUNCHER

EXIT_REQUEUE = 75  # EX_TEMPFAIL: saved and left because it was asked to; whoever launched it may start it again

_HANG = "torch would wait for ranks that never come, until its timeout"


class _Names(NamedTuple):
    """What a launcher calls the four numbers."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCHRUN = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ARGUMENTS = (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
# OMPI_COMM_WORLD_NODE_RANK is a rank *on* the node, not the node's index, so it is not read.
_OPENMPI = _Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_MVAPICH = _Names(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_PMI = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")

# mpirun inside a SLURM job starts its remote daemons in a step of their own: ranks on the first node and on
# the others see different SLURM_STEP_* values, so only the job's may decide what all ranks must agree on.
# The tasks of one srun do share a step, which may cover a part of the job's nodes and have neighbours there.
_JOB_NODELISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_JOB_IDS = {
    _OPENMPI: (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",), ("SLURM_JOB_ID",)),
    _MVAPICH: (("PMI_JOBID",), ("SLURM_JOB_ID",)),
    _PMI: (("PMI_JOBID",), ("SLURM_JOB_ID",)),
    _SLURM: (("SLURM_JOB_ID", "SLURM_STEP_ID"),),
}
_SIGNS = {
    "torchrun": _TORCHRUN[:3],
    "mpi": (*_OPENMPI[:2], *_MVAPICH[:2], *_PMI[:2]),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID"),
}


@dataclass(frozen=True)
class LaunchEnv:
    """This process's place in the job.

    ``master_addr`` and ``master_port`` are None without a launcher, and may be in a world of one.
    ``node_rank`` is a label, not to be computed with: SLURM and torchrun state it, elsewhere it supposes
    that ranks fill equal nodes in order, and is -1 where they visibly do not.
    ``agent_store``: torchrun's agent already serves the store at ``master_port``; rank 0 must not.
    ``reason``: one line, which variables decided, or why a scheduler's were ignored.
    ``in_allocation``: alone although a scheduler's variables are there; worth saying.
    """

    launcher: str  # "explicit" | "torchrun" | "openmpi" | "pmi" | "slurm" | "none"
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
        """Whether a launcher, or the caller's arguments, made this process part of a job (maybe of one)."""
        return self.launcher != "none"


@dataclass(frozen=True)
class _Variables:
    """The variables found, and the names in messages of those that are the caller's arguments."""

    values: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    def shown(self, *names: str) -> str:
        return ", ".join(f"{self.label(name)}={self.values[name]!r}" for name in names if name in self.values)

    def text(self, name: str) -> Optional[str]:
        value = self.values.get(name)
        if value is not None and not value.strip():
            raise LaunchError(f"{self.shown(name)} is empty: {_HANG}. Set {self.label(name)} or unset it.")
        return value

    def number(self, name: str) -> Optional[int]:
        value = self.values.get(name)
        if value is not None and not re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
            raise LaunchError(
                f"{self.shown(name)} is not a whole number from 0 up: {_HANG}. "
                f"Correct {self.label(name)}, or let torchrun, mpirun or srun set it."
            )
        return None if value is None else int(value)

    def master(self) -> tuple[Optional[str], Optional[int]]:
        port = self.number("MASTER_PORT")
        if port is not None and not 1 <= port <= 65535:
            raise LaunchError(
                f"{self.shown('MASTER_PORT')} is not a port: no rank could reach the rendezvous. "
                f"Set {self.label('MASTER_PORT')} to a free port from 1 to 65535."
            )
        return self.text("MASTER_ADDR"), port

    def missing(self, names: Sequence[str], found: str) -> NoReturn:
        wanted = " and ".join(self.label(name) for name in names)
        raise LaunchError(
            f"{found} found, but {wanted} not set: this process would train alone, or {_HANG}. Start "
            f"the job with torchrun, or {'pass' if self.labels else 'export'} {wanted}; for one process "
            "unset what was found, or export DDPSHIM_LAUNCHER=none (or force torchrun, slurm or mpi by it)."
        )

    def need(self, names: Sequence[str], found: str) -> list[int]:
        missing = [name for name in names if name not in self.values]
        if missing:
            self.missing(missing, found)
        return [number for number in map(self.number, names) if number is not None]

    def rank_and_world_size(self, names: _Names, found: str) -> tuple[int, int]:
        rank, world_size = self.need(names[:2], found)
        self.check_below(rank, names.rank, world_size, names.world_size)
        return rank, world_size

    def check_below(self, rank: int, rank_name: str, size: int, size_name: str) -> None:
        if rank >= size:
            names = self.label(rank_name), self.label(size_name)
            raise LaunchError(
                f"{names[0]}={rank} is not below {names[1]}={size}: {_HANG}. "
                f"Correct {names[0]} or {names[1]}, or let torchrun, mpirun or srun set both."
            )


def read_launch_env(
    environ: Mapping[str, str],
    *,
    rank: Optional[int] = None,
    world_size: Optional[int] = None,
    local_rank: Optional[int] = None,
    local_world_size: Optional[int] = None,
    master_addr: Optional[str] = None,
    master_port: Optional[int] = None,
) -> LaunchEnv:
    """This process's place in the job. Local: reads ``environ`` only, opens no socket, writes nothing.

    The first that applies decides: the arguments (``rank`` and ``world_size`` together); DDPSHIM_LAUNCHER =
    torchrun, slurm, mpi or none; torchrun's variables; Open MPI's; PMI's (MPICH, Intel MPI, MVAPICH); a
    SLURM step of several tasks. Else one process. Inside a SLURM allocation but outside such a step the
    process is alone: SLURM_JOB_ID and SLURM_NTASKS=4 by themselves give rank 0 of 1; ``reason`` says why.

    Raises LaunchError where variables are missing, are no numbers or contradict each other.
    """
    arguments = (rank, world_size, local_rank, local_world_size, master_addr, master_port)
    given = {name: str(value) for name, value in zip(_ARGUMENTS, arguments) if value is not None}
    if given:
        return _read_explicit(environ, given)
    variables = _Variables(environ)
    forced = variables.shown(LAUNCHER) if environ.get(LAUNCHER) else ""
    seen = (launcher for launcher, names in _SIGNS.items() if any(name in environ for name in names))
    launcher = environ.get(LAUNCHER) or next(seen, "none")
    if launcher == "torchrun":
        return _read_torchrun(variables, launcher, variables.shown(LAUNCHER, *_TORCHRUN))
    if launcher == "mpi":
        return _read_mpi(variables, forced)
    if launcher == "slurm":
        return _read_slurm(variables, launcher, forced)
    if launcher == "none":
        reason = f"{forced or 'no launcher variable was seen'}, so this process runs alone"
        return LaunchEnv("none", 0, 0, 1, 1, 0, None, None, False, reason)
    raise LaunchError(
        f"{forced} is no launcher: this process would have to guess its rank, and {_HANG}. "
        "Set DDPSHIM_LAUNCHER to torchrun, slurm, mpi or none, or unset it."
    )


def read_num_restarts(environ: Mapping[str, str]) -> int:
    """How often torchrun (--max-restarts) or SLURM (a requeue) has started this very job before. Local.

    >>> read_num_restarts({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "0"})
    2
    """
    counts = [environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    return max(int(count) if count.isdigit() else 0 for count in counts)


def _read_explicit(environ: Mapping[str, str], given: Mapping[str, str]) -> LaunchEnv:
    labels = {name: name.lower() for name in _ARGUMENTS}
    found = f"arguments {_Variables(given, labels).shown(*given)}"
    overridden = [name for name in given if environ.get(name, given[name]) != given[name]]
    if overridden:
        found += f" (not {_Variables(environ).shown(*overridden)})"
    # A world of one has nobody to meet, least of all at the address of the job around it.
    inherited = [] if given.get("WORLD_SIZE") == "1" else ["MASTER_ADDR", "MASTER_PORT"]
    # LOCAL_RANK and its kind belong to the rank that they were set for. Where the arguments only repeat
    # RANK and WORLD_SIZE they hold; next to another rank they would select another process's GPU.
    if all(environ.get(name) == given.get(name, "") for name in ("RANK", "WORLD_SIZE")):
        inherited += ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    # The agent serves its own address only; at any other, rank 0 has to.
    master = {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in given}
    if master == {name: environ.get(name) for name in master}:
        inherited += ["TORCHELASTIC_USE_AGENT_STORE"]
    values = {name: environ[name] for name in inherited if name in environ}
    labels = {name: name.lower() for name in _ARGUMENTS if name in given or name not in values}
    return _read_torchrun(_Variables({**values, **given}, labels), "explicit", found)


def _read_torchrun(variables: _Variables, launcher: str, found: str) -> LaunchEnv:
    rank, world_size = variables.rank_and_world_size(_TORCHRUN, found)
    master = variables.master()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables.values]
    if missing and world_size > 1:
        variables.missing(missing, found)
    local_rank, size, node_rank = _read_local(variables, _TORCHRUN, rank, world_size, found)
    if "GROUP_RANK" in variables.values:
        (node_rank,) = variables.need(["GROUP_RANK"], found)
    agent_store = not missing and variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchEnv(launcher, rank, local_rank, world_size, size, node_rank, *master, agent_store, found)


def _read_mpi(variables: _Variables, forced: str = "") -> LaunchEnv:
    known = (_OPENMPI, _MVAPICH, _PMI)
    names = next((names for names in known if any(name in variables.values for name in names[:2])), None)
    if names is None:
        variables.missing([f"{_OPENMPI.rank} (or {_MVAPICH.rank}, {_PMI.rank})"], forced)
    launcher = "openmpi" if names is _OPENMPI else "pmi"
    found = variables.shown(LAUNCHER, *names)
    rank, world_size = variables.rank_and_world_size(names, found)
    # srun sets PMI_* too, in interactive shells as well, and leaves the local rank to SLURM_LOCALID. Under
    # mpiexec, SLURM_* number its daemons and not the ranks: hence the comparison.
    in_step = (variables.number(_SLURM.rank), variables.number(_SLURM.world_size)) == (rank, world_size)
    if names is _PMI and _PMI.local_rank not in variables.values and in_step:
        return _read_slurm(variables, launcher, forced)
    local_rank, size, node_rank = _read_local(variables, names, rank, world_size, found)
    master = _read_master(variables, names, world_size, size, found)
    return LaunchEnv(launcher, rank, local_rank, world_size, size, node_rank, *master, False, found)


def _read_slurm(variables: _Variables, launcher: str, forced: str = "") -> LaunchEnv:
    if not forced and not _is_slurm_step(variables):
        seen = variables.shown("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_ID", *_SLURM[:2], "SLURM_PTY_PORT")
        reason = f"SLURM variables ({seen}), but not of an srun with several tasks: this process runs alone"
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
            f"{shown} do not fit together (as '2(x3),1', 7 and 3 do): ranks would share a GPU, or "
            f"{_HANG}. Start the job with srun, or with torchrun on each node."
        )
    size = num_tasks[node_rank]
    variables.check_below(local_rank, _SLURM.local_rank, size, _SLURM.local_world_size)
    master = _read_master(variables, _SLURM, world_size, size, found)
    return LaunchEnv(launcher, rank, local_rank, world_size, size, node_rank, *master, False, found)


def _is_slurm_step(variables: _Variables) -> bool:
    """Whether srun started this as one of several tasks; batch scripts (reserved ids) and shells are not."""
    names = ("SLURM_STEP_ID", _SLURM.world_size, _SLURM.rank)
    if "SLURM_PTY_PORT" in variables.values or not all(name in variables.values for name in names):
        return False
    step_id, num_tasks, rank = variables.need(names, "")
    return step_id < 0xFFFFFFF0 and rank < num_tasks and num_tasks > 1


def _read_local(variables: _Variables, names: _Names, rank: int, world_size: int, found: str) -> tuple[int, int, int]:
    """(local_rank, local_world_size, node_rank); derived only if surely all on one machine."""
    local_rank, size = variables.number(names.local_rank), variables.number(names.local_world_size)
    loopback = r"localhost(\.localdomain)?|127(\.[0-9]+){3}|::1"
    if size is None and (world_size == 1 or re.fullmatch(loopback, variables.text("MASTER_ADDR") or "")):
        size = world_size
    if local_rank is None and size == world_size:
        local_rank = rank
    if local_rank is None or size is None:
        variables.missing([name for name in names[2:] if name not in variables.values], found)
    variables.check_below(local_rank, names.local_rank, size, names.local_world_size)
    if size > world_size:
        raise LaunchError(
            f"{variables.shown(names.local_world_size)} exceeds {variables.shown(names.world_size)}: "
            f"{_HANG}. Correct one of the two, or let torchrun, mpirun or srun set both."
        )
    in_order = world_size % size == 0 and rank % size == local_rank
    return local_rank, size, rank // size if in_order else -1


def _read_master(
    variables: _Variables, names: _Names, world_size: int, local_world_size: int, found: str
) -> tuple[Optional[str], Optional[int]]:
    """(master_addr, master_port), the same on all ranks, for launchers that do not say them."""
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
        # Clear of system services, and below the range of ephemeral ports (on Linux from 32768).
        master_port = 15000 + zlib.crc32(job_id.encode()) % 15000
    missing = ["MASTER_ADDR"] * (master_addr is None) + ["MASTER_PORT"] * (master_port is None)
    if missing:
        variables.missing(missing, found)
    return master_addr, master_port


def expand_nodelist(nodelist: str) -> list[str]:
    """The host names of a SLURM hostlist, in order: ``"gpu[001-002,7]-ib,login1"`` is ``gpu001-ib``,
    ``gpu002-ib``, ``gpu7-ib``, ``login1``. Of several brackets in a name the last runs fastest.

    Raises LaunchError if it is no hostlist.
    """
    host_pattern = r"(?:[^\[\],\s]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"
    is_valid = re.fullmatch(f"{host_pattern}(?:,{host_pattern})*", nodelist) is not None
    hosts: list[str] = []
    for host in re.findall(host_pattern, nodelist):
        # Of the parts, every second is the inside of a bracket.
        parts = enumerate(re.split(r"\[([^\]]*)\]", host))
        choices = [_expand_ranges(part) if index % 2 else [part] for index, part in parts]
        is_valid = is_valid and all(choices)
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    if not is_valid:
        raise LaunchError(
            f"nodelist {nodelist!r} is no SLURM hostlist: ranks would not find rank 0, and {_HANG}. "
            "Correct it (as in 'gpu[001-003,07]'), or export MASTER_ADDR."
        )
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    """The numbers of one bracket, padded as written; none if a range runs downwards."""
    ends = [part.split("-") for part in ranges.split(",")]
    if any(int(end[0]) > int(end[-1]) for end in ends):
        return []
    return [str(n).zfill(len(end[0])) for end in ends for n in range(int(end[0]), int(end[-1]) + 1)]


def _is_this_machine(host: str) -> bool:
    """Whether a socket can be bound to ``host``; not so for a name that does not resolve."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def check_port(env: LaunchEnv) -> None:
    """Nothing, if rank 0 can serve ``master_port`` or need not. Local: binds a socket on rank 0, briefly.

    Raises LaunchError if this process has to serve the port on this machine and it is taken, or privileged.
    """
    if env.rank != 0 or env.world_size == 1 or env.agent_store:
        return
    if env.master_addr is None or env.master_port is None or not _is_this_machine(env.master_addr):
        return
    # torch listens on all interfaces, in IPv6 where it can and else in IPv4.
    for family, any_address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                # As torch does: a port in TIME_WAIT is free. On Windows the option would share a taken port.
                if os.name == "posix":
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # Never listen: a rank that connected already would be cut off.
                probe.bind((any_address, env.master_port))
        except OSError as error:
            # Any other error means that this machine lacks the family; torch then takes the other one.
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise LaunchError(
                    f"MASTER_PORT={env.master_port} of MASTER_ADDR={env.master_addr!r} cannot be served "
                    f"({error.strerror}): ranks would fail, or wait at another program until torch's "
                    "timeout. Set MASTER_PORT to a free port (torchrun: --master-port, or --standalone)."
                ) from error
