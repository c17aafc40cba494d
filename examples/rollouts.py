"""Evaluation rollouts on all ranks, through robomimic's own loop: the same statistics on any number of ranks, sooner.

    python -m ddpshim run --nproc 1 examples/rollouts.py     # or torchrun
    python -m ddpshim run --nproc 2 examples/rollouts.py     # and --nproc 3
    python examples/rollouts.py                              # robomimic alone: no seed for each episode

Expect: the return and success rate of 20 episodes, to the last digit those of --nproc 1, on every rank; each rank
played its part of them. In robomimic's own trainer this happens by itself. (robomimic has to be installed.)
"""

import numpy as np
import torch
from robomimic.algo import RolloutPolicy
from robomimic.envs.wrappers import EnvWrapper

import ddpshim
from ddpshim.robomimic.rollout import rollout_with_stats

NUM_EPISODES, HORIZON = 20, 30


class Reach(EnvWrapper):  # a wrapper around nothing: has to implement less than a subclass of EnvBase
    """Move a point (2,) to the origin, from a random start, by a push that is not obeyed exactly."""

    rollout_exceptions = ()

    def __init__(self):
        self.env, self.name = None, "Reach"
        self.rng = np.random.default_rng()  # is seeded for each episode, as are torch's and numpy's global ones
        self.num_played = 0

    def reset(self):
        self.num_played += 1
        self.at = self.rng.uniform(-1, 1, 2)
        return {"at": self.at}

    def step(self, action):
        self.at = self.at + 0.1 * np.clip(action, -1, 1) + 0.02 * self.rng.standard_normal(2)
        return {"at": self.at}, -float(np.abs(self.at).sum()), self.is_success()["task"], {}

    def is_success(self):
        return {"task": bool(np.abs(self.at).max() < 0.05)}


class Noisy(RolloutPolicy):
    """Stands for RolloutPolicy(algo): a network with noise in its actions, as a diffusion policy has."""

    def __init__(self, network):
        self.network = network

    def start_episode(self):
        self.network.eval()

    @torch.no_grad()
    def __call__(self, ob, goal=None):
        way_back = -self.network(torch.as_tensor(ob["at"], dtype=torch.float32))
        return (way_back + 0.3 * torch.randn(2)).numpy()


def main():
    world = ddpshim.setup(seed=1, device="cpu")
    network = torch.nn.Linear(2, 2, bias=False)  # wrapped by ddpshim.wrap_parallel or not
    torch.nn.init.eye_(network.weight)
    env = Reach()
    logs, _ = rollout_with_stats(
        policy=Noisy(network), envs={env.name: env}, horizon=HORIZON, num_episodes=NUM_EPISODES, epoch=1
    )
    found = [float(logs[env.name][key]) for key in ("Return", "Horizon", "Success_Rate")]
    everyones = world.gather((env.num_played, found))
    if world.is_main:
        print("rank  episodes played                return  length  success rate, of all episodes")
        for rank, (num_played, (reward, length, success)) in enumerate(everyones):
            print(f"{rank:4d}  {num_played:8d} of {NUM_EPISODES:2d} {reward:24.15f} {length:7.2f}  {success:.2f}")
    ddpshim.cleanup()


if __name__ == "__main__":
    main()
