"""Reads this process's place in its job (rank, world size, address) from the launcher's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Optional

from ddpshim.errors import LaunchError
from ddpshim.variables import LAUNCHER

EXIT_REQUEUE = 75  # EX_TEMPFAIL: the run was asked to stop, and saved; the launcher may start it again

# The variable that names a job: the variable that counts its restarts.
_JOB_NAMES = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT"}

HANG = "torch would wait for missing ranks until its timeout"


class Names(NamedTuple):
    """A launcher's variables for a process's place in its job."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCHRUN = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ARGUMENTS = (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
PLACE = (*_ARGUMENTS, "GROUP_RANK")  # torchrun's variables for a process's place in its job
_SIGNS = {
    "torchrun": _TORCHRUN[:3],
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

    launcher: str  # "explicit" | "torchrun" | "openmpi" | "pmi" | "submitit" | "slurm" | "none"
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
        """Whether a launcher, or the caller's arguments, made this process a rank of a job (even of a single rank)."""
        return self.launcher != "none"


@dataclass(frozen=True)
class Variables:
    """The variables found, and the names that messages use for the caller's arguments."""

    values: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    def shown(self, *names: str) -> str:
        return ", ".join(f"{self.label(name)}={self.values[name]!r}" for name in names if name in self.values)

    def text(self, name: str) -> Optional[str]:
        value = self.values.get(name)
        if value is not None and not value.strip():
            raise LaunchError(f"{self.shown(name)} is empty: {HANG}. Set {self.label(name)} or unset it.")
        return value

    def number(self, name: str) -> Optional[int]:
        value = self.values.get(name)
        if value is not None and not re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
            raise LaunchError(
                f"{self.shown(name)} is not a whole number of at least 0: {HANG}. Correct {self.label(name)}, or let "
                "torchrun, mpirun or srun set it."
            )
        return None if value is None else int(value)

    def master(self) -> tuple[Optional[str], Optional[int]]:
        port = self.number("MASTER_PORT")
        if port is not None and not 1 <= port <= 65535:
            raise LaunchError(
                f"{self.shown('MASTER_PORT')} is not a port: ranks could not meet. Set {self.label('MASTER_PORT')} "
                "to a free port from 1 to 65535."
            )
        return self.text("MASTER_ADDR"), port

    def missing(self, names: Sequence[str], found: str) -> NoReturn:
        wanted = " and ".join(self.label(name) for name in names)
        raise LaunchError(
            f"{found} found, but {wanted} not set: this process would train alone, or {HANG}. Start the job with "
            f"torchrun, or {'pass' if self.labels else 'export'} {wanted}; for one process unset what was found, or "
            "export DDPSHIM_LAUNCHER=none (torchrun, slurm or mpi force that launcher)."
        )

    def need(self, names: Sequence[str], found: str) -> list[int]:
        missing = [name for name in names if name not in self.values]
        if missing:
            self.missing(missing, found)
        return [number for number in map(self.number, names) if number is not None]

    def rank_and_world_size(self, names: Names, found: str) -> tuple[int, int]:
        rank, world_size = self.need(names[:2], found)
        self.check_below(rank, names.rank, world_size, names.world_size)
        return rank, world_size

    def check_below(self, rank: int, rank_name: str, size: int, size_name: str) -> None:
        if rank >= size:
            names = self.label(rank_name), self.label(size_name)
            raise LaunchError(
                f"{names[0]}={rank} is not below {names[1]}={size}: {HANG}. "
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
    """Return this process's place in the job. Local: reads ``environ`` only, opens no socket, writes nothing.

    The first that applies decides: the arguments (``rank`` and ``world_size`` together); DDPSHIM_LAUNCHER =
    torchrun, slurm, mpi, submitit or none; torchrun's variables; Open MPI's; PMI's (MPICH, Intel MPI, MVAPICH);
    those of submitit's local executor; a SLURM step of several tasks. Else it is a single process, also inside a
    SLURM allocation: SLURM_JOB_ID and SLURM_NTASKS=4 without a step give rank 0 of 1, and ``reason`` says why.

    Raises LaunchError if variables are missing, are not numbers or contradict each other.
    """
    arguments = (rank, world_size, local_rank, local_world_size, master_addr, master_port)
    given = {name: str(value) for name, value in zip(_ARGUMENTS, arguments) if value is not None}
    if given:
        return _read_explicit(environ, given)
    variables = Variables(environ)
    forced = variables.shown(LAUNCHER) if environ.get(LAUNCHER) else ""
    seen = (launcher for launcher, names in _SIGNS.items() if any(name in environ for name in names))
    launcher = environ.get(LAUNCHER) or next(seen, "none")
    if launcher == "torchrun":
        return _read_torchrun(variables, launcher, variables.shown(LAUNCHER, *_TORCHRUN))
    if launcher in ("mpi", "submitit", "slurm"):
        from ddpshim.job import schedulers  # not needed under torchrun

        if launcher == "mpi":
            return schedulers.read_mpi(variables, forced)
        if launcher == "submitit":
            return schedulers.read_submitit(variables, forced)
        return schedulers.read_slurm(variables, launcher, forced)
    if launcher == "none":
        reason = f"{forced or 'no launcher variable was seen'}, so this is a single process"
        return LaunchEnv("none", 0, 0, 1, 1, 0, None, None, False, reason)
    raise LaunchError(
        f"{forced} is not a launcher: this process would have to guess its rank, and {HANG}. Set DDPSHIM_LAUNCHER "
        "to torchrun, slurm, mpi, submitit or none, or unset it."
    )


def read_num_restarts(environ: Mapping[str, str]) -> int:
    """How often torchrun (--max-restarts) or SLURM (a requeue) has restarted this job. Local.

    >>> read_num_restarts({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "0"})
    2
    """
    return max(_read_counts(environ).values())


def read_job_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Return SLURM's and torchrun's names of this job, by variable; a restart keeps them. Local."""
    return {name: environ.get(name, "") for name in _JOB_NAMES}


def is_start_of(names: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return False if this is a restart of a job with another name, else True, also if that is unknown. Local."""
    counts = _read_counts(environ)
    name = next((name for name in _JOB_NAMES if counts[name]), "")
    return names.get(name, "") in ("", environ.get(name, "")) or not environ.get(name)


def _read_counts(environ: Mapping[str, str]) -> dict[str, int]:
    """Return how often each launcher has restarted the job, by the variable that names the job."""
    counts = {name: environ.get(count, "") for name, count in _JOB_NAMES.items()}
    return {name: int(count) if re.fullmatch("[0-9]{1,9}", count) else 0 for name, count in counts.items()}


def _read_explicit(environ: Mapping[str, str], given: Mapping[str, str]) -> LaunchEnv:
    labels = {name: name.lower() for name in _ARGUMENTS}
    found = f"arguments {Variables(given, labels).shown(*given)}"
    overridden = [name for name in given if environ.get(name, given[name]) != given[name]]
    if overridden:
        found += f" (not {Variables(environ).shown(*overridden)})"
    # A world of one needs no address, and must not use that of the job in which it runs.
    inherited = [] if given.get("WORLD_SIZE") == "1" else ["MASTER_ADDR", "MASTER_PORT"]
    # LOCAL_RANK and the like belong to the rank that they were set for: use them only if the arguments repeat
    # RANK and WORLD_SIZE. With another rank they would select another process's GPU.
    if all(environ.get(name) == given.get(name, "") for name in ("RANK", "WORLD_SIZE")):
        inherited += ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    # torchrun's agent serves the store at its own address only; at any other, rank 0 must serve it.
    master = {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in given}
    if master == {name: environ.get(name) for name in master}:
        inherited += ["TORCHELASTIC_USE_AGENT_STORE"]
    values = {name: environ[name] for name in inherited if name in environ}
    labels = {name: name.lower() for name in _ARGUMENTS if name in given or name not in values}
    return _read_torchrun(Variables({**values, **given}, labels), "explicit", found)


def _read_torchrun(variables: Variables, launcher: str, found: str) -> LaunchEnv:
    rank, world_size = variables.rank_and_world_size(_TORCHRUN, found)
    master = variables.master()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables.values]
    if missing and world_size > 1:
        variables.missing(missing, found)
    local_rank, size, node_rank = read_local(variables, _TORCHRUN, rank, world_size, found)
    stated = next((name for name in ("GROUP_RANK", "NODE_RANK") if name in variables.values), None)
    if stated is not None:
        (node_rank,) = variables.need([stated], found)
    agent_store = not missing and variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchEnv(launcher, rank, local_rank, world_size, size, node_rank, *master, agent_store, found)


def read_local(variables: Variables, names: Names, rank: int, world_size: int, found: str) -> tuple[int, int, int]:
    """Return (local_rank, local_world_size, node_rank); derives missing ones only from NNODES, or if all ranks are
    certainly on one machine. Local."""
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
        variables.missing([name for name in names[2:] if name not in variables.values], found)
    variables.check_below(local_rank, names.local_rank, size, names.local_world_size)
    if size > world_size:
        raise LaunchError(
            f"{variables.shown(names.local_world_size)} exceeds {variables.shown(names.world_size)}: "
            f"{HANG}. Correct one of the two, or let torchrun, mpirun or srun set both."
        )
    in_order = world_size % size == 0 and rank % size == local_rank
    return local_rank, size, rank // size if in_order else -1
