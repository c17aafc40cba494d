"""Two environments with tasks, repeatable start states, and demonstrations: robosuite's Lift, and a toy."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

DEMONSTRATIONS = Path(__file__).resolve().parents[1] / "data" / "lift_scripted200_train.hdf5"
_OBSERVED = ("object-state", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")


class Lift:
    """robosuite's Lift; a task is the cube's area on the table. In demonstrations it is always the centre."""

    tasks: ClassVar = {"centre": (0.0, 0.0), "left": (0.0, 0.07), "right": (0.0, -0.07), "far": (0.05, 0.0)}
    observation_size, action_size, noise, horizon = 19, 7, 0.1, 70

    def __init__(self) -> None:
        import h5py
        import robosuite

        with h5py.File(DEMONSTRATIONS, "r") as file, contextlib.redirect_stdout(io.StringIO()):
            arguments = json.loads(file["data"].attrs["env_args"])
            self._env = robosuite.make(arguments["env_name"], hard_reset=False, **arguments["env_kwargs"])

    def draw_start(self, task: str, draw: np.random.Generator) -> Any:
        """Return the cube's position and angle, and the seed of the noise in the arm's first pose."""
        at = np.array(self.tasks[task]) + draw.uniform(-0.03, 0.03, 2)
        return at, draw.uniform(-np.pi, np.pi), int(draw.integers(2**31))

    def reset(self, start: Any) -> np.ndarray:
        at, angle, seed = start
        self._env.rng = np.random.default_rng(seed)
        self._env.reset()
        joint, data = self._env.cube.joints[0], self._env.sim.data
        data.set_joint_qpos(joint, [*at, data.get_joint_qpos(joint)[2], np.cos(angle / 2), 0, 0, np.sin(angle / 2)])
        self._env.sim.forward()
        self._num_steps = 0
        return self._observed(self._env._get_observations(force_update=True))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool, bool]:
        """Return the next observation, whether the episode is over, and whether it succeeded."""
        observed, reward, _, _ = self._env.step(np.clip(action, -1, 1))
        self._num_steps += 1
        is_success = reward > 0
        return self._observed(observed), is_success or self._num_steps == self.horizon, is_success

    def demonstrations(self) -> tuple[np.ndarray, np.ndarray]:
        import h5py

        names = ("object", *_OBSERVED[1:])
        names = tuple(name.replace("-state", "") for name in names)
        with h5py.File(DEMONSTRATIONS, "r") as file:
            episodes = list(file["data"].values())
            observed = [np.concatenate([episode["obs"][name][:] for name in names], 1) for episode in episodes]
            return np.concatenate(observed), np.concatenate([episode["actions"][:] for episode in episodes])

    def _observed(self, found: Any) -> np.ndarray:
        return np.concatenate([found[name] for name in _OBSERVED])


class Toy:
    """A point moves to its task's goal; the demonstrator slows down too early."""

    tasks: ClassVar = {"east": (0.8, 0), "north": (0, 0.8), "west": (-0.8, 0), "south": (0, -0.8), "origin": (0, 0)}
    observation_size, action_size, noise, horizon = 4, 2, 0.4, 12

    def draw_start(self, task: str, draw: np.random.Generator) -> Any:
        return np.array(self.tasks[task], dtype=float), draw.uniform(-1, 1, 2)

    def reset(self, start: Any) -> np.ndarray:
        self._goal, self._at, self._num_steps = start[0], start[1].copy(), 0
        return np.concatenate([self._at, self._goal])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool, bool]:
        self._at = self._at + 0.2 * np.clip(action, -1, 1)
        self._num_steps += 1
        is_success = bool(np.abs(self._at - self._goal).max() < 0.1)
        return np.concatenate([self._at, self._goal]), is_success or self._num_steps == self.horizon, is_success

    def demonstrations(self) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(0)
        at = draw.uniform(-1, 1, (2000, 2))
        goals = np.array(list(self.tasks.values()), dtype=float)[draw.integers(len(self.tasks), size=len(at))]
        way = goals - at
        return np.concatenate([at, goals], 1), np.where(np.abs(way) > 0.5, np.sign(way), 0.05 * way)
