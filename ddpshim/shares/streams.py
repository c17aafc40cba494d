"""Random numbers of ranks with shares: equal until the program splits them, and a line if noise is equal, too."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ddpshim.job.world import world
from ddpshim.process import messages
from ddpshim.process.devices import is_capturing
from ddpshim.process.job import current, derive_seed
from ddpshim.process.job_store import is_there
from ddpshim.process.observed import note, observe
from ddpshim.process.random_streams import rank_states, seed_own_streams
from ddpshim.process.say import ranks_called, say

_NUM_INTERVALS = 3  # between steps of optimizers; a permutation moves a stream between two epochs only


def draws_alike() -> bool:
    """Return whether ranks draw what one process would, because every rank holds whole batches. Local."""
    return world().world_size == 1 or current().door.computes_alike


def split_random_streams() -> None:
    """Give every rank its own random streams: noise, timesteps and dropout differ between ranks from now on.

    Local. Call it once all networks are built. From then on a permutation that each rank slices must come from equal
    streams: a `torch.Generator` with an equal seed, or `with ddpshim.shared_random_streams(epoch):`. Without this call
    ranks that are seeded equally draw equally, as with torch's DDP.

    The streams derive from `setup`'s seed, else from torch's. Does nothing the second time, without a launcher, or
    after `setup(batch="global")`.
    """
    here, job = world(), current()
    job.has_networks = True
    if job.is_split or not here.is_launched or draws_alike():
        return
    job.is_split = True
    base = here.seed if here.seed is not None else torch.initial_seed()
    seed_own_streams(derive_seed(base, "rank", here.rank))


def watch_noise() -> None:
    """Print a line, once, if ranks draw equal numbers in each of their first steps. Local; the main rank prints."""
    if not draws_alike() and world().options.guard:
        current().part(_EqualNoise)


class _EqualNoise:
    """Finds ranks that draw equal noise.

    Ranks leave hashes of their streams in the job's store, and the main rank reads them at a later step. So no rank
    waits, and an optimizer that steps on one rank alone blocks nobody.
    """

    def __init__(self) -> None:
        self._after: list[dict[str, str]] = []  # hashes of this rank's streams after each step
        self._is_done = False
        observe(current().at_end, after_step=self._after_step)

    def _after_step(self, *_: Any) -> None:
        here, after = world(), self._after
        if self._is_done or is_capturing(here.device):
            return
        if len(after) <= _NUM_INTERVALS:
            states = rank_states(here.device).items()
            after.append({name: hashlib.blake2b(messages.packed(state)).hexdigest() for name, state in states})
            if len(after) <= _NUM_INTERVALS:
                return
            moves = {name: sum(a.get(name) != b[name] for a, b in zip(after, after[1:])) for name in after[0]}
            noisy = {name: after[-1][name] for name, num in moves.items() if 2 * num > _NUM_INTERVALS}
            current().store.set(f"noise/{here.rank}", messages.packed(noisy))
        self._is_done = not here.is_main or self._has_judged(here.world_size)

    def _has_judged(self, world_size: int) -> bool:
        """Whether all ranks' states were there to judge. Local."""
        store, keys = current().store, [f"noise/{rank}" for rank in range(world_size)]
        if not all(is_there(store, key) for key in keys):
            return False
        of_ranks = [messages.unpacked(store.get(key), rank) for rank, key in enumerate(keys)]
        for name, state in of_ranks[0].items():
            alike = [rank for rank, theirs in enumerate(of_ranks) if theirs.get(name) == state]
            if len(alike) > 1:
                stream = {"random": "Python's", "numpy": "numpy's"}.get(name, "torch's")
                text = (
                    f"{ranks_called(alike)} use the same random numbers in each step ({stream}): equal noise and "
                    "dropout masks, as if there were fewer samples. Call ddpshim.split_random_streams() once all "
                    "networks are built; then draw what must be equal, as a permutation that each rank slices, from a "
                    "torch.Generator of your own"
                )
                note("guard", check="noise", passed=False, said=text)
                say(text)
                break
        return True
