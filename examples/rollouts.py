"""Evaluate a policy on all ranks, in any trainer: the same episodes on any number of ranks, in less time.

    python examples/rollouts.py
    python -m ddpshim run --nproc 1 examples/rollouts.py     # or torchrun
    python -m ddpshim run --nproc 2 examples/rollouts.py     # and --nproc 3

Expect: on every rank the reward and success of 20 episodes, equal to those of --nproc 1 to the last digit; each rank
played its part. Then an evaluation that stops when the policy is certainly better than
50%. In robomimic's own trainer, evaluations use all ranks automatically.
"""

import numpy as np
import torch

import ddpshim

NUM_EPISODES, HORIZON = 20, 30


class Reach:
    """Move a point (2,) from a random start to the origin; its response to actions is noisy."""

    num_played = 0  # on this rank

    def __init__(self):
        self.rng = np.random.default_rng()  # `evaluate` seeds it for each episode, like torch's and numpy's global ones

    def reset(self):
        Reach.num_played += 1
        self.at = self.rng.uniform(-1, 1, 2)
        return self.at

    def step(self, action):
        self.at = self.at + 0.1 * np.clip(action, -1, 1) + 0.02 * self.rng.standard_normal(2)
        return self.at, -float(np.abs(self.at).sum()), False, {"success": np.abs(self.at).max() < 0.05}


class Noisy(torch.nn.Module):
    """A network with noise in its actions, as a diffusion policy has."""

    def __init__(self):
        super().__init__()
        self.way_back = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.eye_(self.way_back.weight)

    def forward(self, at):
        return 0.3 * torch.randn(1, 2) - self.way_back(at)


def main():
    world = ddpshim.setup(seed=1, device="cpu")
    policy = ddpshim.wrap_parallel(Noisy())
    found = ddpshim.evaluate(Reach, policy, NUM_EPISODES, horizon=HORIZON)
    everyones = world.gather((Reach.num_played, found.mean_reward, found.success_rate))
    if world.is_main:
        print("rank  episodes played                reward  success rate, of all episodes")
        for rank, (num_played, reward, success) in enumerate(everyones):
            print(f"{rank:4d}  {num_played:8d} of {NUM_EPISODES:2d} {reward:24.15f}  {success:.2f}")
        print(f"all: {found}")
    ddpshim.cleanup()


if __name__ == "__main__":
    main()
