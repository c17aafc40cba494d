"""An environment without a simulator: a random walk with Lift's observations, for the trainer's rollout path."""

from __future__ import annotations

from typing import Any

import numpy as np
from robomimic.envs.env_base import EnvBase

SHAPES = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 10}


class ToyEnv(EnvBase):
    name = "Toy"
    type = 2
    action_dimension = 7
    version = "0"
    rollout_exceptions = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._steps = 0
        print("ToyEnv was made")

    def get_observation(self) -> dict[str, np.ndarray]:
        return {key: np.full(size, 0.01 * self._steps, np.float32) for key, size in SHAPES.items()}

    def reset(self) -> dict[str, np.ndarray]:
        self._steps = 0
        return self.get_observation()

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        assert action.shape == (7,)
        self._steps += 1
        return self.get_observation(), 1.0, False, {}

    def is_success(self) -> dict[str, bool]:
        return {"task": self._steps >= 3}

    def is_done(self) -> bool:
        return False

    def get_reward(self) -> float:
        return 1.0

    def render(self, mode: str = "human", height: int = 8, width: int = 8, **kwargs: Any) -> np.ndarray:
        return np.zeros((height, width, 3), np.uint8)

    def reset_to(self, state: Any) -> Any:
        return self.reset()

    def get_state(self) -> dict[str, Any]:
        return {}

    def get_goal(self) -> dict[str, Any]:
        return {}

    def set_goal(self, **kwargs: Any) -> None: ...

    def serialize(self) -> dict[str, Any]:
        return {}

    @classmethod
    def create_for_data_processing(cls, *args: Any, **kwargs: Any) -> ToyEnv:
        return cls()
