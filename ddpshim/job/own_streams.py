"""Decides whether ranks draw what one process would, and gives each rank random streams of its own if not."""

from __future__ import annotations

import torch

from ddpshim.job.group import world
from ddpshim.process.job import current
from ddpshim.process.random_streams import seed_own_streams
from ddpshim.process.seeds import derive_seed


def draws_alike() -> bool:
    """Return whether ranks draw what one process would, because their batches are shares of its batches. Local."""
    here = world()
    return here.options.noise != "per_rank" and (here.world_size == 1 or not current().has_own_batches)


def split_random_streams() -> None:
    """Give every rank its own random streams: noise, timesteps and dropout differ between ranks from now on.

    Local. Does nothing the second time, without a launcher, or if ranks draw what one process would (option noise). The
    streams derive from `setup`'s seed, else from torch's. Call it after all networks are built; `wrap_parallel` does.
    """
    here, job = world(), current()
    job.has_networks = True
    if job.is_split or not here.is_launched or draws_alike():
        return
    job.is_split = True
    if here.options.noise != "per_rank" and here.is_main:
        return  # the main rank keeps the streams of one process
    base = here.seed if here.seed is not None else torch.initial_seed()
    seed_own_streams(derive_seed(base, "rank", here.rank))


def use_own_batches() -> None:
    """Record that ranks train on batches that are not shares of one process's: each gets its own random streams. Local.

    It gets them now if a network is wrapped already, else when the first one is.
    """
    job = current()
    job.has_own_batches = True
    if job.has_networks:
        split_random_streams()
