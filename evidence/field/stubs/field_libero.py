"""Replaces LIBERO's simulators: each environment returns random images and its own success."""

import numpy as np


class OffScreenRenderEnv:
    def __init__(self, **ignored):
        pass


class DummyVectorEnv:
    """One environment for each function; it succeeds if the first number of its action is positive."""

    def __init__(self, make_envs):
        self.num_envs = len(make_envs)
        self.generator = np.random.default_rng(3)

    def reset(self):
        return self._observed()

    def set_init_state(self, states):
        return self._observed()

    def step(self, actions):
        dones = np.asarray(actions)[:, 0] > 0
        return self._observed(), dones.astype(float), dones, [{}] * self.num_envs

    def get_sim_state(self):
        return np.zeros((self.num_envs, 4))

    def close(self):
        pass

    def _observed(self):
        def image():
            return self.generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)

        return [
            {
                "agentview_image": image(),
                "robot0_eye_in_hand_image": image(),
                "robot0_gripper_qpos": self.generator.random(2),
                "robot0_joint_pos": self.generator.random(7),
            }
            for _ in range(self.num_envs)
        ]


SubprocVectorEnv = DummyVectorEnv
