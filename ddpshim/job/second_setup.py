"""Answers a second `setup()` of a process with the existing World, unless its arguments contradict the first call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ddpshim.errors import WorldError
from ddpshim.job.world import World
from ddpshim.process.job import Job
from ddpshim.process.seeds import seed_everything


def reuse(job: Job, made: World, asked: dict[str, Any]) -> World:
    """Return the existing World, with `seed` if it had none; raise WorldError if the arguments contradict it."""
    seed = asked["seed"]
    if seed is None or made.seed is not None:
        check_same(made, asked)
        return made
    if job.is_split:
        raise WorldError(
            f"setup(seed={seed}) after the ranks got their own random streams: networks were built without that "
            "seed, and every rank would now draw the same noise. Give the seed to the first setup()."
        )
    made = replace(made, seed=seed)
    check_same(made, asked)
    job.world = made
    seed_everything(seed)
    return made


def check_same(made: World, asked: dict[str, Any]) -> None:
    """Raise WorldError if arguments of `setup` contradict the existing world."""
    for name, value in asked.items():
        existing = getattr(made, name)
        if name == "device" and value is not None:
            value = torch.device(value)
            existing = existing if value.index is not None else torch.device(existing.type)
        if None not in (value, existing) and value != existing:
            raise WorldError(
                f"setup({name}={str(value)!r}), but there is a world with {name}={str(existing)!r} already: one part "
                "of the program would rely on the one, another part on the other. Call setup once, or cleanup() "
                "before the second call."
            )
