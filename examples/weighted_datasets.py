"""Datasets of unequal size, mixed by weights: one weighted draw, split over the ranks.

    python examples/weighted_datasets.py                              # one process
    python -m ddpshim run --nproc 2 examples/weighted_datasets.py     # or torchrun; and --nproc 1, 4

Expect: each dataset's share is its weight, whatever its size; ranks draw equal samples no more often than by chance;
with --nproc 1, 2 and 4 each step has the same draws (see the fingerprint). A DistributedSampler would ignore the
weights; one weighted sampler per rank, with equal seeds, would give all ranks the same samples.
"""

import hashlib

import torch
from torch.utils.data import ConcatDataset, Dataset, WeightedRandomSampler

import ddpshim

MIX = {"human": (500, 0.5), "scripted": (6000, 0.3), "play": (200, 0.2)}  # samples, weight
BATCH_SIZE, NUM_DRAWS = 64, 6400


class Demonstrations(Dataset):
    """Replace this by your dataset: each sample names its dataset and index."""

    def __init__(self, source, num_samples):
        self.source, self.obs = source, torch.randn(num_samples, 8)

    def __len__(self):
        return len(self.obs)

    def __getitem__(self, index):
        return {"obs": self.obs[index], "source": self.source, "index": index}


def main():
    world = ddpshim.setup(seed=1)
    dataset = ConcatDataset([Demonstrations(i, size) for i, (size, _) in enumerate(MIX.values())])
    # As in robomimic's MetaDataset, a sample's probability is its dataset's weight over that dataset's size.
    chances = torch.cat([torch.full((size,), weight / size) for size, weight in MIX.values()])
    sampler = WeightedRandomSampler(chances, NUM_DRAWS)
    loader = ddpshim.make_loader(dataset, batch_size=BATCH_SIZE, sampler=sampler)

    steps = [[(int(s), int(i)) for s, i in zip(batch["source"], batch["index"])] for batch in loader]
    report(world, world.gather(steps), chances)
    ddpshim.cleanup()


def report(world, steps_of_ranks, chances):
    """Print the draws of all ranks: steps_of_ranks[rank][step] is a list of (dataset, index)."""
    if not world.is_main:
        return
    drawn = [[draw for step in steps for draw in step] for steps in steps_of_ranks]
    together = [draw for draws in drawn for draw in draws]
    print("dataset    samples  weight   share  of each rank's draws")
    for source, (name, (size, weight)) in enumerate(MIX.items()):
        share, *shares = [sum(s == source for s, _ in draws) / len(draws) for draws in (together, *drawn)]
        print(f"{name:9s} {size:8d} {weight:7.2f} {share:7.3f}  {' '.join(f'{one:.3f}' for one in shares)}")
    if world.world_size > 1:
        alike = sum(a == b for a, b in zip(*drawn[:2]))
        by_chance = float((chances / chances.sum()).square().sum()) * len(drawn[0])
        print(f"draws that ranks 0 and 1 made alike: {alike} of {len(drawn[0])} (by chance about {by_chance:.0f})")
    global_batches = [sorted(draw for part in step for draw in part) for step in zip(*steps_of_ranks)]
    fingerprint = hashlib.sha256(repr(global_batches).encode()).hexdigest()[:16]
    print(f"fingerprint of the {len(together)} draws, step by step: {fingerprint}")


if __name__ == "__main__":
    main()
