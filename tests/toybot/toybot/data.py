"""Windows of demonstrations."""

import torch
from torch.utils.data import Dataset


class Windows(Dataset):
    """Each step of some demonstrations, with the steps before it."""

    def __init__(self, num_demos, length, window):
        random = torch.Generator().manual_seed(0)
        self.obs = torch.randn(num_demos, length, 8, generator=random)
        self.actions = torch.stack([self.obs.sum(2), self.obs.prod(2)], 2)
        self.window = window
        self.starts = length - window + 1

    def __len__(self):
        return len(self.obs) * self.starts

    def __getitem__(self, index):
        demo, start = divmod(index, self.starts)
        steps = slice(start, start + self.window)
        return {"obs": self.obs[demo, steps], "actions": self.actions[demo, start + self.window - 1]}
