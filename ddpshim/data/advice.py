"""Prints one line if a launched job's settings would make it slow."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple, Optional

from ddpshim.process import machine
from ddpshim.process.say import count, say_once


class Share(NamedTuple):
    """What one rank needs from its machine, and the cores that it may use there."""

    host: str
    num_machine_cores: int
    cores: frozenset[int]
    quota: Optional[float]
    num_workers: int


def own_share(num_workers: int) -> Share:
    """Return this process's Share. Local."""
    return Share(socket.gethostname(), os.cpu_count() or 1, machine.cores(), machine.core_quota(), num_workers)


def on_workers(shares: Sequence[Share]) -> Optional[str]:
    """Return advice if the first rank's node has fewer cores than ranks and data workers, else None. Local.

    Ranks may be bound to their own cores, so the union counts. 4 ranks with 8 workers each, on 16 cores, are 36
    processes; with 3 workers, 16.
    """
    here = [share for share in shares if share.host == shares[0].host]
    num_workers = max(share.num_workers for share in here)
    num_processes = sum(1 + share.num_workers for share in here)
    num_cores = machine.num_usable(frozenset().union(*(share.cores for share in here)), here[0].quota)
    if num_workers == 0 or num_processes <= num_cores:
        return None
    most = here[0].num_machine_cores
    of_more = f" (of the machine's {most}; an affinity or a quota excludes the others)" if most > num_cores else ""
    return (
        f"{count(len(here), 'rank')} x {count(num_workers, 'worker')} on {count(num_cores, 'core')}{of_more}: "
        f"{num_processes} processes compete for cores and slow each other down; use "
        f"num_workers={max(0, num_cores // len(here) - 1)} (robomimic: train.num_data_workers)"
    )


def give(line: Optional[str]) -> None:
    """Print the advice, if there is one, once in this process. Local: for the main rank."""
    if line is not None:
        say_once(line)
