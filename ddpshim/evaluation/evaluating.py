"""Evaluates a policy on all ranks (`evaluate`)."""

from __future__ import annotations

import math
import time
from dataclasses import astuple, dataclass
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import RolloutError
from ddpshim.evaluation import environments, episodes
from ddpshim.evaluation.dealing import Deal, plays_rollouts
from ddpshim.evaluation.episodes import Episode, IsSuccess, Rules, networks_of
from ddpshim.job.group import on_cleanup, world
from ddpshim.job.world import World
from ddpshim.model.checksums import bits_of_rows
from ddpshim.process import events
from ddpshim.process.job import current
from ddpshim.process.observed import outside_steps
from ddpshim.process.random_streams import shared_random_streams

_NUM_CHECKED = 2  # episodes whose environment is checked for unseeded generators
_NUM_HALVINGS = 60  # of the range in which an end of the interval is


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
    rules = Rules((here.seed or 0) if seed is None else seed, horizon, ends_at_success, is_success)
    _check(here, policy, rules, num_episodes, confidence)
    player = current().part(_Player)

    def play(number: int) -> tuple[Any, Any]:
        return player.play(make_env, policy, rules, number)

    with outside_steps():
        dealt = Deal(here, num_episodes, plays=plays_rollouts()).play(play, lambda number: f"episode {number}")()
    dealt.raise_failure(here.rank)
    played = [dealt.results[number] for number in range(num_episodes)]
    environments.name_unseeded("the environment", [environments.Shown(*shown) for _, shown in played], here)
    kept = tuple(Episode(*episode) for episode, _ in played)
    interval = exact_interval(sum(episode.success for episode in kept), num_episodes, confidence)
    found = Evaluation(kept, confidence, interval)
    batch = current().progress.batch
    events.note(
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

    def at_least(rate: float, k: int) -> float:
        return math.fsum(math.exp(chance(rate, i)) for i in range(k, episodes + 1))

    def chance(rate: float, k: int) -> float:
        ways = math.lgamma(episodes + 1) - math.lgamma(k + 1) - math.lgamma(episodes - k + 1)
        return ways + k * math.log(rate) + (episodes - k) * math.log1p(-rate)

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


class _Player:
    """Plays episodes, and keeps the environment. A job has one."""

    def __init__(self) -> None:
        self._make_env: Any = None
        self._env: Any = None
        on_cleanup(self._close)

    def play(self, make_env: Callable[[], Any], policy: Any, rules: Rules, number: int) -> tuple[Any, Any]:
        """Play an episode; return the fields of its `Episode` and `Shown`. Local."""
        if self._make_env is not make_env:
            self._close()
            with shared_random_streams(rules.seed):
                self._env = make_env()
            self._make_env = make_env
        played = episodes.play(self._env, policy, rules, number, number < _NUM_CHECKED)
        return astuple(played[0]), astuple(played[1])

    def _close(self) -> None:
        """Close the environment, if there is one. Local; idempotent."""
        env, self._env, self._make_env = self._env, None, None
        if env is not None and callable(getattr(env, "close", None)):
            env.close()


def _check(here: World, policy: Any, rules: Rules, num_episodes: int, confidence: float) -> None:
    """Raise RolloutError if an argument is invalid, or differs between ranks (collective)."""
    odd = [] if 0 < confidence < 1 else [f"confidence={confidence}"]
    numbers = {"num_episodes": num_episodes, "horizon": rules.horizon}
    odd += [f"{name}={number}" for name, number in numbers.items() if number is not None and number < 1]
    if odd:
        raise RolloutError(
            f"evaluate() with {', '.join(odd)}: the policy could not be evaluated. Give a confidence between 0 and "
            "1, and at least one episode of one step."
        )
    facts = {**numbers, "confidence": confidence, "seed": rules.seed, "ends_at_success": rules.ends_at_success}
    everyones = here.gather({**facts, "the weights of the policy": _bits(policy)})
    apart = [name for name in everyones[0] if any(facts[name] != everyones[0][name] for facts in everyones)]
    if apart:
        found = [f"{name}: {', '.join(str(facts[name]) for facts in everyones)} (in rank order)" for name in apart]
        raise RolloutError(
            f"ranks evaluate with different {'; '.join(found)}; the result would depend on the number of ranks. "
            "Give all ranks the same, such as an average of weights that every rank keeps."
        )


def _bits(policy: Any) -> list[int]:
    """Return a checksum of each network of the policy."""
    rows = [list(network.state_dict().items()) for network in networks_of(policy)]
    return bits_of_rows(rows, torch.device("cpu")).tolist() if rows else []
