"""Evaluates a policy on all ranks (`evaluate`): plays seeded episodes of gym or gymnasium environments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import RolloutError
from ddpshim.evaluation import environments
from ddpshim.evaluation.dealing import Deal, render_on_own_gpu
from ddpshim.job.group import world
from ddpshim.job.world import World
from ddpshim.model.equality import hash_of
from ddpshim.model.wrapper import unwrap
from ddpshim.process import observed
from ddpshim.process.job import current, derive_seed
from ddpshim.process.observed import outside_steps
from ddpshim.process.random_streams import shared_random_streams

IsSuccess = Callable[[Any, Mapping[str, Any]], bool]
_SUCCESS_KEYS = ("success", "is_success")  # in a step's info: metaworld, gymnasium-robotics
_BEGINS_EPISODE = ("reset", "start_episode")  # diffusion_policy's and LeRobot's policies, robomimic's
_MOST_STEPS = 100_000
_DEPTH, _NUM_HELD = 5, 100  # limits of the search for a policy's networks
_NUM_CHECKED = 2  # episodes whose environment is checked for unseeded generators
_NUM_HALVINGS = 60  # of the range in which an end of the interval is


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
class Evaluation:
    """The result of an evaluation; equal on all ranks, and for every number of ranks.

    Attributes:
        episodes: in order.
        confidence: the confidence of `interval`.
        interval: that of the success rate, by Clopper and Pearson.
    """

    episodes: tuple[Episode, ...]
    confidence: float
    interval: tuple[float, float]

    @property
    def num_successes(self) -> int:
        """The number of episodes in which the task was done."""
        return sum(episode.success for episode in self.episodes)

    @property
    def success_rate(self) -> float:
        """The share of episodes in which the task was done."""
        return self.num_successes / len(self.episodes)

    @property
    def mean_reward(self) -> float:
        """The mean of the episodes' rewards."""
        return math.fsum(episode.reward for episode in self.episodes) / len(self.episodes)

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        return (
            f"{self.num_successes} of {len(self.episodes)} episodes succeeded: {100 * self.success_rate:.0f}% "
            f"({low:.0f} to {high:.0f}% with {100 * self.confidence:g}% confidence)"
        )


def evaluate(
    make_env: Callable[[], Any],
    policy: Any,
    num_episodes: int,
    *,
    horizon: Optional[int] = None,
    seed: Optional[int] = None,
    is_success: Optional[IsSuccess] = None,
    ends_at_success: bool = True,
    confidence: float = 0.95,
) -> Evaluation:
    """Return how often a policy succeeds; episodes are distributed over all ranks (collective). One process plays all.

    Episode i has its own seed, from `seed` and i: its random draws (of the environment, and of the global generators of
    torch, numpy and Python) depend on nothing else. So the result is equal to the last bit on any number of ranks. The
    training's random streams and modes are unchanged. Evaluations with the same `seed` play the same episodes, so that
    checkpoints can be compared.

    >>> import ddpshim
    >>> class Coin:  # any gym or gymnasium environment, also one with its own generator
    ...     def reset(self, *, seed=None):
    ...         return [0.0], {}
    ...     def step(self, action):
    ...         return [0.0], 1.0, True, False, {"success": torch.rand(()).item() < 0.9}
    >>> print(ddpshim.evaluate(Coin, lambda observation: 0, 40, seed=1))
    36 of 40 episodes succeeded: 90% (76 to 97% with 95% confidence)

    Args:
        make_env: returns an environment. Called once on each rank that plays, and again if it is not the function of
            the last evaluation. `cleanup()` closes the environment.
        policy: a function from observation to action, or a network: its forward gets one observation as tensors
            (1, ...) on its device, and returns an action (1, ...). Networks that it is, holds or calls are in
            evaluation mode meanwhile, without gradients and on one thread. Its method `reset` or `start_episode`, if
            any, is called before each episode.
        num_episodes: how many.
        horizon: the maximum number of steps of an episode; default: the environment ends it.
        seed: default: that of `setup`, or else 0.
        is_success: called after each step as `is_success(env, info)`; default: what the environment's method
            `is_success` returns (robomimic), else info["success"] or info["is_success"].
        ends_at_success: whether an episode ends with the step in which the task is done.
        confidence: the confidence of the interval.

    Raises:
        RolloutError: an episode failed (on all ranks, naming episode and rank); an argument is invalid; or ranks have
            different weights or arguments.
    """
    here, start = world(), time.perf_counter()
    seed = (here.seed or 0) if seed is None else seed
    facts = {"num_episodes": num_episodes, "horizon": horizon, "confidence": confidence, "seed": seed}
    _check(here, policy, {**facts, "ends_at_success": ends_at_success})

    def play(number: int) -> tuple[Any, Any]:
        """Play an episode, and restore streams, modes and threads; return the fields of its `Episode` and `Shown`."""
        env, begun = current().part(_Environment).of(make_env, seed), time.perf_counter()
        own = derive_seed(seed, "episode", number) % 2**31  # environments need 31 bits
        seeding = environments.seeded(env, own, is_checked=number < _NUM_CHECKED)
        with shared_random_streams(own), _acting(policy) as act, seeding as shown:
            success, rewards = _rewards(env, act, horizon, ends_at_success, is_success)
        seconds = time.perf_counter() - begun
        return (number, own, success, sum(rewards), len(rewards), seconds), astuple(shown)

    render_on_own_gpu(here)
    deal = Deal(here, num_episodes)
    with outside_steps():
        deal.play(play, lambda number: f"episode {number}")
    deal.raise_failure()
    played = [deal.results[number] for number in range(num_episodes)]
    environments.name_unseeded("the environment", [environments.Shown(*shown) for _, shown in played], here)
    kept = tuple(Episode(*episode) for episode, _ in played)
    interval = exact_interval(sum(episode.success for episode in kept), num_episodes, confidence)
    found = Evaluation(kept, confidence, interval)
    batch = current().part(observed.Progress).batch
    observed.note(
        "rollout",
        epoch=None if batch is None else batch[0],
        environment=getattr(make_env, "__name__", type(make_env).__name__),
        episodes=num_episodes,
        metrics={"Success_Rate": found.success_rate, "Return": found.mean_reward},
        interval=interval,
        returns=[episode.reward for episode in kept],
        seconds=time.perf_counter() - start,
    )
    return found


def exact_interval(successes: int, episodes: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a success rate. Local.

    The number of episodes must not depend on their outcomes: an interval that is checked after every episode, until it
    gives the wanted answer, is wrong far more often than in 5% of cases.

    >>> [round(end, 4) for end in exact_interval(18, 20)]
    [0.683, 0.9877]
    """
    if not (0 <= successes <= episodes and 0 < confidence < 1):
        raise ValueError(
            f"{successes} successes in {episodes} episodes at a confidence of {confidence}: there is no such "
            "interval. Give a confidence between 0 and 1, and no more successes than episodes."
        )

    ways = [math.lgamma(episodes + 1) - math.lgamma(k + 1) - math.lgamma(episodes - k + 1) for k in range(episodes + 1)]

    def at_least(rate: float, k: int) -> float:
        won, lost = math.log(rate), math.log1p(-rate)
        return math.fsum(math.exp(ways[i] + i * won + (episodes - i) * lost) for i in range(k, episodes + 1))

    def rate_at(k: int, probability: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(_NUM_HALVINGS):
            rate = (low + high) / 2
            low, high = (low, rate) if at_least(rate, k) > probability else (rate, high)
        return low

    tail = (1 - confidence) / 2
    lower = 0.0 if successes == 0 else rate_at(successes, tail)
    upper = 1.0 if successes == episodes else rate_at(successes + 1, 1 - tail)
    return lower, upper


class _Environment:
    """The environment that this rank plays in, kept between evaluations. A job has one."""

    def __init__(self) -> None:
        self._make_env: Any = None
        self._env: Any = None
        current().at_end.callback(self._close)

    def of(self, make_env: Callable[[], Any], seed: int) -> Any:
        """Return what `make_env` has made: it is called once for each function. Random streams stay. Local."""
        if self._make_env is not make_env:
            self._close()
            with shared_random_streams(seed):
                self._env = make_env()
            self._make_env = make_env
        return self._env

    def _close(self) -> None:
        """Close the environment, if there is one. Local; idempotent."""
        env, self._env, self._make_env = self._env, None, None
        if env is not None and callable(getattr(env, "close", None)):
            env.close()


def _check(here: World, policy: Any, facts: dict[str, Any]) -> None:
    """Raise RolloutError if an argument is invalid, or differs between ranks (collective)."""
    odd = [] if 0 < facts["confidence"] < 1 else [f"confidence={facts['confidence']}"]
    numbers = {name: facts[name] for name in ("num_episodes", "horizon")}
    odd += [f"{name}={number}" for name, number in numbers.items() if number is not None and number < 1]
    if odd:
        raise RolloutError(
            f"evaluate() with {', '.join(odd)}: the policy could not be evaluated. Give a confidence between 0 and "
            "1, and at least one episode of one step."
        )
    hashes = [hash_of({}, network.state_dict()) for network in networks_of(policy)]
    everyones = here.gather({**facts, "the weights of the policy": hashes})
    apart = [name for name in everyones[0] if any(facts[name] != everyones[0][name] for facts in everyones)]
    if apart:
        found = [f"{name}: {', '.join(str(facts[name]) for facts in everyones)} (in rank order)" for name in apart]
        raise RolloutError(
            f"ranks evaluate with different {'; '.join(found)}; the result would depend on the number of ranks. "
            "Give all ranks the same, such as an average of weights that every rank keeps."
        )


def _rewards(
    env: Any, act: Callable[[Any], Any], horizon: Optional[int], ends_at_success: bool, is_success: Optional[IsSuccess]
) -> tuple[bool, list[float]]:
    observation, rewards, has_succeeded = env.reset(), [], False
    if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):
        observation = observation[0]  # (observation, info): gymnasium, gym from 0.26 on
    for _ in range(_MOST_STEPS if horizon is None else horizon):
        step = env.step(act(observation))
        if type(step) is not tuple or len(step) not in (4, 5) or not isinstance(step[-1], Mapping):
            raise RolloutError(
                f"a step of the environment ({type(env).__name__}) returned {type(step).__name__}, and not "
                "observation, reward, done (or terminated, truncated) and a dictionary; these would be confused. Wrap "
                "it to follow gym or gymnasium."
            )
        observation, reward, *ends, info = step
        rewards.append(float(reward))
        has_succeeded |= bool(is_success(env, info)) if is_success else _says_success(env, info)
        if any(map(bool, ends)) or (has_succeeded and ends_at_success):
            break
    else:
        if horizon is None:
            raise RolloutError(
                f"an episode did not end in {_MOST_STEPS} steps; the evaluation might never end. Give it a horizon."
            )
    return has_succeeded, rewards


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
def _acting(policy: Any) -> Iterator[Callable[[Any], Any]]:
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
    held = environments.reached([[policy]], _held_by, _DEPTH)
    found = [unwrap(one) for one in held if isinstance(one, torch.nn.Module)]
    return [*{id(network): network for network in found}.values()]


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
    is_plain = isinstance(holder, (type, types.ModuleType, torch.Tensor, torch.nn.Module))
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
