"""Replaces diffuser's renderer: writes the observations that it is to draw."""

import torch


class MuJoCoRenderer:
    def __init__(self, env):
        pass

    def composite(self, savepath, paths, **ignored):
        torch.save(torch.as_tensor(paths), savepath.replace(".png", ".pt"))
