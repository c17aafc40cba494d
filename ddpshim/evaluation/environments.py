"""Seeds an environment's generators for an episode, wherever they are, and detects unseeded ones."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import pickle
import random
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

from ddpshim.job.world import World
from ddpshim.process.job import derive_seed
from ddpshim.process.random_streams import digest
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say_once

_INSIDE = ("env", "_env", "_environment")  # attributes of wrappers: the wrapped environment
_FIRST = ("rng", "np_random")  # robosuite 1.5, gymnasium; reading the latter creates its generator
_DEPTH, _NUM_OBJECTS = 4, 5000  # limits of the search through attributes of attributes
_LEFT_OUT = ("numpy", "mujoco", "xml", "threading", "logging", "multiprocessing")


@dataclass
class Shown:
    """What the start of an episode shows about the randomness of its environment."""

    start: Optional[int] = None  # a digest of the numbers in the first observation; None if there are none
    is_known: bool = True  # the environment took a seed, or drew from a generator that ddpshim seeds
    is_repeatable: bool = True  # False if one seed gave two different starts


def name_unseeded(name: str, episodes: Iterable[Shown], here: World) -> None:
    """Print once, on the main rank, if episodes start differently without a draw from a seeded generator. Local."""
    kept = list(episodes)
    starts = {one.start for one in kept if not one.is_known}
    if here.is_main and (len(starts) > 1 or not all(one.is_repeatable for one in kept)):
        say_once(
            f"{name} uses an unseeded generator, or remembers earlier episodes: its statistics depend on the "
            f"number of ranks, here {here.world_size}. Make its reset take a seed, or give it a method seed(n), or "
            "keep its generator (numpy's, random.Random) in an attribute"
        )


@contextlib.contextmanager
def seeded(env: Any, seed: int, is_checked: bool = False) -> Iterator[Shown]:
    """Make the episode of `env` in this block depend on `seed` alone; yield what it shows. Local.

    The caller seeds the global generators. If the environment's `reset` takes a seed, the next reset gets one;
    otherwise its method `seed`, if any, is called. Generators in its attributes are seeded in place. `is_checked`:
    reset an environment twice if it takes a seed but draws from no generator that was found.
    """
    shown, own = Shown(), seed % 2**31
    with contextlib.ExitStack() as stack:
        seedable = [layer for layer in _layers(env) if _takes_seed(layer)]
        unseeded: set[int] = set()  # layers whose next reset gets the seed; later ones in the episode get none

        def reset(number: int, reset_layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if number in unseeded and kwargs.get("seed") is None and not args:
                kwargs["seed"] = own
            unseeded.discard(number)
            return reset_layer(*args, **kwargs)

        for number, layer in enumerate(seedable):
            stack.enter_context(replaced(layer, "reset", functools.partial(reset, number, layer.reset)))

        def give_seed() -> bool:
            unseeded.update(range(len(seedable)))
            return bool(seedable) or _call_seed(env, own)

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
                shown.is_known = takes_seed or has_drawn
                if is_checked and takes_seed and not has_drawn:
                    give_seed()
                    observation = reset_once(*args, **kwargs)
                    shown.is_repeatable = _digest(observation) == shown.start
            return observation

        stack.enter_context(replaced(env, "reset", watched))
        yield shown


def own_generators(env: Any) -> Iterator[Any]:
    """Yield the random generators of `env`: `rng` and `np_random` of each layer, then any in attributes. Local."""
    import numpy

    kinds = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)
    layers = list(_layers(env))
    first = [held for layer in layers for name in _FIRST if isinstance(held := getattr(layer, name, None), kinds)]
    for held in reached([first, *map(_held_by, layers)], _held_by, _DEPTH, _NUM_OBJECTS):
        if isinstance(held, kinds) and not isinstance(held, random.SystemRandom):  # which cannot be seeded
            yield held


def reached(
    start: Iterable[list[Any]], held_by: Callable[[Any], list[Any]], depth: int, most: float = math.inf
) -> Iterator[Any]:
    """Yield about `most` objects, each once: those of `start`, what `held_by` returns of these, and so on. Local."""
    seen: dict[int, Any] = {}  # kept alive, so that no other object gets the same id
    left = deque((values, 1) for values in start)
    while left and len(seen) < most:
        values, level = left.popleft()
        for held in values:
            if id(held) not in seen:
                seen[id(held)] = held
                yield held
                left.extend([(held_by(held), level + 1)] if level < depth else [])


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator in place, because parts of the environment share it. Local."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


def _layers(env: Any) -> Iterator[Any]:
    """Yield `env` and the environments that it wraps."""
    seen: set[int] = set()
    while env is not None and id(env) not in seen:
        seen.add(id(env))
        yield env
        held = getattr(env, "__dict__", {})
        env = next((held[name] for name in _INSIDE if name in held), None) or getattr(env, "env", None)


def _held_by(holder: Any) -> list[Any]:
    """Return the values in `holder` that may be or hold a generator."""
    if isinstance(holder, (list, tuple, deque)):
        values = list(holder)
    else:
        values = list((holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})).values())
    plain = (str, bytes, int, float, bool, type, type(None), types.ModuleType, types.FunctionType, types.MethodType)
    kept = [value for value in values[:1000] if not isinstance(value, (*plain, torch.nn.Module, torch.Tensor))]
    homes = [str(type(value).__module__) for value in kept]
    return [v for v, home in zip(kept, homes) if home.startswith("numpy.random") or not home.startswith(_LEFT_OUT)]


def _takes_seed(layer: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):  # no reset, or one without a signature
        return "seed" in inspect.signature(type(layer).reset).parameters and hasattr(layer, "__dict__")
    return False


def _call_seed(env: Any, seed: int) -> bool:
    """Call the first method `seed` of `env` or its wrapped ones (before gym 0.26); return whether there is one."""
    for layer in _layers(env):
        if callable(getattr(type(layer), "seed", None)):
            with contextlib.suppress(AttributeError, NotImplementedError, TypeError):  # the wrapped one has none
                layer.seed(seed)
                return True
    return False


def _states(generators: list[Any]) -> list[Any]:
    """Return the states of all generators that are seeded for an episode."""
    own = [g.get_state().tolist() if isinstance(g, torch.Generator) else pickle.dumps(g) for g in generators]
    return [digest(), *(torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else []), *own]


def _digest(observation: Any) -> Optional[int]:
    """Return a digest of the numbers in an observation, or None; without images, as renderers may round."""
    import numpy

    if isinstance(observation, tuple):  # gymnasium: (observation, info)
        observation = observation[0]
    items = sorted(observation.items()) if isinstance(observation, Mapping) else [("", observation)]
    found, is_empty = 0, True
    for name, value in items:
        if isinstance(value, (int, float)) or (isinstance(value, numpy.ndarray) and value.ndim < 3):
            array = numpy.ascontiguousarray(value)
            if array.dtype.kind in "fiub":
                # Processors differ in the last digits; + 0.0 turns -0.0 into 0.0.
                rounded = numpy.round(array.astype(float), 4) + 0.0
                found, is_empty = zlib.crc32(rounded.tobytes(), zlib.crc32(str(name).encode(), found)), False
    return None if is_empty else found
