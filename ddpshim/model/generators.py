"""Compares random generators other than torch's global ones: Python's, numpy's, and those that a program owns."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.job.own_streams import draws_alike
from ddpshim.process.job import current
from ddpshim.process.say import say


def states_of_others() -> list[int]:
    """Return hashes of Python's and numpy's global generators; without numpy this rank's number. Local."""
    numpy, of_numpy = sys.modules.get("numpy"), dist.get_rank()
    if numpy is not None:
        _, key, *others = numpy.random.get_state()
        of_numpy = zlib.crc32(key.tobytes() + repr(others).encode())
    return [zlib.crc32(repr(random.getstate()).encode()), of_numpy]


class PrivateGenerators:
    """The generators in a network's or the main file's attributes that were used since the last look.

    If one draws equally on all ranks, different samples get the same noise, because ddpshim divides only the draws of
    torch's functions and numpy's global ones. This may be intended (an equal decision), so it is only reported.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._used: list[str] = []
        self._is_named = False

    def states_if_used(self, module: nn.Module) -> int:
        """Return a hash of the states that have changed since the last call; 0 if none has. Local."""
        now = {name: zlib.crc32(repr(_state(generator)).encode()) for name, generator in _found(module)}
        self._used = [name for name, state in now.items() if self._before.get(name, state) != state]
        self._before = now
        return zlib.crc32(repr([(name, now[name]) for name in self._used]).encode()) if self._used else 0

    def name_if_alike(self, of_ranks: list[int], is_main: bool) -> None:
        """Print once, on the main rank, if two ranks have the same states. Local."""
        is_alike = len(set(of_ranks)) < len(of_ranks) and of_ranks[0] != 0
        # Where every rank runs the whole program, they should.
        if is_alike and not self._is_named and is_main and not current().holds_whole_batches:
            self._is_named = True
            say(
                f"{', '.join(self._used)} draws the same numbers on all ranks, so different samples get the same "
                "noise, unlike in one process. Draw with torch's functions or numpy.random's, or seed it with "
                "ddpshim.world().rank. If it is meant to decide something equally on all ranks, ignore this line"
            )


def _found(module: nn.Module) -> Iterator[tuple[str, Any]]:
    numpy = sys.modules.get("numpy")
    kinds: tuple[Any, ...] = (random.Random, *(() if draws_alike() else (torch.Generator,)))
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    holders = [(f"a {type(child).__name__}", vars(child)) for child in module.modules()]
    for holder, held in (*holders, ("the program", vars(sys.modules["__main__"]))):
        for name, value in list(held.items()):
            if isinstance(value, kinds):
                yield f"the generator '{name}' of {holder}", value


def _state(generator: Any) -> Any:
    """Return the state that determines its next draws, in a form that `repr` shows in full."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if hasattr(generator, "bit_generator"):
        state = generator.bit_generator.state
        return [[key, value.tolist() if hasattr(value, "tolist") else value] for key, value in _flat(state)]
    _, key, *others = generator.get_state()
    return [key.tolist(), others]


def _flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
