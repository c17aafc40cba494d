"""Replaces d3il's simulator: calls the agent on random observations, and writes its actions."""

import os

import numpy as np
import torch


class Avoiding_Sim:
    def __init__(self, **ignored):
        pass

    def test_agent(self, agent):
        agent.reset()
        generator = np.random.default_rng(7)
        actions = [agent.predict(generator.random(4, dtype=np.float32)) for _ in range(6)]
        torch.save(torch.from_numpy(np.stack(actions)), os.path.join(agent.working_dir, "actions.pt"))
