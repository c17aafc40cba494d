"""The adapter for toybot: where its patch sets are and how its batches are fetched at once."""

from pathlib import Path

import torch


def patch_sets():
    return Path(__file__).with_name("patches")


def fetcher(dataset):
    from toybot.data import Windows

    return WholeBatches(dataset) if type(dataset) is Windows else None


class WholeBatches:
    """Fetches a batch by one index for each tensor, where the dataset would be asked for each sample."""

    def __init__(self, dataset):
        self.dataset = dataset

    def attach(self):
        self.dataset.__getitems__ = self.fetch

    def fetch(self, indices):
        demos, starts = torch.tensor(indices) // self.dataset.starts, torch.tensor(indices) % self.dataset.starts
        steps = starts[:, None] + torch.arange(self.dataset.window)
        return {"obs": self.dataset.obs[demos[:, None], steps], "actions": self.dataset.actions[demos, steps[:, -1]]}

    def collate(self):
        return lambda batch: batch
