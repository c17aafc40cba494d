"""An environment without a simulator, for the trainer's rollouts: Lift's observations, which drift from a random start.

A file for each rank in the working directory records every episode's initial draws. It is opened when this is imported:
once the ranks run one program, the main rank alone writes. DDPSHIM_FAULT=toy_env:RANK:EPISODE makes that rank's
EPISODE-th episode fail.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy as np
from robomimic.envs.env_base import EnvBase

RANK = os.environ.get("RANK", "plain")  # which a program on ranks does not see
WRITTEN = os.open(f"toy_env_{RANK}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # also by environments in forks
SHAPES = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 10}


class ToyEnv(EnvBase):
    name = "Toy"
    type = 2
    action_dimension = 7
    version = "0"
    rollout_exceptions = ()
    _ep_lang_str = "walk on"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rng = np.random.default_rng(kwargs.get("seed"))  # as in robosuite 1.5
        self._start = 0.0
        self._steps = self._episodes = 0
        self._write_down("made")

    def _write_down(self, text: str) -> None:
        os.write(WRITTEN, f"{text}\n".encode())

    def get_observation(self) -> dict[str, np.ndarray]:
        return {key: np.full(size, self._start + 0.01 * self._steps, np.float32) for key, size in SHAPES.items()}

    def reset(self) -> dict[str, np.ndarray]:
        self._steps = 0
        self._episodes += 1
        draws = [self.rng.random(), np.random.rand(), random.random()]
        self._start = sum(draws) / 3
        self._write_down(f"episode {json.dumps(draws)}")
        kind, rank, episode = os.environ.get("DDPSHIM_FAULT", "toy_env::0").split(":")
        if (kind, rank, int(episode)) == ("toy_env", RANK, self._episodes):
            raise ValueError("the toy broke on purpose")
        return self.get_observation()

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        assert action.shape == (7,)
        self._steps += 1
        return self.get_observation(), float(action.sum()), False, {"is_success": self.is_success()}

    def is_success(self) -> dict[str, bool]:
        return {"task": self._steps >= 3 and self._start > 0.5}

    def render(self, mode: str = "human", height: int = 8, width: int = 8, **kwargs: Any) -> np.ndarray:
        return np.full((8, 8, 3), int(255 * self._start), np.uint8)

    @property
    def base_env(self) -> ToyEnv:
        return self

    def close(self) -> None:
        self._write_down("closed")


ToyEnv.__abstractmethods__ = frozenset()  # the trainer does not call the others
