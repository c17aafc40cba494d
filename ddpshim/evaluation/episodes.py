"""Plays an episode of a gym or gymnasium environment; each episode has its own seed.

numpy is imported inside the functions only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import RolloutError
from ddpshim.evaluation import environments
from ddpshim.model.keys import unwrap
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.process.seeds import derive_seed

IsSuccess = Callable[[Any, Mapping[str, Any]], bool]
_SUCCESS_KEYS = ("success", "is_success")  # in a step's info: metaworld, gymnasium-robotics
_BEGINS_EPISODE = ("reset", "start_episode")  # diffusion_policy's and LeRobot's policies, robomimic's
_MOST_STEPS = 100_000
_DEPTH, _NUM_HELD = 4, 100  # limits of the search for a policy's networks


@dataclass(frozen=True)
class Episode:
    """One episode of an evaluation.

    Attributes:
        number: counted from 0.
        seed: the seed of the environment's `reset`, and of all random generators.
        success: whether the task was done in any of its steps.
        reward: the sum of its steps' rewards.
        num_steps: its length.
        seconds: its duration.
    """

    number: int
    seed: int
    success: bool
    reward: float
    num_steps: int
    seconds: float


@dataclass(frozen=True)
class Rules:
    """The rules by which episodes are played.

    Attributes:
        seed: the seed of the evaluation.
        horizon: the maximum number of steps of an episode; None: the environment ends it.
        ends_at_success: whether an episode ends with the step in which the task is done.
        is_success: called with the environment and the info of its last step; None: see `_says_success`.
    """

    seed: int
    horizon: Optional[int] = None
    ends_at_success: bool = True
    is_success: Optional[IsSuccess] = None


def play(env: Any, policy: Any, rules: Rules, number: int, is_checked: bool) -> tuple[Episode, environments.Shown]:
    """Play episode `number`; return it, and what it shows about the environment's randomness. Local.

    The process's random streams, the modes of networks and the number of threads are restored.

    Args:
        policy: see `ddpshim.evaluate`.
        is_checked: see `environments.seeded`.
    """
    seed = derive_seed(rules.seed, "episode", number) % 2**31  # environments need 31 bits
    start = time.perf_counter()
    with shared_random_streams(seed), acting(policy) as act, environments.seeded(env, seed, is_checked) as shown:
        success, rewards = _play(env, act, rules)
    return Episode(number, seed, success, sum(rewards), len(rewards), time.perf_counter() - start), shown


def _play(env: Any, act: Callable[[Any], Any], rules: Rules) -> tuple[bool, list[float]]:
    observation, rewards, has_succeeded = env.reset(), [], False
    if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):
        observation = observation[0]  # (observation, info): gymnasium, gym from 0.26 on
    horizon = _MOST_STEPS if rules.horizon is None else rules.horizon
    for _ in range(horizon):
        observation, reward, *ends, info = _checked(env, env.step(act(observation)))
        rewards.append(float(reward))
        has_succeeded |= bool(rules.is_success(env, info)) if rules.is_success else _says_success(env, info)
        if any(map(bool, ends)) or (has_succeeded and rules.ends_at_success):
            break
    else:
        if rules.horizon is None:
            raise RolloutError(
                f"an episode did not end in {_MOST_STEPS} steps; the evaluation might never end. Give it a horizon."
            )
    return has_succeeded, rewards


def _checked(env: Any, step: Any) -> Any:
    if type(step) is tuple and len(step) in (4, 5) and isinstance(step[-1], Mapping):
        return step
    raise RolloutError(
        f"a step of the environment ({type(env).__name__}) returned {type(step).__name__}, and not observation, "
        "reward, done (or terminated, truncated) and a dictionary; these would be confused. Wrap it to follow gym "
        "or gymnasium."
    )


def _says_success(env: Any, info: Mapping[str, Any]) -> bool:
    """Return what the environment's method `is_success` returns, or else a known key of its last step's info."""
    method = getattr(env, "is_success", None)
    if callable(method):
        said = method()
        return bool(said["task"] if isinstance(said, Mapping) else said)  # robomimic's also has parts of the task
    for key in _SUCCESS_KEYS:
        if key in info:
            return bool(info[key])
    raise RolloutError(
        f"the environment ({type(env).__name__}) has no method is_success, and its step's info has "
        f"{', '.join(map(repr, info)) or 'nothing'}, none of {_SUCCESS_KEYS}; there would be no success rate. Give "
        "evaluate is_success=lambda env, info: ..."
    )


@contextlib.contextmanager
def acting(policy: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield a function from observation to action; the policy's networks are in evaluation mode meanwhile. Local.

    On one thread: the last bits of a sum depend on the number of threads, and that depends on the launcher.
    """
    networks = networks_of(policy)
    modes = [(part, part.training) for network in networks for part in network.modules()]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for network in networks:
        network.eval()
    try:
        with torch.no_grad():
            _begin_episode(policy, networks)
            yield _of_network(unwrap(policy)) if isinstance(policy, torch.nn.Module) else policy
    finally:
        for part, mode in modes:
            part.training = mode
        torch.set_num_threads(num_threads)


def _begin_episode(policy: Any, networks: list[torch.nn.Module]) -> None:
    """Call the policy's `reset` or `start_episode`, if any; raise if that changes parameters."""
    owner = getattr(policy, "__self__", policy)
    method = next((getattr(owner, name) for name in _BEGINS_EPISODE if callable(getattr(owner, name, None))), None)
    if method is not None:
        before = _num_writes(networks)
        method()
        if _num_writes(networks) != before:
            raise RolloutError(
                f"{type(owner).__name__}.{method.__name__}() changed its parameters at the start of an episode, so "
                "a different model would be evaluated. It should only forget the last episode; give evaluate a "
                "function if this method has another purpose."
            )


def _num_writes(networks: list[torch.nn.Module]) -> int:
    return sum(parameter._version for network in networks for parameter in network.parameters())


def networks_of(policy: Any) -> list[torch.nn.Module]:
    """Return the networks that the policy is, holds or calls, also those of the object whose method it is. Local."""
    found: dict[int, torch.nn.Module] = {}
    seen: set[int] = set()
    left = [(policy, 0)]
    while left:
        held, depth = left.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, torch.nn.Module):
            found[id(unwrap(held))] = unwrap(held)
        elif depth < _DEPTH:
            left += [(value, depth + 1) for value in _held_by(held)]
    return list(found.values())


def _held_by(holder: Any) -> list[Any]:
    if inspect.ismethod(holder):
        return [holder.__self__]
    if inspect.isfunction(holder):
        used = inspect.getclosurevars(holder)
        return [*used.nonlocals.values(), *used.globals.values()]
    if isinstance(holder, functools.partial):
        return [holder.func, *holder.args, *holder.keywords.values()]
    if isinstance(holder, (dict, list, tuple)):
        return list(holder.values() if isinstance(holder, dict) else holder)[:_NUM_HELD]
    is_plain = isinstance(holder, (type, types.ModuleType, torch.Tensor))
    return [] if is_plain else list(getattr(holder, "__dict__", {}).values())[:_NUM_HELD]


def _of_network(network: torch.nn.Module) -> Callable[[Any], Any]:
    """Return a function from arrays (...) of one observation to an action (...); the network gets tensors (1, ...)."""
    first = next(iter(network.parameters()), torch.empty(0, device="cpu"))

    def act(observation: Any) -> Any:
        action = network(_batch(observation, first))
        if not isinstance(action, torch.Tensor) or len(action) != 1:
            got = tuple(action.shape) if isinstance(action, torch.Tensor) else type(action).__name__
            raise RolloutError(
                f"{type(network).__name__} returned {got} for one observation instead of actions (1, ...); the "
                "environment would get a wrong action. Give evaluate a function from observation to action."
            )
        return action[0].float().cpu().numpy() if action.dtype == torch.bfloat16 else action[0].cpu().numpy()

    return act


def _batch(observation: Any, like: torch.Tensor) -> Any:
    """Return an observation as a batch of one, on the device of `like`; floats with its dtype."""
    if isinstance(observation, Mapping):
        return {key: _batch(value, like) for key, value in observation.items()}
    if isinstance(observation, (tuple, list)) and not all(isinstance(value, (int, float)) for value in observation):
        return type(observation)(_batch(value, like) for value in observation)
    if isinstance(observation, str):  # an instruction
        return [observation]
    tensor = torch.as_tensor(observation)
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)[None]
