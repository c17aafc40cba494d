"""Gives each rank random streams of its own, or one process's to all, where every rank holds whole batches."""

from __future__ import annotations

import torch

from ddpshim.job.world import world
from ddpshim.process.job import current, derive_seed
from ddpshim.process.random_streams import seed_own_streams


def draws_alike() -> bool:
    """Return whether ranks draw what one process would, because every rank holds whole batches. Local."""
    return world().world_size == 1 or current().door.draws_alike


def split_random_streams() -> None:
    """Give every rank its own random streams: noise, timesteps and dropout differ between ranks from now on.

    Local. Does nothing the second time, without a launcher, or after `setup(batch="global")`. The streams derive from
    `setup`'s seed, else from torch's. Call it after all networks are built; `wrap_parallel` does.
    """
    here, job = world(), current()
    job.has_networks = True
    if job.is_split or not here.is_launched or draws_alike():
        return
    job.is_split = True
    base = here.seed if here.seed is not None else torch.initial_seed()
    seed_own_streams(derive_seed(base, "rank", here.rank))
