"""Evaluates a policy on all ranks: `evaluate` in the loop, `evaluate_in_background` beside the training."""

from __future__ import annotations

import atexit
import functools
import inspect
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import RolloutError
from ddpshim.evaluation import environments
from ddpshim.evaluation.dealing import Deal, Dealt, plays_rollouts
from ddpshim.evaluation.episodes import Episode, IsSuccess, Rules, networks_of
from ddpshim.evaluation.player import Order, Player, PlayerBeside, packed
from ddpshim.job import events
from ddpshim.job.group import on_cleanup, world
from ddpshim.job.job import current
from ddpshim.job.say import say, say_once
from ddpshim.job.world import World
from ddpshim.model.checksums import bits_of_rows
from ddpshim.observe import intervals

_LONG_S = 1.0  # to have waited, for a word about it
_END_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Evaluation:
    """What episodes say of a policy; equal on all ranks, and for every number of ranks.

    Attributes:
        episodes: those that count, in order. With an early stop they are the first ones, up to the one that decided.
        confidence: of `interval`.
        interval: of the rate of success: that of Clopper and Pearson; where the evaluation could stop early, one that
            holds for all looks together (`at_any_time` of ddpshim/observe/intervals.py), which is wider.
        is_above: whether the interval is above the threshold: None where it holds the threshold, or there is none.
    """

    episodes: tuple[Episode, ...]
    confidence: float
    interval: tuple[float, float]
    is_above: Optional[bool] = None

    @property
    def num_successes(self) -> int:
        """In how many episodes the task was done."""
        return sum(episode.success for episode in self.episodes)

    @property
    def success_rate(self) -> float:
        """The share of such episodes."""
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
    threshold: Optional[float] = None,
    width: Optional[float] = None,
) -> Evaluation:
    """How often a policy succeeds, with the episodes dealt to all ranks (collective). One process plays them all.

    Episode i has a seed of its own, from `seed` and i: what it draws (the environment, and the global generators of
    torch, numpy and Python) depends on nothing else, so that the result is the same to the last bit on any number of
    ranks, and the training's random streams and modes go on as if nothing had been played. Evaluations with the same
    `seed` play the same episodes: checkpoints are compared on equal terms.

    >>> import ddpshim
    >>> class Coin:  # any environment of gym's or gymnasium's kind; one that draws from its own generator, too
    ...     def reset(self, *, seed=None):
    ...         return [0.0], {}
    ...     def step(self, action):
    ...         return [0.0], 1.0, True, False, {"success": torch.rand(()).item() < 0.9}
    >>> print(ddpshim.evaluate(Coin, lambda observation: 0, 40, seed=1))
    36 of 40 episodes succeeded: 90% (76 to 97% with 95% confidence)

    Args:
        make_env: returns an environment. Called once on each rank that plays, and again where it is another function
            than that of the last evaluation. The environment is closed by `cleanup()`.
        policy: a function from observation to action, or a network: its forward gets one observation as tensors
            (1, ...) on its device, and returns an action (1, ...). Networks that it is, holds or calls are in
            evaluation mode meanwhile, without gradients and on one thread. A method `reset` or `start_episode` of it is
            called before each episode.
        num_episodes: at most.
        horizon: steps of an episode at most; default: until the environment says that it is done.
        seed: default that of `setup`, else 0.
        is_success: called after each step as `is_success(env, info)`; default: what the environment's method
            `is_success` returns (robomimic), else info["success"] or info["is_success"].
        ends_at_success: whether an episode ends with the step in which the task is done.
        confidence: of the interval.
        threshold: stop as soon as the interval is all above or all below this rate.
        width: stop as soon as the interval is narrower.

    Raises:
        RolloutError: an episode failed; on all ranks, naming episode and rank. Or ranks were to evaluate different
            weights or with different arguments.
    """
    call = _checked(
        make_env, policy, num_episodes, horizon, seed, is_success, ends_at_success, confidence, threshold, width
    )
    player = current().part(_Players).here
    with events.counted("rollout"):
        dealt = call.deal().play(functools.partial(player.play, call.order), _what, is_success=_succeeded)()
    return call.evaluation(dealt)


def evaluate_in_background(
    make_env: Callable[[], Any], policy: Any, num_episodes: int, **options: Any
) -> EvaluationInBackground:
    """`evaluate` in a process beside each rank, of the policy as it is now (collective; does not wait for episodes).

    Training goes on while it plays: the process takes a core that is idle, and next to nothing of one that is not
    (Linux: SCHED_IDLE). The result is that of `evaluate`, to the last bit. Where the last evaluation is still being
    played, this waits for it. A policy on a GPU plays there, in a context of its own.

    Args:
        make_env, policy, options: as `evaluate` has them. They are pickled: functions are those of a module, or of a
            script that trains only under `if __name__ == "__main__":`.

    Raises:
        RolloutError: something cannot be sent to a process, or what `evaluate` finds before it plays.
    """
    asked = inspect.signature(evaluate).bind(make_env, policy, num_episodes, **options)
    asked.apply_defaults()
    return EvaluationInBackground(_checked(**asked.arguments))


class EvaluationInBackground:
    """An evaluation that is being played. Made by `evaluate_in_background`."""

    def __init__(self, call: _Call) -> None:
        beside = current().part(_Players).beside
        begin = time.monotonic()
        with beside.turn:  # the last one is done
            waited_s = time.monotonic() - begin
        if waited_s > _LONG_S and call.here.is_main:
            say_once(
                "an evaluation in the background takes longer than the training until the next one, so the "
                f"training waited ({waited_s:.0f} s this time). Evaluate less often, or fewer episodes, or leave it "
                "a core"
            )
        self._call, self._beside = call, beside
        self._gathered: Optional[Callable[[], Dealt]] = None
        self._result: Optional[Evaluation] = None
        self._is_asked = False
        self._is_unwanted = threading.Event()
        has_turn = threading.Event()
        arguments = (call.deal(), beside.ordered(packed(call.order)), has_turn)
        self._thread = threading.Thread(target=self._run, args=arguments, name="ddpshim-evaluation", daemon=True)
        self._thread.start()
        has_turn.wait()
        on_cleanup(self._end)
        atexit.register(self._end)  # a thread that Python ends in a call to the store would take the process with it

    def result(self) -> Evaluation:
        """The evaluation; waits until all episodes are played (collective).

        Raises RolloutError, on all ranks, where an episode failed.
        """
        self._is_asked = True
        if self._result is None:
            self._thread.join()
            atexit.unregister(self._end)
            if self._gathered is None:
                raise RolloutError("the evaluation in the background lost the other ranks; see the error above")
            self._result = self._call.evaluation(self._gathered())
        return self._result

    def poll(self) -> Optional[Evaluation]:
        """The evaluation if all ranks have played theirs, else None: the same on all ranks (collective)."""
        if self._result is None and not all(self._call.here.gather(not self._thread.is_alive())):
            return None
        return self.result()

    def cancel(self) -> None:
        """Play no more, on any rank, than the episodes that are being played. Local; there is no result."""
        self._is_asked = True
        self._is_unwanted.set()

    def _run(self, deal: Deal, play: Callable[[int], Any], has_turn: threading.Event) -> None:
        with self._beside.turn:
            has_turn.set()
            is_unwanted = self._is_unwanted.is_set
            self._gathered = deal.play(play, _what, is_told_to_end=is_unwanted, is_success=_succeeded)

    def _end(self) -> None:
        """Leave it where the job ends. Local; idempotent."""
        atexit.unregister(self._end)
        if not self._is_asked:
            self._is_asked = True
            say("an evaluation in the background was dropped: the job ended before its result() was used")
        if self._thread.is_alive():
            self._beside.close()
            self._thread.join(_END_DEADLINE_S)


class _Players:
    """Those of a job."""

    def __init__(self) -> None:
        self.here, self.beside = Player(), PlayerBeside()
        on_cleanup(self.here.close)
        on_cleanup(self.beside.close)


@dataclass(frozen=True)
class _Call:
    """An evaluation that was asked for, with the same arguments on all ranks."""

    here: World
    order: Order
    num_episodes: int
    confidence: float
    threshold: Optional[float]
    width: Optional[float]
    begun: float = field(default_factory=time.perf_counter)

    @property
    def may_stop(self) -> bool:
        return self.threshold is not None or self.width is not None

    def deal(self) -> Deal:
        is_decided = self.is_decided if self.may_stop else None
        return Deal(self.here, self.num_episodes, plays=plays_rollouts(), is_decided=is_decided)

    def is_decided(self, successes: int, num_episodes: int) -> bool:
        low, high = intervals.at_any_time(successes, num_episodes, self.confidence)
        is_narrow = self.width is not None and high - low <= self.width
        return is_narrow or (self.threshold is not None and not low <= self.threshold <= high)

    def evaluation(self, dealt: Dealt) -> Evaluation:
        """What was played, cut where the first episodes decide: ranks may have played more of them."""
        dealt.raise_failure(self.here.rank)
        kept: list[Episode] = []
        shown: list[environments.Shown] = []
        num_successes = 0
        for number in range(self.num_episodes):
            if number not in dealt.results:
                raise RolloutError(f"the evaluation was cancelled; episode {number} was not played, there is no result")
            episode, of_env = dealt.results[number]
            kept.append(Episode(*episode))
            shown.append(environments.Shown(*of_env))
            num_successes += kept[-1].success
            if self.may_stop and self.is_decided(num_successes, len(kept)):
                break
        environments.name_unseeded("the environment", shown, self.here)
        method = intervals.at_any_time if self.may_stop else intervals.exact
        low, high = method(num_successes, len(kept), self.confidence)
        is_above = None if self.threshold is None or low <= self.threshold <= high else low > self.threshold
        found = Evaluation(tuple(kept), self.confidence, (low, high), is_above)
        batch, make_env = current().progress.batch, self.order.make_env
        events.note(
            "rollout",
            epoch=None if batch is None else batch[0],
            environment=getattr(make_env, "__name__", type(make_env).__name__),
            episodes=len(kept),
            metrics={"Success_Rate": found.success_rate, "Return": found.mean_reward},
            interval=found.interval,
            returns=[episode.reward for episode in found.episodes],
            seconds=time.perf_counter() - self.begun,
        )
        return found


def _checked(
    make_env: Callable[[], Any],
    policy: Any,
    num_episodes: int,
    horizon: Optional[int],
    seed: Optional[int],
    is_success: Optional[IsSuccess],
    ends_at_success: bool,
    confidence: float,
    threshold: Optional[float],
    width: Optional[float],
) -> _Call:
    """The call (collective). Raises RolloutError where it makes no sense, or ranks call otherwise."""
    here = world()
    rates = {"confidence": confidence, "threshold": threshold, "width": width}
    odd = [f"{name}={rate}" for name, rate in rates.items() if rate is not None and not 0 < rate < 1]
    numbers = {"num_episodes": num_episodes, "horizon": horizon}
    odd += [f"{name}={number}" for name, number in numbers.items() if number is not None and number < 1]
    if odd:
        raise RolloutError(
            f"evaluate() with {', '.join(odd)}: the policy could not be evaluated. Give rates between 0 and 1, and "
            "at least one episode of one step."
        )
    rules = Rules((here.seed or 0) if seed is None else seed, horizon, ends_at_success, is_success)
    facts = {**numbers, **rates, "seed": rules.seed, "ends_at_success": ends_at_success}
    everyones = here.gather({**facts, "the weights of the policy": _bits(policy)})
    apart = [name for name in everyones[0] if any(facts[name] != everyones[0][name] for facts in everyones)]
    if apart:
        found = [f"{name}: {', '.join(str(facts[name]) for facts in everyones)} (in rank order)" for name in apart]
        raise RolloutError(
            f"ranks evaluate with different {'; '.join(found)}; the result would depend on the number of ranks. "
            "Give all ranks the same, such as an average of weights that every rank keeps."
        )
    return _Call(here, Order(make_env, policy, rules), num_episodes, confidence, threshold, width)


def _bits(policy: Any) -> list[int]:
    """A checksum of each network of the policy."""
    rows = [list(network.state_dict().items()) for network in networks_of(policy)]
    return bits_of_rows(rows, torch.device("cpu")).tolist() if rows else []


def _what(number: int) -> str:
    return f"episode {number}"


def _succeeded(played: Any) -> bool:
    return Episode(*played[0]).success
