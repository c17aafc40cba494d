"""Prints one line if a launched job's settings would make it slow or run out of memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple, Optional

from ddpshim.process import machine
from ddpshim.process.say import count, say_once, size


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


def on_cache(
    loaded_bytes: float,
    has_images: bool,
    num_ranks: int,
    num_workers: int,
    available_bytes: Optional[int],
    sharing_is_off: bool = False,
) -> Optional[str]:
    """Return advice if robomimic's hdf5_cache_mode="all", one copy per rank, needs more memory than available.

    Else None. Local.

    Measured with robomimic 0.3.0: a process holds 28 times the size of low-dim data on disk, 48 times after an
    epoch with workers (their reference counts unshare the pages), and 17 times the size of images.

    Args:
        loaded_bytes: the size of the loaded keys on disk.
        num_ranks: on this node; each has a copy.
        available_bytes: see :func:`ddpshim.process.machine.memory`; None is never exceeded.
        sharing_is_off: the option `node_memory` is off; otherwise ranks would share one copy.
    """
    factor = 17 if has_images else 48 if num_workers else 28
    needed = loaded_bytes * factor * num_ranks
    if available_bytes is None or needed <= available_bytes:
        return None
    return (
        f"hdf5_cache_mode='all' keeps {size(loaded_bytes)} of data about {factor} times as large in each of "
        f"{count(num_ranks, 'rank')}: {size(needed)}, where {size(available_bytes)} are available; the kernel "
        f"would kill a rank. {'Do not set node_memory=off, or use' if sharing_is_off else 'Use'} "
        "train.hdf5_cache_mode='low_dim' (images stay on disk), or null"
    )


def give(line: Optional[str]) -> None:
    """Print the advice, if there is one, once in this process. Local: for the main rank."""
    if line is not None:
        say_once(line)
