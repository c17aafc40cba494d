"""`ddpshim.evaluate`: the same episodes on any number of ranks and in the background, intervals and failures."""

from __future__ import annotations

import functools
import random
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddpshim
from ddpshim.errors import RolloutError
from ddpshim.evaluation import evaluating
from ddpshim.evaluation.evaluating import Evaluation, exact_interval, networks_of
from ddpshim.failures.hang_detector import place_of
from ddpshim.process import observed
from ddpshim.process.observed import Progress
from tests.ranks import run_ranks


class Reach:
    """Move a point to the origin against noise; with gymnasium's conventions."""

    def __init__(self, breaks_at: int = -1) -> None:
        self._breaks_at, self._noise = breaks_at, np.random.default_rng()
        self.num_episodes, self.is_closed = 0, False

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.num_episodes += 1
        self._at, self._steps = np.random.default_rng(seed).uniform(-1, 1, 2), 0
        return {"at": self._at.astype(np.float32)}, {}

    def step(self, action: np.ndarray) -> Any:
        assert action.shape == (2,)
        if self._breaks_at == self._steps:
            raise ValueError("the gripper is stuck")
        self._steps += 1
        self._at = self._at + 0.3 * action + 0.05 * self._noise.standard_normal(2)
        near = bool(np.abs(self._at).max() < 0.2)
        reward = -float(np.abs(self._at).sum())
        return {"at": self._at.astype(np.float32)}, reward, False, self._steps >= 8, self._told(near)

    def _told(self, near: bool) -> dict[str, Any]:
        return {"success": near}

    def close(self) -> None:
        self.is_closed = True


class OldReach(Reach):
    """gym's: no seed, no information at a reset, one `done`, and a method for success, as robomimic has it."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset(seed=random.randrange(2**31))[0]

    def step(self, action: np.ndarray) -> Any:
        observation, reward, _, truncated, self._info = super().step(action)
        return observation, reward, truncated, {}

    def is_success(self) -> dict[str, bool]:
        return {"task": self._info["success"], "grasp": True}


class Net(nn.Module):
    """Has dropout, and noise in its actions, which are the way back to the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(2, 2, bias=False)
        self.dropout = nn.Dropout(0.9)
        nn.init.eye_(self.back.weight)

    def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
        assert observation["at"].shape == (1, 2)
        return -self.dropout(self.back(observation["at"])) + 0.5 * torch.randn(1, 2)


def _without_seconds(evaluation: Evaluation) -> list[tuple[Any, ...]]:
    return [(e.number, e.seed, e.success, e.reward, e.num_steps) for e in evaluation.episodes]


def _refused(make_env: Any, policy: Any) -> str:
    try:
        return f"nothing: {ddpshim.evaluate(make_env, policy, 40, ends_at_success=False)}"
    except RolloutError as error:
        return str(error)


def _rank_evaluates(num: int) -> tuple[list[Any], str, list[str]]:
    here = ddpshim.world()
    torch.manual_seed(here.rank)  # of training: of no account
    net = ddpshim.wrap_parallel(Net())
    found = [ddpshim.evaluate(Reach, net, num), ddpshim.evaluate(OldReach, net, num, horizon=5, ends_at_success=False)]
    said = []
    if here.world_size > 1:
        odd = here.rank == 1
        breaks = functools.partial(Reach, breaks_at=2) if odd else Reach
        said.append(_refused(breaks, Net()))
        other = Net()
        nn.init.constant_(other.back.weight, float(odd))
        said.append(_refused(Reach, other))
    rates = [(e.success_rate, e.mean_reward, e.interval) for e in found]
    return [_without_seconds(e) for e in found], repr(rates), said


@pytest.mark.launch
def test_the_result_depends_neither_on_ranks_nor_on_the_place_to_the_last_bit() -> None:
    num = 14
    (alone, rates, _), *_ = run_ranks(_rank_evaluates, 1, num)
    (many, same_rates, said), other = run_ranks(_rank_evaluates, 2, num)
    assert other == (many, same_rates, said)
    assert many == alone
    assert rates == same_rates
    plain, old = alone
    assert [number for number, *_ in plain] == list(range(num))
    assert len({seed for _, seed, *_ in plain}) == num
    assert 0 < sum(success for _, _, success, *_ in plain) < num
    assert {num_steps for *_, num_steps in old} == {5}
    failed, apart = said
    assert "failed on rank 1 (ValueError: the gripper is stuck" in failed
    assert apart.startswith("ranks evaluate with different the weights of the policy: [")


@pytest.mark.unit
def test_training_goes_on_as_if_nothing_had_been_played() -> None:
    net = Net()
    net.dropout.eval()
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    threads = torch.get_num_threads()
    first = ddpshim.evaluate(Reach, net, 3, seed=1)
    assert [net.training, net.back.training, net.dropout.training] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == streams[1:]
    assert torch.get_num_threads() == threads
    torch.rand(3)
    again, other = ddpshim.evaluate(Reach, net, 3, seed=1), ddpshim.evaluate(Reach, net, 3, seed=2)
    assert _without_seconds(first) == _without_seconds(again) != _without_seconds(other)
    assert str(other).startswith(f"{other.num_successes} of 3 episodes succeeded: ")


class Remembering:
    """A policy that is no network, and has one."""

    def __init__(self) -> None:
        self.parts = {"actor": Net()}
        self.seen: list[bool] = []
        self.num_episodes = 0

    def reset(self) -> None:
        self.num_episodes += 1

    def act(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        self.seen.append(self.parts["actor"].training)
        return -observation["at"]


@pytest.mark.unit
def test_a_policy_may_be_a_method_whose_memory_is_cleared_and_whose_networks_evaluate() -> None:
    policy = Remembering()
    ddpshim.evaluate(Reach, policy.act, 3)
    assert policy.num_episodes == 3
    assert set(policy.seen) == {False}
    assert policy.parts["actor"].training
    held = Net()
    assert networks_of(lambda observation: held(observation)) == [held]
    assert networks_of(functools.partial(policy.act, 1)) == [policy.parts["actor"]]


class Odd(Reach):
    def __init__(self, returned: Any = None, told: Any = None) -> None:
        super().__init__()
        self._returned, self._information = returned, told

    def step(self, action: np.ndarray) -> Any:
        step = super().step(action)
        return step if self._returned is None else self._returned

    def _told(self, near: bool) -> dict[str, Any]:
        return {"is_success": near} if self._information is None else self._information


class Resets(Net):
    def reset(self) -> None:
        with torch.no_grad():
            self.back.weight.fill_(0.0)


class TwoActions(Net):
    def forward(self, observation: Any) -> torch.Tensor:
        return torch.zeros(2, 2)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make_env", "policy", "more", "text"),
    [
        (lambda: Odd(told={"score": 1}), Net, {}, "Odd) has no method is_success, and its step's info has 'score'"),
        (lambda: Odd(returned=(0, 0, 0)), Net, {}, "a step of the environment (Odd) returned tuple, and not"),
        (Reach, TwoActions, {}, "TwoActions returned (2, 2) for one observation instead of actions (1, ...)"),
        (Reach, Resets, {}, "Resets.reset() changed its parameters at the start of an episode"),
        (lambda: Reach(breaks_at=2), Net, {}, "episode 0 failed on rank 0 (ValueError: the gripper is stuck"),
        (Reach, Net, {"num_episodes": 0}, "evaluate() with num_episodes=0"),
        (Reach, Net, {"confidence": 90}, "evaluate() with confidence=90"),
    ],
)
def test_what_would_be_wrong_is_refused(make_env: Any, policy: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(RolloutError) as refused:
        ddpshim.evaluate(make_env, policy(), **{"num_episodes": 3, **more})
    assert text in str(refused.value)


@pytest.mark.unit
def test_an_evaluation_is_recorded_and_known_as_work_of_a_rank() -> None:
    noted: list[tuple[str, Any]] = []
    records: Any = SimpleNamespace(note=lambda kind, **values: noted.append((kind, values)), end=print)
    observed.record_to(records)
    try:
        found = ddpshim.evaluate(Reach, Net(), 4)
    finally:
        observed.record_to(None)
    ((kind, values),) = noted
    assert (kind, values["environment"], values["episodes"]) == ("rollout", "Reach", 4)
    assert values["metrics"] == {"Success_Rate": found.success_rate, "Return": found.mean_reward}
    assert values["interval"] == found.interval
    assert values["returns"] == [episode.reward for episode in found.episodes]
    place = place_of([FrameSummary("train.py", 3, "main"), FrameSummary(evaluating.__file__, 80, "play")], Progress())
    assert place.section == "a rollout"


@pytest.mark.unit
def test_success_is_what_the_caller_says_or_info_has() -> None:
    net = Net()
    told = ddpshim.evaluate(Odd, net, 6)
    assert _without_seconds(told) == _without_seconds(ddpshim.evaluate(Reach, net, 6))
    never = ddpshim.evaluate(Reach, net, 6, is_success=lambda env, info: False)
    assert never.num_successes == 0
    assert {episode.num_steps for episode in never.episodes} == {8}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("successes", "num", "expected"),
    [(0, 20, (0.0, 0.1684)), (10, 20, (0.2720, 0.7280)), (20, 20, (0.8316, 1.0)), (57, 60, (0.8608, 0.9896))],
)
def test_the_exact_interval(successes: int, num: int, expected: tuple[float, float]) -> None:
    assert exact_interval(successes, num) == pytest.approx(expected, abs=1e-4)
    assert exact_interval(1900, 2000) == pytest.approx((0.9395, 0.9591), abs=1e-4)
