"""Reads a rank's place in its job from variables; loaded only if a launcher's are set. torchrun's are read here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Callable, NoReturn, Optional

from ddpshim.errors import LaunchError
from ddpshim.process.launch_env import HANG, TORCHRUN, LaunchEnv, Names
from ddpshim.variables import LAUNCHER

Address = tuple[Optional[str], Optional[int]]


def read(launcher: str, environ: Mapping[str, str], forced: str) -> LaunchEnv:
    """Return the place of a rank that `launcher` started. Local. `forced`: the value of DDPSHIM_LAUNCHER, if set.

    Raises LaunchError if variables are missing, are not numbers or contradict each other.
    """
    variables = Variables(environ)
    if launcher != "torchrun":
        from ddpshim.process import schedulers

        return schedulers.read(launcher, variables, forced)
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
