"""Seeds an environment for an episode, wherever it keeps its random numbers, and notices one that draws elsewhere.

numpy is imported inside the functions only.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

from ddpshim.job.random_streams import derive_seed
from ddpshim.job.replaced import replaced
from ddpshim.job.say import say_once
from ddpshim.job.world import World

_INSIDE = ("env", "_env", "_environment")  # where a wrapper has the environment that it wraps
_FIRST = ("rng", "np_random")  # robosuite 1.5, gymnasium; the latter makes its generator when it is asked for
_DEPTH, _NUM_OBJECTS = 4, 5000  # as far as attributes of attributes are searched
_LEFT_OUT = ("numpy", "mujoco", "xml", "threading", "logging", "multiprocessing")


@dataclass
class Shown:
    """What an episode showed of its environment's randomness.

    Attributes:
        start: a digest of the numbers in the first observation; None where there are none.
        outcome: a digest of the episode's results; None where a GPU may have rounded them.
        start_is_known, outcome_is_known: whether a seed was taken, or a generator that ddpshim seeds was drawn from.
        is_repeatable: False where one seed gave two starts.
    """

    start: Optional[int] = None
    outcome: Optional[str] = None
    start_is_known: bool = True
    outcome_is_known: bool = True
    is_repeatable: bool = True

    def take(self, result: Mapping[str, Any]) -> None:
        """Take note of the episode's results. Local."""
        if not torch.cuda.is_initialized():
            self.outcome = ", ".join(f"{key} {float(value):.4g}" for key, value in sorted(result.items()))


def differ_without_reason(episodes: Iterable[Shown]) -> bool:
    """Whether episodes differ though nothing was drawn that is seeded: by what nobody has seeded. Local."""
    kept = list(episodes)
    starts = {one.start for one in kept if not one.start_is_known}
    outcomes = {(one.start, one.outcome) for one in kept if not one.outcome_is_known and one.outcome is not None}
    from_one_start = len(outcomes) > len({start for start, _ in outcomes})
    return len(starts) > 1 or from_one_start or not all(one.is_repeatable for one in kept)


def name_unseeded(name: str, episodes: Iterable[Shown], here: World) -> None:
    """Say so on the main rank, once, where episodes, of all ranks, differ by what nobody has seeded. Local."""
    if differ_without_reason(episodes) and here.is_main:
        say_once(
            f"{name} draws from an unseeded generator, or remembers earlier episodes: its statistics depend on the "
            f"number of ranks, here {here.world_size}. Make its reset take a seed, or give it a method seed(n), or "
            "keep its generator (numpy's, random.Random) in an attribute"
        )


@contextlib.contextmanager
def seeded(env: Any, seed: int, is_checked: bool = False) -> Iterator[Shown]:
    """In this block `env` plays an episode that depends on `seed` alone; yields what it shows. Local.

    Global generators are the caller's. An environment whose `reset` takes a seed gets one at the next reset; else one
    with a method `seed` is seeded by it; generators that are found in its attributes are seeded in place.

    Args:
        is_checked: one that takes a seed, and draws from no generator that is in sight, is reset twice.
    """
    shown, own = Shown(), seed % 2**31
    with contextlib.ExitStack() as stack:
        resets = [_SeededReset(layer.reset) for layer in _layers(env) if _takes_seed(layer)]
        for layer, reset in zip(filter(_takes_seed, _layers(env)), resets):
            stack.enter_context(replaced(layer, "reset", reset))

        def give_seed() -> bool:
            for reset in resets:
                reset.seed = own
            return bool(resets) or _call_seed(env, own)

        takes_seed = give_seed()
        generators = list(own_generators(env))
        for number, generator in enumerate(generators):
            reseed(generator, derive_seed(seed, "environment", number))
        before, reset_once, is_first = _states(generators), env.reset, [True]

        def watched(*args: Any, **kwargs: Any) -> Any:
            observation = reset_once(*args, **kwargs)
            if is_first:
                is_first.clear()
                has_drawn, shown.start = _states(generators) != before, _digest(observation)
                shown.start_is_known = takes_seed or has_drawn
                if is_checked and takes_seed and not has_drawn:
                    give_seed()
                    observation = reset_once(*args, **kwargs)
                    shown.is_repeatable = _digest(observation) == shown.start
            return observation

        stack.enter_context(replaced(env, "reset", watched))
        yield shown
        shown.outcome_is_known = takes_seed or _states(generators) != before


class _SeededReset:
    """An environment's reset, which gets the seed once; later resets of an episode go on from there."""

    def __init__(self, reset: Callable[..., Any]) -> None:
        self._reset = reset
        self.seed: Optional[int] = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.seed is not None and kwargs.get("seed") is None and not args:
            kwargs["seed"] = self.seed
        self.seed = None
        return self._reset(*args, **kwargs)


def own_generators(env: Any) -> Iterator[Any]:
    """The random generators that `env` holds: those of its wrappers first, then any in its attributes. Local."""
    import numpy

    kinds = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)
    layers = list(_layers(env))
    seen = {id(layer): layer for layer in layers}  # kept: an id may be another object's afterwards
    first = [getattr(layer, name, None) for layer in layers for name in _FIRST]
    left: deque[tuple[list[Any], int]] = deque([([held for held in first if isinstance(held, kinds)], 0)])
    left.extend((_held_by(layer), 1) for layer in layers)
    while left and len(seen) < _NUM_OBJECTS:
        values, depth = left.popleft()
        for held in values:
            if id(held) in seen:
                continue
            seen[id(held)] = held
            if not isinstance(held, kinds):
                left.extend([(_held_by(held), depth + 1)] if depth < _DEPTH else [])
            elif not isinstance(held, random.SystemRandom):  # which nobody can seed
                yield held


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator in place: parts of the environment hold the same object. Local."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


def _layers(env: Any) -> Iterator[Any]:
    """`env`, and the environments that it wraps."""
    seen: set[int] = set()
    while env is not None and id(env) not in seen:
        seen.add(id(env))
        yield env
        held = getattr(env, "__dict__", {})
        env = next((held[name] for name in _INSIDE if name in held), None) or getattr(env, "env", None)


def _held_by(holder: Any) -> list[Any]:
    """What may hold a generator, of what `holder` holds."""
    if isinstance(holder, dict):
        values = list(holder.values())
    elif isinstance(holder, (list, tuple, deque)):
        values = list(holder)
    else:
        values = list(getattr(holder, "__dict__", {}).values())
    plain = (str, bytes, int, float, bool, type, type(None), types.ModuleType, types.FunctionType, types.MethodType)
    kept = [value for value in values[:1000] if not isinstance(value, (*plain, torch.nn.Module, torch.Tensor))]
    homes = [str(type(value).__module__) for value in kept]
    return [v for v, home in zip(kept, homes) if home.startswith("numpy.random") or not home.startswith(_LEFT_OUT)]


def _takes_seed(layer: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):  # no reset, or one that Python cannot describe
        return "seed" in inspect.signature(type(layer).reset).parameters and hasattr(layer, "__dict__")
    return False


def _call_seed(env: Any, seed: int) -> bool:
    """Whether a layer of `env` has a method `seed`, as environments before gym 0.26, which is called."""
    for layer in _layers(env):
        if callable(getattr(type(layer), "seed", None)):
            with contextlib.suppress(AttributeError, NotImplementedError, TypeError):  # a wrapper around one without
                layer.seed(seed)
                return True
    return False


def _states(generators: list[Any]) -> list[Any]:
    """Where all generators stand that are seeded for an episode."""
    import numpy

    everywhere: Any = numpy.random.get_state()
    states = [repr(everywhere[1:]), random.getstate(), torch.get_rng_state().tolist()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().tolist())
    return states + [_state(generator) for generator in generators]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    return repr(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()[1:])


def _digest(observation: Any) -> Optional[int]:
    """Of the numbers in an observation, images left out: renderers may round; None without any."""
    import numpy

    if isinstance(observation, tuple):  # gymnasium's, with a dictionary of facts
        observation = observation[0]
    items = sorted(observation.items()) if isinstance(observation, Mapping) else [("", observation)]
    digest, is_empty = 0, True
    for name, value in items:
        if isinstance(value, (int, float)) or (isinstance(value, numpy.ndarray) and value.ndim < 3):
            array = numpy.ascontiguousarray(value)
            if array.dtype.kind in "fiub":
                rounded = (
                    numpy.round(array.astype(float), 4) + 0.0
                )  # no negative zeros; processors differ in last digits
                digest, is_empty = zlib.crc32(rounded.tobytes(), zlib.crc32(str(name).encode(), digest)), False
    return None if is_empty else digest
