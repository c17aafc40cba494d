"""Replaces simulators: calls a policy a few times on random observations, and scores its actions."""

import numpy as np
import torch


class Played:
    """Implements `run(policy)` of diffusion_policy's env_runners; accepts any arguments."""

    def __init__(self, output_dir=None, shapes=None, n_obs_steps=2, **ignored):
        self.output_dir = output_dir
        self.shapes = {name: list(shape) for name, shape in shapes.items()}
        self.n_obs_steps = n_obs_steps

    def run(self, policy, **ignored):
        generator = torch.Generator().manual_seed(7)
        total = 0.0
        with torch.no_grad():
            for _ in range(2):
                batch = {
                    name: torch.rand(2, self.n_obs_steps, *shape, generator=generator)
                    for name, shape in self.shapes.items()
                }
                policy.reset()
                total += float(policy.predict_action(batch)["action"].abs().mean())
        return {"test_mean_score": float(np.tanh(total)), "test/mean_action": total}


def lowdim(**arguments):
    from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner

    return type("Runner", (Played, BaseLowdimRunner), {})(**arguments)


def image(**arguments):
    from diffusion_policy.env_runner.base_image_runner import BaseImageRunner

    return type("Runner", (Played, BaseImageRunner), {})(**arguments)


def points(**arguments):
    from diffusion_policy_3d.env_runner.base_runner import BaseRunner

    return type("Runner", (Played, BaseRunner), {})(**arguments)
