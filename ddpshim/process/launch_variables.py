"""Reads a rank's place in its job from torchrun's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Optional

from ddpshim.errors import LaunchError
from ddpshim.process.launch_env import HANG, TORCHRUN, LaunchEnv, Names
from ddpshim.variables import LAUNCHER


@dataclass(frozen=True)
class Variables:
    """The variables found."""

    values: Mapping[str, str]

    def shown(self, *names: str) -> str:
        return ", ".join(f"{name}={self.values[name]!r}" for name in names if name in self.values)

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

    def master(self) -> tuple[Optional[str], Optional[int]]:
        port = self.number("MASTER_PORT")
        if port is not None and not 1 <= port <= 65535:
            raise LaunchError(
                f"{self.shown('MASTER_PORT')} is not a port: ranks could not meet. Set MASTER_PORT "
                "to a free port from 1 to 65535."
            )
        return self.text("MASTER_ADDR"), port

    def missing(self, names: Sequence[str], found: str) -> NoReturn:
        wanted = " and ".join(names)
        raise LaunchError(
            f"{found} found, but {wanted} not set: this process would train alone, or {HANG}. Start the job with "
            f"torchrun, or export {wanted}; for one process unset what was found, or "
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
            raise LaunchError(
                f"{rank_name}={rank} is not below {size_name}={size}: {HANG}. "
                f"Correct {rank_name} or {size_name}, or let torchrun, mpirun or srun set both."
            )


def read_torchrun(variables: Variables) -> LaunchEnv:
    """Return the place of a rank of torchrun, or of one that was started by hand with torchrun's variables. Local."""
    found = variables.shown(LAUNCHER, *TORCHRUN)
    rank, world_size = variables.rank_and_world_size(TORCHRUN, found)
    master = variables.master()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables.values]
    if missing and world_size > 1:
        variables.missing(missing, found)
    local_rank, size, node_rank = read_local(variables, TORCHRUN, rank, world_size, found)
    stated = next((name for name in ("GROUP_RANK", "NODE_RANK") if name in variables.values), None)
    if stated is not None:
        (node_rank,) = variables.need([stated], found)
    agent_store = not missing and variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchEnv("torchrun", rank, local_rank, world_size, size, node_rank, *master, agent_store, found)


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
